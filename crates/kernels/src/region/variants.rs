//! Regions that cover the plans: see [`variants`](crate::variants).

use super::{Region, write_region};
use crate::{
    Promise,
    buffer::Buffer,
    variants::{FLOATS, Variant},
};

/// Eight cubes of 256 units a multiprocessor.
const PROMISES: [(&str, Promise); 1] = [("region", Promise::registers(32))];

const TURNED: [(&str, Promise); 1] = [("region_turned", Promise::registers(32))];

/// One of three parts of a projection, by vectors; every second pixel, by elements; and images whose channels go behind
/// their pixels, by pairs and by elements.
pub(crate) fn variants() -> Vec<Variant> {
    let mut all = Vec::new();
    for (dtype, name) in FLOATS {
        for adds in [false, true] {
            let how = if adds { "added" } else { "written" };
            all.push(Variant::new(format!("{name}_columns_{how}"), PROMISES, move |client| {
                let (rows, columns) = (4096, 768);
                let region = Region {
                    shape: vec![rows, columns],
                    source_strides: vec![columns, 1],
                    target_strides: vec![3 * columns, 1],
                    source_start: 0,
                    start: columns,
                    adds,
                };
                let buffer = |elements| Buffer::empty(client, elements, dtype);
                write_region(client, &region, &buffer(rows * columns), &buffer(3 * rows * columns))
            }));
        }
        all.push(Variant::new(format!("{name}_pixels"), PROMISES, move |client| {
            let (side, channels) = (28, 7);
            let region = Region {
                shape: vec![8, side, side, channels],
                source_strides: vec![side * side * channels, side * channels, channels, 1],
                target_strides: vec![
                    4 * side * side * channels,
                    4 * side * channels,
                    2 * channels,
                    1,
                ],
                source_start: 0,
                start: channels,
                adds: false,
            };
            let elements = 8 * side * side * channels;
            let buffer = |elements| Buffer::empty(client, elements, dtype);
            write_region(client, &region, &buffer(elements), &buffer(4 * elements))
        }));
        for channels in [64, 33] {
            let name = format!("{name}_{channels}_channels_behind");
            all.push(Variant::new(name, TURNED, move |client| {
                let pixels = 32 * 32;
                let region = Region {
                    shape: vec![8, pixels, channels],
                    source_strides: vec![channels * pixels, 1, pixels],
                    target_strides: vec![channels * pixels, channels, 1],
                    source_start: 0,
                    start: 0,
                    adds: false,
                };
                let buffer = || Buffer::empty(client, 8 * channels * pixels, dtype);
                write_region(client, &region, &buffer(), &buffer())
            }));
        }
    }
    all
}

//! Regions that cover the plans: see [`variants`](crate::variants).

use super::{Region, write_region};
use crate::{
    Promise,
    buffer::Buffer,
    variants::{FLOATS, Variant},
};

/// Eight cubes of 256 units a multiprocessor.
const PROMISES: [(&str, Promise); 1] = [("region", Promise::registers(32))];

/// One of three parts of a projection, by vectors; and every second pixel, by elements.
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
                start: channels,
                adds: false,
            };
            let elements = 8 * side * side * channels;
            let buffer = |elements| Buffer::empty(client, elements, dtype);
            write_region(client, &region, &buffer(elements), &buffer(4 * elements))
        }));
    }
    all
}

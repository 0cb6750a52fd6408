//! Copies of pixels (PTX ISA, "Im2col mode"): images as a product of matrices takes them, a row for each pixel.
//!
//! A map has a box in which pixels stand, the same one in each image. A copy goes from one of them on by a step
//! along the first dimension that is not over, as many pixels as the map says, on to the next image at the box's
//! end. Each is read so many elements away as the copy's offsets say.

use crate::error::{FaultKind, Outcome, Trouble};
use std::ops::RangeInclusive;

/// Pixels that a copy takes. The tensor's first dimension is its channels and the last one its images; those in
/// between are a pixel's place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Im2col {
    /// First pixel of the box, from the image's first one.
    pub lower: Vec<i32>,
    /// Last pixel of the box, from the image's last one.
    pub upper: Vec<i32>,
    /// From one pixel to the next, 8 at most.
    pub steps: Vec<u32>,
    /// Channels of a copy, 256 at most.
    pub channels: u32,
    /// Pixels of a copy, 1024 at most.
    pub pixels: u32,
}

impl Im2col {
    /// What a corner may be and what an offset may be, in a tensor of that rank.
    fn ranges(rank: usize) -> Option<(RangeInclusive<i32>, u16)> {
        match rank {
            3 => Some((-32768..=32767, u16::MAX)),
            4 => Some((-128..=127, 255)),
            5 => Some((-16..=15, 31)),
            _ => None,
        }
    }

    pub(super) fn check(&self, rank: usize) -> Result<(), String> {
        let (corners, _) = Self::ranges(rank)
            .ok_or(format!("pixels in {rank} dimensions; 3 to 5 are possible"))?;
        let Self { lower, upper, steps, channels, pixels } = self;
        let sizes = [lower.len(), upper.len(), steps.len()];
        if sizes != [rank - 2; 3] {
            return Err(format!("corners and steps of {sizes:?} dimensions, not {}", rank - 2));
        }
        if !lower.iter().chain(upper).all(|corner| corners.contains(corner)) {
            return Err(format!("corners {lower:?} and {upper:?}; {corners:?} are possible"));
        }
        if !steps.iter().all(|step| (1..=8).contains(step)) {
            return Err(format!("steps {steps:?}; 1 to 8 are possible"));
        }
        if !(1..=256).contains(channels) || !(1..=1024).contains(pixels) {
            return Err(format!("{channels} channels of {pixels} pixels; 256 of 1024 at most"));
        }
        Ok(())
    }

    /// The first element of each pixel of a copy that begins at `corner`, in a tensor of that shape.
    pub(super) fn rows(
        &self,
        shape: &[u64],
        corner: &[i32],
        offsets: &[u16],
    ) -> Outcome<Vec<Vec<i64>>> {
        let misuse = |reason: String| Err(Trouble::new(FaultKind::Misuse, reason));
        let last = shape.len() - 1;
        let farthest = Self::ranges(shape.len()).map_or(0, |(_, farthest)| farthest);
        if offsets.iter().any(|offset| *offset > farthest) {
            return misuse(format!("offsets {offsets:?} of pixels; {farthest} is the most"));
        }
        let ends: Vec<_> = self
            .lower
            .iter()
            .zip(&self.upper)
            .zip(&shape[1..last])
            .map(|((lower, upper), size)| (i64::from(*lower), *size as i64 - 1 + i64::from(*upper)))
            .collect();
        let mut at: Vec<i64> = corner.iter().map(|place| i64::from(*place)).collect();
        let stands = at[1..last]
            .iter()
            .zip(&ends)
            .all(|(at, (lower, upper))| (*lower..=*upper).contains(at));
        if !stands {
            return misuse(format!("a copy of pixels begins at {corner:?}, outside of {ends:?}"));
        }
        let mut rows = Vec::with_capacity(self.pixels as usize);
        for _ in 0..self.pixels {
            let mut row = at.clone();
            for (place, offset) in row[1..last].iter_mut().zip(offsets) {
                *place += i64::from(*offset);
            }
            rows.push(row);
            let mut is_over = true;
            for ((place, step), (lower, upper)) in
                at[1..last].iter_mut().zip(&self.steps).zip(&ends)
            {
                *place += i64::from(*step);
                is_over = *place > *upper;
                if !is_over {
                    break;
                }
                *place = *lower;
            }
            at[last] += i64::from(is_over);
        }
        Ok(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CopyBox, Swizzle, TensorMap, memory::Global};

    const CHANNELS: usize = 16;
    const HEIGHT: usize = 5;
    const WIDTH: usize = 7;
    const IMAGES: usize = 3;

    /// A convolution's geometry in a dimension: padding before and after, taps, dilation, stride.
    #[derive(Clone, Copy)]
    struct Line {
        padding: [i32; 2],
        taps: i32,
        dilation: i32,
        stride: i32,
    }

    impl Line {
        fn outputs(self, size: usize) -> i32 {
            let reach = (self.taps - 1) * self.dilation;
            (size as i32 + self.padding[0] + self.padding[1] - reach - 1) / self.stride + 1
        }

        fn upper(self) -> i32 {
            self.padding[1] - (self.taps - 1) * self.dilation
        }
    }

    fn map(address: u64, [rows, columns]: [Line; 2], pixels: u32) -> TensorMap {
        TensorMap {
            address,
            element_bytes: 2,
            shape: [CHANNELS, WIDTH, HEIGHT, IMAGES].map(|size| size as u64).to_vec(),
            strides: [1, WIDTH, WIDTH * HEIGHT].map(|size| (2 * CHANNELS * size) as u64).to_vec(),
            taken: CopyBox::Pixels(Im2col {
                lower: vec![-columns.padding[0], -rows.padding[0]],
                upper: vec![columns.upper(), rows.upper()],
                steps: vec![columns.stride as u32, rows.stride as u32],
                channels: 8,
                pixels,
            }),
            swizzle: Swizzle::None,
        }
    }

    fn value(image: usize, row: usize, column: usize, channel: usize) -> u16 {
        (((image * HEIGHT + row) * WIDTH + column) * CHANNELS + channel + 1) as u16
    }

    /// Every copy of pixels of every tap, against the definition of a convolution.
    fn check(lines: [Line; 2], pixels: usize) {
        let mut global = Global::new();
        let count = CHANNELS * WIDTH * HEIGHT * IMAGES;
        let address = global.allocate(2 * count as u64);
        let data: Vec<u8> = (0..count).flat_map(|at| (at as u16 + 1).to_le_bytes()).collect();
        global.write(address, &data).unwrap();
        let map = map(address, lines, pixels as u32);
        assert_eq!(map.check(), Ok(()));
        let [rows, columns] = lines;
        let [height, width] = [rows.outputs(HEIGHT), columns.outputs(WIDTH)];
        let place = |pixel: usize| {
            let [height, width] = [height as usize, width as usize];
            let (image, within) = (pixel / (height * width), pixel % (height * width));
            let row = (within / width) as i32 * rows.stride - rows.padding[0];
            (image, row, (within % width) as i32 * columns.stride - columns.padding[0])
        };
        let all = IMAGES * (height * width) as usize;
        for first in (0..all).step_by(pixels) {
            for tap in 0..rows.taps * columns.taps {
                let [r, s] =
                    [tap / columns.taps * rows.dilation, tap % columns.taps * columns.dilation];
                let (image, row, column) = place(first);
                let corner = [8, column, row, image as i32];
                let taken = map.rows(&corner, &[s as u16, r as u16]).unwrap();
                let (bytes, _) = map.read(&mut global, &taken).unwrap();
                let read: Vec<_> = bytes
                    .chunks_exact(2)
                    .map(|pair| u16::from_le_bytes([pair[0], pair[1]]))
                    .collect();
                let mut expected = Vec::new();
                for pixel in first..first + pixels {
                    let (image, row, column) = place(pixel);
                    let (row, column) = ((row + r) as usize, (column + s) as usize);
                    let is_there = image < IMAGES && row < HEIGHT && column < WIDTH;
                    expected.extend((8..16).map(|channel| {
                        if is_there { value(image, row, column, channel) } else { 0 }
                    }));
                }
                assert_eq!(read, expected, "pixel {first}, tap {tap}");
            }
        }
    }

    #[test]
    fn pixels_of_a_copy_are_those_of_a_convolution() {
        let plain = Line { padding: [1, 1], taps: 3, dilation: 1, stride: 1 };
        let strided = Line { padding: [1, 1], stride: 2, ..plain };
        let dilated = Line { padding: [2, 0], dilation: 2, ..plain };
        let wide = Line { padding: [2, 3], taps: 5, stride: 3, ..plain };
        // Without padding.
        let bare = Line { padding: [0, 0], ..plain };
        for pixels in [1, 4, 13, 128] {
            for lines in [[plain; 2], [strided; 2], [dilated, plain], [wide, strided], [bare, wide]]
            {
                check(lines, pixels);
            }
        }
    }

    #[test]
    fn copies_that_the_engine_does_not_know_are_refused() {
        let plain = Line { padding: [1, 1], taps: 3, dilation: 1, stride: 1 };
        let right = map(1 << 20, [plain; 2], 8);
        let refused = |change: fn(&mut Im2col)| {
            let mut map = right.clone();
            let CopyBox::Pixels(pixels) = &mut map.taken else { unreachable!() };
            change(pixels);
            map.check().unwrap_err()
        };
        assert!(refused(|pixels| pixels.lower[0] = -129).contains("corners"));
        assert!(refused(|pixels| pixels.steps[1] = 9).contains("steps"));
        assert!(refused(|pixels| pixels.pixels = 1025).contains("1025"));
        assert!(refused(|pixels| pixels.upper.truncate(1)).contains("dimensions"));
        let reason = |corner: [i32; 4], offsets: [u16; 2]| {
            right.rows(&corner, &offsets).err().map(|trouble| trouble.reason)
        };
        assert_eq!(reason([0, -1, -1, 0], [2, 2]), None);
        assert!(reason([0, -2, 0, 0], [0, 0]).unwrap().contains("begins"));
        assert!(reason([0, 0, 4, 0], [0, 0]).unwrap().contains("begins"));
        assert!(reason([0, 0, 0, 0], [0, 256]).unwrap().contains("255"));
    }
}

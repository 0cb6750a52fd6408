//! Where outputs lie between pixels, as quotients of whole numbers.

use super::{Mode, backward::AxisLaunch};
use crate::divisor::{DIVIDEND_LIMIT, divisor};

/// Output o lies at `(o scale + offset) / divisor`, in lowest terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Positions {
    scale: usize,
    offset: i64,
    divisor: usize,
}

impl Positions {
    /// Of `outputs` in one dimension of `pixels`, both at least 1.
    pub(super) fn new(mode: Mode, align_corners: bool, pixels: usize, outputs: usize) -> Self {
        // Sizes are below 2^31: they are those of tensors with fewer elements.
        let (from, to) = (pixels as i64, outputs as i64);
        let (scale, offset, divisor) = match mode {
            // All that counts is that every output lies in the only pixel.
            _ if pixels == 1 => (1, 0, to),
            Mode::Nearest => (from, 0, to),
            Mode::NearestExact => (2 * from, from, 2 * to),
            Mode::Linear | Mode::Cubic if align_corners => (from - 1, 0, (to - 1).max(1)),
            Mode::Linear | Mode::Cubic => (2 * from, from - to, 2 * to),
        };
        let common = gcd(gcd(scale, divisor), offset.abs());
        let reduced = |number: i64| (number / common) as usize;
        Self { scale: reduced(scale), offset: offset / common, divisor: reduced(divisor) }
    }

    /// Whether the kernel can count in 32 bits: places of pixels and of what lies two beyond them.
    pub(super) fn are_counted(&self, pixels: usize) -> bool {
        let farthest = (pixels as u128 + 2) * self.divisor as u128;
        let around = self.offset.unsigned_abs() as u128 + self.scale as u128;
        farthest + around < DIVIDEND_LIMIT as u128
    }

    pub(super) fn launch(&self, pixels: usize, outputs: usize) -> AxisLaunch {
        AxisLaunch {
            pixels: pixels as u32,
            outputs: outputs as u32,
            scale: divisor(self.scale),
            offset: self.offset as i32,
            divisor: self.divisor as i32,
            step: (1.0 / self.divisor as f64) as f32,
        }
    }
}

/// The greatest common divisor, of numbers of which one is above zero.
fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn positions(mode: Mode, align_corners: bool, sizes: [usize; 2]) -> (usize, i64, usize) {
        let Positions { scale, offset, divisor } =
            Positions::new(mode, align_corners, sizes[0], sizes[1]);
        (scale, offset, divisor)
    }

    #[test]
    fn positions_are_in_lowest_terms() {
        // (o + 1/2) / 2 - 1/2 is (2 o - 1) / 4.
        assert_eq!(positions(Mode::Linear, false, [8, 16]), (2, -1, 4));
        assert_eq!(positions(Mode::Cubic, true, [8, 15]), (1, 0, 2));
        assert_eq!(positions(Mode::Nearest, true, [8, 6]), (4, 0, 3));
        assert_eq!(positions(Mode::NearestExact, false, [8, 16]), (2, 1, 4));
    }

    #[test]
    fn a_size_that_is_kept_puts_outputs_onto_pixels() {
        for mode in [Mode::Nearest, Mode::Linear, Mode::Cubic] {
            for align_corners in [false, true] {
                assert_eq!(positions(mode, align_corners, [7, 7]), (1, 0, 1), "{mode:?}");
            }
        }
    }

    #[test]
    fn one_output_of_aligned_corners_lies_on_the_first_pixel() {
        let (_, offset, divisor) = positions(Mode::Linear, true, [5, 1]);
        assert_eq!((offset, divisor), (0, 1));
    }

    #[test]
    fn what_takes_more_than_31_bits_is_not_counted() {
        let counted = |pixels: usize, outputs: usize| {
            Positions::new(Mode::Cubic, true, pixels, outputs).are_counted(pixels)
        };
        assert!(counted(30_000, 60_001));
        assert!(!counted(60_000, 60_001));
        // Reduced, large images that are doubled are small numbers.
        assert!(Positions::new(Mode::Cubic, false, 1 << 24, 1 << 25).are_counted(1 << 24));
    }
}

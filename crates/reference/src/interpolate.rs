//! Resized images and their gradient.
//!
//! Tensors are images, rows, columns and channels (NHWC), contiguous. Images whose pixels are contiguous (NCHW) are
//! images of one channel, as many as there were channels.

use crate::storage::Storage;

/// How numbers between pixels are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// That of the pixel in which the beginning of an output lies.
    Nearest,
    /// That of the pixel in which the center of an output lies.
    NearestExact,
    /// A line between two pixels, in each dimension.
    Linear,
    /// A cubic through four pixels, in each dimension (Keys, "Cubic Convolution Interpolation for Digital Image
    /// Processing", 1981, section II, with a slope of -3/4).
    Cubic,
}

impl Mode {
    /// All modes.
    pub const ALL: [Self; 4] = [Self::Nearest, Self::NearestExact, Self::Linear, Self::Cubic];

    /// What a pixel at that distance gives, or is given.
    fn filter(self, distance: f64) -> f64 {
        const A: f64 = -0.75;
        let t = distance.abs();
        match self {
            Self::Nearest | Self::NearestExact => 1.0,
            Self::Linear => (1.0 - t).max(0.0),
            Self::Cubic if t <= 1.0 => ((A + 2.0) * t - (A + 3.0)) * t * t + 1.0,
            Self::Cubic if t < 2.0 => A * (t - 1.0) * (2.0 - t).powi(2),
            Self::Cubic => 0.0,
        }
    }

    /// How far off a filter may be that a device computes in f32, in unit roundoffs.
    ///
    /// A distance is a rounded whole number times a rounded inverse: three roundings of up to 2 in cubic mode and 1 in
    /// linear mode, and of one more pixel where the tap lies beyond an end of the image. The slopes are at most 1.35
    /// and 1. A line is one more rounding, of up to 1. Near a pixel the cubic is 1 less a product of up to 1 whose three
    /// factors take five roundings, one of them of 2.25 where the product is below 1.25 times the result; beyond it, a
    /// product of up to 1/9.
    fn error(self) -> f64 {
        match self {
            Self::Nearest | Self::NearestExact => 0.0,
            Self::Linear => 3.0 + 1.0 + 1.0,
            Self::Cubic => 1.35 * (3.0 * 2.0 + 2.0) + (5.0 * 2.25 + 1.0),
        }
    }
}

/// What an output has of a pixel, in one dimension.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Tap {
    pixel: usize,
    weight: f64,
    /// How far off the weight may be, in unit roundoffs.
    error: f64,
}

/// Images that are resized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interpolation {
    /// Images, rows, columns and channels.
    pub sizes: [usize; 4],
    /// Rows and columns that they are resized to.
    pub output: [usize; 2],
    /// How.
    pub mode: Mode,
    /// Whether the first and the last pixel stay where they are, in the modes that compute numbers.
    pub align_corners: bool,
}

/// The gradient of images, with what bounds it.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradient {
    /// The gradient.
    pub values: Vec<f64>,
    /// What the absolute values of the terms add up to.
    magnitudes: Vec<f64>,
    /// How far off the weights make it, in unit roundoffs.
    errors: Vec<f64>,
    /// Roundings that a term goes through at most.
    roundings: f64,
}

impl Gradient {
    /// How far off each number may be that a device adds up in f32, columns first and then rows, and rounds once to
    /// storage. Additions are those of any order (Higham, "Accuracy and Stability of Numerical Algorithms", section
    /// 4.2).
    pub fn bounds(&self, storage: Storage) -> Vec<f64> {
        let unit = Storage::F32.unit_roundoff();
        let parts = self.values.iter().zip(&self.magnitudes).zip(&self.errors);
        let bound = |((value, magnitude), error): ((&f64, &f64), &f64)| {
            unit * (self.roundings * magnitude + error)
                + storage.unit_roundoff() * value.abs()
                + storage.underflow()
        };
        parts.map(bound).collect()
    }
}

impl Interpolation {
    /// Sizes of the resized images.
    pub fn output_sizes(&self) -> [usize; 4] {
        let ([images, _, _, channels], [rows, columns]) = (self.sizes, self.output);
        [images, rows, columns, channels]
    }

    /// Where an output lies between the pixels of a dimension: the pixel before it, and the part of the way to
    /// the next. Whole numbers tell where it lies on a pixel.
    fn place(&self, dim: usize, output: usize) -> (i64, f64) {
        let [pixels, outputs, at] =
            [self.sizes[1 + dim], self.output[dim], output].map(|n| n as i64);
        let (place, parts) = match self.mode {
            Mode::Nearest => (at * pixels, outputs),
            Mode::NearestExact => ((2 * at + 1) * pixels, 2 * outputs),
            Mode::Linear | Mode::Cubic if self.align_corners => {
                (at * (pixels - 1), (outputs - 1).max(1))
            }
            Mode::Linear | Mode::Cubic => ((2 * at + 1) * pixels - outputs, 2 * outputs),
        };
        (place.div_euclid(parts), place.rem_euclid(parts) as f64 / parts as f64)
    }

    /// What an output has of the pixels of a dimension. Taps beyond an end are those of the pixel there.
    fn taps(&self, dim: usize, output: usize) -> Vec<Tap> {
        let (pixel, within) = self.place(dim, output);
        let around = match self.mode {
            Mode::Nearest | Mode::NearestExact => 0..=0,
            Mode::Linear => 0..=1,
            Mode::Cubic => -1..=2,
        };
        let last = self.sizes[1 + dim] as i64 - 1;
        let mut taps: Vec<Tap> = Vec::new();
        for step in around {
            let weight = self.mode.filter(within - step as f64);
            let pixel = (pixel + step).clamp(0, last) as usize;
            let error = self.mode.error();
            match taps.last_mut().filter(|tap| tap.pixel == pixel) {
                Some(tap) => {
                    tap.weight += weight;
                    // And the addition, of numbers whose sum is at most 1.2.
                    tap.error += error + 1.2;
                }
                None => taps.push(Tap { pixel, weight, error }),
            }
        }
        // What has no weight counts for nothing, NaN included.
        taps.retain(|tap| tap.weight != 0.0);
        taps
    }

    /// Calls `each` for each element of the resized images and each pixel that it has, with both places and the taps
    /// of row and column.
    fn walk(&self, mut each: impl FnMut(usize, usize, [Tap; 2])) {
        let [images, height, width, channels] = self.sizes;
        let [rows, columns] = [0, 1].map(|dim| {
            let outputs = 0..self.output[dim];
            outputs.map(|output| self.taps(dim, output)).collect::<Vec<_>>()
        });
        for image in 0..images {
            for (p, of_row) in rows.iter().enumerate() {
                for (q, of_column) in columns.iter().enumerate() {
                    let output = (image * rows.len() + p) * columns.len() + q;
                    for row in of_row {
                        for column in of_column {
                            let pixel = (image * height + row.pixel) * width + column.pixel;
                            for channel in 0..channels {
                                let at = |pixel| pixel * channels + channel;
                                each(at(output), at(pixel), [*row, *column]);
                            }
                        }
                    }
                }
            }
        }
    }

    /// The resized images.
    pub fn forward(&self, x: &[f64]) -> Vec<f64> {
        let mut y = vec![0.0; self.output_sizes().iter().product()];
        self.walk(|output, pixel, [row, column]| {
            y[output] += row.weight * column.weight * x[pixel];
        });
        y
    }

    /// The gradient of the images given that of the resized ones.
    pub fn backward(&self, dy: &[f64]) -> Gradient {
        let zeros = || vec![0.0; self.sizes.iter().product()];
        let (mut values, mut magnitudes, mut errors) = (zeros(), zeros(), zeros());
        self.walk(|output, pixel, [row, column]| {
            let dy = dy[output];
            values[pixel] += row.weight * column.weight * dy;
            magnitudes[pixel] += (row.weight * column.weight * dy).abs();
            errors[pixel] += dy.abs()
                * (row.error * column.weight.abs()
                    + row.weight.abs() * column.error
                    + row.error * column.error * Storage::F32.unit_roundoff());
        });
        let additions = [0, 1].map(|dim| {
            let mut of_pixel = vec![0usize; self.sizes[1 + dim]];
            let outputs = 0..self.output[dim];
            outputs
                .flat_map(|output| self.taps(dim, output))
                .for_each(|tap| of_pixel[tap.pixel] += 1);
            of_pixel.into_iter().max().unwrap_or(0)
        });
        // And a product with the weight of the column, and one with that of the row.
        let roundings = (additions[0] + additions[1] + 2) as f64;
        Gradient { values, magnitudes, errors, roundings }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{gradcheck::check_derivative, random::normal, tolerance::compare};

    fn line(pixels: usize, outputs: usize, mode: Mode, align_corners: bool) -> Interpolation {
        Interpolation { sizes: [1, 1, pixels, 1], output: [1, outputs], mode, align_corners }
    }

    #[test]
    fn outputs_are_those_that_the_formulas_give() {
        let of = |mode, align_corners, x: &[f64], outputs| {
            line(x.len(), outputs, mode, align_corners).forward(x)
        };
        let x = [0.0, 8.0, 4.0];
        assert_eq!(of(Mode::Nearest, true, &x, 5), [0.0, 0.0, 8.0, 8.0, 4.0]);
        assert_eq!(of(Mode::NearestExact, true, &x, 5), [0.0, 0.0, 8.0, 4.0, 4.0]);
        assert_eq!(of(Mode::Linear, true, &x, 5), [0.0, 4.0, 8.0, 6.0, 4.0]);
        assert_eq!(of(Mode::Linear, false, &x, 6), [0.0, 2.0, 6.0, 7.0, 5.0, 4.0]);
        // The cubic half way: -3/32, 19/32, 19/32, -3/32, and the end twice.
        let half = (-3.0 * 0.0 + 19.0 * 0.0 + 19.0 * 8.0 - 3.0 * 4.0) / 32.0;
        let cubic = of(Mode::Cubic, true, &x, 5);
        assert_eq!((cubic[0], cubic[1], cubic[2]), (0.0, half, 8.0));
    }

    #[test]
    fn weights_of_an_output_add_up_to_one() {
        for mode in Mode::ALL {
            for align_corners in [false, true] {
                for (pixels, outputs) in [(1, 1), (1, 5), (5, 1), (2, 7), (7, 2), (6, 6), (9, 31)] {
                    let y = line(pixels, outputs, mode, align_corners).forward(&vec![1.0; pixels]);
                    let is_one = y.iter().all(|y| (y - 1.0).abs() < 1e-14);
                    assert!(is_one, "{mode:?} {align_corners} {pixels} to {outputs}: {y:?}");
                }
            }
        }
    }

    #[test]
    fn gradients_are_those_of_central_differences() {
        for mode in Mode::ALL {
            for (align_corners, output) in [(false, [7, 3]), (true, [2, 9]), (false, [4, 10])] {
                let resized = Interpolation { sizes: [2, 4, 5, 2], output, mode, align_corners };
                let x = normal(1, 80, 1.0, Storage::F32);
                let dy = normal(2, resized.output_sizes().iter().product(), 1.0, Storage::F32);
                let dx = resized.backward(&dy).values;
                for at in 0..x.len() {
                    let loss = |value| {
                        let mut moved = x.clone();
                        moved[at] = value;
                        resized.forward(&moved).iter().zip(&dy).map(|(y, dy)| y * dy).sum::<f64>()
                    };
                    check_derivative(loss, |_| dx[at], x[at]).unwrap();
                }
            }
        }
    }

    #[test]
    fn nan_reaches_the_pixels_with_a_weight() {
        // Outputs of a size that is kept lie on pixels.
        for mode in Mode::ALL {
            let mut dy = vec![1.0; 5];
            dy[2] = f64::NAN;
            let dx = line(5, 5, mode, false).backward(&dy).values;
            let is_nan: Vec<bool> = dx.iter().map(|dx| dx.is_nan()).collect();
            assert_eq!(is_nan, [false, false, true, false, false], "{mode:?}");
        }
    }

    #[test]
    fn the_bound_tells_faults_apart() {
        for mode in [Mode::Linear, Mode::Cubic] {
            let right = line(9, 20, mode, false);
            let dy = normal(3, 20, 1.0, Storage::F32);
            let gradient = right.backward(&dy);
            let bounds = gradient.bounds(Storage::F32);
            let fails = |other: &[f64]| compare(other, &gradient.values, &bounds).is_err();
            // Corners that are aligned, a lost output, and a gradient scaled a little.
            assert!(fails(&Interpolation { align_corners: true, ..right }.backward(&dy).values));
            let mut lost = dy.clone();
            lost[11] = 0.0;
            assert!(fails(&right.backward(&lost).values));
            let scaled: Vec<f64> = gradient.values.iter().map(|dx| dx * 1.0001).collect();
            assert!(fails(&scaled));
        }
    }
}

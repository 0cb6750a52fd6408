//! Pools of images and their gradients.
//!
//! Tensors are images, rows, columns and channels (NHWC), contiguous. Images whose pixels are contiguous (NCHW) are
//! images of one channel, as many as there were channels.

use crate::storage::Storage;
use std::ops::Range;

/// Which pixels the windows have; of each pair, the first is for rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Windows {
    /// A window that walks.
    Walking {
        /// Taps.
        kernel: [usize; 2],
        /// Pixels from one window to the next.
        stride: [usize; 2],
        /// Pixels that the image is thought to have more, before and after it.
        padding: [usize; 2],
        /// Pixels from one tap to the next.
        dilation: [usize; 2],
        /// Whether a last window may reach beyond the padding, if it begins before it.
        ceil: bool,
    },
    /// So many equal parts of the image, rounded to whole pixels outwards.
    Adaptive([usize; 2]),
}

/// A pool of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Images, rows, columns and channels.
    pub sizes: [usize; 4],
    /// Which pixels are taken together.
    pub windows: Windows,
}

/// What is largest in each window, and where: row times width plus column, or -1 in a window of no pixels.
#[derive(Clone, Debug, PartialEq)]
pub struct Maxima {
    /// The numbers.
    pub values: Vec<f64>,
    /// The places.
    pub indices: Vec<i32>,
}

/// Sums with the terms' magnitudes, and how many terms a sum has at most.
#[derive(Clone, Debug, PartialEq)]
pub struct Sums {
    /// The sums.
    pub values: Vec<f64>,
    /// What the absolute values of the terms add up to.
    magnitudes: Vec<f64>,
    terms: usize,
}

/// Relative error of a share in f32, in unit roundoffs: the quotient's 2.5 units in the last place of WGSL, and a
/// product.
const SHARE: f64 = 6.0;

impl Sums {
    /// How far off each sum may be that a device adds up in f32, of terms or a sum that it multiplies by a
    /// quotient, and rounds once to storage. Additions are those of any order (Higham, "Accuracy and
    /// Stability of Numerical Algorithms", section 4.2).
    pub fn bounds(&self, storage: Storage) -> Vec<f64> {
        let each = (self.terms as f64 + SHARE) * Storage::F32.unit_roundoff();
        let bound = |(sum, magnitude): (&f64, &f64)| {
            each * magnitude + storage.unit_roundoff() * sum.abs() + storage.underflow()
        };
        self.values.iter().zip(&self.magnitudes).map(bound).collect()
    }
}

impl Pool {
    /// Rows and columns of windows.
    pub fn output(&self) -> [usize; 2] {
        match self.windows {
            Windows::Adaptive(parts) => parts,
            Windows::Walking { kernel, stride, padding, dilation, ceil } => [0, 1].map(|dim| {
                let input = self.sizes[1 + dim];
                let padded = input + 2 * padding[dim];
                let reach = (kernel[dim] - 1) * dilation[dim] + 1;
                let up = if ceil { stride[dim] - 1 } else { 0 };
                let windows = (padded + up).checked_sub(reach).map_or(0, |it| it / stride[dim] + 1);
                // One that would begin behind the image is left out.
                let begins_behind =
                    ceil && windows > 0 && (windows - 1) * stride[dim] >= input + padding[dim];
                windows - usize::from(begins_behind)
            }),
        }
    }

    /// Sizes of the windows' tensor.
    pub fn output_sizes(&self) -> [usize; 4] {
        let ([images, _, _, channels], [rows, columns]) = (self.sizes, self.output());
        [images, rows, columns, channels]
    }

    /// Pixels of window `at` in one dimension, in the order of its taps.
    fn pixels(&self, dim: usize, at: usize) -> Vec<usize> {
        let size = self.sizes[1 + dim];
        match self.windows {
            Windows::Adaptive(parts) => {
                let parts = parts[dim];
                (at * size / parts..((at + 1) * size).div_ceil(parts)).collect()
            }
            Windows::Walking { kernel, stride, padding, dilation, .. } => (0..kernel[dim])
                .filter_map(|tap| {
                    (at * stride[dim] + tap * dilation[dim]).checked_sub(padding[dim])
                })
                .filter(|pixel| *pixel < size)
                .collect(),
        }
    }

    /// Numbers that the mean of window `at` is taken over, in one dimension.
    fn count(&self, dim: usize, at: usize, include_padding: bool) -> usize {
        match self.windows {
            Windows::Walking { kernel, stride, padding, .. } if include_padding => {
                let first = at * stride[dim];
                kernel[dim].min(self.sizes[1 + dim] + 2 * padding[dim] - first)
            }
            _ => self.pixels(dim, at).len(),
        }
    }

    /// Each window's place in y, with its image, row and column, and the channel.
    fn each(&self) -> impl Iterator<Item = (usize, [usize; 4])> {
        let [images, rows, columns, channels] = self.output_sizes();
        let total: Range<usize> = 0..images * rows * columns * channels;
        total.map(move |place| {
            let (pixel, channel) = (place / channels, place % channels);
            (place, [pixel / (rows * columns), pixel / columns % rows, pixel % columns, channel])
        })
    }

    /// The places in x of a window's pixels, rows first, and each as row times width plus column.
    fn places(&self, [image, row, column, channel]: [usize; 4]) -> Vec<(usize, usize)> {
        let [_, height, width, channels] = self.sizes;
        let across = self.pixels(1, column);
        let of_row = |row: usize| across.iter().map(move |column| row * width + column);
        let pixels = self.pixels(0, row).into_iter().flat_map(of_row);
        let place = |pixel| ((image * height * width + pixel) * channels + channel, pixel);
        pixels.map(place).collect()
    }

    /// The largest number of each window. NaN is larger than all, and its last place counts; of equal numbers
    /// the first place does.
    pub fn max(&self, x: &[f64]) -> Maxima {
        let of_window = |(_, at)| {
            let mut largest = (f64::NEG_INFINITY, -1);
            for (place, pixel) in self.places(at) {
                if largest.1 < 0 || x[place] > largest.0 || x[place].is_nan() {
                    largest = (x[place], pixel as i32);
                }
            }
            largest
        };
        let (values, indices) = self.each().map(of_window).unzip();
        Maxima { values, indices }
    }

    /// The gradient of x given that of the maxima.
    pub fn max_backward(&self, dy: &[f64], indices: &[i32]) -> Sums {
        self.collect(|place, at| {
            let named = usize::try_from(indices[place]).ok();
            let is_named = |(_, pixel): &(usize, usize)| Some(*pixel) == named;
            self.places(at).into_iter().filter(is_named).map(|(to, _)| (to, dy[place])).collect()
        })
    }

    /// The mean of each window.
    pub fn average(&self, x: &[f64], include_padding: bool) -> Sums {
        let mut sums = Sums { values: Vec::new(), magnitudes: Vec::new(), terms: 0 };
        for (_, at) in self.each() {
            let places = self.places(at);
            let count = self.window_count(at, include_padding);
            let sum = |of: fn(f64) -> f64| {
                places.iter().map(|(place, _)| of(x[*place])).sum::<f64>() / count
            };
            sums.values.push(sum(|x| x));
            sums.magnitudes.push(sum(f64::abs));
            sums.terms = sums.terms.max(places.len());
        }
        sums
    }

    /// The gradient of x given that of the means.
    pub fn average_backward(&self, dy: &[f64], include_padding: bool) -> Sums {
        self.collect(|place, at| {
            let share = dy[place] / self.window_count(at, include_padding);
            self.places(at).into_iter().map(|(to, _)| (to, share)).collect()
        })
    }

    fn window_count(&self, [_, row, column, _]: [usize; 4], include_padding: bool) -> f64 {
        (self.count(0, row, include_padding) * self.count(1, column, include_padding)) as f64
    }

    /// Adds up what each window gives to places of x.
    fn collect(&self, given: impl Fn(usize, [usize; 4]) -> Vec<(usize, f64)>) -> Sums {
        let elements = self.sizes.iter().product();
        let mut sums =
            Sums { values: vec![0.0; elements], magnitudes: vec![0.0; elements], terms: 0 };
        let mut terms = vec![0; elements];
        for (place, at) in self.each() {
            for (to, value) in given(place, at) {
                sums.values[to] += value;
                sums.magnitudes[to] += value.abs();
                terms[to] += 1;
            }
        }
        sums.terms = terms.into_iter().max().unwrap_or(0);
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{gradcheck::check_derivative, random::normal};

    fn walking(kernel: usize, stride: usize, padding: usize, ceil: bool) -> Windows {
        Windows::Walking {
            kernel: [kernel; 2],
            stride: [stride; 2],
            padding: [padding; 2],
            dilation: [1; 2],
            ceil,
        }
    }

    #[test]
    fn windows_are_counted_as_burn_counts_them() {
        let output = |size, windows| Pool { sizes: [1, size, size, 1], windows }.output()[0];
        assert_eq!(output(7, walking(3, 2, 1, false)), 4);
        assert_eq!(output(6, walking(3, 2, 0, false)), 2);
        assert_eq!(output(6, walking(3, 2, 0, true)), 3);
        // The last one would begin in the padding behind the image.
        assert_eq!(output(5, walking(2, 2, 1, true)), 3);
        assert_eq!(output(2, walking(5, 1, 0, false)), 0);
    }

    #[test]
    fn of_equal_numbers_the_first_counts_and_of_nan_the_last() {
        let pool = Pool { sizes: [1, 2, 2, 1], windows: walking(2, 2, 0, false) };
        let index = |x: [f64; 4]| pool.max(&x).indices[0];
        assert_eq!(index([1.0, 3.0, 3.0, 2.0]), 1);
        assert_eq!(index([f64::NEG_INFINITY; 4]), 0);
        assert_eq!(index([f64::NAN, 3.0, f64::NAN, f64::INFINITY]), 2);
        assert!(pool.max(&[0.0, f64::NAN, 1.0, 2.0]).values[0].is_nan());
    }

    #[test]
    fn a_window_between_pixels_has_none() {
        let windows = Windows::Walking {
            kernel: [2; 2],
            stride: [1; 2],
            padding: [1; 2],
            dilation: [2; 2],
            ceil: false,
        };
        let found = Pool { sizes: [1, 1, 1, 1], windows }.max(&[5.0]);
        assert_eq!((found.values, found.indices), (vec![f64::NEG_INFINITY], vec![-1]));
    }

    #[test]
    fn means_leave_out_the_padding_or_count_it_but_not_what_lies_behind_it() {
        let pool = Pool { sizes: [1, 2, 2, 1], windows: walking(2, 2, 1, true) };
        assert_eq!(pool.average(&[4.0; 4], false).values, [4.0; 4]);
        assert_eq!(pool.average(&[4.0; 4], true).values, [1.0; 4]);
        let beyond = Pool { sizes: [1, 3, 3, 1], windows: walking(2, 2, 0, true) };
        assert_eq!(beyond.average(&[4.0; 9], true).values, [4.0; 4]);
    }

    #[test]
    fn parts_overlap_where_they_do_not_divide_the_image() {
        let pool = Pool { sizes: [1, 1, 5, 1], windows: Windows::Adaptive([1, 3]) };
        let means = pool.average(&[1.0, 2.0, 3.0, 4.0, 5.0], false).values;
        assert_eq!(means, [1.5, 3.0, 4.5]);
    }

    #[test]
    fn gradients_are_those_of_central_differences() {
        let ceiled = walking(3, 2, 1, true);
        for windows in [walking(2, 1, 0, false), ceiled, Windows::Adaptive([2, 3])] {
            let pool = Pool { sizes: [2, 4, 5, 2], windows };
            let x = normal(1, 80, 1.0, Storage::F32);
            let dy = normal(2, pool.output_sizes().iter().product(), 1.0, Storage::F32);
            let dot = |y: &[f64]| y.iter().zip(&dy).map(|(y, dy)| y * dy).sum::<f64>();
            let with = |at: usize, value: f64| {
                let mut moved = x.clone();
                moved[at] = value;
                moved
            };
            let by_max = pool.max_backward(&dy, &pool.max(&x).indices).values;
            for at in 0..x.len() {
                for padded in [false, true] {
                    let loss = |value| dot(&pool.average(&with(at, value), padded).values);
                    let dx = pool.average_backward(&dy, padded).values;
                    check_derivative(loss, |_| dx[at], x[at]).unwrap();
                }
                let loss = |value| dot(&pool.max(&with(at, value)).values);
                check_derivative(loss, |_| by_max[at], x[at]).unwrap();
            }
        }
    }

    #[test]
    fn the_bound_tells_a_missing_tap_apart() {
        let pool = Pool { sizes: [1, 9, 9, 1], windows: walking(3, 2, 0, false) };
        let mean = pool.average(&normal(3, 81, 1.0, Storage::F32), false);
        let x = normal(3, 81, 1.0, Storage::F32);
        assert!(x[20].abs() / 9.0 > mean.bounds(Storage::F32)[5]);
    }
}

//! Convolutions of images and their two gradients, in f64 by the definition.
//!
//! ```text
//! y[n, k, p, q]   = sum_{c, r, s} x[n, c, p u + r d - a, q u + s d - b] w[k, c, r, s]
//! ```
//!
//! with strides u, dilations d and paddings a and b for each dimension; x is zero outside of the image. The
//! gradients are sums of the same products: of `dy w` for x, of `dy x` for w. With groups, output channel k
//! sees the channels of its own group.
//!
//! Tensors are contiguous: images `[n, c, h, w]`, weights `[k, c / groups, r, s]`.
//!
//! # The bounds
//!
//! Each element is a sum of products, of which a device accumulates as it does those of a matrix product. So
//! the bounds are those of [`MatmulPrecision`](crate::matmul::MatmulPrecision), with the sum of the terms'
//! magnitudes and the number of terms: taps by channels for y and dx, pixels for dw.

#[cfg(test)]
mod tests;
mod volumes;

use crate::matmul::Sums;
use std::fmt;
pub use volumes::{VolumeCase, conv_volumes};

/// A convolution to test or to time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConvCase {
    /// Images.
    pub batch: usize,
    /// Channels of x.
    pub in_channels: usize,
    /// Channels of y.
    pub out_channels: usize,
    /// Parts that the channels are divided into; each part of y sees one of x.
    pub groups: usize,
    /// Height and width of x.
    pub input: [usize; 2],
    /// Height and width of the weights.
    pub kernel: [usize; 2],
    /// Rows and columns of x from one pixel of y to the next.
    pub stride: [usize; 2],
    /// Zeros before and after each dimension of x.
    pub padding: [[usize; 2]; 2],
    /// Rows and columns of x from one tap to the next.
    pub dilation: [usize; 2],
}

/// Which of the three sums is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConvPass {
    /// y, from x and the weights.
    Fprop,
    /// The gradient of x, from that of y and the weights.
    Dgrad,
    /// The gradient of the weights, from x and the gradient of y.
    Wgrad,
}

impl ConvPass {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Fprop, Self::Dgrad, Self::Wgrad];
}

impl ConvCase {
    /// Square images and kernels, strides of 1, one group and no padding.
    pub const fn square(
        batch: usize,
        [in_channels, out_channels]: [usize; 2],
        size: usize,
        kernel: usize,
    ) -> Self {
        Self {
            batch,
            in_channels,
            out_channels,
            groups: 1,
            input: [size; 2],
            kernel: [kernel; 2],
            stride: [1; 2],
            padding: [[0; 2]; 2],
            dilation: [1; 2],
        }
    }

    /// The same with as many zeros on every side.
    pub const fn padded(self, padding: usize) -> Self {
        Self { padding: [[padding; 2]; 2], ..self }
    }

    /// The same with that stride in both dimensions.
    pub const fn strided(self, stride: usize) -> Self {
        Self { stride: [stride; 2], ..self }
    }

    /// The same with taps that far apart in both dimensions.
    pub const fn dilated(self, dilation: usize) -> Self {
        Self { dilation: [dilation; 2], ..self }
    }

    /// The same with that many groups.
    pub const fn grouped(self, groups: usize) -> Self {
        Self { groups, ..self }
    }

    /// Height and width of y.
    ///
    /// # Panics
    ///
    /// When the kernel is larger than the padded image.
    pub fn output(&self) -> [usize; 2] {
        [0, 1].map(|dim| {
            let padded = self.input[dim] + self.padding[dim][0] + self.padding[dim][1];
            let reach = (self.kernel[dim] - 1) * self.dilation[dim] + 1;
            assert!(reach <= padded, "{self}: the kernel is larger than the padded image");
            (padded - reach) / self.stride[dim] + 1
        })
    }

    /// Sizes of x.
    pub fn x_shape(&self) -> [usize; 4] {
        [self.batch, self.in_channels, self.input[0], self.input[1]]
    }

    /// Sizes of the weights.
    pub fn weight_shape(&self) -> [usize; 4] {
        let [r, s] = self.kernel;
        [self.out_channels, self.in_channels / self.groups, r, s]
    }

    /// Sizes of y.
    pub fn y_shape(&self) -> [usize; 4] {
        let [p, q] = self.output();
        [self.batch, self.out_channels, p, q]
    }

    /// Sizes of the two operands of a pass, and of its result.
    pub fn shapes(&self, pass: ConvPass) -> [[usize; 4]; 3] {
        let (x, w, y) = (self.x_shape(), self.weight_shape(), self.y_shape());
        match pass {
            ConvPass::Fprop => [x, w, y],
            ConvPass::Dgrad => [y, w, x],
            ConvPass::Wgrad => [x, y, w],
        }
    }

    /// Terms of the longest sum of a pass.
    pub fn terms(&self, pass: ConvPass) -> usize {
        let taps = self.kernel[0] * self.kernel[1];
        let [p, q] = self.output();
        match pass {
            ConvPass::Fprop => taps * self.in_channels / self.groups,
            ConvPass::Dgrad => taps * self.out_channels / self.groups,
            ConvPass::Wgrad => self.batch * p * q,
        }
    }

    /// Calls `visit` with the indices in x, w and y of every product of the definition, and `None` for x
    /// where it is one of the zeros around the image.
    fn visit(&self, mut visit: impl FnMut(Option<usize>, usize, usize)) {
        let [height, width] = self.input;
        let [p_size, q_size] = self.output();
        let [k_size, c_size, r_size, s_size] = self.weight_shape();
        let filters = self.out_channels / self.groups;
        let inside = |position: usize, tap: usize, dim: usize, size: usize| {
            let at = position * self.stride[dim] + tap * self.dilation[dim];
            at.checked_sub(self.padding[dim][0]).filter(|at| *at < size)
        };
        for (n, k) in (0..self.batch).flat_map(|n| (0..k_size).map(move |k| (n, k))) {
            for (p, q) in (0..p_size).flat_map(|p| (0..q_size).map(move |q| (p, q))) {
                let y = ((n * k_size + k) * p_size + p) * q_size + q;
                for (r, s) in (0..r_size).flat_map(|r| (0..s_size).map(move |s| (r, s))) {
                    let at = inside(p, r, 0, height).zip(inside(q, s, 1, width));
                    for c in 0..c_size {
                        let w = ((k * c_size + c) * r_size + r) * s_size + s;
                        let channel = k / filters * c_size + c;
                        let image = n * self.in_channels + channel;
                        visit(at.map(|(h, v)| (image * height + h) * width + v), w, y);
                    }
                }
            }
        }
    }
}

impl fmt::Display for ConvCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { batch, in_channels, out_channels, groups, input, kernel, .. } = self;
        let [[h, w], [r, s]] = [input, kernel];
        write!(f, "N{batch}C{in_channels}H{h}W{w}K{out_channels}R{r}S{s}")?;
        let Self { stride, padding, dilation, .. } = self;
        write!(f, " stride {stride:?} padding {padding:?} dilation {dilation:?} groups {groups}")
    }
}

/// The result of a pass and what its bounds are multiples of.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvSums {
    /// The elements.
    pub values: Vec<f64>,
    /// The same sums of the terms' magnitudes.
    pub magnitudes: Vec<f64>,
    /// The same sums of the terms' squares.
    pub squares: Vec<f64>,
    /// Terms of the longest sum.
    pub terms: usize,
}

impl ConvSums {
    /// As the comparison takes them whose operands have random signs.
    pub fn random(&self) -> Sums<'_> {
        let Self { values, magnitudes, squares, terms } = self;
        Sums { values, magnitudes, squares, k: *terms }
    }
}

/// The result of a pass, from its operands in the order of [`ConvCase::shapes`].
///
/// A zero of the padding counts as a term of y and dw: times a weight or gradient that is not finite it is NaN.
///
/// # Panics
///
/// When an operand has another length than the case says.
pub fn conv(case: &ConvCase, pass: ConvPass, first: &[f64], second: &[f64]) -> ConvSums {
    let elements = case.shapes(pass).map(|shape| shape.iter().product());
    let visit = |add: &mut dyn FnMut(Option<usize>, usize, usize)| case.visit(add);
    summed(case, pass, elements, [first, second], case.terms(pass), visit)
}

/// The sums of a pass over the products that `visit` finds, with those elements of both operands and of the result.
fn summed(
    case: &dyn fmt::Display,
    pass: ConvPass,
    [first_len, second_len, len]: [usize; 3],
    [first, second]: [&[f64]; 2],
    terms: usize,
    visit: impl FnOnce(&mut dyn FnMut(Option<usize>, usize, usize)),
) -> ConvSums {
    assert_eq!(first.len(), first_len, "the first operand of {case} differs in length");
    assert_eq!(second.len(), second_len, "the second operand of {case} differs in length");
    let zeros = vec![0.0; len];
    let mut sums =
        ConvSums { values: zeros.clone(), magnitudes: zeros.clone(), squares: zeros, terms };
    let mut add = |at: usize, term: f64| {
        sums.values[at] += term;
        sums.magnitudes[at] += term.abs();
        sums.squares[at] += term * term;
    };
    visit(&mut |x, w, y| match pass {
        ConvPass::Fprop => add(y, x.map_or(0.0, |x| first[x]) * second[w]),
        ConvPass::Dgrad => {
            if let Some(x) = x {
                add(x, first[y] * second[w]);
            }
        }
        ConvPass::Wgrad => add(w, x.map_or(0.0, |x| first[x]) * second[y]),
    });
    sums
}

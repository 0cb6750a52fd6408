//! Convolutions whose operands are large, with results that are checked at some of their elements.

use crate::Rotated;
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    conv::{ConvBlueprint, ConvPass, ConvProblem, conv_with},
};
use blackburn_reference::{matmul::MatmulPrecision, matmul::Sums, storage::Storage};
use cubecl::client::Client;

/// A pass and its operands.
#[derive(Debug)]
pub struct Convolution {
    /// What is asked for.
    pub problem: ConvProblem,
    operands: [Rotated; 2],
}

impl Convolution {
    /// With normal numbers as operands.
    pub fn new(client: &Client, problem: ConvProblem) -> Self {
        let spans = problem.spans();
        let operand = |at: usize| Rotated::new(client, 1 + at as u64, spans[at], problem.dtype);
        Self { problem, operands: [operand(0), operand(1)] }
    }

    /// Launches a plan's kernels.
    ///
    /// # Errors
    ///
    /// As [`conv_with`].
    pub fn run(&self, client: &Client, plan: &ConvBlueprint) -> Result<Buffer, KernelError> {
        let [first, second] = &self.operands;
        conv_with(client, &self.problem, plan, &first.buffer, &second.buffer, None)
    }

    /// How far off the worst of some elements is, in bounds of the sum's precision.
    ///
    /// # Errors
    ///
    /// What the device or the comparison reports.
    pub fn verify(
        &self,
        client: &Client,
        out: &Buffer,
        storage: Storage,
        precision: &MatmulPrecision,
    ) -> Result<(), String> {
        /// A prime, so that samples fall on all places of a tile.
        const SAMPLES: usize = 211;
        let bytes = client.read_one(out.handle.clone()).map_err(|error| format!("{error:?}"))?;
        let actual = storage.decode(&bytes);
        let [_, _, shape] = self.problem.shapes();
        let strides = self.problem.out_strides();
        let elements = self.problem.out_elements();
        let step = (elements / SAMPLES).max(1);
        let mut sampled = Vec::new();
        let (mut values, mut magnitudes, mut squares) = (Vec::new(), Vec::new(), Vec::new());
        let mut most_terms = 1;
        for element in (0..elements).step_by(step) {
            let mut rest = element;
            let mut index = [0; 4];
            for dim in (0..4).rev() {
                index[dim] = rest % shape[dim];
                rest /= shape[dim];
            }
            let (mut sum, mut magnitude, mut square, mut terms) = (0.0, 0.0, 0.0, 0);
            self.for_each_term(index, |term| {
                sum += term;
                magnitude += term.abs();
                square += term * term;
                terms += 1;
            });
            most_terms = most_terms.max(terms);
            let at: usize = index.iter().zip(strides).map(|(index, stride)| index * stride).sum();
            sampled.push(actual[at]);
            values.push(sum);
            magnitudes.push(magnitude);
            squares.push(square);
        }
        let sums =
            Sums { values: &values, magnitudes: &magnitudes, squares: &squares, k: most_terms };
        precision.check_random(&sampled, &sums).map(drop).map_err(|error| error.to_string())
    }

    /// Calls `add` with each product of which that element of the result is the sum.
    fn for_each_term(&self, index: [usize; 4], mut add: impl FnMut(f64)) {
        let ConvProblem { pass, input, output, kernel, options, batch, .. } = self.problem;
        let [channels, filters] = self.problem.group_channels();
        let at = |operand: usize, index: [usize; 4]| {
            let strides = if operand == 0 { self.problem.first } else { self.problem.second };
            let at: usize = index.iter().zip(strides).map(|(index, stride)| index * stride).sum();
            self.operands[operand].at(at)
        };
        // The pixel of x that a tap meets at a pixel of y.
        let met = |dim: usize, pixel: usize, tap: usize| {
            let at = pixel * options.stride[dim] + tap * options.dilation[dim];
            at.checked_sub(options.padding[dim][0]).filter(|at| *at < input[dim])
        };
        let taps = || (0..kernel[0]).flat_map(|r| (0..kernel[1]).map(move |s| [r, s]));
        let pixels = || (0..output[0]).flat_map(|p| (0..output[1]).map(move |q| [p, q]));
        match pass {
            ConvPass::Fprop => {
                let [n, k, p, q] = index;
                for [r, s] in taps() {
                    let Some((h, w)) = met(0, p, r).zip(met(1, q, s)) else { continue };
                    for c in 0..channels {
                        add(at(0, [n, k / filters * channels + c, h, w]) * at(1, [k, c, r, s]));
                    }
                }
            }
            ConvPass::Dgrad => {
                let [n, c, h, w] = index;
                let group = c / channels;
                let back = |dim: usize, pixel: usize, tap: usize| {
                    let at = (pixel + options.padding[dim][0])
                        .checked_sub(tap * options.dilation[dim])?;
                    let is_met = at % options.stride[dim] == 0;
                    let at = at / options.stride[dim];
                    (is_met && at < output[dim]).then_some(at)
                };
                for [r, s] in taps() {
                    let Some((p, q)) = back(0, h, r).zip(back(1, w, s)) else { continue };
                    for k in group * filters..(group + 1) * filters {
                        add(at(0, [n, k, p, q]) * at(1, [k, c % channels, r, s]));
                    }
                }
            }
            ConvPass::Wgrad => {
                let [k, c, r, s] = index;
                for n in 0..batch {
                    for [p, q] in pixels() {
                        let Some((h, w)) = met(0, p, r).zip(met(1, q, s)) else { continue };
                        let x = at(0, [n, k / filters * channels + c, h, w]);
                        add(x * at(1, [n, k, p, q]));
                    }
                }
            }
        }
    }
}

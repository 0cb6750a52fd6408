//! What is done to a sum before it is written: `out = act(alpha s_a s_b sum + bias) + beta residual`, or that times a
//! residual.

use super::MatmulProblem;
use crate::{
    KernelError,
    buffer::{Buffer, F32},
    outlier,
};
use cubecl::prelude::*;
use std::f32::consts::{FRAC_1_SQRT_2, PI};

/// A function applied to each element of a product.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Activation {
    /// x.
    #[default]
    Identity,
    /// 0 below 0, else x, NaN included.
    Relu,
    /// x / (1 + exp(-x)).
    Silu,
    /// x Phi(x).
    Gelu,
    /// x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
    GeluTanh,
}

/// What is done to a product before it is written.
#[derive(Clone, Debug)]
pub struct Epilogue {
    /// A factor.
    pub alpha: f32,
    /// Two more factors, f32 scalars on the device: what operands of 8 and 4 bits have to be
    /// multiplied by.
    pub scales: Option<[Buffer; 2]>,
    /// Numbers of the output's type, one added to each of the problem's [`columns`](MatmulProblem::columns).
    pub bias: Option<Buffer>,
    /// Applied after the bias.
    pub activation: Activation,
    /// Also return what the activation is applied to, for the backward pass.
    pub keep_preactivation: bool,
    /// Added last, `beta` times; shape, layout and type of the output.
    pub residual: Option<Buffer>,
    /// The residual's factor. With 0 the residual is not read, as in BLAS: it may hold NaN, or
    /// nothing yet. Without a residual it has no meaning.
    pub beta: f32,
    /// Whether the residual multiplies the activation's value, in the place of being added: a mask of dropout, say. beta
    /// has no meaning then.
    pub residual_multiplies: bool,
    /// Whether rows of the inner batch's matrices take turns: the output lies as `[outer, m, inner, n]` and not as
    /// `[outer, inner, m, n]`. The heads of a token then lie beside each other in attention's output. The residual and
    /// the kept preactivation lie in the same way.
    pub interleaved: bool,
}

impl Default for Epilogue {
    fn default() -> Self {
        Self {
            alpha: 1.0,
            scales: None,
            bias: None,
            activation: Activation::Identity,
            keep_preactivation: false,
            residual: None,
            beta: 1.0,
            residual_multiplies: false,
            interleaved: false,
        }
    }
}

impl Epilogue {
    /// Checks each tensor against the problem, for `op`.
    pub(super) fn check(
        &self,
        op: &'static str,
        problem: &MatmulProblem,
    ) -> Result<(), KernelError> {
        if let Some(bias) = &self.bias {
            bias.check_span(op, "bias", problem.columns, problem.out)?;
            // It is copied four bytes at a time.
            if !bias.offset_bytes().is_multiple_of(4) {
                let reason = "a bias that does not begin at a multiple of 4 bytes";
                return Err(KernelError::unsupported(op, reason));
            }
        }
        if let Some(residual) = &self.residual {
            residual.check_span(op, "residual", problem.out_elements(), problem.out)?;
        }
        let mut scales = self.scales.iter().flatten();
        scales.try_for_each(|scale| scale.check_span(op, "scales", 1, F32))
    }

    /// The tensors as arguments; what a step that is not compiled in would read is `unused`.
    pub(crate) fn args<T: CubePrimitive>(&self, unused: &Buffer) -> EpilogueTensorsLaunch<T> {
        let [lhs_scale, rhs_scale] = match &self.scales {
            Some(scales) => scales.each_ref(),
            None => [unused; 2],
        };
        EpilogueTensorsLaunch {
            lhs_scale: lhs_scale.arg(1),
            rhs_scale: rhs_scale.arg(1),
            bias: self.bias.as_ref().unwrap_or(unused).arg(1),
            bias_columns: self.bias.as_ref().map_or(0, |bias| bias.elements as u32),
            residual: self.residual.as_ref().unwrap_or(unused).arg(1),
            alpha: self.alpha,
            beta: self.beta,
            steps: self.blueprint(),
        }
    }

    /// Whether its steps need registers that the widest tiles leave none of: there they spill.
    pub(super) fn needs_registers(&self) -> bool {
        self.keep_preactivation
            || !matches!(self.activation, Activation::Identity | Activation::Relu)
    }

    /// Memory for what a product returns.
    pub(super) fn output(&self, client: &Client, problem: &MatmulProblem) -> MatmulOutput {
        let empty = || match problem.makes_outlier() {
            true => outlier::empty(client, problem.out_elements(), problem.out),
            false => Buffer::empty(client, problem.out_elements(), problem.out),
        };
        MatmulOutput { out: empty(), preactivation: self.keep_preactivation.then(empty) }
    }

    pub(super) fn blueprint(&self) -> EpilogueBlueprint {
        let is_read = self.residual_multiplies || self.beta != 0.0;
        let residual = self.residual.as_ref().filter(|_| is_read);
        let offset = residual.map_or(0, Buffer::offset_bytes);
        EpilogueBlueprint {
            scaled: self.scales.is_some(),
            bias: self.bias.is_some(),
            activation: self.activation,
            preactivation: self.keep_preactivation,
            residual: residual.is_some(),
            residual_in_octets: residual.is_some() && offset.is_multiple_of(16),
            residual_multiplies: residual.is_some() && self.residual_multiplies,
            interleaved: self.interleaved,
        }
    }
}

/// What a matrix product returns.
#[derive(Clone, Debug)]
pub struct MatmulOutput {
    /// The product without gaps: row by row of each matrix, or [interleaved](Epilogue::interleaved).
    pub out: Buffer,
    /// What the activation was applied to, if [`Epilogue::keep_preactivation`] asks for it.
    pub preactivation: Option<Buffer>,
}

impl MatmulOutput {
    /// As arguments: what is not asked for has the product in its place.
    pub(crate) fn args<T: CubePrimitive>(&self) -> OutputsLaunch<T> {
        let preactivation = self.preactivation.as_ref().unwrap_or(&self.out).arg(1);
        OutputsLaunch { preactivation, out: self.out.arg(1) }
    }
}

/// Which steps are compiled in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct EpilogueBlueprint {
    pub(crate) scaled: bool,
    pub(crate) bias: bool,
    pub(crate) activation: Activation,
    pub(crate) preactivation: bool,
    pub(crate) residual: bool,
    /// Whether the residual begins at a multiple of 16 bytes.
    pub(crate) residual_in_octets: bool,
    /// Whether the residual is a factor.
    pub(crate) residual_multiplies: bool,
    /// Whether rows of the inner batch's matrices take turns.
    pub(crate) interleaved: bool,
}

/// What an epilogue reads, and its numbers.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct EpilogueTensors<T: CubePrimitive> {
    pub(crate) lhs_scale: Box<[f32]>,
    pub(crate) rhs_scale: Box<[f32]>,
    pub(crate) bias: Box<[T]>,
    /// Columns that have a bias; none from there on is read.
    pub(crate) bias_columns: u32,
    pub(crate) residual: Box<[T]>,
    pub(crate) alpha: f32,
    pub(crate) beta: f32,
    #[cube(comptime)]
    pub(crate) steps: EpilogueBlueprint,
}

/// What a product writes.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Outputs<T: CubePrimitive> {
    pub(crate) preactivation: Box<[T]>,
    pub(crate) out: Box<[T]>,
}

/// alpha, times the scales.
#[cube]
pub(super) fn factor<T: CubePrimitive>(epilogue: &EpilogueTensors<T>) -> f32 {
    if comptime!(epilogue.steps.scaled) {
        epilogue.alpha * epilogue.lhs_scale[0] * epilogue.rhs_scale[0]
    } else {
        epilogue.alpha
    }
}

/// Row `row` of matrix `batch`, counted as rows of the output lie in memory.
#[cube]
pub(super) fn row_in_memory(
    batch: u32,
    row: u32,
    m: u32,
    inner_batches: u32,
    #[comptime] interleaved: bool,
) -> u32 {
    if comptime!(interleaved) {
        (batch / inner_batches * m + row) * inner_batches + batch % inner_batches
    } else {
        batch * m + row
    }
}

/// The bias of `column`; zero where there is none, and beyond the last column.
#[cube]
pub(crate) fn bias_of<O: Float>(
    bias: &[O],
    column: u32,
    columns: u32,
    #[comptime] epilogue: EpilogueBlueprint,
) -> f32 {
    let mut value = 0.0f32;
    if comptime!(epilogue.bias) {
        if column < columns {
            value = f32::cast_from(bias[column as usize]);
        }
    }
    value
}

/// Finishes element `at` of the output, whose sum has its factor and its bias, and writes it.
#[cube]
pub(super) fn finish<O: Float>(
    epilogue: &EpilogueTensors<O>,
    outputs: &mut Outputs<O>,
    sum: f32,
    at: u32,
) {
    let steps = comptime!(epilogue.steps);
    let at = at as usize;
    if comptime!(steps.preactivation) {
        outputs.preactivation[at] = O::cast_from(sum);
    }
    let mut value = activate(sum, comptime!(steps.activation));
    if comptime!(steps.residual) {
        let residual = f32::cast_from(epilogue.residual[at]);
        value = if comptime!(steps.residual_multiplies) {
            value * residual
        } else {
            fma(residual, epilogue.beta, value)
        };
    }
    outputs.out[at] = O::cast_from(value);
}

/// The activation's value at x.
#[cube]
pub(super) fn activate(x: f32, #[comptime] activation: Activation) -> f32 {
    match comptime!(activation) {
        Activation::Identity => x,
        // A maximum would turn NaN into 0 and hide an overflow.
        Activation::Relu => select(x < 0.0f32, 0.0f32, x),
        Activation::Silu => x / (1.0f32 + (-x).exp()),
        Activation::Gelu => 0.5f32 * x * (1.0f32 + Erf::erf(x * FRAC_1_SQRT_2)),
        Activation::GeluTanh => {
            let scale = comptime!((2.0 / PI).sqrt());
            0.5f32 * x * (1.0f32 + (scale * (x + 0.044715f32 * x * x * x)).tanh())
        }
    }
}

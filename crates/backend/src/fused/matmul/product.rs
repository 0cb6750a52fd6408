//! A product, when it runs.

use super::{
    NAME,
    chain::{Action, Chain, ChainStep},
    eight_bits,
    placed::Placed,
};
use crate::{
    declined::{tell_once, unsupported},
    fused::gelu::GeluPass,
    ops::fp8_linear::count_other,
    stream::{Done, ExpectedScalar, Replacement},
    tensors::{
        Input, Tensors, consume, contiguous_buffer, cube_tensor, register_output,
        register_with_strides, register_zeros,
    },
};
use blackburn_kernels::{
    DeviceProfile, KernelError,
    buffer::Buffer,
    matmul::{
        Epilogue, F32Precision, MatmulBlueprint, MatmulProblem, TensorLayout, matmul, matmul_tuned,
    },
};
use burn_fusion::stream::ScalarId;
use burn_ir::TensorIr;
use serde::{Deserialize, Serialize};

pub(super) const OP: &str = "matmul";

/// What replaces a product and operations behind it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum MatmulPass {
    Product(Product),
    /// The gradient of GELU behind it.
    Gelu(GeluPass),
}

/// A product on the kernel, with as many of its steps as the kernel serves.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Product {
    pub(super) chain: Chain,
    pub(super) settings: ProductSettings,
}

/// How products are computed.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ProductSettings {
    /// Whether f32 tensors are multiplied with all their bits, and not rounded to TF32.
    pub(crate) full_f32: bool,
    /// Whether plans are measured, or chosen by the model alone.
    pub(crate) tune: bool,
}

impl Replacement for MatmulPass {
    const NAME: &'static str = NAME;

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        match self {
            Self::Product(Product { chain, settings }) => {
                let steps = chain.launch(tensors, *settings)?;
                Ok(Done::First(chain.positions(steps).len()))
            }
            Self::Gelu(pass) => pass.launch(tensors),
        }
    }
}

impl Chain {
    /// Runs the product and as many steps as the kernel serves, and says how many those are.
    fn launch(
        &self,
        context: &mut Tensors,
        settings: ProductSettings,
    ) -> Result<usize, KernelError> {
        let lhs = Input::of(context, &self.lhs, OP)?;
        let rhs = Input::of(context, &self.rhs, OP)?;
        if lhs.elements() == 0 || rhs.elements() == 0 {
            return self.make_of_nothing(context, &lhs);
        }
        let (of_lhs, of_rhs, dtype) = (layout(&lhs), layout(&rhs), lhs.dtype);
        let precision = if settings.full_f32 { F32Precision::Full } else { F32Precision::Tf32 };
        let mut epilogue = Epilogue::default();
        let mut served = 0;
        let summed = self.steps.first().is_some_and(|step| step.action == Action::BatchSum);
        let summed = summed
            .then(|| MatmulProblem::summed_over_batch(of_lhs, of_rhs, dtype, precision))
            .transpose()
            .unwrap_or_else(|reason| {
                tell_once(NAME, &reason);
                None
            });
        let problem = match summed {
            Some(problem) => {
                served = 1;
                problem
            }
            None => MatmulProblem::new(of_lhs, of_rhs, dtype, precision)?,
        };
        if MatmulBlueprint::waits_for_proof(&problem, DeviceProfile::of(&lhs.client)) {
            // Burn's own products run on tensor cores, and ordinary arithmetic is far slower.
            return Err(unsupported(OP, "kernels on tensor cores that are unproven on this GPU"));
        }
        for step in &self.steps[served..] {
            match step.add_to(&mut epilogue, context, &problem) {
                Ok(()) => served += 1,
                Err(reason) => {
                    tell_once(NAME, &reason);
                    break;
                }
            }
        }
        let in_eight_bits = eight_bits::multiply(&lhs, &rhs, &problem, &epilogue);
        let is_declined = in_eight_bits.is_err();
        let in_eight_bits = in_eight_bits.unwrap_or_else(|reason| {
            tell_once(NAME, &reason);
            None
        });
        let out = self.value_before(served);
        let (output, strides) = match in_eight_bits {
            Some(output) => (output, None),
            None => {
                let known = context.tensors.get(&out.id);
                let shape: &[usize] = known.map_or(&[], |known| &known.shape);
                let placed = Placed::of(&problem, &epilogue, shape, &rhs);
                let (problem, turned) = (placed.problem, placed.turned);
                epilogue.interleaved = placed.interleaved;
                let [lhs, rhs] = if turned { [&rhs, &lhs] } else { [&lhs, &rhs] };
                let product = if settings.tune { matmul_tuned } else { matmul };
                let output = product(
                    &lhs.client,
                    &problem,
                    &lhs.buffer(problem.lhs_span()),
                    &rhs.buffer(problem.rhs_span()),
                    &epilogue,
                )?;
                // Batches of products are attention's, and never a layer's.
                if problem.batch == [1, 1] {
                    count_other(problem.flops(), is_declined);
                }
                (output, placed.strides)
            }
        };

        match strides {
            Some(strides) => register_with_strides(context, out, &lhs, output.out, &strides, OP)?,
            None => register_output(context, out, &lhs, output.out, OP)?,
        }
        if let (Some(kept), Some(buffer)) = (self.preactivation(served), output.preactivation) {
            register_output(context, kept, &lhs, buffer, OP)?;
        }
        self.consume(context, served);
        Ok(served)
    }

    /// As [`launch`](Self::launch), where an operand has no elements: the product has none either, or is
    /// zeros, sums over nothing. Nothing becomes of no elements, up to a sum over no matrices, which is
    /// zeros again; what is done to zeros is left to Burn.
    fn make_of_nothing(&self, context: &mut Tensors, lhs: &Input) -> Result<usize, KernelError> {
        let elements = |made: usize| {
            let known = context.tensors.get(&self.value_before(made).id);
            known.map_or(0, |known| known.shape.num_elements())
        };
        let served = (0..=self.steps.len()).find(|made| elements(*made) > 0);
        let served = served.unwrap_or(self.steps.len());
        register_zeros(context, self.value_before(served), &lhs.location(), OP)?;
        let is_kept =
            |step: &ChainStep| matches!(step.action, Action::Activation { kept: true, .. });
        if self.steps[..served].iter().any(is_kept)
            && let Some(kept) = self.preactivation(served)
        {
            register_zeros(context, kept, &lhs.location(), OP)?;
        }
        self.consume(context, served);
        Ok(served)
    }

    /// Lets go of what the product and its first `served` steps read.
    fn consume(&self, context: &mut Tensors, served: usize) {
        let operands = self.steps[..served].iter().filter_map(ChainStep::operand);
        for tensor in [&self.lhs, &self.rhs].into_iter().chain(operands) {
            consume(context, tensor);
        }
    }

    /// What an activation among the first `served` steps is applied to.
    fn preactivation(&self, served: usize) -> Option<&TensorIr> {
        let is_activation = |step: &ChainStep| matches!(step.action, Action::Activation { .. });
        self.steps[..served].iter().position(is_activation).map(|at| self.value_before(at))
    }
}

impl ChainStep {
    /// The tensor that it reads besides what it is applied to.
    fn operand(&self) -> Option<&TensorIr> {
        match &self.action {
            Action::Bias(tensor) | Action::Residual(tensor) | Action::Factor(tensor) => {
                Some(tensor)
            }
            Action::BatchSum | Action::Scale { .. } | Action::Activation { .. } | Action::View => {
                None
            }
        }
    }

    /// Asks `epilogue` for the step, if it is one that the kernel serves now that sizes, numbers
    /// and layouts are known.
    fn add_to(
        &self,
        epilogue: &mut Epilogue,
        context: &Tensors,
        problem: &MatmulProblem,
    ) -> Result<(), KernelError> {
        match &self.action {
            Action::Scale { scalar, divides } => {
                let number = context.scalars.get(&ScalarId { value: *scalar });
                let number = number.ok_or_else(|| unsupported(OP, "a number that is not known"))?;
                let number = number.elem::<f64>();
                let factor = if *divides { number.recip() } else { number };
                epilogue.alpha = factor as f32;
            }
            Action::Bias(tensor) => {
                epilogue.bias = Some(dense(context, tensor, problem.n)?);
            }
            Action::Residual(tensor) => {
                epilogue.residual = Some(residual(context, tensor, problem)?);
            }
            Action::Factor(tensor) => {
                epilogue.residual = Some(residual(context, tensor, problem)?);
                epilogue.residual_multiplies = true;
            }
            Action::Activation { function, scalars, kept } => {
                if !ExpectedScalar::are_there(scalars, context) {
                    return Err(unsupported(
                        OP,
                        "an activation's operations, with other constants",
                    ));
                }
                epilogue.activation = function.activation();
                epilogue.keep_preactivation = *kept;
            }
            Action::View => {}
            Action::BatchSum => {
                return Err(unsupported(OP, "a sum over batches that do not follow each other"));
            }
        }
        Ok(())
    }
}

/// The memory of a residual, copied where its elements do not lie in their order: the sum by an operation of its own
/// would read them so, too, and hand its result on in the same disorder.
fn residual(
    context: &Tensors,
    tensor: &TensorIr,
    problem: &MatmulProblem,
) -> Result<Buffer, KernelError> {
    let input = Input::of(context, tensor, OP)?;
    if input.elements() == problem.out_elements() && !input.is_contiguous() {
        return Ok(contiguous_buffer(cube_tensor(context, tensor, OP)?));
    }
    dense(context, tensor, problem.out_elements())
}

fn layout(input: &Input) -> TensorLayout<'_> {
    TensorLayout { shape: &input.shape, strides: &input.strides, dtype: input.dtype }
}

/// The memory of `tensor`, which has to be `elements` elements without gaps.
fn dense(context: &Tensors, tensor: &TensorIr, elements: usize) -> Result<Buffer, KernelError> {
    let input = Input::of(context, tensor, OP)?;
    if input.elements() != elements || !input.is_contiguous() {
        return Err(unsupported(OP, "a bias or residual that is broadcast otherwise or strided"));
    }
    Ok(input.buffer(elements))
}

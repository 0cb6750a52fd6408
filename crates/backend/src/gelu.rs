//! The provider that runs `burn::nn::Gelu`, forward and backward, on the GELU kernels.
//!
//! Burn emits GELU as five element-wise operations and its gradient as sixteen ([`FORWARD`],
//! [`BACKWARD`]). Burn's own fusion makes one kernel of either, which moves about half the bytes a
//! second that ours moves.
//!
//! The gradient is not the same function: Burn differentiates the tanh approximation of GELU
//! although its forward is the exact one, and the kernel computes the derivative of the forward,
//! `Phi(x) + x phi(x)`. They differ by up to 9e-4 of the output's gradient (at |x| = 2), which is
//! 14,000 roundings of f32 and a fifth of one of bf16.
//!
//! Taken is what stands at the head of a block. Elsewhere the gradient is Burn's:
//! - Behind other element-wise operations (a bias, the gradient of dropout) Burn's fusion makes one
//!   kernel of all, which saves more than ours gains.
//! - Behind a product that Burn's fusion takes, that is, without `BlackburnMatmul`, the sixteen
//!   operations become part of the product's kernel.

use crate::{
    declined::tell_once,
    handles::{Input, Tensors, consume, register_output},
    pattern::{
        ExpectedScalar, Matcher, Pattern,
        Step::{Add, AddScalar, DivScalar, Erf, Mul, MulScalar, PowfScalar, Tanh},
        burn_score,
    },
};
use blackburn_kernels::{
    KernelError,
    gelu::{gelu_backward, gelu_forward},
};
use burn_backend::DType;
use burn_cubecl::{
    CubeDevice,
    fusion::{CubeFuser, OptimizationProvider},
};
use burn_cubecl_fusion::{
    FallbackOperation,
    optim::{CubeOptimization, FusedOperation},
};
use burn_fusion::{FuserProperties, FuserStatus, OperationFuser, stream::ScalarId};
use burn_ir::{OperationIr, TensorIr};
use serde::{Deserialize, Serialize};
use std::f64::consts::SQRT_2;

/// The provider's name.
pub(crate) const NAME: &str = "BlackburnGelu";

/// `ActivationOps::gelu` of burn-backend: `x (1 + erf(x / sqrt 2)) / 2`.
pub(crate) const FORWARD: Pattern = &[
    ("scaled", DivScalar("x", SQRT_2)),
    ("erf", Erf("scaled")),
    ("one_plus_erf", AddScalar("erf", 1.0)),
    ("twice", Mul("x", "one_plus_erf")),
    ("y", DivScalar("twice", 2.0)),
];

/// `ActivationOps::gelu_backward` of burn-backend, with the constants that it has.
const BACKWARD: Pattern = &[
    ("x3", PowfScalar("x", 3.0)),
    ("c1", MulScalar("x3", 0.035_677_4)),
    ("c2", MulScalar("x", 0.797_885)),
    ("c3", MulScalar("x3", 0.053_516_1)),
    ("c4", MulScalar("x", 0.398_942)),
    ("inner1", Add("c1", "c2")),
    ("inner2", Add("c3", "c4")),
    ("tanh", Tanh("inner1")),
    ("tanh2", Mul("tanh", "tanh")),
    ("minus_tanh2", MulScalar("tanh2", -1.0)),
    ("sech2", AddScalar("minus_tanh2", 1.0)),
    ("half_tanh", MulScalar("tanh", 0.5)),
    ("product", Mul("inner2", "sech2")),
    ("half_plus_product", AddScalar("product", 0.5)),
    ("slope", Add("half_tanh", "half_plus_product")),
    ("dx", Mul("slope", "dy")),
];

/// Registers [`GeluFuser`] with Burn.
pub(crate) struct GeluProvider;

impl OptimizationProvider for GeluProvider {
    type Operation = GeluOperation;

    fn fuser(&self, _device: &CubeDevice) -> CubeFuser {
        CubeFuser::new(GeluFuser::default())
    }
}

/// Follows both patterns, and closes once one is complete or both are broken.
///
/// It waits on no operation that Burn's element-wise fusion does not wait on too, so it takes none
/// from another fusion.
#[derive(Clone)]
struct GeluFuser {
    candidates: Vec<Matcher>,
    found: Option<GeluOperation>,
}

impl Default for GeluFuser {
    fn default() -> Self {
        Self { candidates: vec![Matcher::new(FORWARD), Matcher::new(BACKWARD)], found: None }
    }
}

impl GeluFuser {
    /// How far the bid is above that of Burn's own fusion for the same operations: two operations
    /// more (210 each). With a mask and a scale behind GELU, ours and one kernel for those move 5
    /// tensors at about 2890 GB/s, and Burn's one kernel 3 tensors at 1571 (H200, bf16). With more
    /// behind it, Burn's kernel takes less time.
    const LEAD: u64 = 430;
}

impl OperationFuser<CubeOptimization> for GeluFuser {
    fn fuse(&mut self, operation: &OperationIr) {
        self.candidates.retain_mut(|candidate| candidate.follow(operation));
        if let Some(complete) = self.candidates.iter().find(|matcher| matcher.is_complete()) {
            self.found = GeluOperation::of(complete);
            self.candidates.clear();
        }
    }

    fn finish(&mut self) -> CubeOptimization {
        let found = self.found.clone();
        CubeOptimization::new(found.expect("Burn finishes a fuser only when it says it is ready"))
    }

    fn reset(&mut self) {
        *self = Self::default();
    }

    fn status(&self) -> FuserStatus {
        if self.candidates.is_empty() { FuserStatus::Closed } else { FuserStatus::Open }
    }

    fn properties(&self) -> FuserProperties {
        let score = match &self.found {
            None => 0,
            Some(GeluOperation { dy: None, .. }) => burn_score(FORWARD, 1) + Self::LEAD,
            Some(GeluOperation { dy: Some(_), .. }) => burn_score(BACKWARD, 2) + Self::LEAD,
        };
        FuserProperties { score, ready: self.found.is_some() }
    }

    fn len(&self) -> usize {
        let followed = self.candidates.iter().map(Matcher::len).max().unwrap_or(0);
        self.found.as_ref().map_or(followed, |found| found.operations)
    }

    fn clone_dyn(&self) -> Box<dyn OperationFuser<CubeOptimization>> {
        Box::new(self.clone())
    }
}

/// GELU on the kernel, or on Burn's own operations where the kernel declines.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct GeluOperation {
    x: TensorIr,
    /// The gradient of the output; with it, the operation is the backward pass.
    dy: Option<TensorIr>,
    out: TensorIr,
    scalars: Vec<ExpectedScalar>,
    /// How many operations it replaces.
    operations: usize,
}

impl GeluOperation {
    /// What `complete` has followed, if the kernel takes the type.
    fn of(complete: &Matcher) -> Option<Self> {
        let x = complete.tensor("x")?.clone();
        matches!(x.dtype, DType::F32 | DType::F16 | DType::BF16).then_some(())?;
        Some(Self {
            x,
            dy: complete.tensor("dy").cloned(),
            out: complete.output()?.clone(),
            scalars: complete.scalars().to_vec(),
            operations: complete.len(),
        })
    }

    fn launch(&self, context: &mut Tensors) -> Result<(), KernelError> {
        const OP: &str = "gelu";

        let unsupported = |reason: &str| KernelError::Unsupported { op: OP, reason: reason.into() };
        let is_there = |expected: &ExpectedScalar| {
            let id = ScalarId { value: expected.id };
            context.scalars.get(&id).is_some_and(|actual| expected.is(*actual))
        };
        if !self.scalars.iter().all(is_there) {
            return Err(unsupported("its operations, but with other constants"));
        }
        // Two passes more for a strided input: about the time of Burn's one kernel, and a fraction of
        // that of its operations one by one.
        let read = |tensor| Input::of(context, tensor, OP).map(Input::contiguous);
        let x = read(&self.x)?;
        let x_buffer = x.buffer(x.elements());
        let out = match &self.dy {
            None => gelu_forward(&x.client, &x_buffer)?,
            Some(dy) => {
                let dy = read(dy)?;
                gelu_backward(&x.client, &x_buffer, &dy.buffer(dy.elements()))?
            }
        };
        register_output(context, &self.out, &x, out, OP)?;
        for input in [Some(&self.x), self.dy.as_ref()].into_iter().flatten() {
            consume(context, input);
        }
        Ok(())
    }
}

impl FusedOperation for GeluOperation {
    const NAME: &'static str = NAME;
    type State = Self;

    fn num_ops_fused(&self) -> usize {
        self.operations
    }

    fn run(
        &mut self,
        context: &mut Tensors,
        fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>,
    ) {
        if let Err(reason) = self.launch(context) {
            tell_once(NAME, &reason);
            for operation in 0..self.operations {
                fallback(operation).run(context);
            }
        }
    }

    fn to_state(&self) -> Self::State {
        self.clone()
    }

    fn from_state(_device: &cubecl::Device, state: Self::State) -> Self {
        state
    }
}

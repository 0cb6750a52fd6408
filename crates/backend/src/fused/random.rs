//! The provider that draws Burn's random numbers of a pass by a key on the device, so that the pass can be
//! recorded.
//!
//! Burn tells kernels their seeds as numbers of a launch, which a replay repeats. Outside of passes its own
//! generator draws, as [`Device::seed`](burn::tensor::Device::seed) has it.

use crate::{
    random::next_random_tensor,
    stream::{Done, Replacement, SingleOperation},
    tensors::{Tensors, contiguous_buffer, contiguous_tensor, known_output, register_cube_tensor},
};
use blackburn_kernels::{
    KernelError,
    random::{RandomDistribution, RandomProblem, random},
};
use burn_backend::{DType, Distribution, cubecl::dtype_to_elem_type};
use burn_ir::{FloatOperationIr, OperationIr, RandomOpIr, TensorIr};
use serde::{Deserialize, Serialize};

const OP: &str = "random";

/// A tensor of random numbers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Random {
    out: TensorIr,
    distribution: Distribution,
}

impl Random {
    /// Whether it is of zeros and ones.
    pub(super) fn is_mask(&self) -> bool {
        matches!(self.distribution, Distribution::Bernoulli(_))
    }

    /// Whether it is of zeros and ones, and as large as `tensor`.
    pub(super) fn is_like(&self, tensor: &TensorIr) -> bool {
        self.is_mask() && self.out.shape == tensor.shape && self.out.dtype == tensor.dtype
    }
}

impl SingleOperation for Random {
    type Settings = ();

    fn of(operation: &OperationIr, (): &()) -> Option<Self> {
        let OperationIr::Float(dtype, FloatOperationIr::Random(RandomOpIr { out, distribution })) =
            operation
        else {
            return None;
        };
        let is_served = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
        is_served.then(|| Self { out: out.clone(), distribution: *distribution })
    }
}

impl Replacement for Random {
    const NAME: &'static str = "BlackburnRandom";

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        let Some((key, number)) = next_random_tensor() else { return Ok(Done::First(0)) };
        let shape = known_output(tensors, &self.out, OP)?.shape.clone();
        let problem = RandomProblem {
            elements: shape.num_elements(),
            dtype: dtype_to_elem_type(self.out.dtype),
            distribution: match self.distribution {
                Distribution::Default => RandomDistribution::Uniform { low: 0.0, high: 1.0 },
                Distribution::Uniform(low, high) => RandomDistribution::Uniform { low, high },
                Distribution::Bernoulli(p) => RandomDistribution::Bernoulli(p),
                Distribution::Normal(mean, deviation) => {
                    RandomDistribution::Normal { mean, deviation }
                }
            },
            number,
        };
        let y = random(&key.client, &problem, &contiguous_buffer(key.clone()))?;
        let y = contiguous_tensor(&key, y, shape, self.out.dtype);
        register_cube_tensor(tensors, &self.out, y, OP)?;
        Ok(Done::All)
    }
}

use super::OP;
use crate::{
    declined::unsupported,
    stream::{Done, ExpectedScalar, Matcher, Replacement, number},
    tensors::{
        Images, Tensors, consume, contiguous_buffer, contiguous_tensor, cube_tensor, known_output,
        register_cube_tensor,
    },
};
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    group_norm::{
        Affine, Form, GroupNormGradients, GroupNormInputs, GroupNormParts, GroupNormProblem,
        GroupNormSaved, group_norm_backward, group_norm_forward, group_norm_forward_with_parts,
    },
};
use burn_backend::DType;
use burn_cubecl::{kernel::cast, tensor::CubeTensor};
use burn_ir::TensorIr;
use burn_std::Shape;
use serde::{Deserialize, Serialize};

/// What replaces operations of a norm of groups.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum GroupNormPass {
    Forward(Forward),
    Backward(Backward),
}

impl Replacement for GroupNormPass {
    const NAME: &'static str = "BlackburnGroupNorm";

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        match self {
            Self::Forward(forward) => forward.launch(tensors),
            Self::Backward(backward) => backward.launch(tensors),
        }?;
        Ok(Done::All)
    }
}

/// The normalized images, and what is kept of the steps to them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Forward {
    x: TensorIr,
    /// Tells the groups; is never made but of sequences, where it is x.
    rows: TensorIr,
    parameters: Option<[TensorIr; 2]>,
    epsilon: u64,
    y: TensorIr,
    centered: Option<TensorIr>,
    normalized: Option<TensorIr>,
    variance: Option<TensorIr>,
    deviation: Option<TensorIr>,
}

impl Forward {
    pub(super) fn of(flow: &Matcher) -> Option<Self> {
        let of = |name| flow.tensor(name).cloned();
        let (x, y) = (of("x")?, of("y")?);
        (x.shape == y.shape && x.dtype == y.dtype).then_some(())?;
        let kept = ["centered", "normalized", "variance", "deviation"];
        let is_of_x =
            |name: &&'static str| flow.kept(name).is_none_or(|kept| kept.dtype == x.dtype);
        kept.iter().all(is_of_x).then_some(())?;
        Some(Self {
            x,
            rows: of("rows").or_else(|| of("x"))?,
            parameters: of("gamma_of_all").zip(of("beta_of_all")).map(|both| both.into()),
            epsilon: flow.scalar_of("variance")?,
            y,
            centered: flow.kept("centered"),
            normalized: flow.kept("normalized"),
            variance: flow.kept("variance"),
            deviation: flow.kept("deviation"),
        })
    }

    fn launch(&self, tensors: &mut Tensors) -> Result<(), KernelError> {
        let x = cube_tensor(tensors, &self.x, OP)?;
        let epsilon = number(tensors, self.epsilon)
            .ok_or_else(|| unsupported(OP, "an epsilon that is unknown"))?;
        let groups = groups_of(tensors, &self.rows, x.meta.shape())?;
        let images = Images::of(x.clone());
        let mut problem = GroupNormProblem { epsilon, ..images.problem(groups) };
        let affine = match &self.parameters {
            Some([gamma, beta]) => {
                let [gamma, beta] = [channels(tensors, gamma, &x)?, channels(tensors, beta, &x)?];
                problem.parameter = gamma.dtype;
                Some(Affine { gamma, beta })
            }
            None => None,
        };
        let inputs = GroupNormInputs { x: images.buffer(), affine };
        let kept = [&self.centered, &self.variance, &self.deviation];
        let keeps = self.normalized.is_some() || kept.iter().any(|kept| kept.is_some());
        let y = if keeps {
            let (y, parts) = group_norm_forward_with_parts(&x.client, &problem, &inputs)?;
            let GroupNormParts { centered, normalized, variance, deviation } = parts;
            if let Some(out) = &self.normalized {
                register_cube_tensor(tensors, out, images.like(normalized), OP)?;
            }
            for (out, made) in kept.into_iter().zip([centered, variance, deviation]) {
                if let Some(out) = out {
                    register(tensors, out, &x, made)?;
                }
            }
            y
        } else {
            group_norm_forward(&x.client, &problem, &inputs)?.y
        };
        register_cube_tensor(tensors, &self.y, images.like(y), OP)?;
        for tensor in [&self.x].into_iter().chain(self.parameters.iter().flatten()) {
            consume(tensors, tensor);
        }
        Ok(())
    }
}

/// The gradients of the images and of gamma.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Backward {
    scalars: Vec<ExpectedScalar>,
    /// Where the numbers by which sums become means are.
    shares: [u64; 2],
    dy: TensorIr,
    gamma: TensorIr,
    normalized: TensorIr,
    /// Is made of the normalized images where it is needed.
    centered: TensorIr,
    variance: TensorIr,
    deviation: TensorIr,
    dgamma: TensorIr,
    dx: TensorIr,
}

impl Backward {
    pub(super) fn of(flow: &Matcher) -> Option<Self> {
        let of = |name| flow.tensor(name).cloned();
        let (dy, rows) = (of("dy")?, of("scaled_rows").or_else(|| of("scaled"))?);
        let is_alike = |tensor: &TensorIr, of: &TensorIr| tensor.shape == of.shape;
        let fits = [("normalized", &dy), ("dx", &dy), ("centered", &rows), ("ones", &rows)]
            .into_iter()
            .chain([("ones_again", &rows)])
            .all(|(name, of)| flow.tensor(name).is_some_and(|tensor| is_alike(tensor, of)));
        let gamma = of("gamma")?;
        (fits && of("dgamma")?.dtype == gamma.dtype).then_some(())?;
        Some(Self {
            scalars: flow.scalars().iter().filter(|scalar| !scalar.is_any()).copied().collect(),
            shares: [flow.scalar_of("share")?, flow.scalar_of("share_again")?],
            dy,
            gamma,
            normalized: of("normalized")?,
            centered: of("centered")?,
            variance: of("variance")?,
            deviation: of("deviation")?,
            dgamma: of("dgamma")?,
            dx: of("dx")?,
        })
    }

    fn launch(&self, tensors: &mut Tensors) -> Result<(), KernelError> {
        let normalized = cube_tensor(tensors, &self.normalized, OP)?;
        let shape = normalized.meta.shape();
        let groups = groups_of(tensors, &self.centered, shape)?;
        let count = shape.num_elements() / (shape[0] * groups).max(1);
        let are_means = self.shares.iter().all(|share| {
            let share = number(tensors, *share).unwrap_or(0.0);
            (share * count as f64 - 1.0).abs() < 1e-3
        });
        if !(are_means && ExpectedScalar::are_there(&self.scalars, tensors)) {
            return Err(unsupported(OP, "its operations, but with other constants"));
        }
        let dy = cube_tensor(tensors, &self.dy, OP)?;
        if dy.meta.shape() != shape {
            return Err(unsupported(OP, "a gradient of another shape"));
        }
        let gamma = channels(tensors, &self.gamma, &normalized)?;
        let deviation = cube_tensor(tensors, &self.deviation, OP)?;
        let images = Images::of(normalized.clone());
        let dy = images.in_order(dy);
        let problem = GroupNormProblem {
            dy_stride: dy.stride(),
            parameter: gamma.dtype,
            ..images.problem(groups)
        };
        let saved = GroupNormSaved {
            x: images.buffer(),
            form: Form::Normalized,
            mean: None,
            rstd: contiguous_buffer(cast(deviation, DType::F32)),
            gamma: Some(gamma),
        };
        let client = &normalized.client;
        let made = group_norm_backward(client, &problem, &saved, &dy.buffer(), true)?;
        let GroupNormGradients { dx, parameters } = made;
        let [dgamma, _] = parameters.ok_or_else(|| unsupported(OP, "no gradient of gamma"))?;
        register_cube_tensor(tensors, &self.dx, images.like(dx), OP)?;
        register(tensors, &self.dgamma, &normalized, dgamma)?;
        let Self { dy, gamma, normalized, centered, variance, deviation, .. } = self;
        for tensor in [dy, gamma, normalized, centered, variance, deviation] {
            consume(tensors, tensor);
        }
        Ok(())
    }
}

/// The groups whose rows a tensor of that shape was turned into.
fn groups_of(tensors: &Tensors, rows: &TensorIr, images: &Shape) -> Result<usize, KernelError> {
    let rows = &known_output(tensors, rows, OP)?.shape;
    let channels = images.get(1).copied().unwrap_or(0);
    let groups = rows.get(1).copied().unwrap_or(0);
    let are_groups = rows.num_dims() == 3
        && rows.first() == images.first()
        && groups > 0
        && channels.is_multiple_of(groups)
        && images.num_elements() > 0
        && rows.num_elements() == images.num_elements();
    if are_groups {
        Ok(groups)
    } else {
        Err(unsupported(OP, "rows that are no groups of channels"))
    }
}

/// A parameter, one number for each channel of `images`.
fn channels(
    tensors: &Tensors,
    tensor: &TensorIr,
    images: &CubeTensor,
) -> Result<Buffer, KernelError> {
    let parameter = cube_tensor(tensors, tensor, OP)?;
    let (shape, images) = (parameter.meta.shape(), images.meta.shape());
    let is_of_channels = shape.num_dims() == images.num_dims()
        && shape.get(1) == images.get(1)
        && shape.num_elements() == shape.get(1).copied().unwrap_or(0);
    if !is_of_channels {
        return Err(unsupported(OP, "parameters that are not one number for each channel"));
    }
    Ok(contiguous_buffer(parameter))
}

/// Makes `buffer` what `out` stands for.
fn register(
    tensors: &mut Tensors,
    out: &TensorIr,
    like: &CubeTensor,
    buffer: Buffer,
) -> Result<(), KernelError> {
    let shape = known_output(tensors, out, OP)?.shape.clone();
    register_cube_tensor(tensors, out, contiguous_tensor(like, buffer, shape, out.dtype), OP)
}

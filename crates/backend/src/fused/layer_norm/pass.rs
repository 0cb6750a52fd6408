use super::OP;
use crate::{
    declined::unsupported,
    fused::dropped::DroppedSum,
    stream::{Done, ExpectedScalar, Matcher, Replacement, number},
    tensors::{
        Tensors, consume, contiguous_buffer, contiguous_tensor, cube_tensor, known_output,
        register_cube_tensor,
    },
};
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    group_norm::{Form, GroupNormProblem, GroupNormSaved, Order, group_norm_backward},
    layer_norm::{
        LayerNormInputs, LayerNormParts, Norm, layer_norm_backward_of_parts, layer_norm_forward,
        layer_norm_forward_with_parts,
    },
};
use burn_backend::DType;
use burn_cubecl::{kernel::cast, tensor::CubeTensor};
use burn_ir::TensorIr;
use cubecl::client::Client;
use serde::{Deserialize, Serialize};

/// What replaces operations of a layer norm.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum LayerNormPass {
    /// What is in front of the norm.
    Sum(DroppedSum),
    Forward(Forward),
    Backward(Backward),
}

impl Replacement for LayerNormPass {
    const NAME: &'static str = "BlackburnLayerNorm";

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        match self {
            Self::Sum(sum) => sum.launch(tensors),
            Self::Forward(forward) => forward.launch(tensors),
            Self::Backward(backward) => backward.launch(tensors),
        }?;
        Ok(Done::All)
    }
}

/// The normalized rows, and what is kept of the steps to them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Forward {
    x: TensorIr,
    gamma: TensorIr,
    beta: Option<TensorIr>,
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
        Some(Self {
            x,
            gamma: of("gamma_of_all")?,
            beta: of("beta_of_all"),
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
        let inputs = LayerNormInputs {
            gamma: columns(tensors, &self.gamma, &x)?,
            beta: self.beta.as_ref().map(|beta| columns(tensors, beta, &x)).transpose()?,
            residual: None,
            residual_bias: None,
            dropout: None,
            watched: false,
            x: contiguous_buffer(x.clone()),
        };
        let kept = [&self.centered, &self.normalized, &self.variance, &self.deviation];
        let y = if kept.iter().all(|kept| kept.is_none()) {
            layer_norm_forward(&x.client, Norm::Layer, &inputs, epsilon)?.y
        } else {
            let (y, made) = layer_norm_forward_with_parts(&x.client, &inputs, epsilon)?;
            let LayerNormParts { centered, normalized, variance, deviation } = made;
            for (out, made) in kept.into_iter().zip([centered, normalized, variance, deviation]) {
                if let Some(out) = out {
                    register(tensors, out, &x, made)?;
                }
            }
            y
        };
        register(tensors, &self.y, &x, y)?;
        for tensor in [&self.x, &self.gamma].into_iter().chain(&self.beta) {
            consume(tensors, tensor);
        }
        Ok(())
    }
}

/// The gradients of the rows and of gamma.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Backward {
    scalars: Vec<ExpectedScalar>,
    /// Where the numbers by which sums become means are.
    shares: [u64; 2],
    dy: TensorIr,
    gamma: Option<Gamma>,
    centered: TensorIr,
    variance: TensorIr,
    deviation: TensorIr,
    /// A gradient that reached the rows on another way.
    dsum: Option<TensorIr>,
    dx: TensorIr,
}

/// What is behind the normalization.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Gamma {
    gamma: TensorIr,
    /// The normalized rows, which are made again of the centered ones.
    normalized: TensorIr,
    gradient: TensorIr,
}

impl Gamma {
    fn of(flow: &Matcher) -> Option<Self> {
        let of = |name| flow.tensor(name).cloned();
        Some(Self { gamma: of("gamma")?, normalized: of("normalized")?, gradient: of("dgamma")? })
    }
}

impl Backward {
    pub(super) fn of(flow: &Matcher) -> Option<Self> {
        let of = |name| flow.tensor(name).cloned();
        let gamma = Gamma::of(flow);
        let dy = if gamma.is_some() { of("dy")? } else { of("scaled")? };
        let is_alike = |tensor: &TensorIr| tensor.shape == dy.shape;
        let fits = ["centered", "ones", "ones_again", "dx"]
            .iter()
            .all(|name| flow.tensor(name).is_some_and(is_alike))
            && gamma.as_ref().is_none_or(|gamma| is_alike(&gamma.normalized))
            && flow.tensor("dsum").is_none_or(is_alike);
        fits.then_some(())?;
        Some(Self {
            scalars: flow.scalars().iter().filter(|scalar| !scalar.is_any()).copied().collect(),
            shares: [flow.scalar_of("share")?, flow.scalar_of("share_again")?],
            dy,
            gamma,
            centered: of("centered")?,
            variance: of("variance")?,
            deviation: of("deviation")?,
            dsum: of("dsum"),
            dx: of("dx")?,
        })
    }

    fn launch(&self, tensors: &mut Tensors) -> Result<(), KernelError> {
        let centered = cube_tensor(tensors, &self.centered, OP)?;
        let shape = centered.meta.shape();
        let width = shape.last().copied().unwrap_or(0);
        let are_means = self.shares.iter().all(|share| {
            let share = number(tensors, *share).unwrap_or(0.0);
            (share * width as f64 - 1.0).abs() < 1e-3
        });
        if !(are_means && ExpectedScalar::are_there(&self.scalars, tensors)) {
            return Err(unsupported(OP, "its operations, but with other constants"));
        }
        let dy = cube_tensor(tensors, &self.dy, OP)?;
        if dy.meta.shape() != shape || shape.num_elements() == 0 {
            return Err(unsupported(OP, "no rows, or a gradient of another shape"));
        }
        let deviation = cube_tensor(tensors, &self.deviation, OP)?;
        let buffer = |tensor| cube_tensor(tensors, tensor, OP).map(contiguous_buffer);
        let dsum = self.dsum.as_ref().map(buffer).transpose()?;
        let of_gamma = |gamma: &Gamma| columns(tensors, &gamma.gamma, &centered);
        let gamma = self.gamma.as_ref().map(of_gamma).transpose()?;
        let client = &centered.client;
        let rows = contiguous_buffer(centered.clone());
        let deviation = contiguous_buffer(cast(deviation, DType::F32));
        let dy = contiguous_buffer(dy);
        let made = layer_norm_backward_of_parts(
            client,
            &rows,
            &deviation,
            gamma.as_ref(),
            &dy,
            dsum.as_ref(),
        );
        let (dx, dgamma) = match made {
            // A row that no cube holds is shared by several.
            Err(KernelError::Unsupported { .. }) if gamma.is_none() && dsum.is_none() => {
                (gradient_of_long_rows(client, &rows, &deviation, &dy)?, None)
            }
            made => made?,
        };
        register(tensors, &self.dx, &centered, dx)?;
        if let (Some(gamma), Some(dgamma)) = (&self.gamma, dgamma) {
            register(tensors, &gamma.gradient, &centered, dgamma)?;
            consume(tensors, &gamma.gamma);
            consume(tensors, &gamma.normalized);
        }
        let Self { dy, centered, variance, deviation, .. } = self;
        for tensor in [dy, centered, variance, deviation].into_iter().chain(&self.dsum) {
            consume(tensors, tensor);
        }
        Ok(())
    }
}

/// The gradient of rows, given what they are less their mean, their deviations and the gradient of what is normalized:
/// each row is a group of one channel.
fn gradient_of_long_rows(
    client: &Client,
    centered: &Buffer,
    deviation: &Buffer,
    dy: &Buffer,
) -> Result<Buffer, KernelError> {
    let rows = deviation.elements;
    let shape = [rows, 1, centered.elements.checked_div(rows).unwrap_or(0)];
    let problem = GroupNormProblem::contiguous(shape, 1, Order::PixelsLast, centered.dtype);
    let saved = GroupNormSaved {
        x: centered.clone(),
        form: Form::Centered,
        mean: None,
        rstd: deviation.clone(),
        gamma: None,
    };
    Ok(group_norm_backward(client, &problem, &saved, dy, false)?.dx)
}

/// A parameter, one number for each column of `rows`.
fn columns(tensors: &Tensors, tensor: &TensorIr, rows: &CubeTensor) -> Result<Buffer, KernelError> {
    let parameter = cube_tensor(tensors, tensor, OP)?;
    let (shape, rows) = (parameter.meta.shape(), rows.meta.shape());
    if shape.last() != rows.last() || shape.num_elements() != rows.last().copied().unwrap_or(1) {
        return Err(unsupported(OP, "parameters that are not one number for each column"));
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

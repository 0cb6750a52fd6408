use super::{OP, view::ChannelRows};
use crate::{
    declined::unsupported,
    fused::{
        channels::ByChannel,
        conv::Convolution,
        mask_fill::{AtMost, MaskFill},
    },
    ops::batch_norm::problem,
    stream::{self, Done, ExpectedScalar, Matcher, Replacement},
    tensors::{
        Channels, Tensors, consume, contiguous_buffer, contiguous_tensor, cube_tensor,
        known_output, register_cube_tensor,
    },
};
use blackburn_kernels::{
    KernelError,
    batch_norm::{
        BatchNormInputs, BatchNormProblem, BatchNormSaved, RunningStatistics, Statistics,
        batch_norm_apply, batch_norm_backward, batch_norm_running, batch_norm_statistics,
    },
    buffer::Buffer,
};
use burn_backend::{DType, cubecl::dtype_to_elem_type};
use burn_cubecl::{kernel::cast, tensor::CubeTensor};
use burn_ir::TensorIr;
use burn_std::Shape;
use serde::{Deserialize, Serialize};

/// What replaces operations of batch normalization, and those in front of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum BatchNormPass {
    InFront(Convolution),
    /// The gradient of an activation that is cut off above zero, too.
    Filled(MaskFill),
    /// Some channels of what a convolution in front makes: gradients of images that were joined.
    Channels(ByChannel),
    Forward(Forward),
    Backward(Backward),
    /// A view that nothing else was found behind.
    View(ChannelRows),
    /// A comparison that nothing else was found behind.
    Compared(AtMost),
}

impl Replacement for BatchNormPass {
    const NAME: &'static str = "BlackburnBatchNorm";

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        match self {
            Self::InFront(convolution) => return convolution.launch(tensors),
            Self::Filled(fill) => fill.launch(tensors, OP),
            Self::Channels(channels) => return channels.launch(tensors),
            Self::Forward(forward) => forward.launch(tensors),
            Self::Backward(backward) => backward.launch(tensors),
            Self::View(rows) => rows.launch(tensors),
            Self::Compared(comparison) => comparison.launch(tensors, OP),
        }?;
        Ok(Done::All)
    }
}

/// The output and the statistics of a batch.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Forward {
    x: TensorIr,
    gamma: TensorIr,
    beta: TensorIr,
    epsilon: u64,
    running: Option<[Running; 2]>,
    /// What tells whether the operations are over channels: the rows of a channel each, and its mean.
    shapes: Shapes,
    y: TensorIr,
    mean: TensorIr,
    variance: TensorIr,
}

/// A running statistic, and where its factor and that of the batch's are.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Running {
    before: TensorIr,
    kept: u64,
    new: u64,
    updated: TensorIr,
}

/// The gradients of a batch.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Backward {
    x: TensorIr,
    gamma: TensorIr,
    mean: TensorIr,
    variance: TensorIr,
    epsilon: u64,
    shapes: Shapes,
    /// The gradient of the output: of the normalization, or of the ReLU behind it, whose output is `relu`.
    dy: TensorIr,
    relu: Option<TensorIr>,
    /// The zeros of the ReLU's gradient.
    zeros: Vec<ExpectedScalar>,
    /// The gradient behind the ReLU, where others read it.
    masked: Option<TensorIr>,
    dx: TensorIr,
    dgamma: TensorIr,
    dbeta: TensorIr,
}

/// Tensors that are never made, for their sizes.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Shapes {
    /// What has a row for each channel.
    rows: [TensorIr; 2],
    /// What has a number for each channel and goes with x.
    of_all: Vec<TensorIr>,
}

impl Shapes {
    fn of(flow: &Matcher, rows: [&'static str; 2], of_all: &[&'static str]) -> Option<Self> {
        let [a, b] = rows.map(|name| flow.tensor(name).cloned());
        let of_all = of_all.iter().map(|name| flow.tensor(name).cloned());
        Some(Self { rows: [a?, b?], of_all: of_all.collect::<Option<_>>()? })
    }

    /// Whether these are what batch normalization makes of a tensor of that shape.
    fn check(&self, tensors: &Tensors, x: &Shape) -> Result<(), KernelError> {
        let channels = x.get(1).copied().unwrap_or(0);
        let mut of_all = vec![1; x.num_dims()];
        if let Some(size) = of_all.get_mut(1) {
            *size = channels;
        }
        let rows = Shape::new([channels, x.num_elements() / channels.max(1)]);
        let is = |tensor: &TensorIr, shape: &Shape| -> Result<bool, KernelError> {
            Ok(known_output(tensors, tensor, OP)?.shape == *shape)
        };
        let of_all = Shape::from(of_all);
        let mut fits = true;
        for (tensors, shape) in [(&self.rows[..], &rows), (&self.of_all, &of_all)] {
            for tensor in tensors {
                fits &= is(tensor, shape)?;
            }
        }
        if fits { Ok(()) } else { Err(unsupported(OP, "statistics over other dimensions")) }
    }
}

impl Running {
    fn of(flow: &Matcher, [before, kept, new, updated]: [&'static str; 4]) -> Option<Self> {
        Some(Self {
            before: flow.tensor(before)?.clone(),
            kept: flow.scalar_of(kept)?,
            new: flow.scalar_of(new)?,
            updated: flow.tensor(updated)?.clone(),
        })
    }
}

impl Forward {
    pub(super) fn of(flow: &Matcher) -> Option<Self> {
        let of = |name| flow.tensor(name).cloned();
        let of_all =
            ["mean_of_all", "mean_again", "variance_of_all", "gamma_of_all", "beta_of_all"];
        Some(Self {
            x: of("x")?,
            gamma: of("gamma")?,
            beta: of("beta")?,
            epsilon: flow.scalar_of("shifted")?,
            running: Running::of(flow, ["running_mean", "kept_mean", "new_mean", "updated_mean"])
                .zip(Running::of(
                    flow,
                    ["running_variance", "kept_variance", "new_variance", "updated_variance"],
                ))
                .map(|(mean, variance)| [mean, variance]),
            shapes: Shapes::of(flow, ["x_rows", "square_rows"], &of_all)?,
            y: of("y")?,
            mean: of("mean")?,
            variance: of("variance")?,
        })
    }

    fn launch(&self, tensors: &mut Tensors) -> Result<(), KernelError> {
        let x = cube_tensor(tensors, &self.x, OP)?;
        self.shapes.check(tensors, x.meta.shape())?;
        let gamma = cube_tensor(tensors, &self.gamma, OP)?;
        let beta = cube_tensor(tensors, &self.beta, OP)?;
        let channels = Channels::of(x.clone());
        let problem = problem(&channels, gamma.dtype, number(tensors, self.epsilon)?);
        let client = &x.client;
        let running = self.running.as_ref().map(|all| self.running_of(tensors, all)).transpose()?;
        let statistics = batch_norm_statistics(client, &problem, &channels.rows.buffer)?;
        let inputs = BatchNormInputs {
            x: channels.rows.buffer.clone(),
            statistics: statistics.clone(),
            gamma: contiguous_buffer(gamma),
            beta: contiguous_buffer(beta),
            residual: None,
            relu: false,
        };
        let y = batch_norm_apply(client, &problem, &inputs)?;
        if let (Some(all), Some(before)) = (&self.running, running) {
            let updated = batch_norm_running(client, &before, &statistics)?;
            for (running, updated) in all.iter().zip(updated) {
                register_numbers(tensors, &running.updated, &x, updated)?;
            }
        }
        let Statistics { mean, variance } = statistics;
        register_cube_tensor(tensors, &self.y, channels.images(y), OP)?;
        for (out, buffer) in [(&self.mean, mean), (&self.variance, variance)] {
            register_numbers(tensors, out, &x, buffer)?;
        }
        let before = self.running.iter().flatten().map(|running| &running.before);
        for tensor in [&self.x, &self.gamma, &self.beta].into_iter().chain(before) {
            consume(tensors, tensor);
        }
        Ok(())
    }
}

impl Forward {
    /// The running statistics before the batch.
    fn running_of(
        &self,
        tensors: &Tensors,
        all: &[Running; 2],
    ) -> Result<RunningStatistics, KernelError> {
        let [mean, variance] = all;
        let before =
            |running: &Running| cube_tensor(tensors, &running.before, OP).map(contiguous_buffer);
        let factors = |running: &Running| -> Result<[f32; 2], KernelError> {
            Ok([number(tensors, running.kept)? as f32, number(tensors, running.new)? as f32])
        };
        let of_mean = factors(mean)?;
        if factors(variance)? != of_mean {
            return Err(unsupported(OP, "a momentum of the variance that is not that of the mean"));
        }
        let [kept, new] = of_mean;
        Ok(RunningStatistics { mean: before(mean)?, variance: before(variance)?, kept, new })
    }
}

impl Backward {
    pub(super) fn of(flow: &Matcher) -> Option<Self> {
        let of = |name| flow.tensor(name).cloned();
        let relu = of("y");
        let of_all =
            ["mean_of_all", "rstd_of_all", "dy_mean_of_all", "product_mean_of_all", "gamma_of_all"];
        Some(Self {
            x: of("x")?,
            gamma: of("gamma")?,
            mean: of("mean")?,
            variance: of("variance")?,
            epsilon: flow.scalar_of("shifted")?,
            shapes: Shapes::of(flow, ["dy_rows", "product_rows"], &of_all)?,
            dy: if relu.is_some() { of("grad")? } else { of("dy")? },
            masked: relu.as_ref().and_then(|_| flow.kept("dy")),
            relu,
            zeros: flow.scalars().iter().filter(|scalar| !scalar.is_any()).copied().collect(),
            dx: of("dx")?,
            dgamma: of("dgamma")?,
            dbeta: of("dbeta")?,
        })
    }

    fn launch(&self, tensors: &mut Tensors) -> Result<(), KernelError> {
        let x = cube_tensor(tensors, &self.x, OP)?;
        self.shapes.check(tensors, x.meta.shape())?;
        if !ExpectedScalar::are_there(&self.zeros, tensors) {
            return Err(unsupported(
                OP,
                "a gradient that is cut off at another number than a ReLU's",
            ));
        }
        let dy = cube_tensor(tensors, &self.dy, OP)?;
        let relu = self.relu.as_ref().map(|y| cube_tensor(tensors, y, OP)).transpose()?;
        let gamma = cube_tensor(tensors, &self.gamma, OP)?;
        let [mean, variance] =
            [cube_tensor(tensors, &self.mean, OP)?, cube_tensor(tensors, &self.variance, OP)?]
                .map(contiguous_buffer);
        let shape = x.meta.shape();
        if dy.meta.shape() != shape || relu.as_ref().is_some_and(|y| y.meta.shape() != shape) {
            return Err(unsupported(OP, "a gradient of another shape than the input"));
        }
        let channels = Channels::of(x.clone());
        let of_dy = Channels::of(dy);
        let problem = BatchNormProblem {
            dy_stride: of_dy.rows.pitch,
            ..problem(&channels, gamma.dtype, number(tensors, self.epsilon)?)
        };
        let saved = BatchNormSaved {
            x: channels.rows.buffer.clone(),
            statistics: Statistics { mean, variance },
            gamma: contiguous_buffer(gamma),
            y: relu.map(|y| Channels::of(y).contiguous()),
        };
        let made = batch_norm_backward(
            &x.client,
            &problem,
            &saved,
            &of_dy.rows.buffer,
            self.masked.is_some(),
        )?;
        register_cube_tensor(tensors, &self.dx, channels.images(made.dx), OP)?;
        if let (Some(out), Some(masked)) = (&self.masked, made.dresidual) {
            register_cube_tensor(tensors, out, channels.images(masked), OP)?;
        }
        for (out, buffer) in [(&self.dgamma, made.dgamma), (&self.dbeta, made.dbeta)] {
            register_numbers(tensors, out, &x, buffer)?;
        }
        let inputs = [&self.x, &self.gamma, &self.mean, &self.variance, &self.dy];
        for tensor in inputs.into_iter().chain(&self.relu) {
            consume(tensors, tensor);
        }
        Ok(())
    }
}

/// The number that the stream has there.
fn number(tensors: &Tensors, id: u64) -> Result<f64, KernelError> {
    let unknown = || unsupported(OP, "an epsilon or a momentum that is unknown");
    stream::number(tensors, id).ok_or_else(unknown)
}

/// Makes `buffer`, a number for each channel, what `out` stands for.
fn register_numbers(
    tensors: &mut Tensors,
    out: &TensorIr,
    like: &CubeTensor,
    buffer: Buffer,
) -> Result<(), KernelError> {
    let shape = known_output(tensors, out, OP)?.shape.clone();
    let dtype = if buffer.dtype == dtype_to_elem_type(out.dtype) { out.dtype } else { DType::F32 };
    let numbers = contiguous_tensor(like, buffer, shape, dtype);
    register_cube_tensor(tensors, out, cast(numbers, out.dtype), OP)
}

use super::{
    LayerNormBlueprint, LayerNormProblem, Norm,
    backward::{
        BackwardInputsLaunch, BackwardOutputsLaunch, SUM_COLUMNS, layer_norm_backward_kernel,
        layer_norm_parameters_kernel,
    },
    blueprint::LayerNormForm,
    forward::{ExtentLaunch, ForwardInputsLaunch, ForwardOutputsLaunch, layer_norm_forward_kernel},
    problem::{BACKWARD, FORWARD},
};
use crate::{
    KernelError, Pass, ahead,
    buffer::{Buffer, F32},
    dropout::DropoutMask,
    magnitude::Magnitudes,
};
use cubecl::{client::Client, prelude::*};

/// What the forward pass reads.
#[derive(Clone, Debug)]
pub struct LayerNormInputs {
    /// Rows.
    pub x: Buffer,
    /// Is added to the rows before they are normalized.
    pub residual: Option<Buffer>,
    /// Is added to the rows of the residual.
    pub residual_bias: Option<Buffer>,
    /// Leaves out elements of the residual, with its bias, before.
    pub dropout: Option<DropoutMask>,
    /// One factor a column.
    pub gamma: Buffer,
    /// Is added to the columns.
    pub beta: Option<Buffer>,
    /// Whether the magnitudes of y are asked for.
    pub watched: bool,
}

/// What the forward pass returns.
#[derive(Clone, Debug)]
pub struct LayerNormOutput {
    /// The normalized rows.
    pub y: Buffer,
    /// x and the residual, where there is one.
    pub sum: Option<Buffer>,
    /// The mean of each row, unless it is the RMS norm.
    pub mean: Option<Buffer>,
    /// 1 / deviation of each row.
    pub rstd: Buffer,
    /// Of y, if they were asked for and it is not empty.
    pub magnitudes: Option<Magnitudes>,
}

/// What the backward pass reads.
#[derive(Clone, Debug)]
pub struct LayerNormSaved {
    /// What was normalized: x, or the sum with the residual.
    pub x: Buffer,
    /// The factors.
    pub gamma: Buffer,
    /// As [`LayerNormOutput`] has it.
    pub mean: Option<Buffer>,
    /// As [`LayerNormOutput`] has it.
    pub rstd: Buffer,
    /// As [`LayerNormInputs`] has it.
    pub dropout: Option<DropoutMask>,
}

/// What the backward pass is asked for beside the gradients of rows and factors.
#[derive(Clone, Copy, Debug, Default)]
pub struct LayerNormWanted {
    /// The gradient of beta.
    pub beta: bool,
    /// The gradient of the residual's bias.
    pub residual_bias: bool,
    /// The magnitudes of the residual's gradient.
    pub watched: bool,
}

/// What the backward pass returns.
#[derive(Clone, Debug)]
pub struct LayerNormGradients {
    /// Of what was normalized.
    pub dx: Buffer,
    /// Of the residual, where it differs from that by dropout.
    pub dresidual: Option<Buffer>,
    /// Of the factors, in their type.
    pub dgamma: Buffer,
    /// Of what is added, if asked for; in the type of the factors.
    pub dbeta: Option<Buffer>,
    /// Of the residual's bias, if asked for; in the type of the factors.
    pub dbias: Option<Buffer>,
    /// Of the residual's gradient, if they were asked for and it is not empty.
    pub magnitudes: Option<Magnitudes>,
}

/// What the steps between x and y make, which backward of automatic differentiation reads: all in the type of x.
#[derive(Clone, Debug)]
pub struct LayerNormParts {
    /// x without the mean of its row.
    pub centered: Buffer,
    /// That over the deviation of its row.
    pub normalized: Buffer,
    /// The variance of each row, with epsilon.
    pub variance: Buffer,
    /// The root of that.
    pub deviation: Buffer,
}

/// y, and what backward reads.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] where tensors do not go together, or epsilon is negative or no
/// number; [`KernelError::Unsupported`] for other dtypes, tensors beyond 32-bit indices and rows that no
/// cube holds.
pub fn layer_norm_forward(
    client: &Client,
    norm: Norm,
    inputs: &LayerNormInputs,
    epsilon: f64,
) -> Result<LayerNormOutput, KernelError> {
    let problem = forward_problem(norm, inputs, epsilon)?;
    let x = &inputs.x;
    let mut output = LayerNormOutput {
        y: Buffer::empty(client, x.elements, x.dtype),
        sum: problem.residual.then(|| Buffer::empty(client, x.elements, x.dtype)),
        mean: (norm == Norm::Layer).then(|| Buffer::empty(client, problem.rows, F32)),
        rstd: Buffer::empty(client, problem.rows, F32),
        magnitudes: None,
    };
    output.magnitudes = launch_forward(client, &problem, inputs, epsilon, &output, None)?;
    Ok(output)
}

/// y, and what the steps to it make. Rows with a residual are not taken, nor the RMS norm.
///
/// # Errors
///
/// As [`layer_norm_forward`].
pub fn layer_norm_forward_with_parts(
    client: &Client,
    inputs: &LayerNormInputs,
    epsilon: f64,
) -> Result<(Buffer, LayerNormParts), KernelError> {
    let problem =
        LayerNormProblem { parts: true, ..forward_problem(Norm::Layer, inputs, epsilon)? };
    if problem.residual {
        return Err(KernelError::invalid(FORWARD, "residual", "none, with parts", "one"));
    }
    let x = &inputs.x;
    let [y, centered, normalized] = [(); 3].map(|()| Buffer::empty(client, x.elements, x.dtype));
    let [variance, deviation] = [(); 2].map(|()| Buffer::empty(client, problem.rows, x.dtype));
    let rstd = Buffer::empty(client, 1, F32);
    let output = LayerNormOutput { y, sum: None, mean: None, rstd, magnitudes: None };
    let parts = LayerNormParts { centered, normalized, variance, deviation };
    launch_forward(client, &problem, inputs, epsilon, &output, Some(&parts))?;
    Ok((output.y, parts))
}

fn forward_problem(
    norm: Norm,
    inputs: &LayerNormInputs,
    epsilon: f64,
) -> Result<LayerNormProblem, KernelError> {
    let LayerNormInputs { x, residual, residual_bias, dropout, gamma, beta, watched } = inputs;
    let problem = LayerNormProblem {
        bias: beta.is_some(),
        residual: residual.is_some(),
        residual_bias: residual_bias.is_some(),
        watched: *watched,
        ..LayerNormProblem::new(FORWARD, norm, x, gamma)?
    };
    if let Some(residual) = residual {
        problem.check_rows(FORWARD, "residual", residual)?;
    }
    if let Some(dropout) = dropout {
        dropout.validate(FORWARD)?;
        if residual.is_none() {
            return Err(KernelError::invalid(FORWARD, "residual", "one, with dropout", "none"));
        }
    }
    problem.check_bias(FORWARD)?;
    if residual_bias.is_some() && residual.is_none() {
        return Err(KernelError::invalid(FORWARD, "residual", "one, with a bias of it", "none"));
    }
    for (argument, parameter) in [("beta", beta), ("residual_bias", residual_bias)] {
        if let Some(parameter) = parameter {
            problem.check_parameter(FORWARD, argument, parameter)?;
        }
    }
    if !(epsilon >= 0.0 && epsilon.is_finite()) {
        return Err(KernelError::invalid(FORWARD, "epsilon", "a number from 0", epsilon));
    }
    Ok(problem)
}

/// Writes `output`, whose statistics are left out where there are `parts`, and these. Returns the magnitudes of y, if
/// they are asked for and it is not empty.
fn launch_forward(
    client: &Client,
    problem: &LayerNormProblem,
    inputs: &LayerNormInputs,
    epsilon: f64,
    output: &LayerNormOutput,
    parts: Option<&LayerNormParts>,
) -> Result<Option<Magnitudes>, KernelError> {
    let LayerNormInputs { x, residual, residual_bias, dropout, gamma, beta, .. } = inputs;
    if x.elements == 0 {
        return Ok(None);
    }
    let blueprint = LayerNormBlueprint::plan(problem, Pass::Forward, client)?;
    let vector_size = blueprint.vector_size;
    let cubes = problem.rows.div_ceil(blueprint.rows as usize);
    let cubes = cubes.min(match problem.watched {
        true => Magnitudes::most_cubes(client),
        false => client.properties().hardware.max_cube_count.0 as usize,
    });
    let magnitudes = problem.watched.then(|| Magnitudes::of_cubes(client, cubes));
    // What is not there is not compiled in. What would be read has gamma standing in for it; what would
    // be written must not be in use, too.
    let unused = |dtype| Buffer::empty(client, vector_size, dtype);
    let part = |of: fn(&LayerNormParts) -> &Buffer| {
        parts.map_or_else(|| unused(x.dtype), |parts| of(parts).clone())
    };
    let sum = output.sum.clone().unwrap_or_else(|| part(|parts| &parts.centered));
    let mean = output.mean.clone().unwrap_or_else(|| unused(F32));
    let largest = Magnitudes::argument(client, magnitudes.as_ref());
    let mask = || DropoutMask::argument(dropout.as_ref(), gamma, client);
    // SAFETY: tensors of rows hold rows of whole vectors, parameters a row's, as `LayerNormProblem` has
    // checked, with indices of 32 bits; statistics one number a row. The kernel stops at the last row
    // and column.
    ahead::launch(client, |client| unsafe {
        layer_norm_forward_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_2d(blueprint.units(), blueprint.rows),
            vector_size,
            ForwardInputsLaunch {
                x: x.arg(vector_size),
                residual: residual.as_ref().unwrap_or(gamma).arg(vector_size),
                residual_bias: residual_bias.as_ref().unwrap_or(gamma).arg(vector_size),
                gamma: gamma.arg(vector_size),
                beta: beta.as_ref().unwrap_or(gamma).arg(vector_size),
                mask: mask().0,
            },
            ForwardOutputsLaunch {
                y: output.y.arg(vector_size),
                sum: sum.arg(vector_size),
                mean: mean.arg(1),
                rstd: output.rstd.arg(1),
                normalized: part(|parts| &parts.normalized).arg(vector_size),
                variance: part(|parts| &parts.variance).arg(1),
                deviation: part(|parts| &parts.deviation).arg(1),
                largest: largest.arg(1),
            },
            extent(problem, vector_size),
            epsilon as f32,
            LayerNormForm::of(problem, mask().1),
            blueprint,
            [problem.dtype, problem.parameter],
        )
    });
    Ok(magnitudes)
}

/// The gradients of what was normalized and of the parameters, and what else is `wanted`, given that of y; to the
/// first, `dsum` is added.
///
/// # Errors
///
/// As [`layer_norm_forward`]; the widest rows that a cube holds are narrower here.
pub fn layer_norm_backward(
    client: &Client,
    norm: Norm,
    saved: &LayerNormSaved,
    dy: &Buffer,
    dsum: Option<&Buffer>,
    wanted: LayerNormWanted,
) -> Result<LayerNormGradients, KernelError> {
    let LayerNormSaved { x, gamma, mean, .. } = saved;
    let LayerNormWanted { beta, residual_bias, watched } = wanted;
    let problem = LayerNormProblem {
        bias: beta,
        residual: dsum.is_some(),
        residual_bias,
        watched,
        ..LayerNormProblem::new(BACKWARD, norm, x, gamma)?
    };
    match (norm, mean) {
        (Norm::Layer, Some(mean)) => problem.check_statistic(BACKWARD, "mean", mean)?,
        (Norm::Rms, _) => {}
        (Norm::Layer, None) => {
            return Err(KernelError::invalid(
                BACKWARD,
                "mean",
                format!("the means of {} rows", problem.rows),
                "none",
            ));
        }
    }
    launch_backward(client, &problem, saved, dy, dsum)
}

/// The gradients of x and gamma, given that of y, from the `centered` rows and their `deviation`s, f32. Without
/// `gamma`, y is the normalized rows. To the gradient of x, `dsum` is added.
///
/// # Errors
///
/// As [`layer_norm_backward`].
pub fn layer_norm_backward_of_parts(
    client: &Client,
    centered: &Buffer,
    deviation: &Buffer,
    gamma: Option<&Buffer>,
    dy: &Buffer,
    dsum: Option<&Buffer>,
) -> Result<(Buffer, Option<Buffer>), KernelError> {
    let width = centered.elements.checked_div(deviation.elements).unwrap_or(0);
    // What is not compiled in has a row in its place.
    let row = Buffer { elements: width, ..centered.clone() };
    let problem = LayerNormProblem {
        parts: true,
        scaled: gamma.is_some(),
        residual: dsum.is_some(),
        ..LayerNormProblem::new(BACKWARD, Norm::Layer, centered, gamma.unwrap_or(&row))?
    };
    let saved = LayerNormSaved {
        x: centered.clone(),
        gamma: gamma.unwrap_or(&row).clone(),
        mean: None,
        rstd: deviation.clone(),
        dropout: None,
    };
    let LayerNormGradients { dx, dgamma, .. } =
        launch_backward(client, &problem, &saved, dy, dsum)?;
    Ok((dx, problem.scaled.then_some(dgamma)))
}

fn launch_backward(
    client: &Client,
    problem: &LayerNormProblem,
    saved: &LayerNormSaved,
    dy: &Buffer,
    dsum: Option<&Buffer>,
) -> Result<LayerNormGradients, KernelError> {
    let LayerNormSaved { x, gamma, mean, rstd, dropout } = saved;
    problem.check_bias(BACKWARD)?;
    problem.check_rows(BACKWARD, "dy", dy)?;
    if let Some(dsum) = dsum {
        problem.check_rows(BACKWARD, "dsum", dsum)?;
    }
    if let Some(dropout) = dropout {
        dropout.validate(BACKWARD)?;
    }
    problem.check_statistic(BACKWARD, if problem.parts { "deviation" } else { "rstd" }, rstd)?;
    if x.elements == 0 {
        let zeros = || {
            let bytes = vec![0; problem.width * gamma.dtype.size()];
            Buffer { handle: client.create_from_slice(&bytes), ..gamma.clone() }
        };
        let dx = Buffer::empty(client, 0, x.dtype);
        let dresidual = dropout.is_some().then(|| dx.clone());
        return Ok(LayerNormGradients {
            dx,
            dresidual,
            dgamma: zeros(),
            dbeta: problem.bias.then(zeros),
            dbias: problem.residual_bias.then(zeros),
            magnitudes: None,
        });
    }
    let blueprint = LayerNormBlueprint::plan(problem, Pass::Backward, client)?;
    let vector_size = blueprint.vector_size;
    let cubes = blueprint.backward_cubes(problem.rows, client);
    let mask = || DropoutMask::argument(dropout.as_ref(), gamma, client);
    let form = LayerNormForm::of(problem, mask().1);
    let sums = form.parameters() as usize * cubes * problem.width;
    let partials = Buffer::empty(client, sums.max(vector_size), F32);
    let magnitudes = problem.watched.then(|| Magnitudes::of_cubes(client, cubes));
    let largest = Magnitudes::argument(client, magnitudes.as_ref());
    let dx = Buffer::empty(client, x.elements, x.dtype);
    let dresidual = dropout.is_some().then(|| Buffer::empty(client, x.elements, x.dtype));
    // What would be written must not be in use, too.
    let of_residual =
        dresidual.clone().unwrap_or_else(|| Buffer::empty(client, vector_size, x.dtype));
    // SAFETY: as in `layer_norm_forward`; `partials` has a row for each cube and parameter.
    ahead::launch(client, |client| unsafe {
        layer_norm_backward_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_2d(blueprint.units(), blueprint.rows),
            vector_size,
            BackwardInputsLaunch {
                x: x.arg(vector_size),
                dy: dy.arg(vector_size),
                dsum: dsum.unwrap_or(dy).arg(vector_size),
                gamma: gamma.arg(vector_size),
                mean: mean.as_ref().unwrap_or(rstd).arg(1),
                rstd: rstd.arg(1),
                mask: mask().0,
            },
            BackwardOutputsLaunch {
                dx: dx.arg(vector_size),
                dresidual: of_residual.arg(vector_size),
                partials: partials.arg(vector_size),
                largest: largest.arg(1),
            },
            extent(problem, vector_size),
            form,
            blueprint,
            [problem.dtype, problem.parameter],
        )
    });
    let (dgamma, dbeta, dbias) = match problem.scaled {
        true => parameters(client, problem, &partials, cubes),
        false => (partials, None, None),
    };
    Ok(LayerNormGradients { dx, dresidual, dgamma, dbeta, dbias, magnitudes })
}

/// The second launch of the backward pass: the gradients of gamma, beta and the residual's bias.
fn parameters(
    client: &Client,
    problem: &LayerNormProblem,
    partials: &Buffer,
    cubes: usize,
) -> (Buffer, Option<Buffer>, Option<Buffer>) {
    let LayerNormProblem { width, parameter: dtype, bias, residual_bias, .. } = *problem;
    let dgamma = Buffer::empty(client, width, dtype);
    let [dbeta, dbias] =
        [bias, residual_bias].map(|wanted| wanted.then(|| Buffer::empty(client, width, dtype)));
    let argument = |gradient: &Option<Buffer>| {
        gradient.clone().unwrap_or_else(|| Buffer::empty(client, 1, dtype))
    };
    let [of_beta, of_bias] = [argument(&dbeta), argument(&dbias)];
    // Few columns are left, and a unit waits for memory once for each sum of its column that it adds:
    // as many units as a cube may have share one.
    let lanes = client.properties().hardware.max_units_per_cube.min(1024) / SUM_COLUMNS;
    // SAFETY: `partials` is `[parameters, cubes, width]`, and there are as many cubes along y as parameters;
    // the kernel stops at the last column.
    ahead::launch(client, |client| unsafe {
        layer_norm_parameters_kernel::launch_unchecked(
            client,
            CubeCount::Static(
                width.div_ceil(SUM_COLUMNS as usize) as u32,
                1 + u32::from(bias) + u32::from(residual_bias),
                1,
            ),
            CubeDim::new_2d(SUM_COLUMNS, lanes),
            partials.arg(1),
            dgamma.arg(1),
            of_beta.arg(1),
            of_bias.arg(1),
            cubes as u32,
            width as u32,
            lanes,
            bias,
            residual_bias,
            dtype,
        )
    });
    (dgamma, dbeta, dbias)
}

fn extent(problem: &LayerNormProblem, vector_size: usize) -> ExtentLaunch {
    ExtentLaunch {
        rows: problem.rows as u32,
        columns: (problem.width / vector_size) as u32,
        of_width: (1.0 / problem.width as f64) as f32,
    }
}

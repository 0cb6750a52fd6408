use super::{
    GeluSumBlueprint,
    backward::{gelu_backward_kernel, gelu_backward_sum_kernel},
    forward::{GeluForm, GeluInputsLaunch, gelu_forward_kernel},
};
use crate::{
    KernelError, ahead,
    buffer::Buffer,
    column_sum::{
        ColumnSumBlueprint, ColumnSumProblem, ROW_LANES, VECTOR_LANES, column_sum, cube_count,
        sum_with,
    },
    divisor::{DIVIDEND_LIMIT, divisor},
    dropout::{DropoutMask, KeptElements},
    elementwise::{ElementwiseBlueprint, ElementwiseProblem},
    functions::Functions,
};
use cubecl::{client::Client, ir::VectorSize, prelude::*};

/// What GELU is made of: alone, or with what stands around it in a feed-forward layer.
#[derive(Clone, Debug)]
pub struct GeluCall {
    /// Rows of elements.
    pub x: Buffer,
    /// Is added to each row of x before.
    pub bias: Option<Buffer>,
    /// Leaves out elements of the result.
    pub dropout: Option<DropoutMask>,
    /// The same by a mask in memory, whose elements lie in the order of x.
    pub kept: Option<KeptElements>,
}

impl GeluCall {
    /// GELU alone.
    pub fn alone(x: &Buffer) -> Self {
        Self { x: x.clone(), bias: None, dropout: None, kept: None }
    }

    fn problem(&self, op: &'static str) -> Result<ElementwiseProblem, KernelError> {
        let Self { x, bias, dropout, kept } = self;
        let problem = ElementwiseProblem::new(op, x)?;
        if let Some(bias) = bias {
            let divides = bias.elements > 0 && x.elements.is_multiple_of(bias.elements);
            if !divides || bias.dtype != x.dtype {
                let expected = format!("a row of the {} elements of x, {:?}", x.elements, x.dtype);
                return Err(bias.mismatch(op, "bias", expected));
            }
        }
        if let Some(dropout) = dropout {
            dropout.validate(op)?;
        }
        if let Some(kept) = kept {
            problem.check_operand(op, "kept", &kept.mask)?;
        }
        if (bias.is_some() || dropout.is_some()) && x.elements >= DIVIDEND_LIMIT {
            return Err(KernelError::unsupported(op, format!("{} elements", x.elements)));
        }
        Ok(problem)
    }

    /// Vectors that divide rows, and of which the generator's words stay in registers.
    fn blueprint(&self, problem: &ElementwiseProblem, client: &Client) -> ElementwiseBlueprint {
        const WIDEST_DROPPED: VectorSize = 8;
        let mut blueprint = ElementwiseBlueprint::plan(problem, client);
        if let Some(bias) = &self.bias {
            blueprint = blueprint.narrowed(1 << bias.elements.trailing_zeros().min(8));
        }
        match self.dropout {
            Some(_) => blueprint.narrowed(WIDEST_DROPPED),
            None => blueprint,
        }
    }

    /// Of `vectors`, which a forward pass has: with dropout it waits for instructions, of which two vectors share some. They
    /// have one column, so that they share the bias, too.
    fn vectors_of_unit(&self, vectors: usize, vector_size: VectorSize) -> usize {
        let columns = self.bias.as_ref().map_or(1, |bias| bias.elements / vector_size);
        let are_shared = self.dropout.is_some() && (vectors / columns).is_multiple_of(2);
        if are_shared { 2 } else { 1 }
    }

    fn argument<F: Float, N: Size>(
        &self,
        vector_size: VectorSize,
        client: &Client,
    ) -> (GeluInputsLaunch<F, N>, GeluForm) {
        let Self { x, bias, dropout, kept } = self;
        let (mask, dropout) = DropoutMask::argument(dropout.as_ref(), x, client);
        let columns = bias.as_ref().map_or(1, |bias| bias.elements / vector_size);
        let launch = GeluInputsLaunch {
            x: x.arg(vector_size),
            bias: bias.as_ref().unwrap_or(x).arg(vector_size),
            columns: divisor(columns),
            mask,
            kept: kept.as_ref().map_or(x, |kept| &kept.mask).arg(vector_size),
            scale: kept.as_ref().map_or(1.0, |kept| kept.scale),
        };
        let functions = Functions::of(x.dtype, client);
        (launch, GeluForm { bias: bias.is_some(), dropout, masked: kept.is_some(), functions })
    }
}

/// y = gelu(x).
///
/// # Errors
///
/// [`KernelError::Unsupported`] for dtypes other than f32, f16 and bf16.
pub fn gelu_forward(client: &Client, x: &Buffer) -> Result<Buffer, KernelError> {
    gelu_call_forward(client, &GeluCall::alone(x))
}

/// y = dropout(gelu(x + bias)).
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] when the bias is no row of x, or dropout makes no sense; [`KernelError::Unsupported`]
/// as for [`gelu_forward`], and with a bias or dropout for 2^31 elements and more.
pub fn gelu_call_forward(client: &Client, call: &GeluCall) -> Result<Buffer, KernelError> {
    let problem = call.problem("gelu_forward")?;
    let y = Buffer::empty(client, problem.elements, problem.dtype);
    if problem.elements == 0 {
        return Ok(y);
    }
    let blueprint = call.blueprint(&problem, client);
    let vectors = problem.elements / blueprint.vector_size;
    let of_unit = call.vectors_of_unit(vectors, blueprint.vector_size);
    let (count, dim) = blueprint.cubes(problem.elements / of_unit, client);
    let inputs = || call.argument(blueprint.vector_size, client);
    // SAFETY: x and y hold `problem.elements` elements, a multiple of the vector size, as does a bias; units have
    // `of_unit` vectors each, and the kernel stops those for which there are none.
    ahead::launch(client, |client| unsafe {
        gelu_forward_kernel::launch_unchecked(
            client,
            count.clone(),
            dim,
            blueprint.vector_size,
            inputs().0,
            y.arg(blueprint.vector_size),
            of_unit,
            inputs().1,
            problem.dtype,
        )
    });
    Ok(y)
}

/// dx = dy gelu'(x).
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] when `dy` differs from `x` in length or dtype;
/// [`KernelError::Unsupported`] as for [`gelu_forward`].
pub fn gelu_backward(client: &Client, x: &Buffer, dy: &Buffer) -> Result<Buffer, KernelError> {
    gelu_call_backward(client, &GeluCall::alone(x), dy)
}

/// The gradient of x, and of what is added to it, given that of [`gelu_call_forward`]'s result.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] when `dy` differs from `x` in length or dtype, and as [`gelu_call_forward`].
pub fn gelu_call_backward(
    client: &Client,
    call: &GeluCall,
    dy: &Buffer,
) -> Result<Buffer, KernelError> {
    let problem = call.problem("gelu_backward")?;
    problem.check_operand("gelu_backward", "dy", dy)?;
    let dx = Buffer::empty(client, problem.elements, problem.dtype);
    if problem.elements == 0 {
        return Ok(dx);
    }
    let blueprint = call.blueprint(&problem, client);
    let (count, dim) = blueprint.cubes(problem.elements, client);
    let inputs = || call.argument(blueprint.vector_size, client);
    // SAFETY: as in `gelu_call_forward`; dy's length was checked.
    ahead::launch(client, |client| unsafe {
        gelu_backward_kernel::launch_unchecked(
            client,
            count.clone(),
            dim,
            blueprint.vector_size,
            inputs().0,
            dy.arg(blueprint.vector_size),
            dx.arg(blueprint.vector_size),
            inputs().1,
            problem.dtype,
        )
    });
    Ok(dx)
}

/// What [`gelu_backward_sum`] returns.
#[derive(Clone, Debug)]
pub struct GeluGradients {
    /// The gradient of the input, `rows` by `columns`.
    pub dx: Buffer,
    /// The sum of its rows, `columns` elements.
    pub db: Buffer,
}

/// `dx = dy gelu'(x)` of `elements / columns` rows, and `db[c] = sum_r dx[r, c]`, by the plan that is
/// expected to be faster.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] when `columns` do not divide x, and as for [`gelu_backward`];
/// [`KernelError::Unsupported`] as for [`ColumnSumProblem::new`], for a single column and for empty
/// tensors among others.
pub fn gelu_backward_sum(
    client: &Client,
    columns: usize,
    x: &Buffer,
    dy: &Buffer,
) -> Result<GeluGradients, KernelError> {
    gelu_call_backward_sum(client, columns, &GeluCall::alone(x), dy)
}

/// As [`gelu_call_backward`], with the sums of `columns`, like [`gelu_backward_sum`].
///
/// # Errors
///
/// As [`gelu_backward_sum`] and [`gelu_call_forward`].
pub fn gelu_call_backward_sum(
    client: &Client,
    columns: usize,
    call: &GeluCall,
    dy: &Buffer,
) -> Result<GeluGradients, KernelError> {
    let problem = sum_problem(columns, &call.x)?;
    let blueprint = GeluSumBlueprint::plan(&problem, client);
    backward_sum(client, columns, blueprint, call, dy)
}

/// As [`gelu_backward_sum`], by a plan of the caller's.
///
/// # Errors
///
/// As [`gelu_backward_sum`], and [`KernelError::InvalidProblem`] when the plan's vectors do not
/// divide the columns.
pub fn gelu_backward_sum_with(
    client: &Client,
    columns: usize,
    blueprint: GeluSumBlueprint,
    x: &Buffer,
    dy: &Buffer,
) -> Result<GeluGradients, KernelError> {
    backward_sum(client, columns, blueprint, &GeluCall::alone(x), dy)
}

fn backward_sum(
    client: &Client,
    columns: usize,
    blueprint: GeluSumBlueprint,
    call: &GeluCall,
    dy: &Buffer,
) -> Result<GeluGradients, KernelError> {
    let problem = sum_problem(columns, &call.x)?;
    call.problem(BACKWARD_SUM)?.check_operand(BACKWARD_SUM, "dy", dy)?;
    if let Some(bias) = &call.bias {
        bias.check(BACKWARD_SUM, "bias", columns, call.x.dtype)?;
    }
    match blueprint {
        GeluSumBlueprint::Fused(blueprint) => launch_sum(client, &problem, blueprint, call, dy),
        GeluSumBlueprint::Separate => {
            let dx = gelu_call_backward(client, call, dy)?;
            let db = column_sum(client, &problem, &dx)?;
            Ok(GeluGradients { dx, db })
        }
    }
}

const BACKWARD_SUM: &str = "gelu_backward_sum";

/// x as the rows whose gradients are summed.
fn sum_problem(columns: usize, x: &Buffer) -> Result<ColumnSumProblem, KernelError> {
    if columns == 0 || !x.elements.is_multiple_of(columns) {
        return Err(KernelError::invalid(
            BACKWARD_SUM,
            "columns",
            format!("a divisor of the {} elements of x", x.elements),
            columns,
        ));
    }
    ColumnSumProblem::new(&[x.elements / columns, columns], &[columns, 1], 0..1, x.dtype)
}

fn launch_sum(
    client: &Client,
    problem: &ColumnSumProblem,
    blueprint: ColumnSumBlueprint,
    call: &GeluCall,
    dy: &Buffer,
) -> Result<GeluGradients, KernelError> {
    let vector_size = blueprint.vector_size;
    if vector_size == 0 || blueprint.splits == 0 || !problem.columns.is_multiple_of(vector_size) {
        return Err(KernelError::invalid(
            BACKWARD_SUM,
            "blueprint",
            format!("splits, and vectors that divide {} columns", problem.columns),
            format!("{blueprint:?}"),
        ));
    }
    let count = cube_count(client, problem, blueprint)?;
    let dx = Buffer::empty(client, call.x.elements, call.x.dtype);
    let db = sum_with(client, problem, blueprint, |sums| {
        let inputs = || call.argument(vector_size, client);
        // SAFETY: x, dy and dx hold rows of whole vectors, which the kernel stops at the ends of, and
        // `sums` a row for each split; a bias is a row. `ColumnSumProblem::new` has seen to 32-bit indices.
        ahead::launch(client, |client| unsafe {
            gelu_backward_sum_kernel::launch_unchecked(
                client,
                count.clone(),
                CubeDim::new_2d(VECTOR_LANES, ROW_LANES),
                vector_size,
                inputs().0,
                dy.arg(vector_size),
                dx.arg(vector_size),
                sums.arg(vector_size),
                problem.rows as u32,
                (problem.columns / vector_size) as u32,
                inputs().1,
                problem.dtype,
                sums.dtype,
            )
        });
        Ok(())
    })?;
    Ok(GeluGradients { dx, db })
}

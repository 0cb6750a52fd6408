use super::{
    cell::{CellExtentLaunch, CellPlaceLaunch, lstm_cell_backward_kernel, lstm_cell_kernel},
    problem::{GATES, LstmForward, LstmGradients, LstmProblem, LstmSaved, OP},
};
use crate::{
    KernelError, ahead,
    buffer::{Buffer, F32},
    device::widest_vector,
    elementwise::{ElementwiseBlueprint, ElementwiseProblem},
    functions::Functions,
    matmul::{Epilogue, MatmulBlueprint, MatmulProblem, matmul_with},
    region::{Region, write_region},
};
use cubecl::{CubeCount, CubeDim, client::Client, ir::VectorSize};

/// All h of a sequence, and the last c, from the first ones.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] when a tensor does not go with the problem; [`KernelError::Unsupported`] as
/// [`LstmProblem::validate`], and where the device has no kernel for the product.
pub fn lstm_forward(
    client: &Client,
    problem: &LstmProblem,
    projected: &Buffer,
    weight: &Buffer,
    [h, c]: [&Buffer; 2],
) -> Result<LstmForward, KernelError> {
    problem.validate()?;
    let (dtype, state) = (problem.dtype, problem.state());
    projected.check(OP, "projected", problem.steps * state * GATES, dtype)?;
    problem.check_weight(weight)?;
    h.check(OP, "h", state, dtype)?;
    c.check(OP, "c", state, F32)?;
    let product = Product::plan(client, problem.of_state()?)?;

    let gates = Buffer::empty(client, problem.steps * state * GATES, dtype);
    let cells = Buffer::empty(client, (problem.steps + 1) * state, F32);
    let hidden = Buffer::empty(client, problem.steps * state, dtype);
    let out = Buffer::empty(client, (problem.steps + 1) * state, dtype);
    write_state(client, c, &cells, 0)?;
    write_state(client, h, &hidden, problem.step_at(0) * state)?;
    let Launch { vector, count, dim, functions } = Launch::plan(client, problem);
    let mut now = h.clone();
    for walked in 0..problem.steps {
        let sums = product.of(client, &now, weight)?;
        let next = Buffer::empty(client, state, dtype);
        let is_last = walked + 1 == problem.steps;
        // SAFETY: all tensors hold what was checked, or were allocated for the problem; steps are those of the sequence,
        // and units stop at the end of a state, which is whole vectors. The last step does not look at the next one.
        ahead::launch(client, |client| unsafe {
            lstm_cell_kernel::launch_unchecked(
                client,
                count.clone(),
                dim,
                vector,
                projected.arg(vector),
                sums.arg(vector),
                gates.arg(vector),
                cells.arg(vector),
                hidden.arg(vector),
                next.arg(vector),
                out.arg(vector),
                extent(problem, vector),
                place(problem, walked),
                is_last,
                functions,
                dtype,
            )
        });
        now = next;
    }
    Ok(LstmForward { out, saved: LstmSaved { gates, cells, hidden } })
}

/// The gradients, from that of what [`lstm_forward`] made, `dout`.
///
/// # Errors
///
/// As there.
pub fn lstm_backward(
    client: &Client,
    problem: &LstmProblem,
    saved: &LstmSaved,
    weight: &Buffer,
    dout: &Buffer,
) -> Result<LstmGradients, KernelError> {
    problem.validate()?;
    let (dtype, state) = (problem.dtype, problem.state());
    problem.check_saved(saved)?;
    problem.check_weight(weight)?;
    dout.check(OP, "dout", (problem.steps + 1) * state, dtype)?;
    let product = Product::plan(client, problem.of_gates(F32)?)?;
    let of_weight = Product::plan(client, problem.of_weight()?)?;
    let of_first = Product::plan(client, problem.of_gates(dtype)?)?;

    let dprojected = Buffer::empty(client, problem.steps * state * GATES, dtype);
    let dc = Buffer::empty(client, state, F32);
    let Launch { vector, count, dim, functions } = Launch::plan(client, problem);
    let LstmSaved { gates, cells, hidden } = saved;
    let mut behind: Option<Buffer> = None;
    for walked in (0..problem.steps).rev() {
        let sums = behind.as_ref().map(|da| product.of(client, da, weight)).transpose()?;
        let da = Buffer::empty(client, state * GATES, dtype);
        let is_last = sums.is_none();
        // What the last step of the walk does not read.
        let sums = sums.unwrap_or_else(|| cells.clone());
        // SAFETY: as in `lstm_forward`. The last step reads neither the product nor dc before it is written.
        ahead::launch(client, |client| unsafe {
            lstm_cell_backward_kernel::launch_unchecked(
                client,
                count.clone(),
                dim,
                vector,
                gates.arg(vector),
                cells.arg(vector),
                dout.arg(vector),
                sums.arg(vector),
                dc.arg(vector),
                dprojected.arg(vector),
                da.arg(vector),
                extent(problem, vector),
                place(problem, walked),
                is_last,
                functions,
                dtype,
            )
        });
        behind = Some(da);
    }
    let first = behind.ok_or_else(|| KernelError::unsupported(OP, "no steps"))?;
    let dh = of_first.of(client, &first, weight)?;
    let dweight = of_weight.of(client, hidden, &dprojected)?;
    Ok(LstmGradients { dprojected, dweight, dh, dc })
}

/// A product that is made again and again.
struct Product {
    problem: MatmulProblem,
    blueprint: MatmulBlueprint,
}

impl Product {
    fn plan(client: &Client, problem: MatmulProblem) -> Result<Self, KernelError> {
        let blueprint = MatmulBlueprint::plan(&problem, &Epilogue::default(), client)?;
        Ok(Self { problem, blueprint })
    }

    fn of(&self, client: &Client, lhs: &Buffer, rhs: &Buffer) -> Result<Buffer, KernelError> {
        let Self { problem, blueprint } = self;
        let made = matmul_with(client, problem, blueprint, lhs, rhs, &Epilogue::default())?;
        Ok(made.out)
    }
}

/// How a cell is launched.
struct Launch {
    vector: VectorSize,
    count: CubeCount,
    dim: CubeDim,
    functions: Functions,
}

impl Launch {
    fn plan(client: &Client, problem: &LstmProblem) -> Self {
        /// Elements of a vector: a state is small, and more units hide the latency of memory.
        const WIDEST: VectorSize = 2;

        let LstmProblem { hidden, dtype, .. } = *problem;
        let vector =
            widest_vector(client, F32.size(), |size| size <= WIDEST && hidden.is_multiple_of(size));
        let elements = problem.state();
        let plan = ElementwiseBlueprint::plan(&ElementwiseProblem { elements, dtype }, client);
        let plan = ElementwiseBlueprint { vector_size: vector, ..plan };
        let (count, dim) = plan.cubes(elements, client);
        Self { vector, count, dim, functions: Functions::of(dtype, client) }
    }
}

fn extent(problem: &LstmProblem, vector: VectorSize) -> CellExtentLaunch {
    let in_vectors = |elements: usize| (elements / vector) as u32;
    let LstmProblem { hidden, steps, .. } = *problem;
    CellExtentLaunch::new(in_vectors(problem.state()), in_vectors(hidden), steps as u32)
}

fn place(problem: &LstmProblem, walked: usize) -> CellPlaceLaunch {
    let next = problem.step_at((walked + 1).min(problem.steps - 1));
    CellPlaceLaunch::new(walked as u32, problem.step_at(walked) as u32, next as u32)
}

/// Writes a state to its place among those of all steps.
fn write_state(
    client: &Client,
    state: &Buffer,
    all: &Buffer,
    start: usize,
) -> Result<(), KernelError> {
    let region = Region {
        shape: vec![state.elements],
        source_strides: vec![1],
        target_strides: vec![1],
        source_start: 0,
        start,
        adds: false,
    };
    write_region(client, &region, state, all)
}

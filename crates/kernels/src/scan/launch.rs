use super::{
    ScanBlueprint, ScanOperation, ScanProblem, ScanWay,
    blueprint::{COLUMN_UNITS, UNITS},
    columns::{ColumnExtentLaunch, scan_column_totals_kernel, scan_columns_kernel},
    operation::Combination,
    problem::OP,
    rows::{RowExtentLaunch, RowPlan, scan_row_totals_kernel, scan_rows_kernel},
};
use crate::{KernelError, ahead, buffer::Buffer, device::grid};
use cubecl::{
    client::Client,
    ir::{ElemType, IntKind},
    prelude::*,
};

const I32: ElemType = ElemType::Int(IntKind::I32);

/// The scan of x.
///
/// # Errors
///
/// [`KernelError::Unsupported`] for other types than f32, f16, bf16, i32 and u32, for empty tensors, and for what the
/// device cannot launch; [`KernelError::InvalidProblem`] for an x of another size or type than the problem says.
pub fn scan(client: &Client, problem: &ScanProblem, x: &Buffer) -> Result<Buffer, KernelError> {
    problem.validate(x)?;
    let blueprint = ScanBlueprint::plan(problem, client);
    let y = Buffer::empty(client, problem.elements(), problem.dtype);
    let how = Combination {
        operation: problem.operation,
        is_float: matches!(problem.dtype, ElemType::Float(_)),
        is_scaled: problem.is_scaled(),
    };
    let call = Call { client, problem, blueprint, how, x, y: &y };
    match blueprint.way {
        ScanWay::Rows { lanes, plane, vectors } => {
            let is_split = blueprint.chunks > 1;
            call.rows(RowPlan { how, lanes, plane, vectors, is_split })?;
        }
        ScanWay::Columns => call.columns()?,
    }
    Ok(y)
}

/// A scan that was validated and planned.
struct Call<'a> {
    client: &'a Client,
    problem: &'a ScanProblem,
    blueprint: ScanBlueprint,
    how: Combination,
    x: &'a Buffer,
    y: &'a Buffer,
}

impl Call<'_> {
    /// What every number is at most or at least.
    fn extreme(&self) -> f32 {
        match self.how.operation {
            ScanOperation::Min => f32::INFINITY,
            _ => f32::NEG_INFINITY,
        }
    }

    /// Memory for the totals of `chunks` chunks of each row or column, and for their exponents. What no kernel touches
    /// is the memory of x.
    fn totals(&self, chunks: usize) -> [Buffer; 2] {
        let wide = self.problem.wide_dtype();
        let count = self.problem.outer * self.problem.inner * chunks;
        let unused =
            |dtype| Buffer { dtype, elements: self.blueprint.vector_size, ..self.x.clone() };
        let of = |dtype, is_used| match is_used {
            true => Buffer::empty(self.client, count, dtype),
            false => unused(dtype),
        };
        let is_split = self.blueprint.chunks > 1;
        [of(wide, is_split), of(I32, is_split && self.how.is_scaled)]
    }

    fn rows(&self, plan: RowPlan) -> Result<(), KernelError> {
        let Self { client, problem, blueprint, how, x, y } = self;
        let ScanBlueprint { vector_size, chunk, chunks, .. } = *blueprint;
        let (dtype, wide) = (problem.dtype, problem.wide_dtype());
        let [totals, exponents] = self.totals(chunks);
        let extent = || {
            let vectors = |elements: usize| (elements / vector_size) as u32;
            let (rows, columns) = (problem.outer as u32, vectors(problem.length));
            RowExtentLaunch::new(rows, columns, vectors(chunk), chunks as u32)
        };
        let rows = problem.outer.div_ceil((UNITS / plan.lanes) as usize);
        let (of_totals, of_rows) =
            (grid(OP, client, [problem.outer, chunks, 1])?, grid(OP, client, [rows, chunks, 1])?);
        // SAFETY: x and y hold their rows, which are whole vectors, and the totals and exponents that are touched one
        // for each row and chunk. Cubes stop at the ends of rows and chunks, and a split row has a cube of its own.
        unsafe {
            if plan.is_split {
                ahead::launch(client, |client| {
                    scan_row_totals_kernel::launch_unchecked(
                        client,
                        of_totals.clone(),
                        CubeDim::new_1d(UNITS),
                        vector_size,
                        x.arg(vector_size),
                        totals.arg(1),
                        exponents.arg(1),
                        extent(),
                        self.extreme(),
                        *how,
                        dtype,
                        wide,
                    )
                });
            }
            ahead::launch(client, |client| {
                scan_rows_kernel::launch_unchecked(
                    client,
                    of_rows.clone(),
                    CubeDim::new_2d(plan.lanes, UNITS / plan.lanes),
                    vector_size,
                    x.arg(vector_size),
                    totals.arg(1),
                    exponents.arg(1),
                    y.arg(vector_size),
                    extent(),
                    self.extreme(),
                    plan,
                    dtype,
                    wide,
                )
            });
        }
        Ok(())
    }

    fn columns(&self) -> Result<(), KernelError> {
        let Self { client, problem, blueprint, how, x, y } = self;
        let ScanBlueprint { vector_size, chunk, chunks, .. } = *blueprint;
        let (dtype, wide) = (problem.dtype, problem.wide_dtype());
        let [totals, exponents] = self.totals(chunks);
        let inner = problem.inner / vector_size;
        let columns = problem.outer * inner;
        let extent = || {
            let (columns, length) = (columns as u32, problem.length as u32);
            ColumnExtentLaunch::new(columns, length, inner as u32, chunk as u32)
        };
        let cubes = |chunks| {
            let cubes = columns.div_ceil(COLUMN_UNITS as usize);
            grid(OP, client, [cubes, chunks, 1])
        };
        // SAFETY: x and y hold their columns, which are whole vectors, and the totals and exponents that are touched
        // one for each of these and chunk. Units stop at the last column and at the ends of chunks.
        unsafe {
            if chunks > 1 {
                ahead::launch(client, |client| {
                    scan_column_totals_kernel::launch_unchecked(
                        client,
                        cubes(chunks - 1)?,
                        CubeDim::new_1d(COLUMN_UNITS),
                        vector_size,
                        x.arg(vector_size),
                        totals.arg(vector_size),
                        exponents.arg(vector_size),
                        extent(),
                        self.extreme(),
                        *how,
                        dtype,
                        wide,
                    );
                    Ok(())
                })?;
            }
            ahead::launch(client, |client| {
                scan_columns_kernel::launch_unchecked(
                    client,
                    cubes(chunks)?,
                    CubeDim::new_1d(COLUMN_UNITS),
                    vector_size,
                    x.arg(vector_size),
                    totals.arg(vector_size),
                    exponents.arg(vector_size),
                    y.arg(vector_size),
                    extent(),
                    self.extreme(),
                    *how,
                    dtype,
                    wide,
                );
                Ok(())
            })?;
        }
        Ok(())
    }
}

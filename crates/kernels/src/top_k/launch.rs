use super::forward::top_k_kernel;
use crate::{
    DeviceProfile, KernelError, ahead,
    buffer::{Buffer, check_float},
    device::grid,
};
use cubecl::{
    client::Client,
    ir::{ElemType, IntKind},
    prelude::*,
};

const OP: &str = "top_k";
/// The fewest and the most units of a cube.
const UNITS: [u32; 2] = [32, 512];

/// What is asked of a contiguous tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TopKProblem {
    /// Rows of x, values and indices.
    pub rows: usize,
    /// Elements of a row of x.
    pub columns: usize,
    /// Elements of a row of values and indices, of which `columns` are the most.
    pub k: usize,
    /// Type of x and values.
    pub dtype: ElemType,
}

/// The largest elements of each row.
#[derive(Clone, Debug)]
pub struct TopK {
    /// In descending order, `[rows, k]`.
    pub values: Buffer,
    /// Their columns, of i32.
    pub indices: Buffer,
}

impl TopKProblem {
    /// Elements that a cube sorts: a power of two.
    fn sorted(&self) -> usize {
        self.columns.next_power_of_two().max(2)
    }

    /// Elements of what is sorted first, and remains: a power of two.
    fn run(&self) -> usize {
        self.k.next_power_of_two().clamp(2, self.sorted())
    }

    fn validate(&self, device: DeviceProfile, x: &Buffer) -> Result<(), KernelError> {
        let Self { rows, columns, k, dtype } = *self;
        check_float(OP, "x", dtype)?;
        if k > columns {
            return Err(KernelError::invalid(OP, "k", format!("at most {columns}"), k));
        }
        let elements = rows * columns;
        // A key and a place of each.
        let shared_bytes = 2 * self.sorted() * size_of::<u32>();
        if rows * k == 0 || i32::try_from(elements).is_err() || shared_bytes > device.shared_bytes {
            let reason = format!("{k} of {rows} rows of {columns}");
            return Err(KernelError::unsupported(OP, reason));
        }
        x.check(OP, "x", elements, dtype)
    }
}

/// The k largest elements of each row.
///
/// # Errors
///
/// [`KernelError::Unsupported`] for other types, empty tensors, and rows that shared memory does not hold;
/// [`KernelError::InvalidProblem`] for more elements than a row has, and for an x of another size or type.
pub fn top_k(client: &Client, problem: &TopKProblem, x: &Buffer) -> Result<TopK, KernelError> {
    problem.validate(DeviceProfile::of(client), x)?;
    let TopKProblem { rows, columns, k, dtype } = *problem;
    let sorted = problem.sorted() as u32;
    let [fewest, most] = UNITS;
    let most = most.min(client.properties().hardware.max_units_per_cube);
    let units = (sorted / 2).clamp(fewest, most);
    let cubes = grid(OP, client, [rows, 1, 1])?;
    let values = Buffer::empty(client, rows * k, dtype);
    let indices = Buffer::empty(client, rows * k, ElemType::Int(IntKind::I32));
    // SAFETY: x holds `rows` rows of `columns` elements, values and indices as many of k, which are no more. The first
    // places in the order are those of elements.
    ahead::launch(client, |client| unsafe {
        top_k_kernel::launch_unchecked(
            client,
            cubes.clone(),
            CubeDim::new_1d(units),
            x.arg(1),
            values.arg(1),
            indices.arg(1),
            columns as u32,
            k as u32,
            sorted,
            problem.run() as u32,
            units,
            dtype,
        )
    });
    Ok(TopK { values, indices })
}

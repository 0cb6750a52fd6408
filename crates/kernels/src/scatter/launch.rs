use super::{
    ScatterProblem, SelectProblem,
    problem::OP,
    rows::scatter_rows_kernel,
    select::{SelectExtentLaunch, select_add_kernel},
};
use crate::{
    DeviceProfile, KernelError, ahead,
    buffer::Buffer,
    device::{grid, widest_vector},
    embedding::sorted,
};
use cubecl::{client::Client, prelude::*};

/// Units of a cube that adds slices.
const SELECT_UNITS: u32 = 256;
/// Words that a unit sorts at least: two are a pair of the network.
const LEAST_WORDS: u32 = 2;
/// The fewest and the most units of a cube that sorts.
const SORT_UNITS: [u32; 2] = [32, 512];

/// `y[r, p] = x[r, p]`, and the values of row r that are meant for p.
///
/// # Errors
///
/// [`KernelError::Unsupported`] for other types, empty tensors, and rows that shared memory does not hold;
/// [`KernelError::InvalidProblem`] when tensors do not go with the problem.
pub fn scatter_add(
    client: &Client,
    problem: &ScatterProblem,
    x: &Buffer,
    index: &Buffer,
    values: &Buffer,
) -> Result<Buffer, KernelError> {
    problem.validate(DeviceProfile::of(client), [x, index, values])?;
    let ScatterProblem { rows, terms, places, dtype } = *problem;
    let sorted = problem.sorted() as u32;
    let [fewest, most] = SORT_UNITS;
    let hardware = &client.properties().hardware;
    let units = (sorted / LEAST_WORDS).clamp(fewest, most.min(hardware.max_units_per_cube));
    let cubes = grid(OP, client, [rows, 1, 1])?;
    let y = Buffer::empty(client, rows * places, dtype);
    // SAFETY: x and y hold `rows` rows of `places` elements, index and values as many of `terms`, and cubes stop at the
    // ends of their row. A word that is found names a term of it.
    ahead::launch(client, |client| unsafe {
        scatter_rows_kernel::launch_unchecked(
            client,
            cubes.clone(),
            CubeDim::new_1d(units),
            x.arg(1),
            index.arg(1),
            values.arg(1),
            y.arg(1),
            terms as u32,
            places as u32,
            sorted,
            units,
            dtype,
        )
    });
    Ok(y)
}

/// `y[o, p, c] = x[o, p, c]`, and the slices of values that are meant for p.
///
/// # Errors
///
/// [`KernelError::Unsupported`] for other types, empty tensors, and what the device cannot launch;
/// [`KernelError::InvalidProblem`] when tensors do not go with the problem.
pub fn select_add(
    client: &Client,
    problem: &SelectProblem,
    x: &Buffer,
    index: &Buffer,
    values: &Buffer,
) -> Result<Buffer, KernelError> {
    problem.validate([x, index, values])?;
    let SelectProblem { outer, terms, places, inner, dtype } = *problem;
    let vector_size = widest_vector(client, dtype.size(), |size| inner.is_multiple_of(size));
    let units = outer * places * inner / vector_size;
    let cubes = grid(OP, client, [units.div_ceil(SELECT_UNITS as usize), 1, 1])?;
    let [keys, order] = sorted(client, index, places);
    let y = Buffer::empty(client, outer * places * inner, dtype);
    let (outer, terms, places) = (outer as u32, terms as u32, places as u32);
    // SAFETY: x, values and y hold their slices, which are whole vectors, and keys and order a word for each term, the
    // latter a permutation of them. Units stop at the last vector of y.
    ahead::launch(client, |client| unsafe {
        select_add_kernel::launch_unchecked(
            client,
            cubes.clone(),
            CubeDim::new_1d(SELECT_UNITS),
            vector_size,
            x.arg(vector_size),
            keys.arg(1),
            order.arg(1),
            values.arg(vector_size),
            y.arg(vector_size),
            SelectExtentLaunch::new(outer, terms, places, (inner / vector_size) as u32),
            [dtype, problem.sums()],
        )
    });
    Ok(y)
}

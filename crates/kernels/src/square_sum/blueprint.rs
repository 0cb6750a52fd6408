use crate::{DeviceProfile, Promise, buffer::Rows, device::widest_vector, plan::tell_plan};
use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind, VectorSize},
};
use std::fmt;

/// Sums that tensors add to: enough cubes to keep any GPU of today busy (132 multiprocessors with room
/// for six each on an H200), and few enough to be added up by a last one.
pub const PLACES: usize = 1024;

/// Units in a cube: every adapter takes as many.
pub(crate) const UNITS: u32 = 256;

/// Tensors of a launch: a launch takes two microseconds, and many a tensor less.
pub const MOST_TENSORS: usize = 32;

/// Vectors that a unit loads before it squares any.
pub(crate) const UNROLL: usize = 4;

/// How a sum is compiled and spread over the device: tensors of one type in one launch.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SquareSumBlueprint {
    /// Elements that a unit loads at once.
    pub vector_size: VectorSize,
    /// Whether something lies between the rows of any tensor.
    pub by_rows: bool,
    /// Vectors of a cube, at most.
    pub share: usize,
    /// Cubes of each tensor, at most [`PLACES`] in all.
    pub cubes: Vec<usize>,
}

impl SquareSumBlueprint {
    /// Cubes that a multiprocessor has room for: of 256 threads with 40 registers, of 65,536. Where a kernel
    /// takes up to 64, four are there at once and the others follow.
    const CUBES_A_MULTIPROCESSOR: usize = 6;

    /// The widest loads that serve all of `tensors`, and as many cubes as there is room for at once, each
    /// with as much to read of one tensor.
    pub fn plan(tensors: &[Rows], dtype: ElemType, client: &Client) -> Self {
        let device = DeviceProfile::of(client);
        let vector_size = widest_vector(client, dtype.size(), |size| {
            tensors.iter().all(|rows| serves(rows, size, &device))
        });
        let vectors: Vec<usize> = tensors.iter().map(|rows| vectors(rows, vector_size)).collect();
        let at_once = device.multiprocessors * Self::CUBES_A_MULTIPROCESSOR;
        let most = at_once.clamp(PLACES / 2, PLACES);
        // Each tensor's last cube may have less than its share.
        let total: usize = vectors.iter().sum();
        let pass = UNITS as usize * UNROLL;
        let share = total.div_ceil(most - tensors.len().min(most - 1)).next_multiple_of(pass);
        let share = share.max(pass);
        let plan = Self {
            vector_size,
            by_rows: tensors.iter().any(|rows| !rows.is_contiguous()),
            share,
            cubes: vectors.iter().map(|vectors| vectors.div_ceil(share)).collect(),
        };
        let reason = format_args!("{most} cubes at most, of {total} vectors");
        tell_plan("square_sum", &(dtype, &vectors), &plan, reason);
        plan
    }

    /// Registers for six cubes of 256 units a multiprocessor, each unit with four loads of 16 bytes on the way;
    /// for four where every vector may be a row's last, and in bf16 of many tensors: where branches meet, its
    /// halves have registers of their own.
    pub(crate) fn promise(tensors: usize, dtype: ElemType, by_rows: bool) -> Promise {
        let is_split = tensors > 1 && dtype == ElemType::Float(FloatKind::BF16);
        Promise::registers(if by_rows || is_split { 64 } else { 40 })
    }

    /// Whether indices of vectors fit 32 bits with a cube's share and a step beyond: for one tensor alone,
    /// of which a share is a 511th, they do if its own leave 2^24.
    pub(super) fn is_counted_in_32_bits(&self) -> bool {
        let most_cubes = self.cubes.iter().max().copied().unwrap_or_default();
        u32::try_from((most_cubes + 2) * self.share).is_ok()
    }
}

/// Vectors of a tensor, one that its end or a row's has only begun among them.
pub(super) fn vectors(rows: &Rows, vector_size: VectorSize) -> usize {
    match rows.is_contiguous() {
        true => rows.elements().div_ceil(vector_size),
        false => rows.rows * rows.columns.div_ceil(vector_size),
    }
}

/// Whether vectors of that many elements can be read from the first to the one that has the last.
fn serves(rows: &Rows, vector_size: VectorSize, device: &DeviceProfile) -> bool {
    let one = || Rows::one(rows.buffer.clone());
    // What CUDA allocates ends where 512 divides it, so that a vector that begins within goes no further.
    let goes_on = device.compute_capability.is_some();
    match rows.is_contiguous() {
        true => one().takes_vectors(vector_size, goes_on),
        false => rows.takes_vectors(vector_size, goes_on),
    }
}

impl fmt::Display for SquareSumBlueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vector_size, by_rows, share, cubes } = self;
        let walk = if *by_rows { "by rows" } else { "flat" };
        let cubes: usize = cubes.iter().sum();
        write!(f, "{cubes} cubes of {share} vectors of {vector_size}, {walk}")
    }
}

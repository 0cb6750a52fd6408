//! Overwriting memory that others know by its address.
//!
//! A captured graph reads its inputs where they lay when it was captured. New ones have to be put there,
//! whoever holds that memory:
//!
//! | tensor | shape | dtype |
//! |---|---|---|
//! | source, read | rows x columns, each with its pitch | f32, f16, bf16, or any integer that the device has |
//! | target, overwritten | the same, with its own pitch | the same kind, rounded to the nearest value |
//!
//! What lies between rows stays as it is. Several tensors take one launch. Targets may be parts of one memory: so tensors
//! are joined, and images whose channels follow each other are by their channels (a pixel is a row, and channels are
//! columns).

mod variants;

use crate::{
    DeviceProfile, KernelError, ahead,
    device::widest_vector,
    together::{MOST_TENSORS, divide, in_launches},
};

pub use crate::buffer::Rows;
use cubecl::{
    client::Client,
    ir::{ElemType, VectorSize},
    prelude::*,
};
use std::ops::Range;
pub(crate) use variants::variants;

const OP: &str = "overwrite";

/// Units in a cube: every adapter takes as many.
pub(crate) const UNITS: u32 = 256;

/// Cubes that a multiprocessor has room for: 2048 threads.
const CUBES_A_MULTIPROCESSOR: usize = 8;

/// Memory, and what it is to hold.
#[derive(Clone, Debug)]
pub struct Overwrite {
    /// What is overwritten.
    pub target: Rows,
    /// What is read.
    pub source: Rows,
    /// Elements of the memory of each in front of its first row: of the target's, and of the source's.
    pub skipped: [usize; 2],
}

/// Writes the elements of `source` to the memory of `target`, in the type of `target`, although others
/// may hold it.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] where the two differ in size or in kind; [`KernelError::Unsupported`]
/// beyond 32-bit indices.
pub fn overwrite(client: &Client, target: &Rows, source: &Rows) -> Result<(), KernelError> {
    overwrite_many(client, &[Overwrite::new(target.clone(), source.clone())])
}

/// [`overwrite`] of several tensors, in any order: no target may be memory that another of them names. Up to
/// 16 take one launch: those that are alike in their types and in how their elements are found.
///
/// # Errors
///
/// As there, before anything is launched.
pub fn overwrite_many(client: &Client, all: &[Overwrite]) -> Result<(), KernelError> {
    launch_all(client, all, false)
}

/// [`overwrite_many`] of targets that are parts of one memory, the same buffer in each, without a common element.
///
/// # Errors
///
/// As there.
pub fn overwrite_parts(client: &Client, all: &[Overwrite]) -> Result<(), KernelError> {
    launch_all(client, all, true)
}

fn launch_all(client: &Client, all: &[Overwrite], is_one_target: bool) -> Result<(), KernelError> {
    all.iter().try_for_each(Overwrite::check)?;
    let spans: Vec<_> = all.iter().flat_map(|one| Span::of(one, client)).collect();
    let room = room(client);
    in_launches(
        spans,
        |_| room,
        |one, other| one.kind() == other.kind(),
        |together| {
            launch(client, together, room, is_one_target);
        },
    );
    Ok(())
}

impl Overwrite {
    /// All of `target`, by all of `source`.
    pub fn new(target: Rows, source: Rows) -> Self {
        Self { target, source, skipped: [0; 2] }
    }

    /// Both, each with what is skipped of its memory.
    fn sides(&self) -> [(&Rows, usize); 2] {
        let [of_target, of_source] = self.skipped;
        [(&self.target, of_target), (&self.source, of_source)]
    }

    /// Whether it can be launched.
    ///
    /// # Errors
    ///
    /// As [`overwrite`].
    pub(crate) fn check(&self) -> Result<(), KernelError> {
        let Self { target, source, .. } = self;
        let is_float = |rows: &Rows| matches!(rows.buffer.dtype, ElemType::Float(_));
        let goes_together = (target.rows, target.columns) == (source.rows, source.columns)
            && (target.buffer.dtype == source.buffer.dtype || is_float(target) && is_float(source));
        if !goes_together {
            return Err(KernelError::invalid(OP, "source", told(target), told(source)));
        }
        let ends = self.sides().map(|(side, skipped)| skipped + side.span());
        if ends[0] > target.buffer.elements || ends[1] > source.buffer.elements {
            return Err(KernelError::invalid(
                OP,
                "source",
                "rows within the memory of both",
                format!("{target:?} and {source:?}, {:?} skipped", self.skipped),
            ));
        }
        // Units step beyond the end before they stop.
        if u32::try_from(ends[0].max(ends[1]) + (1 << 24)).is_err() {
            let reason = format!("{} rows of {} elements", target.rows, target.columns);
            return Err(KernelError::Unsupported { op: OP, reason });
        }
        Ok(())
    }
}

fn told(rows: &Rows) -> String {
    format!("{} rows of {} elements of {:?}", rows.rows, rows.columns, rows.buffer.dtype)
}

/// How many tensors a launch has room for.
fn room(client: &Client) -> usize {
    /// CubeCL's own buffers.
    const OTHERS: usize = 2;
    let most = client.properties().hardware.max_bindings as usize;
    (most.saturating_sub(OTHERS) / 2).clamp(1, MOST_TENSORS)
}

/// Columns of all rows of a tensor, which are copied by vectors of one size.
struct Span<'a> {
    of: &'a Overwrite,
    columns: Range<usize>,
    vector_size: VectorSize,
}

impl<'a> Span<'a> {
    /// The columns that the widest vectors divide, and those that are left.
    fn of(one: &'a Overwrite, client: &Client) -> impl Iterator<Item = Self> + use<'a> {
        let Overwrite { target, source, .. } = one;
        let widest = target.buffer.dtype.size().max(source.buffer.dtype.size());
        let vector_size = widest_vector(client, widest, |size| {
            one.sides().iter().all(|(side, skipped)| {
                let start = side.buffer.offset_bytes();
                (side.rows == 1 || side.pitch.is_multiple_of(size))
                    && skipped.is_multiple_of(size)
                    && start.is_multiple_of((size * side.buffer.dtype.size()) as u64)
            })
        });
        let whole = target.columns / vector_size * vector_size;
        [(0..whole, vector_size), (whole..target.columns, 1)]
            .into_iter()
            .map(move |(columns, vector_size)| Self { of: one, columns, vector_size })
            .filter(|span| span.vectors() > 0)
    }

    fn vectors(&self) -> usize {
        self.of.target.rows * self.columns.len() / self.vector_size
    }

    fn is_one_row(&self) -> bool {
        self.of.target.rows == 1
    }

    /// What a kernel is compiled for.
    fn kind(&self) -> (ElemType, ElemType, VectorSize, bool) {
        let Overwrite { target, source, .. } = self.of;
        (source.buffer.dtype, target.buffer.dtype, self.vector_size, self.is_one_row())
    }

    /// What the kernel is told, with cubes before `end` that follow those of the span before.
    fn part(&self, end: u32) -> PartLaunch {
        let vectors = |elements: usize| (elements / self.vector_size) as u32;
        let [to, from] = self.of.skipped.map(|skipped| vectors(skipped + self.columns.start));
        PartLaunch::new(
            end,
            self.vectors() as u32,
            from,
            to,
            vectors(self.columns.len()),
            vectors(self.of.source.pitch),
            vectors(self.of.target.pitch),
        )
    }
}

/// Overwrites what goes together, in one launch.
fn launch(client: &Client, spans: &[Span<'_>], room: usize, is_one_target: bool) {
    let Some(model) = spans.first() else { return };
    let (source_dtype, target_dtype, vector_size, is_one_row) = model.kind();
    let at_once = DeviceProfile::of(client).multiprocessors * CUBES_A_MULTIPROCESSOR;
    let passes: Vec<_> = spans.iter().map(|span| span.vectors().div_ceil(UNITS as usize)).collect();
    let cubes = divide(at_once, &passes);
    // A few kernels serve all numbers of tensors: what is not there has no cubes, and the first stands in.
    let count = spans.len().next_power_of_two().min(room);
    let at = |place: usize| spans.get(place).unwrap_or(model);
    let parts = || -> SequenceArg<Part> {
        let mut end = 0;
        let part = |place: usize| {
            end += cubes.get(place).copied().unwrap_or(0);
            at(place).part(end)
        };
        (0..count).map(part).collect()
    };
    // Buffers are counted as the kernel names them: the sources come first.
    let target = |place: usize| match spans.get(place) {
        Some(span) if place == 0 || !is_one_target => span.of.target.arg(),
        _ => BufferArg::alias(count, model.of.target.buffer.elements),
    };
    // SAFETY: `check` has seen that all rows are within the memory of both sides and that indices and one
    // step beyond fit 32 bits; vectors divide pitches and columns. The kernel stops at the last vector.
    ahead::launch(client, |client| unsafe {
        overwrite_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes.iter().sum(), 1, 1),
            CubeDim::new_1d(UNITS),
            vector_size,
            (0..count).map(|place| at(place).of.source.arg()).collect(),
            (0..count).map(target).collect(),
            parts(),
            is_one_row,
            source_dtype,
            target_dtype,
        )
    });
}

/// A span's share of a launch; all but `end` counts vectors.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Part {
    /// The cube after its last one; those after the last of the span before are its own.
    end: u32,
    /// Of all rows.
    vectors: u32,
    /// Where the span begins in the first row.
    from: u32,
    to: u32,
    /// Of a row.
    columns: u32,
    source_pitch: u32,
    target_pitch: u32,
}

/// Vectors of each tensor by cubes of its own. Units follow each other through rows as through columns, so that none is
/// idle where rows are short.
#[cube(launch_unchecked)]
pub(crate) fn overwrite_kernel<S: Numeric, T: Numeric, N: Size>(
    sources: Sequence<Box<[Vector<S, N>]>>,
    mut targets: Sequence<Box<[Vector<T, N>]>>,
    parts: Sequence<Part>,
    #[comptime] is_one_row: bool,
    #[define(S)] _source_dtype: ElemType,
    #[define(T)] _target_dtype: ElemType,
) {
    let cube = CUBE_POS as u32;
    let mut first = 0u32;
    #[unroll]
    for tensor in 0..parts.len() {
        let part = &parts[tensor];
        if cube >= first && cube < part.end {
            let stride = (part.end - first) * CUBE_DIM;
            let mut index = (cube - first) * CUBE_DIM + UNIT_POS;
            while index < part.vectors {
                let mut from = part.from + index;
                let mut to = part.to + index;
                if comptime!(!is_one_row) {
                    let row = index / part.columns;
                    let column = index % part.columns;
                    from = part.from + row * part.source_pitch + column;
                    to = part.to + row * part.target_pitch + column;
                }
                write::<S, T, N>(&sources[tensor], &mut targets[tensor], from, to);
                index += stride;
            }
        }
        first = part.end;
    }
}

#[cube]
fn write<S: Numeric, T: Numeric, N: Size>(
    source: &[Vector<S, N>],
    target: &mut [Vector<T, N>],
    from: u32,
    to: u32,
) {
    target[to as usize] = Vector::cast_from(source[from as usize]);
}

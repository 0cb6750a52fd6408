//! Keys and values of new tokens put into memory that holds those before them, on any runtime.
//!
//! ```text
//! cache[b, h, position + i, :] = new[b, h, i, :]
//! ```
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | cached keys, cached values | `[batch, heads, capacity, head_dim]` | [`HeadStrides`], rows contiguous | f32, f16, bf16 |
//! | new keys, new values | `[batch, heads, seq, head_dim]` | as they are | that of the cache |
//! | position | one number, or one for each sequence | contiguous | 32-bit integers |
//!
//! The cache's memory is written where it lies, whoever holds it, and its other rows stay as they are. The position is
//! on the device: a launch that was recorded serves every length. Rows outside the capacity are dropped. Nothing is
//! rounded.

use super::{
    HeadStrides,
    decode::Vectors,
    decode_launch::{check_position, steps, vectors},
    rules::origin,
};
use crate::{
    KernelError, ahead,
    buffer::{Buffer, check_float},
    device::widest_vector,
    divisor::DIVIDEND_LIMIT,
};
use cubecl::{calculate_cube_count_elemwise, client::Client, ir::ElemType, prelude::*};

const OP: &str = "attention_append";
/// Units of a cube: every adapter takes as many.
const UNITS: u32 = 256;

/// What is put where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AppendProblem {
    /// Sequences.
    pub batch: usize,
    /// Heads of keys and values.
    pub heads: usize,
    /// New tokens of a sequence.
    pub seq: usize,
    /// Tokens that the cache has room for.
    pub capacity: usize,
    /// Elements of a row.
    pub head_dim: usize,
    /// Element type of all four: f32, f16 or bf16.
    pub dtype: ElemType,
    /// Where the cache's keys and values lie.
    pub cached: [HeadStrides; 2],
    /// Where the new ones lie.
    pub new: [HeadStrides; 2],
}

/// The tensors: keys first, then values.
#[derive(Clone, Copy, Debug)]
pub struct AppendTensors<'a> {
    /// The cache, whose memory is written.
    pub cached: [&'a Buffer; 2],
    /// What is put there.
    pub new: [&'a Buffer; 2],
    /// Where the first new token stands.
    pub position: &'a Buffer,
}

impl AppendProblem {
    /// Bytes that have to be moved: keys and values in and out.
    pub fn bytes(&self) -> usize {
        4 * self.elements() * self.dtype.size()
    }

    fn elements(&self) -> usize {
        [self.heads, self.seq, self.head_dim]
            .into_iter()
            .fold(self.batch, |elements, size| elements.saturating_mul(size))
    }

    fn check(&self, tensors: &AppendTensors<'_>) -> Result<(), KernelError> {
        check_float(OP, "keys and values", self.dtype)?;
        for (argument, size) in [
            ("batch", self.batch),
            ("heads", self.heads),
            ("capacity", self.capacity),
            ("head_dim", self.head_dim),
        ] {
            if size == 0 {
                return Err(KernelError::invalid(OP, argument, "at least 1", size));
            }
        }
        check_position(OP, tensors.position, self.batch)?;
        let sides = [
            ("cached", tensors.cached, self.cached, self.capacity),
            ("new", tensors.new, self.new, self.seq),
        ];
        for (argument, buffers, strides, seq) in sides {
            for (buffer, strides) in buffers.into_iter().zip(strides) {
                let span = self.span(strides, seq);
                if span >= DIVIDEND_LIMIT {
                    let reason = format!("{argument} that spans {span} elements, 2^31 or more");
                    return Err(KernelError::unsupported(OP, reason));
                }
                buffer.check_span(OP, argument, span, self.dtype)?;
            }
        }
        match i32::try_from(self.elements().max(self.capacity)) {
            Ok(_) => Ok(()),
            Err(_) => Err(KernelError::unsupported(OP, "2^31 elements or more")),
        }
    }

    /// Elements from the first to the last of `seq` rows a head.
    fn span(&self, HeadStrides { batch, head, row }: HeadStrides, seq: usize) -> usize {
        if seq == 0 {
            return 0;
        }
        [(self.batch, batch), (self.heads, head), (seq, row)]
            .into_iter()
            .map(|(size, stride)| (size - 1).saturating_mul(stride))
            .fold(self.head_dim, usize::saturating_add)
    }

    /// The widest vectors that rows, strides and the beginnings of tensors divide into.
    fn vector_size(&self, client: &Client, tensors: &AppendTensors<'_>) -> usize {
        let bytes = self.dtype.size();
        widest_vector(client, bytes, |size| {
            let are_whole = |strides, seq| {
                let steps = steps(strides, [self.batch, self.heads, seq]);
                steps.into_iter().all(|step| step.is_multiple_of(size))
            };
            let begins_whole =
                |buffer: &Buffer| buffer.offset_bytes().is_multiple_of((size * bytes) as u64);
            self.head_dim.is_multiple_of(size)
                && self.cached.into_iter().all(|strides| are_whole(strides, self.capacity))
                && self.new.into_iter().all(|strides| are_whole(strides, self.seq))
                && tensors.cached.into_iter().chain(tensors.new).all(begins_whole)
        })
    }
}

/// Puts new keys and values into the cache's memory.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] where a size is zero or a tensor is not what the problem says;
/// [`KernelError::Unsupported`] for other types, and beyond 31-bit indices.
pub fn attention_append(
    client: &Client,
    problem: &AppendProblem,
    tensors: &AppendTensors<'_>,
) -> Result<(), KernelError> {
    problem.check(tensors)?;
    let elements = problem.elements();
    if elements == 0 {
        return Ok(());
    }
    let size = problem.vector_size(client, tensors);
    let units = elements / size;
    let dim = CubeDim::new_1d(UNITS);
    let AppendTensors { cached, new, position } = *tensors;
    // SAFETY: `check` has seen that tensors have their spans and indices fit 31 bits; the vectors divide rows, strides
    // and where tensors begin. The kernel stops at the last vector and at the ends of the capacity, wherever the
    // position is.
    ahead::launch(client, |client| unsafe {
        attention_append_kernel::launch_unchecked(
            client,
            calculate_cube_count_elemwise(client, units, dim),
            dim,
            size,
            vectors(new[0], problem.new[0], size),
            vectors(new[1], problem.new[1], size),
            position.arg(1),
            vectors(cached[0], problem.cached[0], size),
            vectors(cached[1], problem.cached[1], size),
            RoomLaunch {
                units: units as u32,
                heads: problem.heads as u32,
                seq: problem.seq as u32,
                capacity: problem.capacity as u32,
                position_step: u32::from(position.elements > 1),
            },
            (problem.head_dim / size) as u32,
            problem.dtype,
        )
    });
    Ok(())
}

/// Sizes of the problem.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Room {
    /// Vectors of the new keys.
    units: u32,
    heads: u32,
    seq: u32,
    capacity: u32,
    /// From one sequence's position to the next one's; 0 where one serves all.
    position_step: u32,
}

/// A unit copies a vector of a key and of a value.
#[cube(launch_unchecked)]
pub(crate) fn attention_append_kernel<I: Float, N: Size>(
    new_keys: &Vectors<I, N>,
    new_values: &Vectors<I, N>,
    position: &[i32],
    keys: &mut Vectors<I, N>,
    values: &mut Vectors<I, N>,
    room: Room,
    #[comptime] vectors: u32,
    #[define(I)] _dtype: ElemType,
) {
    let unit = ABSOLUTE_POS as u32;
    if unit < room.units {
        let (row, column) = (unit / vectors, unit % vectors);
        let (head, token) = (row / room.seq, row % room.seq);
        let (batch, head) = (head / room.heads, head % room.heads);
        // A sum beyond the largest number is negative, and outside all the same.
        let place = position[(batch * room.position_step) as usize] + i32::cast_from(token);
        if place >= 0i32 && place < i32::cast_from(room.capacity) {
            let place = u32::cast_from(place);
            let from = origin(&new_keys.strides, batch, head, token) + column;
            let to = origin(&keys.strides, batch, head, place) + column;
            keys.memory[to as usize] = new_keys.memory[from as usize];
            let from = origin(&new_values.strides, batch, head, token) + column;
            let to = origin(&values.strides, batch, head, place) + column;
            values.memory[to as usize] = new_values.memory[from as usize];
        }
    }
}

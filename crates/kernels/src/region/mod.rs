//! Writing from a part of one tensor to a part of another, or adding to it:
//!
//! ```text
//! target[start + step * i] = source[start + step * i]          target[start + step * i] += source[start + step * i]
//! ```
//!
//! for each place i of the part, each tensor with starts and steps of its own. A permuted tensor or a slice is copied so,
//! and the gradient of a slice is: the slice's, written to zeros or added to another gradient. Only the part is touched.
//!
//! | tensor | shape | dtype |
//! |---|---|---|
//! | source, read | any, with any distances | f32, f16 or bf16 |
//! | target, written, and read for a sum | the same, with distances of its own | the same |
//!
//! A sum is one of f32, rounded to the type once. No two places of the source may lie on one of the target.
//!
//! Where neighbors of the source are not those of the target, as in a transposed matrix, cubes turn squares of both
//! dimensions in shared memory (`turned.rs`).

mod turned;
mod variants;

use crate::{
    DeviceProfile, KernelError, ahead,
    buffer::{Buffer, check_float},
    device::widest_vector,
    divisor::{DIVIDEND_LIMIT, Divisor, divide, divisor},
};
use cubecl::{
    client::Client,
    ir::{ElemType, VectorSize},
    prelude::*,
};
use turned::Turned;
pub(crate) use variants::variants;

const OP: &str = "region";

const UNITS: u32 = 256;
/// Cubes that a multiprocessor has room for: 2048 threads.
const CUBES_A_MULTIPROCESSOR: usize = 8;

/// Where the elements of a source lie, and where they go. Distances count elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Elements along each dimension.
    pub shape: Vec<usize>,
    /// From one to the next in the source.
    pub source_strides: Vec<usize>,
    /// The same in the target. Steps of a part are included in either.
    pub target_strides: Vec<usize>,
    /// Where the first element lies in the source.
    pub source_start: usize,
    /// Where it goes.
    pub start: usize,
    /// Whether it is added to what is there.
    pub adds: bool,
}

/// Writes or adds `source` to a part of `target`, whoever holds that memory.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] where shape, distances and memory do not go together; [`KernelError::Unsupported`] for
/// other types, and beyond 32-bit indices.
pub fn write_region(
    client: &Client,
    region: &Region,
    source: &Buffer,
    target: &Buffer,
) -> Result<(), KernelError> {
    region.check(source, target)?;
    if region.shape.contains(&0) {
        return Ok(());
    }
    let dims = region.dims();
    let is_in_pairs = source.dtype.size() == 2
        && region.begins_with_vectors(source, target, 2)
        && region.source_end().next_multiple_of(2) <= source.elements;
    if let Some(turned) = Turned::of(region, &dims, is_in_pairs) {
        turned.launch(client, source, target);
        return Ok(());
    }
    let size = widest_vector(client, source.dtype.size(), |size| {
        region.begins_with_vectors(source, target, size) && divides(&dims, size)
    });
    let in_vectors = |dim: &Dim, is_last: bool| {
        let of_last = |stride: usize| if is_last { 1 } else { stride / size };
        WalkedDimLaunch::new(
            divisor(if is_last { dim.size / size } else { dim.size }),
            of_last(dim.source) as u32,
            of_last(dim.target) as u32,
        )
    };
    let vectors = region.shape.iter().product::<usize>() / size;
    let most = DeviceProfile::of(client).multiprocessors * CUBES_A_MULTIPROCESSOR;
    let cubes = vectors.div_ceil(UNITS as usize).min(most.max(1));
    // The last dimension first, as units find their places. Of one element each is the last.
    let is_last = |at: usize| size > 1 && at == 0;
    // SAFETY: `check` has seen that all places are within both memories and that indices fit 32 bits; vectors divide
    // starts, distances and the last dimension. The kernel stops at the last vector.
    ahead::launch(client, |client| unsafe {
        region_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            size,
            source.arg_read_in_part(),
            target.arg_read_in_part(),
            dims.iter().rev().enumerate().map(|(at, dim)| in_vectors(dim, is_last(at))).collect(),
            vectors as u32,
            (region.source_start / size) as u32,
            (region.start / size) as u32,
            region.adds,
            source.dtype,
        )
    });
    Ok(())
}

/// A dimension that is walked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Dim {
    size: usize,
    source: usize,
    target: usize,
}

/// Whether vectors of so many elements go through all dimensions.
fn divides(dims: &[Dim], size: VectorSize) -> bool {
    let [outer @ .., last] = dims else { return size == 1 };
    let is_whole = |dim: &Dim| dim.source.is_multiple_of(size) && dim.target.is_multiple_of(size);
    size == 1
        || (last.source == 1
            && last.target == 1
            && last.size.is_multiple_of(size)
            && outer.iter().all(is_whole))
}

impl Region {
    /// How far the last element is from the first one.
    fn last(&self, strides: &[usize]) -> usize {
        self.shape.iter().zip(strides).map(|(size, stride)| (size - 1) * stride).sum()
    }

    /// The element behind the last one that is read.
    fn source_end(&self) -> usize {
        self.source_start + self.last(&self.source_strides) + 1
    }

    /// Whether the first element of each side begins a vector of so many.
    fn begins_with_vectors(&self, source: &Buffer, target: &Buffer, size: VectorSize) -> bool {
        [(source, self.source_start), (target, self.start)].into_iter().all(|(buffer, start)| {
            let bytes = (size * buffer.dtype.size()) as u64;
            buffer.offset_bytes().is_multiple_of(bytes) && start.is_multiple_of(size)
        })
    }

    /// The dimensions as the target has them, outermost first, without those of one element. What follows each other
    /// in both is one.
    fn dims(&self) -> Vec<Dim> {
        let sizes = self.shape.iter().zip(&self.source_strides).zip(&self.target_strides);
        let mut dims: Vec<Dim> = sizes
            .map(|((size, source), target)| Dim { size: *size, source: *source, target: *target })
            .filter(|dim| dim.size > 1)
            .collect();
        dims.sort_by_key(|dim| std::cmp::Reverse(dim.target));
        let mut merged: Vec<Dim> = Vec::new();
        for dim in dims {
            match merged.last_mut() {
                Some(outer)
                    if outer.source == dim.size * dim.source
                        && outer.target == dim.size * dim.target =>
                {
                    *outer = Dim { size: outer.size * dim.size, ..dim };
                }
                _ => merged.push(dim),
            }
        }
        if merged.is_empty() {
            merged.push(Dim { size: 1, source: 1, target: 1 });
        }
        merged
    }

    /// Whether [`write_region`] takes it with that memory.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn check(&self, source: &Buffer, target: &Buffer) -> Result<(), KernelError> {
        let Self { shape, source_strides, target_strides, start, .. } = self;
        check_float(OP, "source", source.dtype)?;
        if target.dtype != source.dtype {
            let (expected, got) = (format!("{:?}", source.dtype), format!("{:?}", target.dtype));
            return Err(KernelError::invalid(OP, "target", expected, got));
        }
        let sides = [("source_strides", source_strides), ("target_strides", target_strides)];
        for (argument, strides) in sides {
            if strides.len() != shape.len() {
                let expected = format!("{} strides, one a dimension", shape.len());
                return Err(KernelError::invalid(OP, argument, expected, strides.len()));
            }
        }
        if shape.contains(&0) {
            return Ok(());
        }
        let ends = [self.source_end(), start + self.last(target_strides) + 1];
        for ((argument, buffer), end) in
            [("source", source), ("target", target)].into_iter().zip(ends)
        {
            if end > buffer.elements {
                let expected = format!("at least {end} elements for {self:?}");
                return Err(KernelError::invalid(OP, argument, expected, buffer.elements));
            }
        }
        // Units step beyond the end before they stop.
        let most = ends.into_iter().max().unwrap_or_default();
        if most + (1 << 24) > DIVIDEND_LIMIT {
            return Err(KernelError::Unsupported { op: OP, reason: format!("{most} elements") });
        }
        Ok(())
    }
}

/// A dimension, in vectors.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct WalkedDim {
    size: Divisor,
    source: u32,
    target: u32,
}

/// A vector a unit at a time; `dims` are the last one first.
#[cube(launch_unchecked)]
pub(crate) fn region_kernel<F: Float, N: Size>(
    source: &[Vector<F, N>],
    target: &mut [Vector<F, N>],
    dims: Sequence<WalkedDim>,
    vectors: u32,
    source_start: u32,
    start: u32,
    #[comptime] adds: bool,
    #[define(F)] _dtype: ElemType,
) {
    let mut index = ABSOLUTE_POS as u32;
    let stride = CUBE_COUNT as u32 * CUBE_DIM;
    while index < vectors {
        let mut rest = index;
        let mut from = source_start;
        let mut to = start;
        #[unroll]
        for at in 0..dims.len() {
            let dim = &dims[at];
            let (outer, place) = divide(rest, &dim.size);
            rest = outer;
            from += place * dim.source;
            to += place * dim.target;
        }
        let mut value = source[from as usize];
        if comptime!(adds) {
            let sum = Vector::<f32, N>::cast_from(target[to as usize])
                + Vector::<f32, N>::cast_from(value);
            value = Vector::cast_from(sum);
        }
        target[to as usize] = value;
        index += stride;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(shape: &[usize], source: &[usize], target: &[usize]) -> Region {
        Region {
            shape: shape.to_vec(),
            source_strides: source.to_vec(),
            target_strides: target.to_vec(),
            source_start: 0,
            start: 0,
            adds: false,
        }
    }

    #[test]
    fn dimensions_that_follow_each_other_are_one() {
        // The middle third of the last dimension.
        let columns = region(&[2, 5, 4], &[20, 4, 1], &[60, 12, 1]).dims();
        assert_eq!(
            columns,
            [Dim { size: 10, source: 4, target: 12 }, Dim { size: 4, source: 1, target: 1 }]
        );
        // One of three, permuted in the source.
        let one = region(&[1, 6, 4], &[24, 1, 6], &[24, 4, 1]).dims();
        assert_eq!(
            one,
            [Dim { size: 6, source: 1, target: 4 }, Dim { size: 4, source: 6, target: 1 }]
        );
        assert_eq!(region(&[1, 1], &[7, 9], &[7, 9]).dims().len(), 1);
    }

    #[test]
    fn vectors_go_through_what_they_divide() {
        let dims = |shape: [usize; 2], pitch| region(&shape, &[shape[1], 1], &[pitch, 1]).dims();
        assert!(divides(&dims([3, 8], 24), 8));
        assert!(!divides(&dims([3, 8], 20), 8), "rows of the target");
        assert!(!divides(&dims([3, 12], 24), 8), "a row");
        assert!(!divides(&region(&[3, 8], &[8, 1], &[24, 2]).dims(), 2), "steps");
    }
}

//! Regions whose neighbors in the source are not neighbors in the target.
//!
//! A cube reads a square of two dimensions along the one whose elements follow each other in the source, keeps it in shared
//! memory, and writes it along the one whose elements do in the target. Elements of 2 bytes are read and written in pairs
//! where both sides allow it.

use super::{Dim, Region, WalkedDim, WalkedDimLaunch};
use crate::{
    DeviceProfile, ahead,
    buffer::Buffer,
    divisor::{Divisor, divide, divisor},
};
use cubecl::{client::Client, ir::ElemType, prelude::*};

/// Vectors along an edge of a square.
const EDGE: u32 = 32;
/// Rows of units in a cube.
const SHARES: u32 = 8;
/// Cubes that a multiprocessor has room for.
const CUBES_A_MULTIPROCESSOR: usize = 8;
/// Shorter dimensions fill too little of a square.
const SHORTEST: usize = 16;

/// How a region is turned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Turned {
    /// Elements of a vector: one or two.
    width: usize,
    /// The dimension of neighbors in the source.
    read: Dim,
    /// That of neighbors in the target.
    written: Dim,
    /// The others, the last one first.
    outer: Vec<Dim>,
    source_start: usize,
    start: usize,
}

impl Turned {
    /// How to turn the region of those dimensions, if it is one to turn. Elements come in pairs if both sides begin with
    /// one, the source holds the last pair, and nothing else is against it.
    pub(super) fn of(region: &Region, dims: &[Dim], is_in_pairs: bool) -> Option<Self> {
        let [others @ .., written] = dims else { return None };
        let read = others.iter().position(|dim| dim.source == 1)?;
        let mut outer = others.to_vec();
        let (read, written) = (outer.remove(read), *written);
        let is_long = [read, written].iter().all(|dim| dim.size >= SHORTEST);
        if region.adds || written.target != 1 || !is_long {
            return None;
        }
        outer.reverse();
        let pitches = outer.iter().flat_map(|dim| [dim.source, dim.target]);
        // An element that is read behind the last one is not written.
        let mut even = pitches.chain([read.target, written.size, written.source]);
        let takes_pairs = is_in_pairs && even.all(|size| size.is_multiple_of(2));
        Some(Self {
            width: if takes_pairs { 2 } else { 1 },
            read,
            written,
            outer,
            source_start: region.source_start,
            start: region.start,
        })
    }

    /// Runs it. The region was checked with these tensors.
    pub(super) fn launch(&self, client: &Client, source: &Buffer, target: &Buffer) {
        let Self { width, read, written, ref outer, source_start, start } = *self;
        let edge = EDGE as usize * width;
        let side = |dim: Dim, pitch: usize| TurnedDimLaunch {
            size: dim.size as u32,
            pitch: (pitch / width) as u32,
            squares: divisor(dim.size.div_ceil(edge)),
        };
        let squares: usize =
            [read, written].iter().map(|dim| dim.size.div_ceil(edge)).product::<usize>()
                * outer.iter().map(|dim| dim.size).product::<usize>();
        let most = DeviceProfile::of(client).multiprocessors * CUBES_A_MULTIPROCESSOR;
        let cubes = squares.min(most.max(1));
        let walked = |dim: &Dim| {
            let [source, target] = [dim.source, dim.target].map(|stride| (stride / width) as u32);
            WalkedDimLaunch::new(divisor(dim.size), source, target)
        };
        // SAFETY: `Region::check` has seen that all places are within both memories and that indices fit 32 bits; pairs
        // divide starts, distances and both dimensions. The kernel stops at the ends of both.
        ahead::launch(client, |client| unsafe {
            region_turned_kernel::launch_unchecked(
                client,
                CubeCount::Static(cubes as u32, 1, 1),
                CubeDim::new_2d(EDGE, SHARES),
                width,
                source.arg_read_in_part(),
                target.arg_read_in_part(),
                side(read, read.target),
                side(written, written.source),
                outer.iter().map(walked).collect(),
                squares as u32,
                (source_start / width) as u32,
                (start / width) as u32,
                source.dtype,
            )
        });
    }
}

/// One of the two dimensions of squares.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct TurnedDim {
    /// Elements.
    size: u32,
    /// Vectors from one to the next, on the side where they are no neighbors.
    pitch: u32,
    squares: Divisor,
}

/// A square a cube at a time; `outer` dimensions are the last one first.
#[cube(launch_unchecked)]
pub(crate) fn region_turned_kernel<F: Float, N: Size>(
    source: &[Vector<F, N>],
    target: &mut [Vector<F, N>],
    read: TurnedDim,
    written: TurnedDim,
    outer: Sequence<WalkedDim>,
    squares: u32,
    source_start: u32,
    start: u32,
    #[define(F)] _dtype: ElemType,
) {
    let width = N::value().comptime() as u32;
    let edge = comptime!(EDGE * width);
    // Units that read along the other edge meet other banks.
    let pitch = comptime!((EDGE + 1) * width);
    let mut square = Shared::<[F]>::new_slice(comptime!((EDGE * width * pitch) as usize));
    let mut index = CUBE_POS as u32;
    while index < squares {
        let (rest, read_place) = divide(index, &read.squares);
        let (mut rest, written_place) = divide(rest, &written.squares);
        let mut from = source_start;
        let mut to = start;
        #[unroll]
        for at in 0..outer.len() {
            let dim = &outer[at];
            let (next, place) = divide(rest, &dim.size);
            rest = next;
            from += place * dim.source;
            to += place * dim.target;
        }
        let (first_read, first_written) = (read_place * edge, written_place * edge);
        #[unroll]
        for round in 0..comptime!(EDGE * width / SHARES) {
            let row = UNIT_POS_Y + comptime!(round * SHARES);
            let column = first_read + UNIT_POS_X * width;
            if first_written + row < written.size && column < read.size {
                let at = from + (first_written + row) * written.pitch + column / width;
                let value = source[at as usize];
                #[unroll]
                for i in 0..N::value().comptime() {
                    let place = row * pitch + UNIT_POS_X * width + comptime!(i as u32);
                    square[place as usize] = value.extract(i);
                }
            }
        }
        sync_cube();
        #[unroll]
        for round in 0..comptime!(EDGE * width / SHARES) {
            let row = UNIT_POS_Y + comptime!(round * SHARES);
            let column = first_written + UNIT_POS_X * width;
            if first_read + row < read.size && column < written.size {
                let mut value = Vector::<F, N>::new(F::new(0.0));
                #[unroll]
                for i in 0..N::value().comptime() {
                    let place = (UNIT_POS_X * width + comptime!(i as u32)) * pitch + row;
                    value.insert(i, square[place as usize]);
                }
                let at = to + (first_read + row) * read.pitch + column / width;
                target[at as usize] = value;
            }
        }
        // Everyone has read the square.
        sync_cube();
        index += CUBE_COUNT as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_are_turned_and_rows_are_not() {
        let turned = |shape: &[usize], source_strides: &[usize], target_strides: &[usize]| {
            let region = Region {
                shape: shape.to_vec(),
                source_strides: source_strides.to_vec(),
                target_strides: target_strides.to_vec(),
                source_start: 0,
                start: 0,
                adds: false,
            };
            Turned::of(&region, &region.dims(), true)
        };
        let matrix = turned(&[64, 48], &[1, 64], &[48, 1]).expect("a transposed matrix");
        assert_eq!((matrix.width, matrix.read.size, matrix.written.size), (2, 64, 48));
        let of_images = turned(&[4, 8, 8, 32], &[2048, 8, 1, 64], &[2048, 256, 32, 1]);
        let of_images = of_images.expect("images with their channels behind");
        assert_eq!((of_images.read.size, of_images.written.size), (64, 32));
        assert_eq!(of_images.outer.len(), 1);
        assert_eq!(turned(&[64, 47], &[1, 64], &[47, 1]).map(|it| it.width), Some(1));
        assert_eq!(turned(&[4, 64, 48], &[48, 192, 1], &[3072, 48, 1]), None, "rows stay whole");
        assert_eq!(turned(&[64, 3], &[1, 64], &[3, 1]), None, "little of a square");
    }
}

//! The largest magnitude of a tensor, found by the kernel that makes the tensor. The scale of a cast to 8 bits follows
//! from it, and needs no pass over memory of its own then.

use crate::{DeviceProfile, buffer::Buffer};
use cubecl::{
    client::Client,
    ir::{ElemType, UIntKind},
    prelude::*,
};

const WORD: ElemType = ElemType::UInt(UIntKind::U32);

/// What is left of a float's bits without its sign: larger for larger magnitudes, above every
/// number's for infinity, and above that for NaN.
const MAGNITUDE: u32 = 0x7fff_ffff;

/// The largest magnitude of a tensor, in parts: that of each cube that wrote some of it.
#[derive(Clone, Debug)]
pub struct Magnitudes {
    /// Bits of f32 without sign.
    pub(crate) partials: Buffer,
}

impl Magnitudes {
    /// Cubes for each multiprocessor: with eight of 256 units it is full. More parts would take whoever reads them
    /// longer.
    const CUBES: usize = 8;

    /// Bits of f32 without sign, of which the largest are the tensor's.
    pub fn parts(&self) -> &Buffer {
        &self.partials
    }

    /// The most cubes of a kernel that leaves parts. Each of them works through many rows or vectors.
    pub(crate) fn most_cubes(client: &Client) -> usize {
        DeviceProfile::of(client).multiprocessors * Self::CUBES
    }

    /// Room for the parts of so many cubes.
    pub(crate) fn of_cubes(client: &Client, cubes: usize) -> Self {
        Self { partials: Buffer::empty(client, cubes, WORD) }
    }

    /// The parts as a kernel's argument, which writes none where there are none.
    pub(crate) fn argument(client: &Client, magnitudes: Option<&Self>) -> Buffer {
        magnitudes.map_or_else(|| Buffer::empty(client, 1, WORD), |it| it.partials.clone())
    }
}

/// The larger of `largest` and the magnitudes of `values`, in bits.
#[cube]
pub(crate) fn larger<N: Size>(largest: u32, values: Vector<f32, N>) -> u32 {
    let mut all = largest;
    #[unroll]
    for lane in 0..N::value().comptime() {
        all = max(all, u32::reinterpret(values.extract(lane)) & MAGNITUDE);
    }
    all
}

/// Writes the part of a cube along x: the largest of the magnitudes that its `units` have seen, in bits of f32, before
/// numbers were rounded to `F`. Rounded, the larger of two is never the smaller one. All units have to call it.
#[cube]
pub(crate) fn write_largest<F: Float>(mine: u32, partials: &mut [u32], #[comptime] units: u32) {
    let largest = largest_of_cube(mine, units);
    if UNIT_POS == 0 {
        let stored = F::cast_from(f32::reinterpret(largest));
        partials[CUBE_POS_X as usize] = u32::reinterpret(f32::cast_from(stored)) & MAGNITUDE;
    }
}

/// The largest of the numbers that the `units` of a cube have, for all of them. All have to call it.
#[cube]
pub(crate) fn largest_of_cube(mine: u32, #[comptime] units: u32) -> u32 {
    let mut all = Shared::<[u32]>::new_slice(comptime!(units as usize));
    all[UNIT_POS as usize] = mine;
    sync_cube();
    let halvings = comptime!(units.next_power_of_two().ilog2());
    #[unroll]
    for step in 0..halvings {
        let distance = comptime!(1u32 << (halvings - 1 - step));
        // The first half may be the longer one.
        if UNIT_POS < distance && UNIT_POS + distance < units {
            let other = all[(UNIT_POS + distance) as usize];
            all[UNIT_POS as usize] = max(all[UNIT_POS as usize], other);
        }
        sync_cube();
    }
    all[0]
}

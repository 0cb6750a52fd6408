use crate::divisor::{Divisor, divide};
use cubecl::prelude::*;

/// Sizes by which a vector of the output is found, and how frames and taps walk x.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Walk {
    /// Vectors of the output.
    pub(crate) vectors: u32,
    /// Vectors of a tap's channels.
    pub(crate) channels: Divisor,
    pub(crate) taps: Divisor,
    pub(crate) groups: Divisor,
    pub(crate) pixels: Divisor,
    pub(crate) out_frames: Divisor,
    /// Frames of a volume of x.
    pub(crate) frames: u32,
    pub(crate) scale: i32,
    pub(crate) shift: i32,
    pub(crate) step: i32,
    pub(crate) stride: Divisor,
}

/// A vector of the output a unit.
#[cube(launch_unchecked)]
pub(crate) fn stack_frames_kernel<E: Float, N: Size>(
    x: &[Vector<E, N>],
    out: &mut [Vector<E, N>],
    walk: Walk,
    #[define(E)] _dtype: ElemType,
) {
    let unit = u32::cast_from(ABSOLUTE_POS);
    if unit >= walk.vectors {
        terminate!();
    }
    let (rest, channel) = divide(unit, &walk.channels);
    let (rest, tap) = divide(rest, &walk.taps);
    let (rest, group) = divide(rest, &walk.groups);
    let (rest, pixel) = divide(rest, &walk.pixels);
    let (volume, out_frame) = divide(rest, &walk.out_frames);
    let place =
        i32::cast_from(out_frame) * walk.scale + walk.shift + i32::cast_from(tap) * walk.step;
    let (frame, between) = divide(u32::cast_from(max(place, 0i32)), &walk.stride);
    let mut vector = Vector::<E, N>::new(E::new(0.0));
    if place >= 0 && between == 0 && frame < walk.frames {
        let image = (volume * walk.frames + frame) * walk.pixels.divisor + pixel;
        let at = (image * walk.groups.divisor + group) * walk.channels.divisor + channel;
        vector = x[at as usize];
    }
    out[unit as usize] = vector;
}

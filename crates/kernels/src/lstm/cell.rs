//! A step's work on each feature of a state.

use crate::functions::{Functions, hyperbolic_tangent, sigmoid};
use cubecl::prelude::*;

/// Sizes, in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct CellExtent {
    /// A state of all sequences.
    pub(crate) state: u32,
    /// A state of one.
    pub(crate) hidden: u32,
    /// Time steps.
    pub(crate) steps: u32,
}

/// Where a step's tensors lie.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct CellPlace {
    /// How many steps were walked before.
    pub(crate) walked: u32,
    /// The step.
    pub(crate) step: u32,
    /// The one that is walked next.
    pub(crate) next: u32,
}

/// What a gate's function is applied to.
#[cube]
fn sum<F: Float, N: Size>(
    projected: &[Vector<F, N>],
    of_input: u32,
    product: &[Vector<f32, N>],
    of_state: u32,
) -> Vector<f32, N> {
    Vector::<f32, N>::cast_from(projected[of_input as usize]) + product[of_state as usize]
}

/// The gates of a step, its c and h. A unit has a vector of a state. The last step of a walk writes c behind all h.
#[cube(launch_unchecked)]
pub(crate) fn lstm_cell_kernel<F: Float, N: Size>(
    projected: &[Vector<F, N>],
    product: &[Vector<f32, N>],
    gates: &mut [Vector<F, N>],
    cells: &mut [Vector<f32, N>],
    hidden: &mut [Vector<F, N>],
    h: &mut [Vector<F, N>],
    out: &mut [Vector<F, N>],
    extent: CellExtent,
    place: CellPlace,
    #[comptime] is_last: bool,
    #[comptime] functions: Functions,
    #[define(F)] _dtype: ElemType,
) {
    let unit = ABSOLUTE_POS as u32;
    if unit >= extent.state {
        terminate!();
    }
    let (state, width) = (extent.state, extent.hidden);
    let first = unit / width * 4u32 * width + unit % width;
    let base = place.step * 4u32 * state + first;
    let of_taken = sum::<F, N>(projected, base, product, first);
    let of_kept = sum::<F, N>(projected, base + width, product, first + width);
    let of_candidate = sum::<F, N>(projected, base + 2u32 * width, product, first + 2u32 * width);
    let of_shown = sum::<F, N>(projected, base + 3u32 * width, product, first + 3u32 * width);
    let taken = sigmoid::<N>(of_taken, functions);
    let kept = sigmoid::<N>(of_kept, functions);
    let candidate = hyperbolic_tangent::<N>(of_candidate, functions);
    let shown = sigmoid::<N>(of_shown, functions);

    let before = place.walked * state + unit;
    let c = kept * cells[before as usize] + taken * candidate;
    let made = Vector::<F, N>::cast_from(shown * hyperbolic_tangent::<N>(c, functions));

    gates[base as usize] = Vector::cast_from(taken);
    gates[(base + width) as usize] = Vector::cast_from(kept);
    gates[(base + 2u32 * width) as usize] = Vector::cast_from(candidate);
    gates[(base + 3u32 * width) as usize] = Vector::cast_from(shown);
    cells[(before + state) as usize] = c;
    out[(place.step * state + unit) as usize] = made;
    if comptime!(is_last) {
        out[(extent.steps * state + unit) as usize] = Vector::cast_from(c);
    } else {
        hidden[(place.next * state + unit) as usize] = made;
        h[unit as usize] = made;
    }
}

/// The gradients of what a step's functions are applied to, for all steps and once more by themselves, and that of the
/// former c, in the place of this one's. `dproduct` is what the step behind gives to the gradient of h; the last step of
/// the walk has none, and begins with the gradient of the last c.
#[cube(launch_unchecked)]
pub(crate) fn lstm_cell_backward_kernel<F: Float, N: Size>(
    gates: &[Vector<F, N>],
    cells: &[Vector<f32, N>],
    dout: &[Vector<F, N>],
    dproduct: &[Vector<f32, N>],
    dc: &mut [Vector<f32, N>],
    dprojected: &mut [Vector<F, N>],
    da: &mut [Vector<F, N>],
    extent: CellExtent,
    place: CellPlace,
    #[comptime] is_last: bool,
    #[comptime] functions: Functions,
    #[define(F)] _dtype: ElemType,
) {
    let unit = ABSOLUTE_POS as u32;
    if unit >= extent.state {
        terminate!();
    }
    let (state, width) = (extent.state, extent.hidden);
    let first = unit / width * 4u32 * width + unit % width;
    let base = place.step * 4u32 * state + first;
    let taken = Vector::<f32, N>::cast_from(gates[base as usize]);
    let kept = Vector::<f32, N>::cast_from(gates[(base + width) as usize]);
    let candidate = Vector::<f32, N>::cast_from(gates[(base + 2u32 * width) as usize]);
    let shown = Vector::<f32, N>::cast_from(gates[(base + 3u32 * width) as usize]);
    let before = cells[(place.walked * state + unit) as usize];
    let c =
        hyperbolic_tangent::<N>(cells[((place.walked + 1u32) * state + unit) as usize], functions);

    let one = Vector::<f32, N>::new(1.0f32);
    let mut dh = Vector::<f32, N>::cast_from(dout[(place.step * state + unit) as usize]);
    let mut of_c = Vector::<f32, N>::cast_from(dout[(extent.steps * state + unit) as usize]);
    if comptime!(!is_last) {
        dh += dproduct[unit as usize];
        of_c = dc[unit as usize];
    }
    of_c += dh * shown * (one - c * c);

    let of_taken = Vector::<F, N>::cast_from(of_c * candidate * taken * (one - taken));
    let of_kept = Vector::<F, N>::cast_from(of_c * before * kept * (one - kept));
    let of_candidate = Vector::<F, N>::cast_from(of_c * taken * (one - candidate * candidate));
    let of_shown = Vector::<F, N>::cast_from(dh * c * shown * (one - shown));
    dprojected[base as usize] = of_taken;
    dprojected[(base + width) as usize] = of_kept;
    dprojected[(base + 2u32 * width) as usize] = of_candidate;
    dprojected[(base + 3u32 * width) as usize] = of_shown;
    da[first as usize] = of_taken;
    da[(first + width) as usize] = of_kept;
    da[(first + 2u32 * width) as usize] = of_candidate;
    da[(first + 3u32 * width) as usize] = of_shown;
    dc[unit as usize] = of_c * kept;
}

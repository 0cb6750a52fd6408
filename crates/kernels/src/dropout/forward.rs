use super::mask::{DropoutForm, ElementMask};
use cubecl::prelude::*;

/// y, a vector a unit.
#[cube(launch_unchecked)]
pub(crate) fn dropout_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    residual: &[Vector<F, N>],
    y: &mut [Vector<F, N>],
    mask: ElementMask,
    #[comptime] adds: bool,
    #[comptime] form: DropoutForm,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS >= y.len() {
        terminate!();
    }
    let size = N::value().comptime();
    let first = u32::cast_from(ABSOLUTE_POS) * comptime!(size as u32);
    let mut kept = mask.dropped::<N>(Vector::cast_from(x[ABSOLUTE_POS]), first, form);
    if comptime!(adds) {
        kept += Vector::<f32, N>::cast_from(residual[ABSOLUTE_POS]);
    }
    y[ABSOLUTE_POS] = Vector::cast_from(kept);
}

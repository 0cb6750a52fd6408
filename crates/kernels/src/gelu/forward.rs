use super::normal::normal;
use crate::{
    divisor::{Divisor, divide},
    dropout::{DropoutForm, ElementMask},
    functions::Functions,
};
use cubecl::prelude::*;

/// How GELU is compiled, and what around it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GeluForm {
    /// A bias is added in front.
    pub(crate) bias: bool,
    /// What is left out behind.
    pub(crate) dropout: DropoutForm,
    /// A mask in memory says what is left out.
    pub(crate) masked: bool,
    pub(crate) functions: Functions,
}

/// What x is, and what is left of y; what is not compiled in has x in its place.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct GeluInputs<F: Float, N: Size> {
    pub(crate) x: Box<[Vector<F, N>]>,
    /// One element a column.
    pub(crate) bias: Box<[Vector<F, N>]>,
    /// Vectors of a row.
    pub(crate) columns: Divisor,
    pub(crate) mask: ElementMask,
    /// A factor for each element, beside one for all.
    pub(crate) kept: Box<[Vector<F, N>]>,
    pub(crate) scale: f32,
}

#[cube]
impl<F: Float, N: Size> GeluInputs<F, N> {
    /// x with the bias, of vector `at` of all.
    pub(super) fn value(&self, at: usize, #[comptime] form: GeluForm) -> Vector<f32, N> {
        let mut value = Vector::<f32, N>::cast_from(self.x[at]);
        if comptime!(form.bias) {
            let (_, column) = divide(u32::cast_from(at), &self.columns);
            value += Vector::<f32, N>::cast_from(self.bias[column as usize]);
        }
        value
    }

    /// What dropout leaves of vector `at` of all.
    pub(super) fn dropped(
        &self,
        value: Vector<f32, N>,
        at: usize,
        #[comptime] form: GeluForm,
    ) -> Vector<f32, N> {
        let size = N::value().comptime();
        let first = u32::cast_from(at) * comptime!(size as u32);
        let mut left = self.mask.dropped::<N>(value, first, form.dropout);
        if comptime!(form.masked) {
            left *= Vector::<f32, N>::cast_from(self.kept[at]) * Vector::new(self.scale);
        }
        left
    }
}

/// y = x Phi(x), a vector a unit.
#[cube(launch_unchecked)]
pub(crate) fn gelu_forward_kernel<F: Float, N: Size>(
    inputs: &GeluInputs<F, N>,
    y: &mut [Vector<F, N>],
    #[comptime] form: GeluForm,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS >= y.len() {
        terminate!();
    }
    let value = inputs.value(ABSOLUTE_POS, form);
    let normal = normal::<N>(value, comptime!(form.functions));
    let result = inputs.dropped(value * normal.cdf, ABSOLUTE_POS, form);
    y[ABSOLUTE_POS] = Vector::cast_from(result);
}

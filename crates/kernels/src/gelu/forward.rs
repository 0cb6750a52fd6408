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
        let bias = self.bias_at(at, form);
        self.biased(at, bias, form)
    }

    /// The bias of vector `at` of all, if there is one.
    fn bias_at(&self, at: usize, #[comptime] form: GeluForm) -> Vector<f32, N> {
        let mut bias = Vector::<f32, N>::new(0.0f32);
        if comptime!(form.bias) {
            let (_, column) = divide(u32::cast_from(at), &self.columns);
            bias = Vector::cast_from(self.bias[column as usize]);
        }
        bias
    }

    fn biased(
        &self,
        at: usize,
        bias: Vector<f32, N>,
        #[comptime] form: GeluForm,
    ) -> Vector<f32, N> {
        let mut value = Vector::<f32, N>::cast_from(self.x[at]);
        if comptime!(form.bias) {
            value += bias;
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

/// y = x Phi(x), so many vectors of one column a unit, which divide those of y.
#[cube(launch_unchecked)]
pub(crate) fn gelu_forward_kernel<F: Float, N: Size>(
    inputs: &GeluInputs<F, N>,
    y: &mut [Vector<F, N>],
    #[comptime] vectors: usize,
    #[comptime] form: GeluForm,
    #[define(F)] _dtype: ElemType,
) {
    let step = y.len() / vectors;
    if ABSOLUTE_POS >= step {
        terminate!();
    }
    let bias = inputs.bias_at(ABSOLUTE_POS, form);
    let mut values = Array::<Vector<f32, N>>::new(vectors);
    #[unroll]
    for v in 0..vectors {
        values[v] = inputs.biased(ABSOLUTE_POS + v * step, bias, form);
    }
    #[unroll]
    for v in 0..vectors {
        let at = ABSOLUTE_POS + v * step;
        let normal = normal::<N>(values[v], comptime!(form.functions));
        y[at] = Vector::cast_from(inputs.dropped(values[v] * normal.cdf, at, form));
    }
}

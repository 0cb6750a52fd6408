//! Copies of parameters in other types, which optimizers write with the parameters.
//!
//! A recorded pass computes with a copy of the model, in memory that stays where it is and in the types that are
//! computed in. After each step the copy has to be made again, for which all parameters are read once more. A step has
//! them at hand already. So copies that are made by [`Copies::refresh`] are known to the steps of
//! [`adamw`](crate::steps::adamw) and [`sgd`](crate::steps::sgd), which write them as well, and nothing is left to
//! refresh.
//!
//! That a copy is as its parameter is holds only as long as nobody writes to either. Burn's operations write in place
//! where nobody else holds the memory: so both are held meanwhile. What writes all the same says so: steps,
//! [`overwrite`](super::overwrite), and whoever asks for an address. A recording can be replayed at any time: what is
//! written while one is made is no copy from then on.

#![cfg_attr(
    not(feature = "gpu"),
    allow(unused_variables, reason = "without a backend there is nothing to hand arguments to")
)]

#[cfg(feature = "gpu")]
mod known;

#[cfg(feature = "gpu")]
pub(crate) use known::{Known, has, is_current, keep, record, register, take, written};

#[cfg(feature = "gpu")]
use super::overwrite::{Overwritten, overwrite_together};
use crate::tensors::Together;
use burn::{
    backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor},
    tensor::Tensor,
};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;
use std::sync::atomic::{AtomicU32, Ordering};

/// What the operation is named in the stream.
#[cfg(feature = "gpu")]
pub(crate) const ID: &str = "blackburn::refresh_copy";

/// The operation under [`Copies::refresh`]. It is not differentiable.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait CopyPrimitives: Backend {
    /// `copy`, with the elements of `parameter`, one of the copies with that number.
    #[fusion(dtype = copy, shape = copy, id = "blackburn::refresh_copy")]
    fn refresh_copy(
        copy: FloatTensor<Self>,
        parameter: FloatTensor<Self>,
        together: FloatTensor<Self>,
        copies: u32,
    ) -> FloatTensor<Self>;
}

#[cfg(feature = "gpu")]
impl CopyPrimitives for CubeBackend {
    fn refresh_copy(
        copy: FloatTensor<Self>,
        parameter: FloatTensor<Self>,
        _together: FloatTensor<Self>,
        copies: u32,
    ) -> FloatTensor<Self> {
        let all = [Overwritten { target: copy, source: parameter, copies: Some(copies) }];
        overwrite_together(&all);
        let [Overwritten { target: copy, .. }] = all;
        copy
    }
}

/// Copies of parameters, which steps keep as the parameters are until this is dropped.
#[derive(Debug)]
pub struct Copies {
    number: u32,
    together: Together,
}

impl Copies {
    /// None yet.
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        #[cfg(feature = "gpu")]
        known::begin(number);
        Self { number, together: Together::default() }
    }

    /// What operations on these copies share, by which they are taken together.
    pub fn together(&self) -> &Together {
        &self.together
    }

    /// `copy` with the elements of `parameter`, rounded to its type, in the same memory, as
    /// [`overwrite_float`](super::overwrite::overwrite_float) has it. Nothing is computed where a step has written
    /// them. For tensors on GPUs, outside automatic differentiation.
    ///
    /// # Panics
    ///
    /// When shapes or devices differ, or rows of `copy` do not follow each other in memory.
    pub fn refresh<const D: usize>(&self, copy: Tensor<D>, parameter: Tensor<D>) -> Tensor<D> {
        super::overwrite::check(copy.dims(), parameter.dims());
        let together = self.together.on(&parameter.device()).into_dispatch();
        Tensor::from_dispatch(<Dispatch as CopyPrimitives>::refresh_copy(
            copy.into_dispatch(),
            parameter.into_dispatch(),
            together,
            self.number,
        ))
    }
}

impl Default for Copies {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Copies {
    /// What waits in a stream finds that they are gone.
    fn drop(&mut self) {
        #[cfg(feature = "gpu")]
        known::end(self.number);
    }
}

//! Matrix products: their types, how operands lie in registers and in shared memory, and their sums.
//!
//! Products of two elements are exact. They are added in f32, one after another along k. The hardware adds
//! several at once and cuts off differently: results agree bit for bit where all sums are exact.

mod descriptor;
mod element;
mod mma;
mod scale;
mod tcgen05;
mod tcgen05_scaled;

pub(crate) use descriptor::{Descriptor, swizzle};
pub(crate) use element::Element;
pub(crate) use mma::{MmaShape, WgmmaShape, accumulate, fragment_place};
pub(crate) use scale::{ScaleSelector, accumulate_scaled, ue8m0};
pub(crate) use tcgen05::{TensorKind, TensorShape};
pub(crate) use tcgen05_scaled::ScaledTensorShape;

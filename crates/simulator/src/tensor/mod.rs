//! Matrix products: their types, how operands lie in registers and in shared memory, and their sums.

mod descriptor;
mod element;
mod mma;
mod scale;
mod sums;
mod tcgen05;
mod tcgen05_scaled;

pub(crate) use descriptor::{Descriptor, swizzle};
pub(crate) use element::Element;
pub(crate) use mma::{MmaShape, WgmmaShape, fragment_place};
pub(crate) use scale::{BlockScaling, ScaleSelector, ScaleType, ScaledKind, accumulate_scaled};
pub(crate) use sums::{Operands, Unit, accumulate};
pub(crate) use tcgen05::{TensorKind, TensorShape};
pub(crate) use tcgen05_scaled::ScaledTensorShape;

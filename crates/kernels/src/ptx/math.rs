//! Functions that the C++ compiler rounds correctly, by code that branches, and the hardware
//! approximates in two or three instructions (PTX ISA, "sqrt" and "div"); and maxima and sums by rules of their own.

use super::load;
use cubecl::prelude::*;

/// The square root, off by 2^-23 of it at most; 0 and infinity stay.
#[cube]
pub(crate) fn approximate_sqrt(x: f32) -> f32 {
    let root: f32;
    gpu_asm!("sqrt.approx.f32 {r}, {x};", r = out(_) root, x = in(_) load::<f32>(x), options(nomem));
    root
}

/// `a / b`, off by two units in the last place at most for an absolute value of `b` from 2^-126 to
/// 2^126, and 0 for a finite `a` beyond.
#[cube]
pub(crate) fn approximate_quotient(a: f32, b: f32) -> f32 {
    let quotient: f32;
    gpu_asm!("div.approx.f32 {q}, {a}, {b};",
        q = out(_) quotient, a = in(_) load::<f32>(a), b = in(_) load::<f32>(b), options(nomem));
    quotient
}

/// `1 / x`, off by one unit in the last place at most, of normal numbers; 0 of infinity.
#[cube]
pub(crate) fn approximate_reciprocal(x: f32) -> f32 {
    let reciprocal: f32;
    gpu_asm!("rcp.approx.ftz.f32 {r}, {x};",
        r = out(_) reciprocal, x = in(_) load::<f32>(x), options(nomem));
    reciprocal
}

/// The larger number, or NaN if one of them is.
#[cube]
pub(crate) fn max_or_nan(a: f32, b: f32) -> f32 {
    let largest: f32;
    gpu_asm!("max.NaN.f32 {m}, {a}, {b};",
        m = out(_) largest, a = in(_) load::<f32>(a), b = in(_) load::<f32>(b), options(nomem));
    largest
}

/// `a + b`, rounded to the number below.
#[cube]
pub(crate) fn sum_rounded_down(a: f32, b: f32) -> f32 {
    let sum: f32;
    gpu_asm!("add.rm.f32 {s}, {a}, {b};",
        s = out(_) sum, a = in(_) load::<f32>(a), b = in(_) load::<f32>(b), options(nomem));
    sum
}

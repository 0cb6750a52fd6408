//! Functions that the C++ compiler rounds correctly, by code that branches, and the hardware
//! approximates in two or three instructions (PTX ISA, "sqrt" and "div").

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

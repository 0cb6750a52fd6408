//! Float instructions of a thread (PTX ISA, "Floating Point Instructions").
//!
//! Everything that PTX calls exact is exact, rounding included. Approximate instructions are computed in f64
//! and rounded once, which is within the error that PTX states and exact wherever the result is a float.

use super::{
    float::{
        BF16, F16, F32, F64, Format, Rounding, bf16_of, exact_sum, f16_of, f32_bits, f32_of,
        f64_bits, f64_of, flushed,
    },
    half_precision::{self, Brain, Ieee},
    integer::{Alu, Comparison},
};
use crate::ptx::Ty;
use std::cmp::Ordering::{Equal, Greater, Less};

const EVEN: u8 = 0;
const ZERO: u8 = 1;
const DOWN: u8 = 2;
const UP: u8 = 3;

const fn rounding(code: u8) -> Rounding {
    match code {
        ZERO => Rounding::Zero,
        DOWN => Rounding::Down,
        UP => Rounding::Up,
        _ => Rounding::Even,
    }
}

/// An f32 operand, flushed to zero where the instruction says so.
fn operand<const FTZ: bool>(bits: u64) -> f32 {
    if FTZ { flushed(f32_of(bits)) } else { f32_of(bits) }
}

fn result<const FTZ: bool>(value: f32) -> u64 {
    f32_bits(if FTZ { flushed(value) } else { value })
}

/// A sum that is known but for its last rounding.
fn rounded32<const FTZ: bool, const R: u8>(value: f64, residue: f64) -> u64 {
    result::<FTZ>(f32_of(F32.round(value, residue, rounding(R), false)))
}

fn add32<const FTZ: bool, const R: u8>(a: u64, b: u64, _: u64) -> u64 {
    let (a, b) = (operand::<FTZ>(a), operand::<FTZ>(b));
    if R == EVEN {
        return result::<FTZ>(a + b);
    }
    let (sum, residue) = exact_sum(f64::from(a), f64::from(b));
    rounded32::<FTZ, R>(sum, residue)
}

fn sub32<const FTZ: bool, const R: u8>(a: u64, b: u64, c: u64) -> u64 {
    add32::<FTZ, R>(a, b ^ 0x8000_0000, c)
}

fn mul32<const FTZ: bool, const R: u8>(a: u64, b: u64, _: u64) -> u64 {
    let (a, b) = (operand::<FTZ>(a), operand::<FTZ>(b));
    if R == EVEN {
        return result::<FTZ>(a * b);
    }
    // 48 bits: exact in f64.
    rounded32::<FTZ, R>(f64::from(a) * f64::from(b), 0.0)
}

fn fma32<const FTZ: bool, const R: u8>(a: u64, b: u64, c: u64) -> u64 {
    let (a, b, c) = (operand::<FTZ>(a), operand::<FTZ>(b), operand::<FTZ>(c));
    if R == EVEN {
        return result::<FTZ>(a.mul_add(b, c));
    }
    let (sum, residue) = exact_sum(f64::from(a) * f64::from(b), f64::from(c));
    rounded32::<FTZ, R>(sum, residue)
}

fn div32<const FTZ: bool, const R: u8>(a: u64, b: u64, _: u64) -> u64 {
    let (a, b) = (operand::<FTZ>(a), operand::<FTZ>(b));
    if R == EVEN {
        return result::<FTZ>(a / b);
    }
    let quotient = f64::from(a) / f64::from(b);
    // What the quotient lacks, as far as its sign goes.
    let rest = (-quotient).mul_add(f64::from(b), f64::from(a));
    let residue = if rest == 0.0 { 0.0 } else { (rest / f64::from(b)) * 0.5 };
    rounded32::<FTZ, R>(quotient, residue)
}

fn rcp32<const FTZ: bool, const R: u8>(a: u64, _: u64, c: u64) -> u64 {
    div32::<FTZ, R>(u64::from(1.0_f32.to_bits()), a, c)
}

fn sqrt32<const FTZ: bool, const R: u8>(a: u64, _: u64, _: u64) -> u64 {
    let a = operand::<FTZ>(a);
    if R == EVEN {
        return result::<FTZ>(a.sqrt());
    }
    let root = f64::from(a).sqrt();
    let rest = (-root).mul_add(root, f64::from(a));
    let residue = if rest == 0.0 { 0.0 } else { rest / root / 4.0 };
    rounded32::<FTZ, R>(root, residue)
}

fn approximate<const FTZ: bool>(value: f64) -> u64 {
    result::<FTZ>(value as f32)
}

/// `div.full` and `div.approx`; the latter gives 0 for a divisor above 2^126.
fn quotient<const FTZ: bool>(a: u64, b: u64, _: u64) -> u64 {
    approximate::<FTZ>(f64::from(operand::<FTZ>(a)) / f64::from(operand::<FTZ>(b)))
}

fn quotient_approx<const FTZ: bool>(a: u64, b: u64, c: u64) -> u64 {
    let (over, under) = (operand::<FTZ>(a), operand::<FTZ>(b));
    if under.is_finite() && under.abs() > 2.0_f32.powi(126) {
        let sign = over.signum() * under.signum();
        return if over.is_finite() {
            f32_bits(0.0_f32.copysign(sign))
        } else {
            f32_bits(f32::NAN)
        };
    }
    quotient::<FTZ>(a, b, c)
}

fn reciprocal<const FTZ: bool>(a: u64, _: u64, _: u64) -> u64 {
    approximate::<FTZ>(1.0 / f64::from(operand::<FTZ>(a)))
}

fn root<const FTZ: bool>(a: u64, _: u64, _: u64) -> u64 {
    approximate::<FTZ>(f64::from(operand::<FTZ>(a)).sqrt())
}

fn inverse_root<const FTZ: bool>(a: u64, _: u64, _: u64) -> u64 {
    approximate::<FTZ>(1.0 / f64::from(operand::<FTZ>(a)).sqrt())
}

fn exp2<const FTZ: bool>(a: u64, _: u64, _: u64) -> u64 {
    approximate::<FTZ>(f64::from(operand::<FTZ>(a)).exp2())
}

fn log2<const FTZ: bool>(a: u64, _: u64, _: u64) -> u64 {
    approximate::<FTZ>(f64::from(operand::<FTZ>(a)).log2())
}

fn sine<const FTZ: bool>(a: u64, _: u64, _: u64) -> u64 {
    approximate::<FTZ>(f64::from(operand::<FTZ>(a)).sin())
}

fn cosine<const FTZ: bool>(a: u64, _: u64, _: u64) -> u64 {
    approximate::<FTZ>(f64::from(operand::<FTZ>(a)).cos())
}

fn tanh(a: u64, _: u64, _: u64) -> u64 {
    approximate::<false>(f64::from(f32_of(a)).tanh())
}

fn neg32<const FTZ: bool>(a: u64, _: u64, _: u64) -> u64 {
    u64::from((-operand::<FTZ>(a)).to_bits())
}

fn abs32<const FTZ: bool>(a: u64, _: u64, _: u64) -> u64 {
    u64::from(operand::<FTZ>(a).abs().to_bits())
}

/// The smaller one; a number rather than NaN, and -0 rather than 0.
fn smaller(a: f64, b: f64) -> f64 {
    match (a.is_nan(), b.is_nan()) {
        (true, _) => b,
        (_, true) => a,
        _ if a == b => {
            if a.is_sign_negative() {
                a
            } else {
                b
            }
        }
        _ => a.min(b),
    }
}

pub(super) fn pick(a: f64, b: f64, largest: bool, nan: bool) -> f64 {
    if nan && (a.is_nan() || b.is_nan()) {
        f64::NAN
    } else if largest {
        -smaller(-a, -b)
    } else {
        smaller(a, b)
    }
}

fn pick32<const FTZ: bool, const MAX: bool, const NAN: bool>(a: u64, b: u64, _: u64) -> u64 {
    let (a, b) = (f64::from(operand::<FTZ>(a)), f64::from(operand::<FTZ>(b)));
    f32_bits(pick(a, b, MAX, NAN) as f32)
}

fn pick64<const MAX: bool>(a: u64, b: u64, _: u64) -> u64 {
    f64_bits(pick(f64_of(a), f64_of(b), MAX, false))
}

fn copysign32(a: u64, b: u64, _: u64) -> u64 {
    a & 0x8000_0000 | b & 0x7fff_ffff
}

fn add64(a: u64, b: u64, _: u64) -> u64 {
    f64_bits(f64_of(a) + f64_of(b))
}

fn sub64(a: u64, b: u64, _: u64) -> u64 {
    f64_bits(f64_of(a) - f64_of(b))
}

fn mul64(a: u64, b: u64, _: u64) -> u64 {
    f64_bits(f64_of(a) * f64_of(b))
}

fn fma64(a: u64, b: u64, c: u64) -> u64 {
    f64_bits(f64_of(a).mul_add(f64_of(b), f64_of(c)))
}

fn div64(a: u64, b: u64, _: u64) -> u64 {
    f64_bits(f64_of(a) / f64_of(b))
}

fn sqrt64(a: u64, _: u64, _: u64) -> u64 {
    f64_bits(f64_of(a).sqrt())
}

fn neg64(a: u64, _: u64, _: u64) -> u64 {
    a ^ 1 << 63
}

fn abs64(a: u64, _: u64, _: u64) -> u64 {
    a & !(1 << 63)
}

/// The function for the rounding, if there is one, and for `.ftz`.
macro_rules! directed {
    ($function:ident, $ftz:expr, $rounding:expr) => {
        match ($ftz, $rounding) {
            (false, "rn") => $function::<false, EVEN> as Alu,
            (false, "rz") => $function::<false, ZERO>,
            (false, "rm") => $function::<false, DOWN>,
            (false, "rp") => $function::<false, UP>,
            (true, "rn") => $function::<true, EVEN>,
            (true, "rz") => $function::<true, ZERO>,
            (true, "rm") => $function::<true, DOWN>,
            (true, "rp") => $function::<true, UP>,
            _ => return None,
        }
    };
}

macro_rules! ftz {
    ($function:ident, $ftz:expr) => {
        if $ftz { $function::<true> as Alu } else { $function::<false> }
    };
}

macro_rules! picks {
    ($ftz:expr, $max:expr, $nan:expr) => {
        match ($ftz, $max, $nan) {
            (false, false, false) => pick32::<false, false, false> as Alu,
            (false, false, true) => pick32::<false, false, true>,
            (false, true, false) => pick32::<false, true, false>,
            (false, true, true) => pick32::<false, true, true>,
            (true, false, false) => pick32::<true, false, false>,
            (true, false, true) => pick32::<true, false, true>,
            (true, true, false) => pick32::<true, true, false>,
            (true, true, true) => pick32::<true, true, true>,
        }
    };
}

/// The function of an instruction: its name, its type and the modifiers in between, and whether the result
/// is clamped to 0 and 1.
pub(crate) fn float(name: &str, modifiers: &[&str], ty: Ty) -> Option<(Alu, bool)> {
    let has = |modifier: &str| modifiers.contains(&modifier);
    let (ftz, saturated) = (has("ftz"), has("sat"));
    let rounding = modifiers.iter().find(|m| matches!(**m, "rn" | "rz" | "rm" | "rp"));
    let rounding = rounding.copied().unwrap_or("rn");
    let known = ["ftz", "sat", "rn", "rz", "rm", "rp", "approx", "full", "NaN"];
    if modifiers.iter().any(|modifier| !known.contains(modifier)) {
        return None;
    }
    let (max, nan) = (name == "max", has("NaN"));
    let alu = match ty {
        Ty::F32 => match (name, has("approx")) {
            ("add", false) => directed!(add32, ftz, rounding),
            ("sub", false) => directed!(sub32, ftz, rounding),
            ("mul", false) => directed!(mul32, ftz, rounding),
            ("fma" | "mad", false) => directed!(fma32, ftz, rounding),
            ("div", false) if has("full") => ftz!(quotient, ftz),
            ("div", false) => directed!(div32, ftz, rounding),
            ("rcp", false) => directed!(rcp32, ftz, rounding),
            ("sqrt", false) => directed!(sqrt32, ftz, rounding),
            ("div", true) => ftz!(quotient_approx, ftz),
            ("rcp", true) => ftz!(reciprocal, ftz),
            ("sqrt", true) => ftz!(root, ftz),
            ("rsqrt", true) => ftz!(inverse_root, ftz),
            ("ex2", true) => ftz!(exp2, ftz),
            ("lg2", true) => ftz!(log2, ftz),
            ("sin", true) => ftz!(sine, ftz),
            ("cos", true) => ftz!(cosine, ftz),
            ("tanh", true) => tanh,
            ("neg", false) => ftz!(neg32, ftz),
            ("abs", false) => ftz!(abs32, ftz),
            ("min" | "max", false) => picks!(ftz, max, nan),
            ("copysign", false) => copysign32,
            _ => return None,
        },
        Ty::F64 if rounding == "rn" && !has("approx") => match name {
            "add" => add64 as Alu,
            "sub" => sub64,
            "mul" => mul64,
            "fma" => fma64,
            "div" => div64,
            "sqrt" => sqrt64,
            "neg" => neg64,
            "abs" => abs64,
            "min" => pick64::<false>,
            "max" => pick64::<true>,
            _ => return None,
        },
        Ty::F16 => half_precision::one::<Ieee>(name, max, nan)?,
        Ty::BF16 => half_precision::one::<Brain>(name, max, nan)?,
        Ty::F16x2 => half_precision::pair::<Ieee>(name, max, nan)?,
        Ty::BF16x2 => half_precision::pair::<Brain>(name, max, nan)?,
        _ => return None,
    };
    Some((alu, saturated))
}

/// A result between 0 and 1, with 0 for NaN.
pub(crate) fn saturate(bits: u64, ty: Ty) -> u64 {
    match ty {
        Ty::F64 => f64_of(bits).clamp(0.0, 1.0).max(0.0).to_bits(),
        _ => {
            let value = f32_of(bits);
            u64::from(if value > 0.0 { value.min(1.0) } else { 0.0 }.to_bits())
        }
    }
}

fn value<const FTZ: bool>(bits: u64, ty: Ty) -> f64 {
    match ty {
        Ty::F64 => f64_of(bits),
        Ty::F16 => f64::from(f16_of(bits)),
        Ty::BF16 => f64::from(bf16_of(bits)),
        _ => f64::from(operand::<FTZ>(bits)),
    }
}

/// The comparison of that name of operands of a type, flushed to zero or not. Nothing is known of the order of
/// NaN and another number.
macro_rules! comparisons {
    ($ty:expr, $name:expr, $ftz:literal) => {
        comparisons!(@orders $name, |a, b| {
            value::<$ftz>(a, $ty).partial_cmp(&value::<$ftz>(b, $ty))
        })
    };
    (@orders $name:expr, $order:expr) => {
        match $name {
            "eq" => |a, b| $order(a, b) == Some(Equal),
            "ne" => |a, b| matches!($order(a, b), Some(Less | Greater)),
            "lt" => |a, b| $order(a, b) == Some(Less),
            "le" => |a, b| matches!($order(a, b), Some(Less | Equal)),
            "gt" => |a, b| $order(a, b) == Some(Greater),
            "ge" => |a, b| matches!($order(a, b), Some(Greater | Equal)),
            "equ" => |a, b| matches!($order(a, b), None | Some(Equal)),
            "neu" => |a, b| $order(a, b) != Some(Equal),
            "ltu" => |a, b| matches!($order(a, b), None | Some(Less)),
            "leu" => |a, b| $order(a, b) != Some(Greater),
            "gtu" => |a, b| matches!($order(a, b), None | Some(Greater)),
            "geu" => |a, b| $order(a, b) != Some(Less),
            "num" => |a, b| $order(a, b).is_some(),
            "nan" => |a, b| $order(a, b).is_none(),
            _ => return None,
        }
    };
}

/// The comparison of floats of that name; those that end in `u` also hold for NaN.
pub(crate) fn compare(name: &str, ty: Ty, ftz: bool) -> Option<Comparison> {
    Some(match (ty, ftz) {
        (Ty::F32, false) => comparisons!(Ty::F32, name, false),
        (Ty::F32, true) => comparisons!(Ty::F32, name, true),
        (Ty::F64, _) => comparisons!(Ty::F64, name, false),
        (Ty::F16, _) => comparisons!(Ty::F16, name, false),
        (Ty::BF16, _) => comparisons!(Ty::BF16, name, false),
        _ => return None,
    })
}

/// The value of a float of any of these types, for conversions.
pub(crate) fn value_of(bits: u64, ty: Ty, ftz: bool) -> f64 {
    if ftz { value::<true>(bits, ty) } else { value::<false>(bits, ty) }
}

/// Where a float of a type has its parts.
pub(crate) fn format_of(ty: Ty) -> Option<Format> {
    Some(match ty {
        Ty::F64 => F64,
        Ty::F32 => F32,
        Ty::F16 => F16,
        Ty::BF16 => BF16,
        _ => return None,
    })
}

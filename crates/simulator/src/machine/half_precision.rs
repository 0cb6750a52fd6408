//! Instructions on floats of 16 bits, one or two in a register (PTX ISA, "Half Precision Floating Point
//! Instructions").

use super::{
    arithmetic::pick,
    float::{BF16, F16, Format, Rounding, bf16_of, exact_sum, f16_of},
    integer::Alu,
};

/// A format of 16 bits.
pub(super) trait Half {
    const FORMAT: Format;
    fn of(bits: u64) -> f64;
}

/// f16.
pub(super) struct Ieee;

/// bf16.
pub(super) struct Brain;

impl Half for Ieee {
    const FORMAT: Format = F16;
    fn of(bits: u64) -> f64 {
        f64::from(f16_of(bits))
    }
}

impl Half for Brain {
    const FORMAT: Format = BF16;
    fn of(bits: u64) -> f64 {
        f64::from(bf16_of(bits))
    }
}

fn rounded16<H: Half>(value: f64, residue: f64) -> u64 {
    H::FORMAT.round(value, residue, Rounding::Even, false)
}

fn add16<H: Half>(a: u64, b: u64, _: u64) -> u64 {
    let (sum, residue) = exact_sum(H::of(a), H::of(b));
    rounded16::<H>(sum, residue)
}

fn sub16<H: Half>(a: u64, b: u64, c: u64) -> u64 {
    add16::<H>(a, b ^ 0x8000, c)
}

fn mul16<H: Half>(a: u64, b: u64, _: u64) -> u64 {
    rounded16::<H>(H::of(a) * H::of(b), 0.0)
}

fn fma16<H: Half>(a: u64, b: u64, c: u64) -> u64 {
    let (sum, residue) = exact_sum(H::of(a) * H::of(b), H::of(c));
    rounded16::<H>(sum, residue)
}

fn neg16(a: u64, _: u64, _: u64) -> u64 {
    a & 0xffff ^ 0x8000
}

fn abs16(a: u64, _: u64, _: u64) -> u64 {
    a & 0x7fff
}

fn pick16<H: Half, const MAX: bool, const NAN: bool>(a: u64, b: u64, _: u64) -> u64 {
    rounded16::<H>(pick(H::of(a), H::of(b), MAX, NAN), 0.0)
}

fn approximate16<H: Half>(value: f64) -> u64 {
    H::FORMAT.round(value, 0.0, Rounding::Even, false)
}

fn exp2_16<H: Half>(a: u64, _: u64, _: u64) -> u64 {
    approximate16::<H>(H::of(a).exp2())
}

fn tanh16<H: Half>(a: u64, _: u64, _: u64) -> u64 {
    approximate16::<H>(H::of(a).tanh())
}

macro_rules! pairs {
    ($($pair:ident = $one:ident),+) => {$(
        /// Both halves of a word.
        fn $pair<H: Half>(a: u64, b: u64, c: u64) -> u64 {
            let low = $one::<H>(a & 0xffff, b & 0xffff, c & 0xffff);
            low | $one::<H>(a >> 16, b >> 16, c >> 16) << 16
        }
    )+};
}

pairs!(add16x2 = add16, sub16x2 = sub16, mul16x2 = mul16, fma16x2 = fma16);

fn pick16x2<H: Half, const MAX: bool, const NAN: bool>(a: u64, b: u64, c: u64) -> u64 {
    let low = pick16::<H, MAX, NAN>(a & 0xffff, b & 0xffff, c);
    low | pick16::<H, MAX, NAN>(a >> 16, b >> 16, c) << 16
}

fn neg16x2(a: u64, _: u64, _: u64) -> u64 {
    a & 0xffff_ffff ^ 0x8000_8000
}

fn abs16x2(a: u64, _: u64, _: u64) -> u64 {
    a & 0x7fff_7fff
}

/// The function of an instruction on one number.
pub(super) fn one<H: Half>(name: &str, max: bool, nan: bool) -> Option<Alu> {
    Some(match (name, max, nan) {
        ("add", ..) => add16::<H>,
        ("sub", ..) => sub16::<H>,
        ("mul", ..) => mul16::<H>,
        ("fma", ..) => fma16::<H>,
        ("neg", ..) => neg16,
        ("abs", ..) => abs16,
        ("ex2", ..) => exp2_16::<H>,
        ("tanh", ..) => tanh16::<H>,
        ("min" | "max", false, false) => pick16::<H, false, false>,
        ("min" | "max", false, true) => pick16::<H, false, true>,
        ("min" | "max", true, false) => pick16::<H, true, false>,
        ("min" | "max", true, true) => pick16::<H, true, true>,
        _ => return None,
    })
}

/// The function of an instruction on both halves of a word.
pub(super) fn pair<H: Half>(name: &str, max: bool, nan: bool) -> Option<Alu> {
    Some(match (name, max, nan) {
        ("add", ..) => add16x2::<H>,
        ("sub", ..) => sub16x2::<H>,
        ("mul", ..) => mul16x2::<H>,
        ("fma", ..) => fma16x2::<H>,
        ("neg", ..) => neg16x2,
        ("abs", ..) => abs16x2,
        ("min" | "max", false, false) => pick16x2::<H, false, false>,
        ("min" | "max", false, true) => pick16x2::<H, false, true>,
        ("min" | "max", true, false) => pick16x2::<H, true, false>,
        ("min" | "max", true, true) => pick16x2::<H, true, true>,
        _ => return None,
    })
}

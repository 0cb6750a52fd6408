//! `cvt`: conversions between integers and floats of all widths.

use super::{
    arithmetic::{format_of, value_of},
    float::{E4M3, E5M2, F16, Format, Rounding, TF32},
};
use crate::ptx::Ty;

/// A conversion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Conversion {
    pub(crate) from: Ty,
    pub(crate) to: Ty,
    pub(crate) rounding: Rounding,
    /// Whether a float is rounded to an integer first.
    pub(crate) integral: bool,
    pub(crate) ftz: bool,
    /// Clamped to the integer's range, or a float to 0 and 1.
    pub(crate) saturated: bool,
    /// What is too large becomes the largest number.
    pub(crate) finite: bool,
    /// Negative results become zero.
    pub(crate) relu: bool,
}

impl Conversion {
    /// The conversion that the parts of an opcode behind `cvt` name.
    pub(crate) fn named(parts: &[&str]) -> Option<Self> {
        let [modifiers @ .., to, from] = parts else { return None };
        let mut conversion = Self {
            from: Ty::named(from)?,
            to: Ty::named(to)?,
            rounding: Rounding::Even,
            integral: false,
            ftz: false,
            saturated: false,
            finite: false,
            relu: false,
        };
        for modifier in modifiers {
            match *modifier {
                "rn" => {}
                "rz" => conversion.rounding = Rounding::Zero,
                "rm" => conversion.rounding = Rounding::Down,
                "rp" => conversion.rounding = Rounding::Up,
                "rna" => conversion.rounding = Rounding::Away,
                "rni" => conversion.integral = true,
                "rzi" => (conversion.integral, conversion.rounding) = (true, Rounding::Zero),
                "rmi" => (conversion.integral, conversion.rounding) = (true, Rounding::Down),
                "rpi" => (conversion.integral, conversion.rounding) = (true, Rounding::Up),
                "ftz" => conversion.ftz = true,
                "sat" => conversion.saturated = true,
                "satfinite" => conversion.finite = true,
                "relu" => conversion.relu = true,
                _ => return None,
            }
        }
        Some(conversion)
    }

    /// Operands that it takes: two for a pair of one.
    pub(crate) fn operands(&self) -> usize {
        let pair = matches!(self.to, Ty::F16x2 | Ty::BF16x2 | Ty::E4M3x2 | Ty::E5M2x2);
        if pair && self.from == Ty::F32 { 2 } else { 1 }
    }

    /// The result; of a pair, `a` becomes the high half and `b` the low one.
    pub(crate) fn apply(&self, a: u64, b: u64) -> u64 {
        let float = |bits| self.positive(value_of(bits, self.from, self.ftz));
        let round = |format: Format, value| {
            let bits = format.round(value, 0.0, self.rounding, self.finite);
            // NaN has no sign after a conversion.
            if f64::is_nan(value) { format.nan } else { bits }
        };
        match (self.to, self.from) {
            (Ty::F16x2, Ty::E4M3x2 | Ty::E5M2x2) => {
                let format = if self.from == Ty::E4M3x2 { E4M3 } else { E5M2 };
                let half = |bits: u64| round(F16, self.positive(format.value(bits & 0xff)));
                half(a) | half(a >> 8) << 16
            }
            (Ty::E4M3x2 | Ty::E5M2x2, from) => {
                let format = if self.to == Ty::E4M3x2 { E4M3 } else { E5M2 };
                let (high, low) = match from {
                    Ty::F32 => (float(a), float(b)),
                    _ => {
                        let one = if from == Ty::F16x2 { Ty::F16 } else { Ty::BF16 };
                        let half = |bits| self.positive(value_of(bits & 0xffff, one, false));
                        (half(a >> 16), half(a))
                    }
                };
                round(format, high) << 8 | round(format, low)
            }
            (Ty::F16x2 | Ty::BF16x2, _) => {
                let one = if self.to == Ty::F16x2 { Ty::F16 } else { Ty::BF16 };
                let format = format_of(one).unwrap_or(F16);
                round(format, float(a)) << 16 | round(format, float(b))
            }
            (Ty::TF32, _) => round(TF32, float(a)) << 13,
            _ => match (format_of(self.to), format_of(self.from)) {
                (Some(to), Some(_)) => self.float_to_float(to, float(a)),
                (Some(to), None) => self.integer_to_float(to, a),
                (None, Some(_)) => self.float_to_integer(float(a)),
                (None, None) => self.integer_to_integer(a),
            },
        }
    }

    fn positive(&self, value: f64) -> f64 {
        if self.relu && value <= 0.0 { 0.0 } else { value }
    }

    fn float_to_float(&self, to: Format, value: f64) -> u64 {
        let value = if self.integral { integral(value, self.rounding) } else { value };
        let value = match self.saturated {
            false => value,
            // NaN becomes 0.
            true if value > 0.0 => value.min(1.0),
            true => 0.0,
        };
        let bits = to.round(value, 0.0, self.rounding, self.finite);
        if self.ftz && self.to == Ty::F32 && f32::from_bits(bits as u32).is_subnormal() {
            return bits & 0x8000_0000;
        }
        bits
    }

    fn integer_to_float(&self, to: Format, bits: u64) -> u64 {
        let value = widened(bits, self.from);
        // An f64 holds 53 bits; the rest breaks ties.
        let nearest = value as f64;
        let residue = (value - nearest as i128) as f64;
        to.round(nearest, residue, self.rounding, self.finite)
    }

    /// Out of range is clamped, NaN becomes zero, as the hardware does for all widths up to 32 bits.
    fn float_to_integer(&self, value: f64) -> u64 {
        let bits = self.to.bits();
        let value = integral(value, self.rounding);
        let clamped = match (self.to.is_signed(), value.is_nan()) {
            (_, true) => return if bits == 64 { 1 << 63 } else { 0 },
            (true, _) => value as i128,
            (false, _) => value.max(0.0) as i128,
        };
        cut(clamp(clamped, self.to), bits)
    }

    fn integer_to_integer(&self, bits: u64) -> u64 {
        let value = widened(bits, self.from);
        cut(if self.saturated { clamp(value, self.to) } else { value }, self.to.bits())
    }
}

fn widened(bits: u64, ty: Ty) -> i128 {
    let unused = 128 - ty.bits();
    let high = i128::from(bits) << unused;
    if ty.is_signed() { high >> unused } else { (high as u128 >> unused) as i128 }
}

fn clamp(value: i128, ty: Ty) -> i128 {
    let bits = ty.bits();
    if ty.is_signed() {
        value.clamp(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    } else {
        value.clamp(0, (1 << bits) - 1)
    }
}

fn cut(value: i128, bits: u32) -> u64 {
    let value = value as u64;
    if bits >= 64 { value } else { value & ((1 << bits) - 1) }
}

fn integral(value: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::Even => value.round_ties_even(),
        Rounding::Away => value.round(),
        Rounding::Zero => value.trunc(),
        Rounding::Down => value.floor(),
        Rounding::Up => value.ceil(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn convert(opcode: &str, a: u64, b: u64) -> u64 {
        let parts: Vec<_> = opcode.split('.').collect();
        Conversion::named(&parts).unwrap().apply(a, b)
    }

    fn f(value: f32) -> u64 {
        u64::from(value.to_bits())
    }

    #[test]
    fn pairs_have_their_first_operand_on_top() {
        let one = u64::from(half::bf16::ONE.to_bits());
        assert_eq!(convert("rn.bf16x2.f32", f(1.0), f(0.0)), one << 16);
        assert_eq!(convert("rn.satfinite.e4m3x2.f32", f(1.0), f(448.0)), 0x387e);
        assert_eq!(convert("rn.f16x2.e4m3x2", 0x387e, 0), 0x3c00 << 16 | 0x5f00);
    }

    #[test]
    fn floats_become_integers_as_their_rounding_says() {
        assert_eq!(convert("rzi.s32.f32", f(-1.5), 0), 0xffff_ffff);
        assert_eq!(convert("rni.s32.f32", f(2.5), 0), 2);
        assert_eq!(convert("rzi.u32.f32", f(-3.0), 0), 0);
        assert_eq!(convert("rzi.s32.f32", f(1e20), 0), 0x7fff_ffff);
        assert_eq!(convert("rmi.f32.f32", f(-1.5), 0), f(-2.0));
    }

    #[test]
    fn integers_keep_or_lose_their_sign() {
        assert_eq!(convert("s64.s32", 0xffff_ffff, 0), u64::MAX);
        assert_eq!(convert("u64.u32", 0xffff_ffff, 0), 0xffff_ffff);
        assert_eq!(convert("u16.u32", 0x1_2345, 0), 0x2345);
        assert_eq!(convert("rn.f32.s32", 0xffff_ffff, 0), f(-1.0));
        assert_eq!(convert("rn.f32.u64", (1 << 60) + (1 << 36) + 1, 0), f(1.152_921_6e18));
    }

    #[test]
    fn tf32_keeps_ten_bits_rounded_away_from_zero() {
        let x = 1.0 + 2.0_f32.powi(-11);
        assert_eq!(convert("rna.tf32.f32", f(x), 0), f(1.0 + 2.0_f32.powi(-10)));
    }
}

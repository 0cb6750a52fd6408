//! Types of operands.

/// The type of an operand, as an instruction's suffix gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Ty {
    Pred,
    B8,
    B16,
    B32,
    B64,
    B128,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F16x2,
    BF16,
    BF16x2,
    TF32,
    F32,
    F64,
    E2M1,
    E4M3,
    E5M2,
    E4M3x2,
    E5M2x2,
}

impl Ty {
    /// The type of that name, without its dot.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "pred" => Self::Pred,
            "b8" => Self::B8,
            "b16" => Self::B16,
            "b32" => Self::B32,
            "b64" => Self::B64,
            "b128" => Self::B128,
            "u8" => Self::U8,
            "u16" => Self::U16,
            "u32" => Self::U32,
            "u64" => Self::U64,
            "s8" => Self::S8,
            "s16" => Self::S16,
            "s32" => Self::S32,
            "s64" => Self::S64,
            "f16" => Self::F16,
            "f16x2" => Self::F16x2,
            "bf16" => Self::BF16,
            "bf16x2" => Self::BF16x2,
            "tf32" => Self::TF32,
            "f32" => Self::F32,
            "f64" => Self::F64,
            "e2m1" => Self::E2M1,
            "e4m3" => Self::E4M3,
            "e5m2" => Self::E5M2,
            "e4m3x2" => Self::E4M3x2,
            "e5m2x2" => Self::E5M2x2,
            _ => return None,
        })
    }

    /// Bits of a value.
    pub(crate) fn bits(self) -> u32 {
        match self {
            Self::Pred => 1,
            Self::E2M1 => 4,
            Self::B8 | Self::U8 | Self::S8 | Self::E4M3 | Self::E5M2 => 8,
            Self::B16 | Self::U16 | Self::S16 | Self::F16 | Self::BF16 => 16,
            Self::E4M3x2 | Self::E5M2x2 => 16,
            Self::B32 | Self::U32 | Self::S32 | Self::F32 | Self::TF32 => 32,
            Self::F16x2 | Self::BF16x2 => 32,
            Self::B64 | Self::U64 | Self::S64 | Self::F64 => 64,
            Self::B128 => 128,
        }
    }

    /// Bytes of a value in memory.
    pub(crate) fn bytes(self) -> u64 {
        u64::from(self.bits().div_ceil(8))
    }

    pub(crate) fn is_signed(self) -> bool {
        matches!(self, Self::S8 | Self::S16 | Self::S32 | Self::S64)
    }
}

use crate::{
    KernelError,
    block_format::BlockFormat,
    buffer::{Buffer, check_float},
    device::ALIGNMENT_BYTES,
};
use cubecl::ir::{ElemType, FloatKind};

pub(super) const OP: &str = "quantize";

/// An 8-bit floating-point type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fp8Format {
    /// 4 bits of exponent, 3 of mantissa: numbers up to 448, a NaN, no infinities.
    E4m3,
    /// 5 bits of exponent, 2 of mantissa: numbers up to 57344, infinities and NaN.
    E5m2,
}

impl Fp8Format {
    /// CubeCL's name of it.
    pub fn dtype(self) -> ElemType {
        ElemType::Float(match self {
            Self::E4m3 => FloatKind::E4M3,
            Self::E5m2 => FloatKind::E5M2,
        })
    }

    /// The type that CubeCL calls so, if it is one of the two.
    pub fn of(dtype: ElemType) -> Option<Self> {
        [Self::E4m3, Self::E5m2].into_iter().find(|format| format.dtype() == dtype)
    }

    /// The largest finite number.
    pub fn max_finite(self) -> f32 {
        match self {
            Self::E4m3 => 448.0,
            Self::E5m2 => 57344.0,
        }
    }

    pub(super) fn mantissa_bits(self) -> u32 {
        match self {
            Self::E4m3 => 3,
            Self::E5m2 => 2,
        }
    }

    /// What is added to exponents.
    pub(super) fn bias(self) -> u32 {
        match self {
            Self::E4m3 => 7,
            Self::E5m2 => 15,
        }
    }

    /// Code of the largest finite number.
    pub(super) fn max_code(self) -> u32 {
        match self {
            Self::E4m3 => 0x7e,
            Self::E5m2 => 0x7b,
        }
    }
}

/// Which copies of a matrix are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layouts {
    /// As it lies.
    Rows,
    /// Its transpose.
    Transposed,
    /// Both, in one pass.
    Both,
}

impl Layouts {
    /// Whether a copy as the matrix lies is among them.
    pub fn rows(self) -> bool {
        self != Self::Transposed
    }

    /// Whether a transposed copy is among them.
    pub fn transposed(self) -> bool {
        self != Self::Rows
    }
}

/// Bytes from one row of codes to the next: tensor cores copy 16 at a time.
pub fn padded_row(columns: usize) -> usize {
    columns.next_multiple_of(ALIGNMENT_BYTES)
}

/// Words of scales of a matrix whose rows have scales of blocks of 32 codes: those of 128 rows and 128 columns are 128
/// words one after another, along a row of such tiles and then down. Word `r % 32 * 4 + r / 32` of a tile has the four
/// scales of its row `r`, in the order in which tensor cores take them.
pub fn scale_words(rows: usize, columns: usize) -> usize {
    BlockFormat::Mxfp8.scale_words(rows, columns)
}

/// What is asked: a contiguous matrix in 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantizeProblem {
    /// Rows of x.
    pub rows: usize,
    /// Columns of x.
    pub columns: usize,
    /// Type of x.
    pub input: ElemType,
    /// Type of the codes.
    pub format: Fp8Format,
    /// Powers of two that the scale is smaller by than it could be: room for products of codes, or
    /// for a caller that reuses the scale.
    pub margin: u32,
    /// Which copies are made.
    pub layouts: Layouts,
}

impl QuantizeProblem {
    /// The scale times amax.
    pub fn target(&self) -> f32 {
        self.format.max_finite() * (-f64::from(self.margin)).exp2() as f32
    }

    /// Bytes that have to be moved: x in twice, codes out.
    pub fn bytes(&self) -> usize {
        let copies = usize::from(self.layouts.rows()) + usize::from(self.layouts.transposed());
        self.rows * self.columns * (2 * self.input.size() + copies)
    }

    /// Elements of x.
    pub fn elements(&self) -> usize {
        self.rows * self.columns
    }

    /// Checks the problem, and x against it.
    pub(super) fn check(&self, x: &Buffer) -> Result<(), KernelError> {
        /// Units step beyond the end of x before they stop.
        const STEP: usize = 1 << 24;
        /// From here on a margin takes every number to zero.
        const MOST_MARGIN: u32 = 16;
        let unsupported = |reason: String| Err(KernelError::Unsupported { op: OP, reason });
        check_float(OP, "x", self.input)?;
        if self.elements() == 0 {
            return unsupported("an empty matrix".into());
        }
        let padded =
            (self.rows * padded_row(self.columns)).max(self.columns * padded_row(self.rows));
        if u32::try_from(padded + STEP).is_err() {
            return unsupported(format!("{} by {} elements", self.rows, self.columns));
        }
        if self.margin > MOST_MARGIN {
            let expected = format!("at most {MOST_MARGIN}");
            return Err(KernelError::invalid(OP, "margin", expected, self.margin));
        }
        x.check_span(OP, "x", self.elements(), self.input)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROBLEM: QuantizeProblem = QuantizeProblem {
        rows: 3,
        columns: 17,
        input: ElemType::Float(FloatKind::BF16),
        format: Fp8Format::E4m3,
        margin: 1,
        layouts: Layouts::Both,
    };

    #[test]
    fn a_margin_halves_the_scale() {
        assert_eq!(PROBLEM.target(), 224.0);
        assert_eq!(QuantizeProblem { margin: 0, ..PROBLEM }.target(), 448.0);
    }

    #[test]
    fn x_is_read_twice_and_each_copy_written_once() {
        assert_eq!(PROBLEM.bytes(), 51 * 6);
        assert_eq!(QuantizeProblem { layouts: Layouts::Rows, ..PROBLEM }.bytes(), 51 * 5);
        assert_eq!((padded_row(17), padded_row(16), padded_row(1)), (32, 16, 16));
    }

    #[test]
    fn scales_are_of_whole_tiles() {
        assert_eq!(
            [(1, 1), (128, 128), (129, 128), (128, 300)].map(|(r, c)| scale_words(r, c)),
            [128, 128, 256, 384]
        );
    }

    #[test]
    fn formats_know_their_names() {
        for format in [Fp8Format::E4m3, Fp8Format::E5m2] {
            assert_eq!(Fp8Format::of(format.dtype()), Some(format));
        }
        assert_eq!(Fp8Format::of(PROBLEM.input), None);
    }
}

use crate::{
    KernelError,
    attention::{HeadStrides, Order},
    buffer::{Buffer, F32, Rows, check_float},
    divisor::DIVIDEND_LIMIT,
};
use cubecl::ir::ElemType;

pub(super) const OP: &str = "rotary";

/// What a rotation asks. Strides count elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RotaryProblem {
    /// Sequences.
    pub batch: usize,
    /// Heads of a sequence.
    pub heads: usize,
    /// Rows of a head.
    pub seq: usize,
    /// Columns of a row, an even number.
    pub head_dim: usize,
    /// Type of x and of the result.
    pub dtype: ElemType,
    /// Where the rows of x lie.
    pub strides: HeadStrides,
    /// How the result is ordered.
    pub order: Order,
    /// Position of the first row.
    pub start: usize,
    /// Positions that the table has.
    pub positions: usize,
}

impl RotaryProblem {
    /// Checks that the sizes go together and that indices fit 32 bits.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] for an odd `head_dim`, and where the table ends before the last row;
    /// [`KernelError::Unsupported`] for dtypes other than f32, f16 and bf16, rows that begin at an odd number of
    /// elements, and tensors beyond 32-bit indices.
    pub fn validate(&self) -> Result<(), KernelError> {
        check_float(OP, "x", self.dtype)?;
        if !self.head_dim.is_multiple_of(2) {
            return Err(KernelError::invalid(OP, "head_dim", "an even number", self.head_dim));
        }
        if self.start.saturating_add(self.seq) > self.positions {
            let most = self.positions.saturating_sub(self.seq);
            let Self { seq, positions, .. } = self;
            return Err(KernelError::invalid(
                OP,
                "start",
                format!("at most {most}, for {seq} rows and {positions} positions"),
                self.start,
            ));
        }
        // Units count vectors of two elements at least, twice as many as there are where rows are padded.
        if self.span().max(self.elements()) >= DIVIDEND_LIMIT {
            return Err(KernelError::unsupported(OP, "a tensor of 2^31 elements or more"));
        }
        if self.steps().iter().any(|step| !step.is_multiple_of(2)) {
            return Err(KernelError::unsupported(OP, "rows at odd elements"));
        }
        Ok(())
    }

    /// Elements of x.
    pub fn elements(&self) -> usize {
        [self.heads, self.seq, self.head_dim]
            .into_iter()
            .fold(self.batch, |elements, size| elements.saturating_mul(size))
    }

    /// Elements from the first of x to its last.
    pub fn span(&self) -> usize {
        if self.elements() == 0 {
            return 0;
        }
        let HeadStrides { batch, head, row } = self.strides;
        [(self.batch, batch), (self.heads, head), (self.seq, row)]
            .into_iter()
            .map(|(size, stride)| (size - 1).saturating_mul(stride))
            .fold(self.head_dim, usize::saturating_add)
    }

    /// Bytes that have to be moved: x in, its result out, and the rows of the table that are read.
    pub fn bytes(&self) -> usize {
        2 * self.elements() * self.dtype.size() + 2 * self.seq * self.head_dim * F32.size()
    }

    /// The strides of the result.
    pub fn out_strides(&self) -> HeadStrides {
        self.order.strides(self.heads, self.seq, self.head_dim)
    }

    /// The strides of x that are stepped by.
    pub(super) fn steps(&self) -> [usize; 3] {
        let HeadStrides { batch, head, row } = self.strides;
        [(self.batch, batch), (self.heads, head), (self.seq, row)]
            .map(|(size, stride)| if size > 1 { stride } else { 0 })
    }

    /// Whether x lies as the result does.
    pub(super) fn lies_as_result(&self) -> bool {
        let HeadStrides { batch, head, row } = self.out_strides();
        let sizes = [self.batch, self.heads, self.seq];
        let all = self.steps().into_iter().zip([batch, head, row]).zip(sizes);
        all.into_iter().all(|((step, stride), size)| size == 1 || step == stride)
    }

    /// Checks that [`rotary`](super::rotary) serves the problem with these tensors, of which it is told where they
    /// lie in `x` and `table`.
    ///
    /// # Errors
    ///
    /// As [`validate`](Self::validate); [`KernelError::InvalidProblem`] where a tensor is too small or of another
    /// type; [`KernelError::Unsupported`] where x begins at an odd element, or a column of the table at no multiple
    /// of 8 bytes.
    pub fn check(&self, x: &Buffer, table: &Rows) -> Result<(), KernelError> {
        self.validate()?;
        x.check_span(OP, "x", self.span(), self.dtype)?;
        let columns = self.positions.saturating_mul(self.head_dim);
        let elements = columns.saturating_mul(2);
        let is_laid_out = table.is_contiguous() || (table.rows, table.columns) == (columns, 2);
        if table.elements() != elements || !is_laid_out {
            let expected = format!("{} positions of {} pairs", self.positions, self.head_dim);
            let actual = format!("{} rows of {} elements", table.rows, table.columns);
            return Err(KernelError::invalid(OP, "table", expected, actual));
        }
        table.buffer.check_span(OP, "table", table.span(), F32)?;
        let pitch = Self::table_pitch(table);
        if columns.saturating_mul(pitch) >= DIVIDEND_LIMIT {
            return Err(KernelError::unsupported(OP, "a table of 2^31 elements or more"));
        }
        let begin = table.buffer.offset_bytes();
        if !pitch.is_multiple_of(2) || !begin.is_multiple_of(8) {
            let reason = format!("a table at byte {begin} with pairs {pitch} elements apart");
            return Err(KernelError::unsupported(OP, reason));
        }
        if !x.offset_bytes().is_multiple_of(2 * self.dtype.size() as u64) {
            let reason = format!("x begins at byte {} of its memory", x.offset_bytes());
            return Err(KernelError::unsupported(OP, reason));
        }
        Ok(())
    }

    /// Elements from one pair of cosine and sine to the next.
    pub(super) fn table_pitch(table: &Rows) -> usize {
        if table.is_contiguous() { 2 } else { table.pitch }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cubecl::ir::{FloatKind, IntKind};

    const HEADS: RotaryProblem = RotaryProblem {
        batch: 2,
        heads: 3,
        seq: 5,
        head_dim: 8,
        dtype: ElemType::Float(FloatKind::BF16),
        strides: HeadStrides { batch: 120, head: 8, row: 24 },
        order: Order::PositionsFirst,
        start: 1,
        positions: 6,
    };

    #[test]
    fn sizes_and_bytes_are_those_of_the_tensors() {
        HEADS.validate().unwrap();
        assert_eq!((HEADS.elements(), HEADS.span()), (240, 240));
        assert_eq!(HEADS.bytes(), 2 * 480 + 5 * 8 * 8);
        assert!(HEADS.lies_as_result());
        let apart = HeadStrides { batch: 480, head: 16, row: 96 };
        let apart = RotaryProblem { strides: apart, ..HEADS };
        assert!(apart.span() == 480 + 32 + 384 + 8 && !apart.lies_as_result());
        assert_eq!(RotaryProblem { seq: 0, ..HEADS }.span(), 0);
    }

    #[test]
    fn a_dimension_of_size_1_has_no_say() {
        let odd = HeadStrides { batch: 7, ..HEADS.strides };
        let one = RotaryProblem { batch: 1, strides: odd, ..HEADS };
        one.validate().unwrap();
        assert!(one.lies_as_result());
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let invalid = |problem: RotaryProblem| match problem.validate() {
            Err(KernelError::InvalidProblem { argument, .. }) => argument,
            other => panic!("{problem:?} gave {other:?}"),
        };
        assert_eq!(invalid(RotaryProblem { head_dim: 7, ..HEADS }), "head_dim");
        assert_eq!(invalid(RotaryProblem { start: 2, ..HEADS }), "start");
        assert_eq!(invalid(RotaryProblem { start: usize::MAX, ..HEADS }), "start");
    }

    #[test]
    fn what_no_kernel_serves_is_declined() {
        let odd = HeadStrides { row: 25, ..HEADS.strides };
        let far = HeadStrides { batch: 1 << 31, ..HEADS.strides };
        for problem in [
            RotaryProblem { dtype: ElemType::Int(IntKind::I32), ..HEADS },
            RotaryProblem { strides: odd, ..HEADS },
            RotaryProblem { strides: far, ..HEADS },
            RotaryProblem { batch: usize::MAX, ..HEADS },
        ] {
            assert!(matches!(problem.validate(), Err(KernelError::Unsupported { .. })));
        }
    }
}

use super::ScanOperation;
use crate::{KernelError, buffer::Buffer};
use cubecl::ir::{ElemType, FloatKind, IntKind, UIntKind};

pub(super) const OP: &str = "scan";

/// What a scan asks: a contiguous tensor, seen as `[outer, length, inner]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScanProblem {
    /// How numbers are combined.
    pub operation: ScanOperation,
    /// Elements of the dimensions before the scanned one.
    pub outer: usize,
    /// Elements of the scanned dimension.
    pub length: usize,
    /// Elements of the dimensions behind it.
    pub inner: usize,
    /// Type of x and y.
    pub dtype: ElemType,
}

impl ScanProblem {
    /// The scan of a contiguous tensor of `shape` along `dim`.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] for a dimension that the tensor does not have.
    pub fn new(
        operation: ScanOperation,
        shape: &[usize],
        dim: usize,
        dtype: ElemType,
    ) -> Result<Self, KernelError> {
        if dim >= shape.len() {
            let expected = format!("a dimension below {}", shape.len());
            return Err(KernelError::invalid(OP, "dim", expected, dim));
        }
        let outer = shape[..dim].iter().product();
        let inner = shape[dim + 1..].iter().product();
        Ok(Self { operation, outer, length: shape[dim], inner, dtype })
    }

    /// Elements of x, and of y.
    pub fn elements(&self) -> usize {
        self.outer * self.length * self.inner
    }

    /// Bytes that have to be moved: x in, y out.
    pub fn bytes(&self) -> usize {
        2 * self.elements() * self.dtype.size()
    }

    /// The type in which numbers are combined.
    pub(super) fn wide_dtype(&self) -> ElemType {
        match self.dtype {
            ElemType::Float(_) => ElemType::Float(FloatKind::F32),
            integer => integer,
        }
    }

    /// Whether products are kept as a number and a power of two.
    pub(super) fn is_scaled(&self) -> bool {
        self.operation == ScanOperation::Product && matches!(self.dtype, ElemType::Float(_))
    }

    /// Refuses what the kernels do not serve.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] for other types, empty tensors and those of 2^31 elements and more;
    /// [`KernelError::InvalidProblem`] for an x of another size or type.
    pub(super) fn validate(&self, x: &Buffer) -> Result<(), KernelError> {
        let is_served = matches!(
            self.dtype,
            ElemType::Float(FloatKind::F32 | FloatKind::F16 | FloatKind::BF16)
                | ElemType::Int(IntKind::I32)
                | ElemType::UInt(UIntKind::U32)
        );
        if !is_served {
            let reason = format!("{:?}; it takes f32, f16, bf16, i32 and u32", self.dtype);
            return Err(KernelError::unsupported(OP, reason));
        }
        if self.elements() == 0 {
            return Err(KernelError::unsupported(OP, "an empty tensor"));
        }
        if i32::try_from(self.elements()).is_err() {
            return Err(KernelError::unsupported(OP, format!("{} elements", self.elements())));
        }
        x.check(OP, "x", self.elements(), self.dtype)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::F32;

    #[test]
    fn dimensions_around_the_scanned_one_are_joined() {
        let of = |dim| ScanProblem::new(ScanOperation::Sum, &[2, 3, 4, 5], dim, F32).unwrap();
        let sizes = |p: ScanProblem| [p.outer, p.length, p.inner];
        assert_eq!(sizes(of(0)), [1, 2, 60]);
        assert_eq!(sizes(of(2)), [6, 4, 5]);
        assert_eq!(sizes(of(3)), [24, 5, 1]);
        assert_eq!(of(1).bytes(), 960);
    }

    #[test]
    fn a_dimension_that_is_not_there_is_named() {
        let error = ScanProblem::new(ScanOperation::Sum, &[2, 3], 2, F32).unwrap_err();
        assert!(matches!(error, KernelError::InvalidProblem { argument: "dim", .. }), "{error}");
    }
}

use crate::{
    DeviceProfile, KernelError,
    buffer::{Buffer, check_float},
};
use cubecl::ir::{ElemType, FloatKind, IntKind};

pub(super) const OP: &str = "scatter";
const I32: ElemType = ElemType::Int(IntKind::I32);
/// Bits of a place, and of a term, in the word that is sorted.
pub(super) const PLACE_BITS: u32 = 16;

/// Values that are added to places of their own row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScatterProblem {
    /// Rows of all tensors.
    pub rows: usize,
    /// Values of a row.
    pub terms: usize,
    /// Elements of a row of x and y.
    pub places: usize,
    /// Type of x, values and y.
    pub dtype: ElemType,
}

/// Slices that are added to others, by the same indices in all outer dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SelectProblem {
    /// Elements of the dimensions before the indexed one.
    pub outer: usize,
    /// Indices.
    pub terms: usize,
    /// Elements of the indexed dimension of x and y.
    pub places: usize,
    /// Elements of the dimensions behind it.
    pub inner: usize,
    /// Type of x, values and y.
    pub dtype: ElemType,
}

impl ScatterProblem {
    /// Words that a cube sorts: a power of two.
    pub(super) fn sorted(&self) -> usize {
        self.terms.next_power_of_two().max(2)
    }

    /// Refuses what the kernel does not serve on the device.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] for other types, empty tensors, and rows that are too long;
    /// [`KernelError::InvalidProblem`] when tensors do not go with the problem.
    pub(super) fn validate(
        &self,
        device: DeviceProfile,
        [x, index, values]: [&Buffer; 3],
    ) -> Result<(), KernelError> {
        let Self { rows, terms, places, dtype } = *self;
        check_float(OP, "values", dtype)?;
        check([rows * places, rows * terms])?;
        let shared_bytes = self.sorted() * size_of::<u32>();
        let most = 1 << PLACE_BITS;
        if terms > most || places >= most || shared_bytes > device.shared_bytes {
            let reason = format!("rows of {terms} values for {places} places");
            return Err(KernelError::unsupported(OP, reason));
        }
        x.check(OP, "x", rows * places, dtype)?;
        values.check(OP, "values", rows * terms, dtype)?;
        check_index(index, rows * terms)
    }
}

impl SelectProblem {
    /// The type that slices are added in.
    pub(super) fn sums(&self) -> ElemType {
        if self.dtype == I32 { I32 } else { ElemType::Float(FloatKind::F32) }
    }

    /// Refuses what the kernel does not serve.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] for other types and empty tensors; [`KernelError::InvalidProblem`] when tensors do
    /// not go with the problem.
    pub(super) fn validate(&self, [x, index, values]: [&Buffer; 3]) -> Result<(), KernelError> {
        let Self { outer, terms, places, inner, dtype } = *self;
        if dtype != I32 {
            check_float(OP, "values", dtype)?;
        }
        check([outer * places * inner, outer * terms * inner])?;
        x.check(OP, "x", outer * places * inner, dtype)?;
        values.check(OP, "values", outer * terms * inner, dtype)?;
        check_index(index, terms)
    }
}

fn check(elements: [usize; 2]) -> Result<(), KernelError> {
    match elements.iter().find(|count| **count == 0 || i32::try_from(**count).is_err()) {
        Some(count) => Err(KernelError::unsupported(OP, format!("{count} elements"))),
        None => Ok(()),
    }
}

fn check_index(index: &Buffer, elements: usize) -> Result<(), KernelError> {
    if index.dtype != I32 {
        let reason = format!("indices of {:?}; it takes i32", index.dtype);
        return Err(KernelError::unsupported(OP, reason));
    }
    index.check(OP, "index", elements, I32)
}

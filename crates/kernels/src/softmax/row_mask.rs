//! Masks of rows that are read where they lie.

use super::SoftmaxProblem;
use crate::{
    KernelError,
    buffer::Buffer,
    divisor::{DIVIDEND_LIMIT, Divisor, divide, divisor},
};
use cubecl::{
    ir::{ElemType, UIntKind, VectorSize},
    prelude::*,
};

/// Which elements of rows are masked: those where the mask is not 0. Rows may share parts of it.
#[derive(Clone, Debug)]
pub struct RowMask {
    /// Truth values, as u8 or u32.
    pub buffer: Buffer,
    /// The dimensions whose product the rows are, the outermost first.
    pub dims: [usize; 3],
    /// Elements of the mask from one row to the next along each of these, and within a row; 0 where they share one.
    pub strides: [usize; 4],
}

impl RowMask {
    /// Checks that each element of the rows has one of the mask.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] where the dimensions are not those of the rows, the mask is shorter than its strides
    /// say, or no mask by its type; [`KernelError::Unsupported`] beyond 32-bit indices.
    pub(super) fn validate(
        &self,
        op: &'static str,
        problem: &SoftmaxProblem,
    ) -> Result<(), KernelError> {
        let Self { buffer, dims, strides } = self;
        if dims.iter().product::<usize>() != problem.rows {
            let expected = format!("dimensions of {} rows", problem.rows);
            return Err(KernelError::invalid(op, "mask", expected, format!("{dims:?}")));
        }
        if !matches!(buffer.dtype, ElemType::UInt(UIntKind::U8 | UIntKind::U32)) {
            return Err(KernelError::invalid(
                op,
                "mask",
                "u8 or u32",
                format!("{:?}", buffer.dtype),
            ));
        }
        let sizes = dims.iter().copied().chain([problem.classes]);
        let last: usize =
            sizes.zip(strides).map(|(size, stride)| size.saturating_sub(1) * stride).sum();
        if problem.rows > 0 && last >= buffer.elements {
            let expected = format!("more than {last} elements");
            return Err(KernelError::invalid(op, "mask", expected, buffer.elements));
        }
        if last.max(problem.rows) >= DIVIDEND_LIMIT {
            return Err(KernelError::unsupported(op, format!("a mask of {last} elements")));
        }
        Ok(())
    }

    /// The mask as an argument of a kernel that takes masked elements for `value`, and reads it as `reading` says. Without
    /// one nothing of it is compiled in, and `stand_in` takes its place.
    pub(super) fn argument<M: Numeric, W: Size>(
        mask: Option<(&Self, f32)>,
        stand_in: &Buffer,
        reading: MaskReading,
    ) -> MaskLaunch<M, W> {
        let (dims, strides) = mask.map_or(([1; 3], [0; 4]), |(mask, _)| (mask.dims, mask.strides));
        let [outer, middle, inner, element] = strides.map(|stride| stride as u32);
        MaskLaunch {
            elements: mask.map_or(stand_in, |(mask, _)| &mask.buffer).arg(reading.vector_size),
            middle_rows: divisor(dims[1]),
            inner_rows: divisor(dims[2]),
            outer,
            middle,
            inner,
            element,
            value: mask.map_or(0.0, |(_, value)| value),
        }
    }
}

/// How a kernel reads a mask, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MaskReading {
    pub(super) form: MaskForm,
    /// Elements that are loaded at once.
    pub(super) vector_size: VectorSize,
    /// The type of the elements.
    pub(super) dtype: ElemType,
}

impl MaskReading {
    /// How a kernel reads `mask` of rows of so many `classes`, of which it loads vectors of `vector_size`: by vectors where
    /// the elements of each row are side by side in the mask, too, and begin where its vectors do.
    pub(super) fn of(mask: Option<&RowMask>, classes: usize, vector_size: VectorSize) -> Self {
        /// What a unit loads by one instruction.
        const MOST_BYTES: usize = 16;
        let Some(RowMask { buffer, strides: [outer, middle, inner, element], .. }) = mask else {
            let dtype = ElemType::UInt(UIntKind::U32);
            return Self { form: MaskForm::None, vector_size: 1, dtype };
        };
        let dtype = buffer.dtype;
        let bytes = vector_size * dtype.size();
        let begins =
            [*outer, *middle, *inner, classes].iter().all(|at| at.is_multiple_of(vector_size));
        let is_aligned = (buffer.offset_bytes() as usize).is_multiple_of(bytes);
        let is_loaded_at_once = vector_size > 1 && bytes <= MOST_BYTES;
        if is_loaded_at_once && *element == 1 && begins && is_aligned {
            Self { form: MaskForm::Vectors, vector_size, dtype }
        } else {
            Self { form: MaskForm::Elements, vector_size: 1, dtype }
        }
    }
}

/// How a mask is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum MaskForm {
    /// Nothing is masked.
    None,
    /// Each element by itself.
    Elements,
    /// By vectors as long as those that are masked.
    Vectors,
}

/// The mask in a kernel.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Mask<M: Numeric, W: Size> {
    elements: Box<[Vector<M, W>]>,
    middle_rows: Divisor,
    inner_rows: Divisor,
    outer: u32,
    middle: u32,
    inner: u32,
    element: u32,
    /// What masked elements are taken for.
    pub(super) value: f32,
}

#[cube]
impl<M: Numeric, W: Size> Mask<M, W> {
    /// Where the mask of a row begins.
    pub(super) fn row(&self, row: u32, #[comptime] form: MaskForm) -> u32 {
        let mut start = 0u32;
        if comptime!(form != MaskForm::None) {
            let (rest, inner) = divide(row, &self.inner_rows);
            let (outer, middle) = divide(rest, &self.middle_rows);
            start = outer * self.outer + middle * self.middle + inner * self.inner;
        }
        start
    }

    /// The elements of vector `column` of the row whose mask begins at `start`, and `value` where they are masked.
    pub(super) fn fill<T: Float, N: Size>(
        &self,
        values: Vector<T, N>,
        value: T,
        start: u32,
        column: u32,
        classes: u32,
        #[comptime] form: MaskForm,
    ) -> Vector<T, N> {
        let mut result = values;
        let size = N::value().comptime();
        if comptime!(form == MaskForm::Vectors) {
            let mask = self.elements[(start / comptime!(size as u32) + column) as usize];
            #[unroll]
            for i in 0..size {
                let is_left = mask.extract(i) == M::from_int(0);
                result.insert(i, select(is_left, values.extract(i), value));
            }
        }
        if comptime!(form == MaskForm::Elements) {
            #[unroll]
            for i in 0..size {
                let class = column * comptime!(size as u32) + comptime!(i as u32);
                // The last vector may reach beyond the row, where the mask may have no memory.
                let at = start + min(class, classes - 1) * self.element;
                let is_left = self.elements[at as usize].extract(0usize) == M::from_int(0);
                result.insert(i, select(is_left, values.extract(i), value));
            }
        }
        result
    }
}

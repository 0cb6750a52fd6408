//! How tensors that are stepped together lie, and the ways to go through them.

use crate::{
    KernelError,
    buffer::{F32, Rows, check_float},
};
use cubecl::{
    client::Client,
    ir::{ElemType, VectorSize},
};

/// Units in a cube: every adapter takes as many.
pub(super) const UNITS: u32 = 256;

/// How units find their elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Walk {
    /// Nothing lies between rows: all is one row.
    Flat,
    /// Row by row, each tensor with its own pitch. What vectors reach of the memory between rows is
    /// read and written, and means nothing.
    Rows,
    /// As [`Flat`](Self::Flat), but the gradient is by rows, and read by elements.
    Gathered,
}

impl Walk {
    /// Elements in the gradient's vectors, and what pitches are counted in, where the others' vectors have
    /// that many.
    pub(crate) fn of_gradient(self, vector_size: VectorSize) -> VectorSize {
        if self == Self::Gathered { 1 } else { vector_size }
    }
}

/// Where the gradient stands among tensors that are stepped together: after the parameter.
pub(super) const GRADIENT: usize = 1;
/// Where the states begin.
pub(super) const STATES: usize = 2;

/// Units step by as many cubes, which [`Layout::of`] leaves room for.
const MOST_CUBES: u32 = (1 << 24) / UNITS;

/// Rows of tensors of one shape: a parameter, its gradient, and what an optimizer keeps for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Layout<const N: usize> {
    /// Rows of each tensor; 1 where nothing lies between the rows of any.
    pub(crate) rows: usize,
    /// Elements of a row.
    pub(crate) columns: usize,
    /// Elements from one row to the next.
    pub(crate) pitches: [usize; N],
    /// Elements of the widest vectors that may go beyond the end of every row.
    pub(crate) beyond_rows: usize,
}

impl<const N: usize> Layout<N> {
    /// That of tensors of these names: parameter, gradient, and states, which are in f32.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] for a parameter or gradient in other types than f32, f16 and bf16 and
    /// for what goes beyond 32-bit indices; [`KernelError::InvalidProblem`] when the tensors do not go
    /// together.
    pub(super) fn of(
        op: &'static str,
        names: [&'static str; N],
        all: [&Rows; N],
    ) -> Result<Self, KernelError> {
        /// Units step beyond the end before they stop.
        const STEP: usize = 1 << 24;
        for (argument, tensor) in names.into_iter().zip(all).take(STATES) {
            check_float(op, argument, tensor.buffer.dtype)?;
        }
        let pitched = all.into_iter().find(|tensor| !tensor.is_contiguous());
        let (rows, columns) =
            pitched.map_or((1, all[0].elements()), |tensor| (tensor.rows, tensor.columns));
        for (position, (argument, tensor)) in names.into_iter().zip(all).enumerate() {
            let dtype = if position < STATES { tensor.buffer.dtype } else { F32 };
            check_rows(op, [rows, columns], dtype, argument, tensor)?;
        }
        let pitches = all.map(|tensor| if tensor.is_contiguous() { columns } else { tensor.pitch });
        let longest = pitches.iter().max().map_or(0, |pitch| rows * pitch);
        if u32::try_from(longest + STEP).is_err() {
            let reason = format!("{longest} elements with what lies between their rows");
            return Err(KernelError::Unsupported { op, reason });
        }
        // All that any device has.
        let beyond_rows = [8, 4, 2, 1].into_iter().find(|size| {
            all.iter().all(|tensor| !tensor.is_contiguous() && tensor.takes_vectors(*size, false))
        });
        Ok(Self { rows, columns, pitches, beyond_rows: beyond_rows.unwrap_or(1) })
    }

    /// Elements of each tensor.
    pub(super) fn elements(&self) -> usize {
        self.rows * self.columns
    }

    /// Whether vectors of that many elements can be walked so.
    pub(super) fn allows(&self, walk: Walk, vector_size: usize) -> bool {
        let Self { rows, columns, pitches, .. } = *self;
        let divides = |elements: usize| elements.is_multiple_of(vector_size);
        let is_flat = |pitch: usize| rows == 1 || pitch == columns;
        match walk {
            Walk::Flat => pitches.into_iter().all(is_flat) && divides(columns * rows),
            Walk::Rows => {
                pitches.into_iter().all(divides)
                    && (divides(columns) || vector_size <= self.beyond_rows)
            }
            Walk::Gathered => {
                let mut each = pitches.into_iter().enumerate();
                each.all(|(position, pitch)| is_flat(pitch) == (position != GRADIENT))
                    && divides(columns * rows)
                    // A vector goes from one row into the next, and no further.
                    && vector_size <= columns
            }
        }
    }

    /// Vectors of a walk.
    pub(super) fn vectors(&self, walk: Walk, vector_size: usize) -> usize {
        match walk {
            Walk::Flat | Walk::Gathered => self.elements() / vector_size,
            Walk::Rows => self.rows * self.columns.div_ceil(vector_size),
        }
    }

    /// What a cube's units have to do together, once each.
    pub(super) fn passes(&self, walk: Walk, vector_size: usize) -> usize {
        self.vectors(walk, vector_size).div_ceil(UNITS as usize)
    }

    /// The widest vectors that serve all tensors, of up to `widest` elements and of those that the device
    /// has for elements of that many bytes, with the walk that has them.
    pub(super) fn way(
        &self,
        client: &Client,
        widest: VectorSize,
        bytes: usize,
    ) -> (Walk, VectorSize) {
        let sizes: Vec<VectorSize> = client
            .io_optimized_vector_sizes(bytes)
            .filter(|size| *size <= widest)
            .chain([1])
            .collect();
        let walks = [Walk::Flat, Walk::Rows, Walk::Gathered];
        walks
            .iter()
            .flat_map(|walk| sizes.iter().map(|size| (*walk, *size)))
            .filter(|(walk, size)| self.allows(*walk, *size))
            .reduce(|best, other| if other.1 > best.1 { other } else { best })
            // By elements all rows can be walked.
            .unwrap_or((Walk::Rows, 1))
    }

    /// Whether that goes through all of it, and no further.
    pub(super) fn is_served(&self, walk: Walk, vector_size: usize, cubes: u32) -> bool {
        self.allows(walk, vector_size) && (1..=MOST_CUBES).contains(&cubes)
    }
}

/// Whether `tensor` has those rows, or as many elements in one, of that type and within its memory.
fn check_rows(
    op: &'static str,
    [rows, columns]: [usize; 2],
    dtype: ElemType,
    argument: &'static str,
    tensor: &Rows,
) -> Result<(), KernelError> {
    let is_alike = match tensor.is_contiguous() {
        true => tensor.elements() == rows * columns,
        false => (tensor.rows, tensor.columns) == (rows, columns) && tensor.pitch > columns,
    };
    if is_alike && tensor.buffer.dtype == dtype && tensor.span() <= tensor.buffer.elements {
        return Ok(());
    }
    Err(KernelError::invalid(
        op,
        argument,
        format!("{rows} rows of {columns} elements of {dtype:?}"),
        format!("{tensor:?}"),
    ))
}

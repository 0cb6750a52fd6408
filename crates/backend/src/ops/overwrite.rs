//! Overwriting a tensor's memory. A recorded graph needs this for its inputs, which it knows by address.
//!
//! Burn's tensors are values: an operation writes in place only where nobody can tell. Here everybody can.
//! All clones of the tensor have the new numbers.
#![cfg_attr(
    not(feature = "gpu"),
    allow(unused_variables, reason = "without a backend there is nothing to hand arguments to")
)]

use crate::tensors::Together;
#[cfg(feature = "gpu")]
use crate::{
    ops::{copies, written},
    tensors::{Location, contiguous_buffer, rows_of},
};
#[cfg(feature = "gpu")]
use blackburn_kernels::overwrite::{Overwrite, Rows, overwrite_many};
use burn::{
    backend::{
        Backend, Dispatch, backend_extension,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Int, Tensor},
};
#[cfg(feature = "gpu")]
use burn::{
    backend::{TensorMetadata, fusion::custom::TensorSpec, ops::FloatTensorOps},
    tensor::Shape,
};
#[cfg(feature = "gpu")]
use burn_cubecl::{CubeBackend, tensor::CubeTensor};

/// The operations under the functions of this module. They are not differentiable.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait OverwritePrimitives: Backend {
    /// `target`, with the elements of `source`.
    #[fusion(dtype = target, shape = target)]
    fn overwrite_float(target: FloatTensor<Self>, source: FloatTensor<Self>) -> FloatTensor<Self>;

    /// The same, together with others.
    #[fusion(dtype = target, shape = target)]
    fn overwrite_float_together(
        target: FloatTensor<Self>,
        source: FloatTensor<Self>,
        together: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// The elements of `source` in memory of their own, together with others.
    #[fusion(meta = copy_of)]
    fn copied_float(
        source: FloatTensor<Self>,
        together: FloatTensor<Self>,
        dtype: DType,
    ) -> FloatTensor<Self>;

    /// `target`, with the elements of `source`.
    #[fusion(dtype = target, shape = target)]
    fn overwrite_int(target: IntTensor<Self>, source: IntTensor<Self>) -> IntTensor<Self>;
}

#[cfg(feature = "gpu")]
fn copy_of(source: &TensorSpec, _together: &TensorSpec, dtype: &DType) -> TensorSpec {
    TensorSpec { dtype: *dtype, ..source.clone() }
}

#[cfg(feature = "gpu")]
impl OverwritePrimitives for CubeBackend {
    fn overwrite_float(target: FloatTensor<Self>, source: FloatTensor<Self>) -> FloatTensor<Self> {
        overwritten(target, source)
    }

    fn overwrite_float_together(
        target: FloatTensor<Self>,
        source: FloatTensor<Self>,
        _together: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        overwritten(target, source)
    }

    fn copied_float(
        source: FloatTensor<Self>,
        _together: FloatTensor<Self>,
        dtype: DType,
    ) -> FloatTensor<Self> {
        overwritten(memory_for(&source, source.shape(), dtype), source)
    }

    fn overwrite_int(target: IntTensor<Self>, source: IntTensor<Self>) -> IntTensor<Self> {
        overwritten(target, source)
    }
}

#[cfg(feature = "gpu")]
fn overwritten(target: CubeTensor, source: CubeTensor) -> CubeTensor {
    let all = [Overwritten { target, source, copies: None }];
    overwrite_together(&all);
    let [Overwritten { target, .. }] = all;
    target
}

/// Memory for a copy of a tensor.
#[cfg(feature = "gpu")]
pub(crate) fn memory_for(source: &CubeTensor, shape: Shape, dtype: DType) -> CubeTensor {
    let Location { device, .. } = Location::of(source);
    CubeBackend::float_empty(shape, &device, dtype.into())
}

/// A tensor that is overwritten.
#[cfg(feature = "gpu")]
pub(crate) struct Overwritten {
    pub(crate) target: CubeTensor,
    pub(crate) source: CubeTensor,
    /// The number of the [`Copies`](copies::Copies) that it is one of: `source` is a parameter then.
    pub(crate) copies: Option<u32>,
}

#[cfg(feature = "gpu")]
impl Overwritten {
    /// Whether a step has written the same already.
    fn is_done(&self) -> bool {
        let Self { target, source, copies } = self;
        copies.is_some() && copies::is_current(&target.handle, &source.handle)
    }

    /// Says that it is done, to those who know of copies.
    fn tell(&self) {
        let Self { target, source, copies } = self;
        match copies.zip(rows_of(target)) {
            Some((copies, rows)) => copies::register(copies, rows, &source.handle),
            None => copies::written(&target.handle),
        }
    }
}

/// Overwrites targets, in any order, in as few launches as that takes. None is memory that another one names.
///
/// # Panics
///
/// Where rows of a target do not follow each other in memory, and where the kernel refuses a pair.
#[cfg(feature = "gpu")]
pub(crate) fn overwrite_together(all: &[Overwritten]) {
    let left: Vec<_> = all.iter().filter(|one| !one.is_done()).collect();
    let Some(first) = left.first() else { return };
    left.iter().for_each(|one| written::forget(&one.target.handle));
    let by_rows: Vec<_> = left.iter().map(|one| by_rows(&one.target, &one.source)).collect();
    overwrite_many(&first.target.client, &by_rows).unwrap_or_else(|error| panic!("{error}"));
    left.into_iter().for_each(Overwritten::tell);
}

/// Writes the second tensor of each pair to the first, which nobody has read yet, in as few launches as that takes.
///
/// # Panics
///
/// As [`overwrite_together`].
#[cfg(feature = "gpu")]
pub(crate) fn copy_together(pairs: &[[CubeTensor; 2]]) {
    let Some([first, _]) = pairs.first() else { return };
    let all: Vec<_> = pairs.iter().map(|[target, source]| by_rows(target, source)).collect();
    overwrite_many(&first.client, &all).unwrap_or_else(|error| panic!("{error}"));
}

/// Both by rows, or both as one.
#[cfg(feature = "gpu")]
fn by_rows(target: &CubeTensor, source: &CubeTensor) -> Overwrite {
    let Some(into) = rows_of(target) else {
        panic!(
            "overwrite: argument `target`: expected rows that follow each other in memory, got strides \
             {:?} for {:?}",
            target.meta.strides(),
            target.meta.shape()
        );
    };
    let contiguous = || Rows::one(contiguous_buffer(source.clone()));
    let from = match rows_of(source) {
        Some(from) if from.rows == into.rows => from,
        _ if into.rows == 1 => contiguous(),
        _ => Rows { rows: into.rows, columns: into.columns, pitch: into.columns, ..contiguous() },
    };
    Overwrite::new(into, from)
}

/// `target` with the elements of `source`, rounded to its type. The memory stays the same, so all clones of
/// `target` have them, too. For tensors on GPUs, outside automatic differentiation.
///
/// # Panics
///
/// When shapes or devices differ, or rows of `target` do not follow each other in memory.
pub fn overwrite_float<const D: usize>(target: Tensor<D>, source: Tensor<D>) -> Tensor<D> {
    check(target.dims(), source.dims());
    Tensor::from_dispatch(<Dispatch as OverwritePrimitives>::overwrite_float(
        target.into_dispatch(),
        source.into_dispatch(),
    ))
}

/// [`overwrite_float`] by few launches, with others that share `together`.
///
/// # Panics
///
/// As [`overwrite_float`].
pub fn overwrite_float_together<const D: usize>(
    target: Tensor<D>,
    source: Tensor<D>,
    together: &Together,
) -> Tensor<D> {
    check(target.dims(), source.dims());
    let together = together.on(&source.device()).into_dispatch();
    Tensor::from_dispatch(<Dispatch as OverwritePrimitives>::overwrite_float_together(
        target.into_dispatch(),
        source.into_dispatch(),
        together,
    ))
}

/// The elements of `source`, rounded to a type of floating-point numbers, in memory that nobody else holds. By few
/// launches, with others that share `together`. For tensors on GPUs, outside automatic differentiation.
pub fn copied_float<const D: usize>(
    source: Tensor<D>,
    dtype: DType,
    together: &Together,
) -> Tensor<D> {
    let together = together.on(&source.device()).into_dispatch();
    Tensor::from_dispatch(<Dispatch as OverwritePrimitives>::copied_float(
        source.into_dispatch(),
        together,
        dtype,
    ))
}

/// The same as [`overwrite_float`] for whole numbers, which have to be of one type.
///
/// # Panics
///
/// As [`overwrite_float`], and when types differ.
pub fn overwrite_int<const D: usize>(
    target: Tensor<D, Int>,
    source: Tensor<D, Int>,
) -> Tensor<D, Int> {
    check(target.dims(), source.dims());
    assert!(
        target.dtype() == source.dtype(),
        "overwrite: argument `source`: expected {:?}, got {:?}",
        target.dtype(),
        source.dtype()
    );
    Tensor::from_dispatch(<Dispatch as OverwritePrimitives>::overwrite_int(
        target.into_dispatch(),
        source.into_dispatch(),
    ))
}

pub(super) fn check<const D: usize>(target: [usize; D], source: [usize; D]) {
    assert!(
        target == source,
        "overwrite: argument `source`: expected the shape {target:?}, got {source:?}"
    );
}

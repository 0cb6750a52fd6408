//! A sketch of many tensors, by which they can be compared with others when they are gone.
#![cfg_attr(
    not(feature = "gpu"),
    allow(unused_variables, reason = "without a backend there is nothing to hand arguments to")
)]

#[cfg(feature = "gpu")]
use crate::tensors::{Location, contiguous_buffer, rows, tensor_of_rows};
#[cfg(feature = "gpu")]
use burn::backend::TensorMetadata;
use burn::{
    backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor},
    tensor::{DType, Device, Tensor},
};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

/// Sums of a sketch.
#[cfg(feature = "gpu")]
const PLACES: usize = blackburn_kernels::sketch::PLACES;
#[cfg(not(feature = "gpu"))]
const PLACES: usize = 1;

/// The operation under [`Sketch`]. It is not differentiable.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait SketchPrimitives: Backend {
    /// `sums` with the elements of `x`, before which there were `first` others.
    #[fusion(dtype = sums, shape = sums)]
    fn sketch(sums: FloatTensor<Self>, x: FloatTensor<Self>, first: usize) -> FloatTensor<Self>;
}

#[cfg(feature = "gpu")]
impl SketchPrimitives for CubeBackend {
    fn sketch(sums: FloatTensor<Self>, x: FloatTensor<Self>, first: usize) -> FloatTensor<Self> {
        let (place, shape, dtype) = (Location::of(&sums), sums.shape(), sums.dtype);
        let sums = contiguous_buffer(sums);
        let added = blackburn_kernels::sketch::sketch(&place.client, sums, &rows(x), first)
            .unwrap_or_else(|error| panic!("{error}"));
        tensor_of_rows(&place, shape, added.into(), dtype)
    }
}

/// Sums that stand for tensors: how far two sketches are apart tells how far the tensors are, to 1 % of it, and to
/// roundings of f32 where there are no more than some 260,000 elements. 1 MiB on the device.
///
/// The tensors of two sketches have to come in the same order.
#[derive(Clone, Debug)]
pub struct Sketch {
    sums: Tensor<1>,
    elements: usize,
}

impl Sketch {
    /// Of nothing yet, on a GPU.
    pub fn new(device: &Device) -> Self {
        let device = device.clone().without_autodiff();
        Self { sums: Tensor::zeros([PLACES], (&device, DType::F32)), elements: 0 }
    }

    /// The sketch with `x`, in f32, f16 or bf16.
    ///
    /// # Panics
    ///
    /// For another type, a tensor of another device, and one of 2^32 elements by a margin.
    pub fn with<const D: usize>(self, x: Tensor<D>) -> Self {
        let first = self.elements;
        let elements = first + x.dims().iter().product::<usize>();
        let (sums, x) = (self.sums.into_dispatch(), x.into_dispatch());
        let sums = Tensor::from_dispatch(<Dispatch as SketchPrimitives>::sketch(sums, x, first));
        Self { sums, elements }
    }

    /// The sketch with so many zeros.
    pub fn with_zeros(self, elements: usize) -> Self {
        Self { elements: self.elements + elements, ..self }
    }

    /// The sums of squares of what this is a sketch of, of what `other` is one of, and of the differences: three
    /// tensors of one f32.
    pub fn squares(&self, other: &Self) -> [Tensor<1>; 3] {
        let [one, other] = [self, other].map(|sketch| sketch.sums.clone());
        let difference = one.clone() - other.clone();
        [one, other, difference].map(|sums| sums.clone().mul(sums).sum())
    }
}

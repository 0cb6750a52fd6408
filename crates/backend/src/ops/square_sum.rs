//! Sums of squares of many tensors, each read once: what a joint norm is made of.
#![allow(
    clippy::large_enum_variant,
    reason = "batches are moved a few times a step, by code that is derived too, and never stored"
)]
#![cfg_attr(
    not(feature = "gpu"),
    allow(unused_variables, reason = "without a backend there is nothing to hand arguments to")
)]

use crate::ops::loss_scale::{Measured, measure};
#[cfg(feature = "gpu")]
use crate::tensors::{Location, address, contiguous_buffer, rows, tensor_of_rows};
#[cfg(feature = "gpu")]
use blackburn_kernels::buffer::Rows;
#[cfg(feature = "gpu")]
use burn::backend::TensorMetadata;
use burn::{
    backend::{
        Backend, Dispatch, DispatchTensor, ExtensionType, backend_extension, tensor::FloatTensor,
    },
    tensor::{DType, Device, Tensor},
};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;
#[cfg(feature = "gpu")]
use std::sync::{Arc, Mutex, PoisonError};

/// Numbers that the squares are added to.
#[cfg(feature = "gpu")]
const PLACES: usize = blackburn_kernels::square_sum::PLACES;
#[cfg(not(feature = "gpu"))]
const PLACES: usize = 1;

/// Eight tensors of any shapes: the stream knows of no lists.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Eight<B: Backend> {
    /// The first tensor.
    pub x0: FloatTensor<B>,
    /// The second tensor.
    pub x1: FloatTensor<B>,
    /// The third tensor.
    pub x2: FloatTensor<B>,
    /// The fourth tensor.
    pub x3: FloatTensor<B>,
    /// The fifth tensor.
    pub x4: FloatTensor<B>,
    /// The sixth tensor.
    pub x5: FloatTensor<B>,
    /// The seventh tensor.
    pub x6: FloatTensor<B>,
    /// The eighth tensor.
    pub x7: FloatTensor<B>,
}

/// The tensors of one operation. A batch that is not full repeats its last tensor.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub enum Batch<B: Backend> {
    /// Up to eight.
    Few(#[extension_type] Eight<B>),
    /// Up to 32.
    Many(
        #[extension_type] Eight<B>,
        #[extension_type] Eight<B>,
        #[extension_type] Eight<B>,
        #[extension_type] Eight<B>,
    ),
}

/// The operation under it. It is not differentiable.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait SquareSumPrimitives: Backend {
    /// `sums` with the squares of the first `count` tensors added, which are noted if somebody asks.
    #[fusion(dtype = sums, shape = sums)]
    fn square_sum(
        sums: FloatTensor<Self>,
        #[extension_type] batch: Batch<Self>,
        count: usize,
        noted: Option<Batches>,
    ) -> FloatTensor<Self>;
}

#[cfg(feature = "gpu")]
impl SquareSumPrimitives for CubeBackend {
    fn square_sum(
        sums: FloatTensor<Self>,
        batch: Batch<Self>,
        count: usize,
        noted: Option<Batches>,
    ) -> FloatTensor<Self> {
        let eights = match batch {
            Batch::Few(a) => vec![a],
            Batch::Many(a, b, c, d) => vec![a, b, c, d],
        };
        let mut is_read_there = true;
        let tensors: Vec<_> = eights
            .into_iter()
            .flat_map(|Eight { x0, x1, x2, x3, x4, x5, x6, x7 }| [x0, x1, x2, x3, x4, x5, x6, x7])
            .take(count)
            .map(|tensor| {
                let place = address(&tensor.handle);
                let rows = rows(tensor);
                is_read_there &= address(&rows.buffer.handle) == place;
                rows
            })
            .collect();
        let (place, shape, dtype) = (Location::of(&sums), sums.shape(), sums.dtype);
        let sums = contiguous_buffer(sums);
        let added = blackburn_kernels::square_sum::square_sum(&place.client, sums, &tensors)
            .unwrap_or_else(|error| panic!("{error}"));
        if let Some(noted) = noted {
            noted.push(is_read_there.then_some(tensors));
        }
        tensor_of_rows(&place, shape, added.into(), dtype)
    }
}

/// The memory of tensors whose squares were added up, by launches. Clones are one.
#[derive(Clone, Debug, Default)]
pub struct Batches {
    /// None for a batch of which some tensor was copied first.
    #[cfg(feature = "gpu")]
    all: Arc<Mutex<Vec<Option<Vec<Rows>>>>>,
}

#[cfg(feature = "gpu")]
impl Batches {
    fn push(&self, batch: Option<Vec<Rows>>) {
        self.all.lock().unwrap_or_else(PoisonError::into_inner).push(batch);
    }

    /// All of them, in their order, if all tensors were read where they lie.
    pub(crate) fn take(&self) -> Option<Vec<Vec<Rows>>> {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *all).into_iter().collect()
    }
}

/// Types of tensors that are served.
const SERVED: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Tensors of an operation.
const MOST: usize = 32;

/// A sum of squares that tensors add to, in f32 on the device. Tensors wait until there are 32 of a type,
/// which one launch takes if nothing lies between their rows.
#[derive(Clone, Debug)]
pub struct SquareSum {
    sums: Tensor<1>,
    /// By type.
    waiting: [Vec<DispatchTensor>; SERVED.len()],
    noted: Option<Batches>,
}

impl SquareSum {
    /// Nothing yet.
    pub fn new(device: &Device) -> Self {
        let device = device.clone().without_autodiff();
        let sums = Tensor::zeros([PLACES], (&device, DType::F32));
        Self { sums, waiting: Default::default(), noted: None }
    }

    /// The same, and `noted` is told of the tensors' memory when they are added.
    #[must_use]
    pub fn noted(mut self, noted: &Batches) -> Self {
        self.noted = Some(noted.clone());
        self
    }

    /// Whether [`with`](Self::with) takes `x`: it is on a GPU (or a software device that passes for one),
    /// in f32, f16 or bf16, and of fewer than 2^32 elements by a margin.
    pub fn serves<const D: usize>(x: &Tensor<D>) -> bool {
        crate::tensors::is_gpu(&x.device())
            && SERVED.contains(&x.dtype())
            && crate::tensors::is_counted_in_32_bits(x)
    }

    /// The sum with the squares of `x`.
    ///
    /// # Panics
    ///
    /// On what [`serves`](Self::serves) refuses, and on a tensor of another device.
    pub fn with<const D: usize>(mut self, x: Tensor<D>) -> Self {
        assert!(
            Self::serves(&x) && x.device() == self.sums.device(),
            "square_sum: argument `x`: expected f32, f16 or bf16 on {:?}, got {:?} of {:?} on {:?}",
            self.sums.device(),
            x.dims(),
            x.dtype(),
            x.device()
        );
        let of_type = SERVED.iter().position(|served| *served == x.dtype()).unwrap_or_default();
        let waiting = &mut self.waiting[of_type];
        waiting.push(x.into_dispatch());
        if waiting.len() == MOST {
            let full = std::mem::take(waiting);
            self.sums = added(self.sums, full, self.noted.as_ref());
        }
        self
    }

    /// The sum, one f32.
    pub fn total(self) -> Tensor<1> {
        self.parts().sum()
    }

    /// What gradients come to that this is the sum of: their norm without `scale`, which they were multiplied
    /// by, whether that was finite, and the factor that undoes the scale and clips them to the norm
    /// `largest`, by one more launch.
    ///
    /// # Panics
    ///
    /// Where `scale` is not one f32 on the device, or `largest` is not positive.
    pub fn measured(self, scale: Option<Tensor<1>>, largest: f32) -> Measured {
        measure(self.parts(), scale, largest)
    }

    /// Numbers whose sum is the sum.
    fn parts(self) -> Tensor<1> {
        let Self { sums, waiting, noted } = self;
        waiting.into_iter().fold(sums, |sums, some| added(sums, some, noted.as_ref()))
    }
}

/// `sums` with the squares of `tensors` added, of which there are 32 at most.
fn added(sums: Tensor<1>, tensors: Vec<DispatchTensor>, noted: Option<&Batches>) -> Tensor<1> {
    let count = tensors.len();
    let Some(last) = tensors.last().cloned() else { return sums };
    // The last one fills up what is left, and does not count again.
    let mut all = tensors.into_iter().chain(std::iter::repeat(last));
    let mut next = || all.next().unwrap_or_else(|| unreachable!("it repeats without an end"));
    let mut eight = || Eight {
        x0: next(),
        x1: next(),
        x2: next(),
        x3: next(),
        x4: next(),
        x5: next(),
        x6: next(),
        x7: next(),
    };
    let batch = match count {
        ..=8 => Batch::Few(eight()),
        _ => Batch::Many(eight(), eight(), eight(), eight()),
    };
    let sums = sums.into_dispatch();
    let noted = noted.cloned();
    Tensor::from_dispatch(<Dispatch as SquareSumPrimitives>::square_sum(sums, batch, count, noted))
}

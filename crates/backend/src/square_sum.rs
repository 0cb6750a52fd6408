//! Sums of squares of many tensors, each read once: what a joint norm is made of.

#[cfg(feature = "gpu")]
use crate::handles::contiguous_buffer;
use burn::{
    backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor},
    tensor::{DType, Device, Tensor},
};
#[cfg(feature = "gpu")]
use burn_cubecl::{CubeBackend, tensor::CubeTensor};

/// Numbers that the squares are added to.
#[cfg(feature = "gpu")]
const PLACES: usize = blackburn_kernels::square_sum::PLACES;
#[cfg(not(feature = "gpu"))]
const PLACES: usize = 1;

/// The operation under it. It is not differentiable.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait SquareSumPrimitives: Backend {
    /// `sums` with the squares of `x` added.
    #[fusion(dtype = sums, shape = sums)]
    fn square_sum(sums: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self>;
}

#[cfg(feature = "gpu")]
impl SquareSumPrimitives for CubeBackend {
    fn square_sum(sums: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        let (client, device, shape, dtype) =
            (sums.client.clone(), sums.device.clone(), sums.meta.shape().clone(), sums.dtype);
        let (sums, x) = (contiguous_buffer(sums), contiguous_buffer(x));
        let added = blackburn_kernels::square_sum::square_sum(&client, sums, &x)
            .unwrap_or_else(|error| panic!("{error}"));
        CubeTensor::new_contiguous(client, device, shape, added.handle, dtype)
    }
}

/// A sum of squares that tensors add to, in f32 on the device.
#[derive(Clone, Debug)]
pub struct SquareSum {
    sums: Tensor<1>,
}

impl SquareSum {
    /// Nothing yet.
    pub fn new(device: &Device) -> Self {
        let device = device.clone().without_autodiff();
        Self { sums: Tensor::zeros([PLACES], (&device, DType::F32)) }
    }

    /// Whether [`with`](Self::with) takes `x`: it is on a GPU (or a software device that passes for one),
    /// in f32, f16 or bf16, and of fewer than 2^32 elements by a margin.
    pub fn serves<const D: usize>(x: &Tensor<D>) -> bool {
        /// What the kernel leaves free at the upper end of 32-bit indices.
        const MARGIN: u64 = 1 << 24;
        let elements: u64 = x.dims().iter().map(|size| *size as u64).product();
        crate::device::is_gpu(&x.device())
            && matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16)
            && elements + MARGIN <= u64::from(u32::MAX)
    }

    /// The sum with the squares of `x`.
    ///
    /// # Panics
    ///
    /// On what [`serves`](Self::serves) refuses, and on a tensor of another device.
    pub fn with<const D: usize>(self, x: Tensor<D>) -> Self {
        assert!(
            Self::serves(&x),
            "square_sum: argument `x`: expected f32, f16 or bf16 on a GPU, got {:?} of {:?} on {:?}",
            x.dims(),
            x.dtype(),
            x.device()
        );
        let sums = <Dispatch as SquareSumPrimitives>::square_sum(
            self.sums.into_dispatch(),
            x.into_dispatch(),
        );
        Self { sums: Tensor::from_dispatch(sums) }
    }

    /// The sum, one f32.
    pub fn total(self) -> Tensor<1> {
        self.sums.sum()
    }
}

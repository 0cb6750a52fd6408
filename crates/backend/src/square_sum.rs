//! Sums of squares of many tensors, each read once: what a joint norm is made of.

#[cfg(feature = "gpu")]
use crate::handles::contiguous_buffer;
use burn::{
    backend::{
        Backend, Dispatch, DispatchTensor, ExtensionType, backend_extension, tensor::FloatTensor,
    },
    tensor::{DType, Device, Tensor},
};
#[cfg(feature = "gpu")]
use burn_cubecl::{CubeBackend, tensor::CubeTensor};

/// Numbers that the squares are added to.
#[cfg(feature = "gpu")]
const PLACES: usize = blackburn_kernels::square_sum::PLACES;
#[cfg(not(feature = "gpu"))]
const PLACES: usize = 1;

/// Tensors of one type and any shapes.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Eight<B: Backend> {
    /// One of them.
    pub x0: FloatTensor<B>,
    /// Another.
    pub x1: FloatTensor<B>,
    /// Another.
    pub x2: FloatTensor<B>,
    /// Another.
    pub x3: FloatTensor<B>,
    /// Another.
    pub x4: FloatTensor<B>,
    /// Another.
    pub x5: FloatTensor<B>,
    /// Another.
    pub x6: FloatTensor<B>,
    /// Another.
    pub x7: FloatTensor<B>,
}

/// The operations under it. They are not differentiable.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait SquareSumPrimitives: Backend {
    /// `sums` with the squares of `x` added.
    #[fusion(dtype = sums, shape = sums)]
    fn square_sum(sums: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// `sums` with the squares of all eight added.
    #[fusion(dtype = sums, shape = sums)]
    fn square_sum_of_eight(
        sums: FloatTensor<Self>,
        #[extension_type] tensors: Eight<Self>,
    ) -> FloatTensor<Self>;
}

#[cfg(feature = "gpu")]
impl SquareSumPrimitives for CubeBackend {
    fn square_sum(sums: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        added(sums, vec![x])
    }

    fn square_sum_of_eight(sums: FloatTensor<Self>, tensors: Eight<Self>) -> FloatTensor<Self> {
        let Eight { x0, x1, x2, x3, x4, x5, x6, x7 } = tensors;
        added(sums, vec![x0, x1, x2, x3, x4, x5, x6, x7])
    }
}

#[cfg(feature = "gpu")]
fn added(sums: CubeTensor, tensors: Vec<CubeTensor>) -> CubeTensor {
    let (client, device, shape, dtype) =
        (sums.client.clone(), sums.device.clone(), sums.meta.shape().clone(), sums.dtype);
    let tensors: Vec<_> = tensors.into_iter().map(contiguous_buffer).collect();
    let added =
        blackburn_kernels::square_sum::square_sum(&client, contiguous_buffer(sums), &tensors)
            .unwrap_or_else(|error| panic!("{error}"));
    CubeTensor::new_contiguous(client, device, shape, added.handle, dtype)
}

/// Types of tensors that are served.
const SERVED: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// A sum of squares that tensors add to, in f32 on the device. Tensors wait until there are eight of a
/// type, which one launch takes.
#[derive(Clone, Debug)]
pub struct SquareSum {
    sums: Tensor<1>,
    /// By type, and apart those of lengths that no vector divides: they would slow the others down.
    waiting: [Vec<DispatchTensor>; 2 * SERVED.len()],
}

impl SquareSum {
    /// Nothing yet.
    pub fn new(device: &Device) -> Self {
        let device = device.clone().without_autodiff();
        let sums = Tensor::zeros([PLACES], (&device, DType::F32));
        Self { sums, waiting: Default::default() }
    }

    /// Whether [`with`](Self::with) takes `x`: it is on a GPU (or a software device that passes for one),
    /// in f32, f16 or bf16, and of fewer than 2^32 elements by a margin.
    pub fn serves<const D: usize>(x: &Tensor<D>) -> bool {
        crate::device::is_gpu(&x.device())
            && SERVED.contains(&x.dtype())
            && crate::device::is_counted_in_32_bits(x)
    }

    /// The sum with the squares of `x`.
    ///
    /// # Panics
    ///
    /// On what [`serves`](Self::serves) refuses, and on a tensor of another device.
    pub fn with<const D: usize>(mut self, x: Tensor<D>) -> Self {
        /// Elements of the widest loads.
        const WIDEST: usize = 8;
        assert!(
            Self::serves(&x) && x.device() == self.sums.device(),
            "square_sum: argument `x`: expected f32, f16 or bf16 on {:?}, got {:?} of {:?} on {:?}",
            self.sums.device(),
            x.dims(),
            x.dtype(),
            x.device()
        );
        let of_type = SERVED.iter().position(|served| *served == x.dtype()).unwrap_or_default();
        let is_even = x.shape().num_elements().is_multiple_of(WIDEST);
        let waiting = &mut self.waiting[2 * of_type + usize::from(is_even)];
        waiting.push(x.into_dispatch());
        match <[_; 8]>::try_from(std::mem::take(waiting)) {
            Ok([x0, x1, x2, x3, x4, x5, x6, x7]) => {
                let sums = <Dispatch as SquareSumPrimitives>::square_sum_of_eight(
                    self.sums.into_dispatch(),
                    Eight { x0, x1, x2, x3, x4, x5, x6, x7 },
                );
                self.sums = Tensor::from_dispatch(sums);
            }
            Err(fewer) => *waiting = fewer,
        }
        self
    }

    /// The sum, one f32.
    pub fn total(self) -> Tensor<1> {
        let mut sums = self.sums.into_dispatch();
        for x in self.waiting.into_iter().flatten() {
            sums = <Dispatch as SquareSumPrimitives>::square_sum(sums, x);
        }
        Tensor::<1>::from_dispatch(sums).sum()
    }
}

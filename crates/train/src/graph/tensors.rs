//! What goes into a pass and comes out of it.

use blackburn_backend::overwrite::{overwrite_float, overwrite_int};
use burn::tensor::{DType, Device, Int, Tensor};

/// Tensors that a pass is given or gives, besides parameters and gradients: a tensor of floating-point or
/// whole numbers, a tuple of up to four, or a `Vec` of some.
pub trait PassTensors: Clone {
    /// The same numbers in memory of their own, which nobody else holds. On GPUs alone.
    fn held(&self) -> Self;

    /// The memory of `self` with the numbers of `new`, of the same layout. On GPUs alone.
    fn overwritten(self, new: Self) -> Self;

    /// Types, shapes and devices, which a captured pass cannot change.
    fn layout(&self) -> Vec<TensorLayout>;
}

/// Shape, type and device of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorLayout {
    dims: Vec<usize>,
    dtype: DType,
    device: Device,
}

impl<const D: usize> PassTensors for Tensor<D> {
    fn held(&self) -> Self {
        let plain = self.clone().without_autodiff();
        let memory = Tensor::empty(plain.dims(), (&plain.device(), plain.dtype()));
        overwrite_float(memory, plain)
    }

    fn overwritten(self, new: Self) -> Self {
        overwrite_float(self, new.without_autodiff())
    }

    fn layout(&self) -> Vec<TensorLayout> {
        vec![layout(self.dims(), self.dtype(), self.device())]
    }
}

impl<const D: usize> PassTensors for Tensor<D, Int> {
    fn held(&self) -> Self {
        let plain = self.clone().without_autodiff();
        let memory = Tensor::empty(plain.dims(), (&plain.device(), plain.dtype()));
        overwrite_int(memory, plain)
    }

    fn overwritten(self, new: Self) -> Self {
        overwrite_int(self, new.without_autodiff())
    }

    fn layout(&self) -> Vec<TensorLayout> {
        vec![layout(self.dims(), self.dtype(), self.device())]
    }
}

fn layout<const D: usize>(dims: [usize; D], dtype: DType, device: Device) -> TensorLayout {
    TensorLayout { dims: dims.to_vec(), dtype, device: device.without_autodiff() }
}

impl<T: PassTensors> PassTensors for Vec<T> {
    fn held(&self) -> Self {
        self.iter().map(PassTensors::held).collect()
    }

    fn overwritten(self, new: Self) -> Self {
        self.into_iter().zip(new).map(|(old, new)| old.overwritten(new)).collect()
    }

    fn layout(&self) -> Vec<TensorLayout> {
        self.iter().flat_map(PassTensors::layout).collect()
    }
}

macro_rules! tuples {
    ($($name:ident $index:tt),+) => {
        impl<$($name: PassTensors),+> PassTensors for ($($name,)+) {
            fn held(&self) -> Self {
                ($(self.$index.held(),)+)
            }

            fn overwritten(self, new: Self) -> Self {
                ($(self.$index.overwritten(new.$index),)+)
            }

            fn layout(&self) -> Vec<TensorLayout> {
                [$(self.$index.layout()),+].concat()
            }
        }
    };
}

tuples!(A 0);
tuples!(A 0, B 1);
tuples!(A 0, B 1, C 2);
tuples!(A 0, B 1, C 2, E 3);

//! What goes into a pass and comes out of it.

use blackburn_backend::{
    overwrite::{overwrite_float, overwrite_int},
    square_sum::SquareSum,
};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};

/// Tensors that a pass is given or gives, besides parameters and gradients: a tensor of floating-point or
/// whole numbers, a tuple of up to four, a `Vec` of some, or none: `()`.
pub trait PassTensors: Clone {
    /// The same numbers in memory of their own, which nobody else holds. On GPUs alone.
    fn held(&self) -> Self;

    /// The memory of `self` with the numbers of `new`, of the same layout. On GPUs alone.
    fn overwritten(self, new: Self) -> Self;

    /// Types, shapes and devices, which a captured pass cannot change.
    fn layout(&self) -> Vec<TensorLayout>;

    /// For each tensor, how it compares with that of `other`, of the same layout. On GPUs alone.
    fn squares(&self, other: &Self) -> Vec<Squares>;

    /// The same tensors off the autodiff graph.
    fn untracked(self) -> Self;

    /// Of each tensor, `length` rows from `start` on: indices of its first dimension.
    fn rows(&self, start: usize, length: usize) -> Self;
}

/// Sums of squares that tell how far two tensors are apart, in f32 on the device.
#[derive(Clone, Debug)]
pub struct Squares {
    one: SquareSum,
    other: SquareSum,
    differences: SquareSum,
}

impl Squares {
    /// Of nothing yet.
    pub fn new(device: &Device) -> Self {
        let none = || SquareSum::new(device);
        Self { one: none(), other: none(), differences: none() }
    }

    /// With two tensors of one shape.
    pub fn with<const D: usize>(self, one: Tensor<D>, other: Tensor<D>) -> Self {
        let [one, other] = [one, other].map(Tensor::without_autodiff);
        let wide = |x: &Tensor<D>| x.clone().cast(FloatDType::F32);
        Self {
            differences: self.differences.with(wide(&one) - wide(&other)),
            one: self.one.with(served(one)),
            other: self.other.with(served(other)),
        }
    }

    /// The sums for the one, the other and the differences.
    pub(super) fn totals(self) -> [Tensor<1>; 3] {
        [self.one, self.other, self.differences].map(SquareSum::total)
    }
}

/// A tensor in a type that kernels sum, off the autodiff graph.
pub(super) fn served<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let x = x.without_autodiff();
    if SquareSum::serves(&x) { x } else { x.cast(FloatDType::F32) }
}

/// Shape, type and device of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorLayout {
    pub(crate) dims: Vec<usize>,
    pub(crate) dtype: DType,
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

    fn squares(&self, other: &Self) -> Vec<Squares> {
        vec![Squares::new(&self.device()).with(self.clone(), other.clone())]
    }

    fn untracked(self) -> Self {
        self.without_autodiff()
    }

    fn rows(&self, start: usize, length: usize) -> Self {
        self.clone().narrow(0, start, length)
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

    fn squares(&self, other: &Self) -> Vec<Squares> {
        self.clone().float().squares(&other.clone().float())
    }

    fn untracked(self) -> Self {
        self.without_autodiff()
    }

    fn rows(&self, start: usize, length: usize) -> Self {
        self.clone().narrow(0, start, length)
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

    fn squares(&self, other: &Self) -> Vec<Squares> {
        self.iter().zip(other).flat_map(|(one, other)| one.squares(other)).collect()
    }

    fn untracked(self) -> Self {
        self.into_iter().map(PassTensors::untracked).collect()
    }

    fn rows(&self, start: usize, length: usize) -> Self {
        self.iter().map(|tensors| tensors.rows(start, length)).collect()
    }
}

/// None.
impl PassTensors for () {
    fn held(&self) -> Self {}

    fn overwritten(self, (): Self) -> Self {}

    fn layout(&self) -> Vec<TensorLayout> {
        Vec::new()
    }

    fn squares(&self, (): &Self) -> Vec<Squares> {
        Vec::new()
    }

    fn untracked(self) -> Self {}

    fn rows(&self, _: usize, _: usize) -> Self {}
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

            fn squares(&self, other: &Self) -> Vec<Squares> {
                [$(self.$index.squares(&other.$index)),+].concat()
            }

            fn untracked(self) -> Self {
                ($(self.$index.untracked(),)+)
            }

            fn rows(&self, start: usize, length: usize) -> Self {
                ($(self.$index.rows(start, length),)+)
            }
        }
    };
}

tuples!(A 0);
tuples!(A 0, B 1);
tuples!(A 0, B 1, C 2);
tuples!(A 0, B 1, C 2, E 3);

use burn::{
    backend::{Backend, TensorMetadata, tensor::FloatTensor},
    tensor::{DType, FloatDType},
};

/// The tensor in that type: itself where it is already.
pub(crate) fn cast<B: Backend>(tensor: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if tensor.dtype() == dtype { tensor } else { B::float_cast(tensor, FloatDType::from(dtype)) }
}

/// The tensor in the type that is computed in: f32, and f64 for f64.
pub(crate) fn wide<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    if tensor.dtype() == DType::F64 { tensor } else { cast::<B>(tensor, DType::F32) }
}

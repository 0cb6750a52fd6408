//! Between the references' numbers and Burn's tensors.

use blackburn_reference::storage::Storage;
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use libtest_mimic::Failed;

/// What Burn calls the type.
pub fn float(storage: Storage) -> FloatDType {
    match storage {
        Storage::F32 => FloatDType::F32,
        Storage::F16 => FloatDType::F16,
        Storage::Bf16 => FloatDType::BF16,
    }
}

/// A tensor of `values`, which have to be numbers of `storage`.
pub fn tensor<const D: usize>(
    values: &[f64],
    shape: [usize; D],
    storage: Storage,
    device: &Device,
) -> Tensor<D> {
    let values: Vec<f32> = values.iter().map(|value| *value as f32).collect();
    let tensor: Tensor<D> = Tensor::from_data(TensorData::new(values, shape), device);
    tensor.cast(float(storage))
}

/// The numbers in `tensor`.
///
/// # Errors
///
/// What the device reports.
pub fn values<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f64>, Failed> {
    // Cast here, and not on the device, where it would join the stream that is watched.
    let data = tensor.try_into_data().map_err(|error| error.to_string())?;
    let data = data.try_cast_as::<f64>().map_err(|error| error.to_string())?;
    Ok(data.try_to_vec().map_err(|error| format!("{error:?}"))?)
}

//! Numbers on their way to the host, for which nobody waits yet.

use burn::tensor::{FloatDType, Tensor};
use std::fmt;
#[cfg(feature = "gpu")]
use {
    burn::{
        backend::{BackendTensor, DispatchTensorKind},
        tensor::Bytes,
    },
    burn_cubecl::CubeBackend,
    cubecl::{
        future::block_on,
        server::{CopyDescriptor, ServerError},
    },
    std::{
        future::{Future, poll_fn},
        pin::Pin,
        task::{Context, Poll, Waker},
    },
};

/// Floats of a tensor that the device was asked for.
///
/// `Tensor::into_data` waits until the device has done all that it was asked for, and nothing new is asked for meanwhile:
/// the device is idle until the host has prepared its next work, milliseconds in a training step. A readback is made
/// before that work is asked for, and [waited for](Self::wait) behind it.
pub struct Readback(State);

enum State {
    Here(Result<Vec<f32>, String>),
    #[cfg(feature = "gpu")]
    Coming(Pin<Box<dyn Future<Output = Result<Bytes, ServerError>> + Send>>),
}

/// Why numbers did not come.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("numbers of the device did not come: {reason}")]
pub struct ReadbackError {
    /// What the runtime says.
    pub reason: String,
}

impl Readback {
    /// Asks for the floats of `tensor`, in f32, behind all that its device was asked for. On a CPU they are there when
    /// this returns.
    pub fn of(tensor: Tensor<1>) -> Self {
        let tensor = tensor.without_autodiff().cast(FloatDType::F32);
        #[cfg(feature = "gpu")]
        if let Some(coming) = asked(&tensor) {
            return coming;
        }
        let data = tensor.try_into_data().map_err(|error| error.to_string());
        Self(State::Here(data.map(|data| data.iter::<f32>().collect())))
    }

    /// Whether they are there without waiting.
    pub fn is_here(&self) -> bool {
        matches!(self.0, State::Here(_))
    }

    /// Waits for them.
    ///
    /// # Errors
    ///
    /// When what computes them, or the copy, has failed.
    pub fn wait(self) -> Result<Vec<f32>, ReadbackError> {
        #[cfg_attr(
            not(feature = "gpu"),
            expect(clippy::infallible_destructuring_match, reason = "GPUs bring another state")
        )]
        let numbers = match self.0 {
            State::Here(numbers) => numbers,
            #[cfg(feature = "gpu")]
            State::Coming(bytes) => {
                block_on(bytes).map_err(|error| error.to_string()).map(|bytes| {
                    let numbers = bytes.chunks_exact(size_of::<f32>());
                    numbers
                        .filter_map(|number| number.first_chunk())
                        .map(|n| f32::from_ne_bytes(*n))
                        .collect()
                })
            }
        };
        numbers.map_err(|reason| ReadbackError { reason })
    }
}

/// Has the copy be asked for, where the tensor is on a GPU and its elements follow each other.
#[cfg(feature = "gpu")]
fn asked(tensor: &Tensor<1>) -> Option<Readback> {
    let DispatchTensorKind::Cube(BackendTensor::Float(fused)) = tensor.clone().into_dispatch().kind
    else {
        return None;
    };
    let client = fused.client.clone();
    let plain = client.resolve_tensor_float::<CubeBackend>(fused);
    let (shape, strides) = (plain.meta.shape().clone(), plain.meta.strides().clone());
    if strides[..] != [1] {
        return None;
    }
    let (client, handle) = (plain.client, plain.handle.binding());
    let descriptor = CopyDescriptor::new(handle, shape, strides, size_of::<f32>());
    let mut is_asked = false;
    let mut bytes = Box::pin(async move {
        // The copy is asked for here, by the first poll, and waited for by the second.
        let bytes = client.read_one_tensor_async(descriptor);
        poll_fn(|_| match std::mem::replace(&mut is_asked, true) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        })
        .await;
        bytes.await
    });
    match bytes.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Pending => Some(Readback(State::Coming(bytes))),
        Poll::Ready(_) => None,
    }
}

impl fmt::Debug for Readback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Readback").field("is_here", &self.is_here()).finish_non_exhaustive()
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::tensor::{DType, Device};

    #[test]
    fn numbers_of_a_cpu_are_there_in_f32() {
        let device = Device::flex();
        let tensor =
            Tensor::<1>::from_data([1.5f32, -2.0, 0.25].as_slice(), (&device, DType::BF16));
        let readback = Readback::of(tensor);
        assert!(readback.is_here());
        assert_eq!(readback.wait(), Ok(vec![1.5, -2.0, 0.25]));
    }
}

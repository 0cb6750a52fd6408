//! Where tensors lie in a CUDA device's memory, for libraries that are given addresses.

use burn::{
    backend::{BackendTensor, DispatchDevice, DispatchTensorKind},
    tensor::{Device, Tensor},
};
use burn_cubecl::CubeBackend;
use cubecl::{
    cuda::{CudaDevice, CudaRuntime},
    server::Handle,
};
use cubecl_runtime::runtime::Runtime;

/// A tensor's memory. It stays where it is as long as this is held.
pub struct CudaMemory {
    /// Both hold the memory in place.
    _handle: Handle,
    _resource: Box<dyn std::any::Any>,
    /// Its address on the device.
    pub address: u64,
    /// Bytes of the tensor.
    pub bytes: usize,
    /// The device's number among those that CUDA sees.
    pub ordinal: usize,
}

impl std::fmt::Debug for CudaMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaMemory")
            .field("address", &format_args!("{:#x}", self.address))
            .field("bytes", &self.bytes)
            .field("ordinal", &self.ordinal)
            .finish_non_exhaustive()
    }
}

/// Why a tensor has no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaMemoryError {
    /// It is on another kind of device.
    #[error("expected a float tensor on a CUDA device, got one on {device}")]
    Elsewhere {
        /// Its device.
        device: String,
    },
    /// Its elements do not follow each other in memory.
    #[error("expected elements that follow each other in memory, got a stride of {stride}")]
    Strided {
        /// Elements between neighbors.
        stride: usize,
    },
    /// The runtime does not give it.
    #[error("the runtime gives no address: {reason}")]
    Runtime {
        /// What it says.
        reason: String,
    },
}

impl CudaMemory {
    /// Where `tensor` lies, once all that computes it has been asked for. Clones of the tensor lie there, too: what
    /// is written to the address is in all of them.
    ///
    /// Waits for the host's side of the work alone: to know that the device is done, wait for the device.
    ///
    /// # Errors
    ///
    /// When the tensor is on no CUDA device, or its elements do not follow each other.
    pub fn of(tensor: Tensor<1>) -> Result<Self, CudaMemoryError> {
        let device = format!("{:?}", tensor.device());
        let elsewhere = || CudaMemoryError::Elsewhere { device };
        let kind = tensor.without_autodiff().into_dispatch().kind;
        let DispatchTensorKind::Cube(BackendTensor::Float(fused)) = kind else {
            return Err(elsewhere());
        };
        let client = fused.client.clone();
        let plain = client.resolve_tensor_float::<CubeBackend>(fused);
        let stride = plain.meta.strides().first().copied().unwrap_or(1);
        let elements = plain.meta.shape().iter().product::<usize>();
        if stride != 1 && elements > 1 {
            return Err(CudaMemoryError::Strided { stride });
        }
        let cubecl::Device::Cuda(CudaDevice { index: ordinal, .. }) = plain.device else {
            return Err(elsewhere());
        };
        let (client, handle) = (plain.client, plain.handle);
        type Server = <CudaRuntime as Runtime>::Server;
        let resource = client.get_resource::<Server>(handle.clone());
        let resource =
            resource.map_err(|error| CudaMemoryError::Runtime { reason: error.to_string() })?;
        Ok(Self {
            address: resource.resource().ptr,
            bytes: elements * plain.dtype.size(),
            ordinal,
            _handle: handle,
            _resource: Box::new(resource),
        })
    }
}

/// Whether tensors of `device` have an address: whether it is one of CUDA's.
pub fn is_cuda(device: &Device) -> bool {
    let device = device.clone().without_autodiff();
    matches!(device.as_dispatch(), DispatchDevice::Cube(cubecl::Device::Cuda(_)))
}

//! Where tensors lie in a CUDA device's memory, for libraries that are given addresses.

use crate::{
    graph::Identity,
    ops::{copies, written},
};
use blackburn_kernels::buffer::Buffer;
use burn::{
    backend::{BackendTensor, DispatchDevice, DispatchTensor, DispatchTensorKind},
    tensor::{DType, Device, Tensor},
};
use burn_cubecl::CubeBackend;
use cubecl::{
    client::Client,
    cuda::{CudaDevice, CudaRuntime},
    server::{Handle, ServerError},
};
use cubecl_runtime::runtime::Runtime;

/// A tensor's memory. It stays where it is as long as this is held.
pub struct CudaMemory {
    /// Both hold the memory in place.
    _handle: Handle,
    _resource: Box<dyn std::any::Any + Send>,
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
    #[error(
        "expected {elements} elements that follow each other in memory, got them within {span}"
    )]
    Gaps {
        /// How many it has.
        elements: usize,
        /// Up to the last one.
        span: usize,
    },
    /// The runtime does not give it.
    #[error("the runtime gives no address: {reason}")]
    Runtime {
        /// What it says.
        reason: String,
    },
}

/// A float tensor of any number of dimensions, as libraries take it.
#[derive(Clone, Debug)]
pub struct AnyTensor {
    tensor: DispatchTensor,
    device: Device,
    dtype: DType,
    /// Which value it is. `None` on CPUs.
    pub identity: Option<Identity>,
}

impl AnyTensor {
    /// `tensor`, off the autodiff graph. Nothing is computed.
    pub fn of<const D: usize>(tensor: Tensor<D>) -> Self {
        let tensor = tensor.without_autodiff();
        let (device, dtype) = (tensor.device(), tensor.dtype());
        let identity = Identity::of(tensor.clone());
        Self { tensor: tensor.into_dispatch(), device, dtype, identity }
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

/// A tensor that is computed, or will be by what the device was asked for.
struct Resolved {
    client: Client,
    handle: Handle,
    bytes: usize,
    ordinal: usize,
}

impl Resolved {
    /// With or without gaps between its elements.
    fn of(tensor: AnyTensor, may_have_gaps: bool) -> Result<Self, CudaMemoryError> {
        let AnyTensor { tensor, device, .. } = tensor;
        let elsewhere = || CudaMemoryError::Elsewhere { device: format!("{device:?}") };
        let DispatchTensorKind::Cube(BackendTensor::Float(fused)) = tensor.kind else {
            return Err(elsewhere());
        };
        let client = fused.client.clone();
        let plain = client.resolve_tensor_float::<CubeBackend>(fused);
        let (shape, strides) = (plain.meta.shape(), plain.meta.strides());
        let elements = shape.iter().product::<usize>();
        // Up to the last element.
        let steps =
            shape.iter().zip(strides.iter()).map(|(size, stride)| (size.max(&1) - 1) * stride);
        let span = if elements == 0 { 0 } else { 1 + steps.sum::<usize>() };
        if span != elements && !may_have_gaps {
            return Err(CudaMemoryError::Gaps { elements, span });
        }
        let cubecl::Device::Cuda(CudaDevice { index: ordinal, .. }) = plain.device else {
            return Err(elsewhere());
        };
        let bytes = span * plain.dtype.size();
        // Whoever has the address may write there.
        copies::written(&plain.handle);
        written::forget(&plain.handle);
        Ok(Self { client: plain.client, handle: plain.handle, bytes, ordinal })
    }

    fn memory(self) -> Result<CudaMemory, ServerError> {
        type Server = <CudaRuntime as Runtime>::Server;
        let Self { client, handle, bytes, ordinal } = self;
        let resource = client.get_resource::<Server>(handle.clone())?;
        let address = resource.resource().ptr;
        Ok(CudaMemory { address, bytes, ordinal, _handle: handle, _resource: Box::new(resource) })
    }
}

impl CudaMemory {
    /// Where `tensors` of one device lie, once all that computes them has been asked for. Clones of a tensor lie
    /// there, too: what is written to the address is in all of them.
    ///
    /// Waits for the host's side of the work alone: to know that the device is done, wait for the device.
    ///
    /// # Errors
    ///
    /// When a tensor is on no CUDA device, or its elements do not follow each other.
    pub fn of_all(tensors: Vec<Tensor<1>>) -> Result<Vec<Self>, CudaMemoryError> {
        Self::resolved(tensors.into_iter().map(AnyTensor::of).collect(), false)
    }

    /// As [`of_all`](Self::of_all), from the first to the last element: there may be gaps in between, with anything
    /// in them, and elements may be in any order.
    ///
    /// # Errors
    ///
    /// When a tensor is on no CUDA device.
    pub fn spans_of(tensors: Vec<AnyTensor>) -> Result<Vec<Self>, CudaMemoryError> {
        Self::resolved(tensors, true)
    }

    /// Where `buffer` lies on `device`, whose client is given.
    pub(crate) fn of_buffer(
        device: &Device,
        client: &Client,
        buffer: &Buffer,
    ) -> Result<Self, CudaMemoryError> {
        let DispatchDevice::Cube(cubecl::Device::Cuda(CudaDevice { index: ordinal, .. })) =
            *device.as_dispatch()
        else {
            return Err(CudaMemoryError::Elsewhere { device: format!("{device:?}") });
        };
        let bytes = buffer.elements * buffer.dtype.size();
        let handle = buffer.handle.clone();
        Resolved { client: client.clone(), handle, bytes, ordinal }
            .memory()
            .map_err(|error| CudaMemoryError::Runtime { reason: error.to_string() })
    }

    fn resolved(
        tensors: Vec<AnyTensor>,
        may_have_gaps: bool,
    ) -> Result<Vec<Self>, CudaMemoryError> {
        let resolved: Result<Vec<Resolved>, _> =
            tensors.into_iter().map(|tensor| Resolved::of(tensor, may_have_gaps)).collect();
        let resolved = resolved?;
        let Some(client) = resolved.first().map(|first| first.client.clone()) else {
            return Ok(Vec::new());
        };
        // On the device's thread, which is asked once instead of for each.
        client
            .exclusive(move || resolved.into_iter().map(Resolved::memory).collect())
            .and_then(|memory: Result<Vec<Self>, ServerError>| memory)
            .map_err(|error| CudaMemoryError::Runtime { reason: error.to_string() })
    }
}

/// Whether tensors of `device` have an address: whether it is one of CUDA's.
pub fn is_cuda(device: &Device) -> bool {
    let device = device.clone().without_autodiff();
    matches!(device.as_dispatch(), DispatchDevice::Cube(cubecl::Device::Cuda(_)))
}

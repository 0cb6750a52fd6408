//! The device that cases run on, and what it computes in.

use crate::{buffers::dtype, find};
use blackburn_reference::{
    activation::FunctionErrors, attention::AttentionPrecision, gelu, matmul::MatmulPrecision,
    storage::Storage,
};
use cubecl::{Device, client::Client};

/// A device, as one thread sees it.
#[derive(Clone)]
pub struct Target {
    /// As kernels' launchers take it.
    pub client: Client,
    /// As Burn takes it.
    pub device: burn::tensor::Device,
    /// The types that it computes in.
    pub storages: Vec<Storage>,
}

/// A device that threads make their own [`Target`] of.
#[derive(Clone)]
pub struct Found(Device);

impl Found {
    /// The device of that name: `webgpu` or `cuda`.
    ///
    /// # Errors
    ///
    /// Why there is none.
    pub fn new(name: &str) -> Result<Self, String> {
        find(Some(name)).map(Self)
    }

    /// The device, with a stream of this thread.
    pub fn target(&self) -> Target {
        Target::new(burn::tensor::Device::new(self.0.clone()), self.0.client())
    }

    /// What the device calls itself.
    pub fn name(&self) -> String {
        self.0.client().properties().identity.name.clone()
    }
}

impl Target {
    /// A device as Burn and as kernels' launchers take it.
    pub fn new(device: burn::tensor::Device, client: Client) -> Self {
        let types = &client.properties().features.types.elem;
        let storages = Storage::ALL.into_iter().filter(|s| types.contains_key(&dtype(*s)));
        let storages = storages.collect();
        Self { client, device, storages }
    }

    /// Whether it is an NVIDIA GPU.
    pub fn is_cuda(&self) -> bool {
        self.client.name() == "cuda"
    }

    /// By how many elements memory may begin late: bindings of other runtimes begin at multiples of 256 bytes.
    pub fn offsets(&self) -> &'static [usize] {
        if self.is_cuda() { &[0, 0, 8, 64, 256] } else { &[0, 0, 256] }
    }

    /// Errors of its functions.
    pub fn functions(&self) -> FunctionErrors {
        if self.is_cuda() { FunctionErrors::CUDA } else { FunctionErrors::PORTABLE }
    }

    /// Error of its erf.
    pub fn erf_error(&self) -> f64 {
        if self.is_cuda() { gelu::CUDA_ERF_ERROR } else { gelu::PORTABLE_ERF_ERROR }
    }

    /// What a product is computed in whose family is not known: the loosest.
    pub fn product(&self, storage: Storage) -> MatmulPrecision {
        match storage {
            _ if !self.is_cuda() => MatmulPrecision::exact(storage),
            Storage::F32 => MatmulPrecision::tf32(),
            Storage::F16 | Storage::Bf16 => MatmulPrecision::tensor_core(storage),
        }
    }

    /// What attention is computed in: tensor cores, which f32 does not reach.
    pub fn attention(&self, storage: Storage) -> AttentionPrecision {
        match storage {
            _ if !self.is_cuda() => AttentionPrecision::portable(storage),
            Storage::F32 => AttentionPrecision::cuda(MatmulPrecision::exact(storage)),
            Storage::F16 | Storage::Bf16 => {
                AttentionPrecision::cuda(MatmulPrecision::tensor_core(storage))
            }
        }
    }
}

//! The device that cases run on, and what it computes in.

use crate::buffers::dtype;
use blackburn_kernels::{Family, attention::AttentionBlueprint};
use blackburn_reference::{
    activation::FunctionErrors, attention::AttentionPrecision, gelu, matmul::MatmulPrecision,
    storage::Storage,
};
use cubecl::{client::Client, ir::features::TypeUsage};

/// A device, as one thread sees it.
#[derive(Clone)]
pub struct Target {
    /// As kernels' launchers take it.
    pub client: Client,
    /// The types that it computes in.
    pub storages: Vec<Storage>,
    /// The only family that plans are taken of, or all of them.
    pub family: Option<Family>,
}

impl Target {
    /// A device, with plans of all families.
    pub fn new(client: Client) -> Self {
        let types = &client.properties().features.types.elem;
        // Vulkan converts bf16, cutting off, and has no tensors of it.
        let computes = |storage: &Storage| {
            let usage = types.get(&dtype(*storage));
            usage.is_some_and(|usage| usage.contains(TypeUsage::Arithmetic))
        };
        let storages = Storage::ALL.into_iter().filter(computes).collect();
        Self { client, storages, family: None }
    }

    /// Whether plans of a family may be taken.
    pub fn takes(&self, family: Family) -> bool {
        self.family.is_none_or(|only| only == family)
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

    /// Error of the erf that GELU has for elements of that type.
    pub fn erf_error(&self, storage: Storage) -> f64 {
        gelu::erf_error(self.is_cuda(), storage)
    }

    /// What a product is computed in whose family is not known: the loosest.
    pub fn product(&self, storage: Storage) -> MatmulPrecision {
        match storage {
            _ if !self.is_cuda() => MatmulPrecision::exact(storage),
            Storage::F32 => MatmulPrecision::tf32(),
            Storage::F16 | Storage::Bf16 => MatmulPrecision::tensor_core(storage),
        }
    }

    /// What attention is computed in: tensor cores, which f32 reaches where it need not keep all bits.
    pub fn attention(&self, storage: Storage, full_f32: bool) -> AttentionPrecision {
        match storage {
            _ if !self.is_cuda() => AttentionPrecision::portable(storage),
            Storage::F32 if !full_f32 => AttentionPrecision::cuda(MatmulPrecision::tf32()),
            Storage::F32 => AttentionPrecision::cuda(MatmulPrecision::exact(storage)),
            Storage::F16 | Storage::Bf16 => {
                let error = AttentionBlueprint::exponential_error(dtype(storage), &self.client);
                AttentionPrecision::cuda(MatmulPrecision::tensor_core(storage))
                    .with_exponentials(error)
            }
        }
    }
}

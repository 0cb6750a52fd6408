//! CubeCL's cache of compiled kernels, as its CUDA runtime (`compute/context.rs` in cubecl-cuda) fills it.

use cubecl::hash::{StableHash, StableHasher};
use cubecl_environment::persistence::Store;
use cubecl_server::{
    compiler::{KernelCacheKey, build_id_hash, compilation_store, store_compiled},
    id::KernelId,
    kernel::BufferIOAttr,
};
use serde::{Deserialize, Serialize};
use std::ffi::c_char;

/// A compiled kernel, with the fields of CubeCL's entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    pub(super) entrypoint_name: String,
    pub(super) shared_mem_bytes: usize,
    /// What the driver loads: PTX or, as here, machine code.
    pub(super) ptx: Vec<c_char>,
    pub(super) io: Option<Vec<BufferIOAttr>>,
}

/// The compiled kernels of a device's architecture.
pub(super) struct Cache {
    entries: Store<KernelCacheKey, Entry>,
    /// By source: under which key it was compiled first, perhaps by another build.
    sources: Store<StableHash, KernelCacheKey>,
    build: StableHash,
}

impl Cache {
    /// `None` where nothing is kept. `fingerprint` is the device's.
    pub(super) fn open(fingerprint: &str) -> Option<Self> {
        let namespace = format!("{fingerprint}-cpp");
        Some(Self {
            entries: compilation_store("cuda", &namespace)?,
            sources: compilation_store("cuda-second-line", namespace)?,
            build: build_id_hash(),
        })
    }

    pub(super) fn key(&self, kernel: &KernelId) -> KernelCacheKey {
        KernelCacheKey::new(kernel, self.build)
    }

    /// Whether a kernel is there by this key. It is read and let go of: it may be large.
    pub(super) fn has(&mut self, key: &KernelCacheKey) -> bool {
        self.entries.remove(key).is_some()
    }

    /// Whether a kernel of this source is there, which CubeCL then takes.
    pub(super) fn has_source(&mut self, source: StableHash) -> bool {
        self.sources.remove(&source).is_some_and(|key| self.has(&key))
    }

    pub(super) fn keep(&mut self, key: KernelCacheKey, source: StableHash, entry: Entry) {
        store_compiled(&mut self.entries, key, entry);
        store_compiled(&mut self.sources, source, key);
    }
}

/// What a source is looked up by.
pub(super) fn hash_of(source: &String) -> StableHash {
    StableHasher::hash_one(source)
}

//! CubeCL's cache of compiled kernels, as its CUDA runtime (`compute/context.rs` in cubecl-cuda) fills it.

use cubecl::hash::{StableHash, StableHasher};
use cubecl_environment::persistence::Store;
use cubecl_server::{
    compiler::{KernelCacheKey, build_id_hash, compilation_store, store_compiled},
    id::KernelId,
    kernel::BufferIOAttr,
};
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{MapAccess, Visitor},
};
use std::{ffi::c_char, fmt};

/// A compiled kernel, with the fields of CubeCL's entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    pub(super) entrypoint_name: String,
    pub(super) shared_mem_bytes: usize,
    /// What the driver loads: PTX or, as here, machine code.
    pub(super) ptx: Vec<c_char>,
    pub(super) io: Option<Vec<BufferIOAttr>>,
}

/// An [`Entry`] of which nothing is read but that it is there: machine code is kept as an array of numbers, of which each
/// takes some 20 ns to read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Present;

impl<'de> Deserialize<'de> for Present {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct First;
        impl<'de> Visitor<'de> for First {
            type Value = Present;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an entry of CubeCL's cache")
            }

            fn visit_map<A: MapAccess<'de>>(self, _: A) -> Result<Present, A::Error> {
                Ok(Present)
            }
        }
        deserializer.deserialize_map(First)
    }
}

/// The compiled kernels of a device's architecture.
pub(super) struct Cache {
    entries: Store<KernelCacheKey, Entry>,
    present: Store<KernelCacheKey, Present>,
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
            present: compilation_store("cuda", &namespace)?,
            sources: compilation_store("cuda-second-line", namespace)?,
            build: build_id_hash(),
        })
    }

    pub(super) fn key(&self, kernel: &KernelId) -> KernelCacheKey {
        KernelCacheKey::new(kernel, self.build)
    }

    /// Whether a kernel is there by this key.
    pub(super) fn has(&mut self, key: &KernelCacheKey) -> bool {
        self.present.remove(key).is_some()
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

#[cfg(test)]
mod tests {
    use super::*;
    use cubecl_environment::persistence::{CacheOption, MemoryStorage, StoreOptions};

    fn store<V>() -> Store<u32, V>
    where
        V: Serialize + for<'de> Deserialize<'de> + PartialEq + Eq + Clone,
    {
        let storage = Box::new(MemoryStorage::new("ahead::cache"));
        Store::new(StoreOptions::new().storage_with(storage, "ahead").cache(CacheOption::Lazy))
    }

    #[test]
    fn an_entry_is_found_without_its_code() {
        let (name, code) = ("kernel".to_string(), vec![-1; 100]);
        let entry = Entry { entrypoint_name: name, shared_mem_bytes: 4, ptx: code, io: None };
        assert!(store::<Entry>().insert(1, entry.clone()).is_ok());
        assert_eq!(store::<Present>().remove(&1), Some(Present));
        assert_eq!(store::<Present>().remove(&2), None);
        // It is still there for CubeCL.
        assert_eq!(store::<Entry>().remove(&1), Some(entry));
    }
}

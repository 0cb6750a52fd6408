//! Maps of masks that the layers of a pass share, while a pass is recorded or warms up for it.
//!
//! All layers of a transformer read one mask, in both passes. What runs once finds its map in each of them: somebody may
//! let go of the mask at any time, and a map that is kept holds it.

use blackburn_kernels::attention::MaskMaps;
use burn_std::id::StreamId;
use cubecl::server::Handle;
use std::{
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError},
};

/// Those of passes that run, by their queues of commands.
static ALL: LazyLock<Mutex<HashMap<StreamId, Arc<MaskMaps>>>> = LazyLock::new(Mutex::default);

fn all() -> MutexGuard<'static, HashMap<StreamId, Arc<MaskMaps>>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Maps of this queue are kept from here on. None is known yet.
pub(crate) fn begin() {
    all().insert(StreamId::current(), Arc::default());
}

/// Maps of this queue are no longer kept.
pub(crate) fn end() {
    all().remove(&StreamId::current());
}

/// Where maps of this queue are kept, if they are.
pub(super) fn current() -> Option<Arc<MaskMaps>> {
    all().get(&StreamId::current()).cloned()
}

/// Lets go of maps of this memory, which is written behind the backs of its holders.
pub(crate) fn written(memory: &Handle) {
    all().values().for_each(|maps| maps.forget(memory));
}

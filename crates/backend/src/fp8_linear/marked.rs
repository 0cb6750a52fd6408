//! Which memory is multiplied in 8 bits.
//!
//! Tensors of the stream have no room for a mark, and plans of the stream are kept for all tensors of a
//! kind. So marks belong to allocations, and are looked up when a product runs. An allocation's number is
//! never given to another one.

use super::recipe::Recipe;
use cubecl::server::Handle;
use std::{
    collections::HashMap,
    sync::{
        LazyLock, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// What a piece of memory is to products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// A weight, stored as it is multiplied forward.
    Weight,
    /// What a weight was multiplied by.
    Input,
}

/// How products of a piece of memory are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) recipe: Recipe,
    pub(crate) role: Role,
}

/// An allocation's number, and the byte at which a tensor begins in it.
type Place = (usize, u64);

struct Entry {
    mark: Mark,
    /// Whether anybody holds the memory still.
    is_held: Box<dyn Fn() -> bool + Send>,
}

#[derive(Default)]
struct Marks {
    entries: HashMap<Place, Entry>,
    /// How many entries are kept before those of memory that is gone are dropped.
    limit: usize,
}

/// Spares programs without marks the look.
static ANY: AtomicBool = AtomicBool::new(false);
static MARKS: LazyLock<Mutex<Marks>> = LazyLock::new(Mutex::default);

fn marks() -> MutexGuard<'static, Marks> {
    MARKS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn place(handle: &Handle) -> Place {
    (handle.memory.descriptor().id.value, handle.offset_start.unwrap_or(0))
}

/// Marks the memory behind `handle`. A weight stays one.
pub(crate) fn set(handle: &Handle, mark: Mark) {
    /// A model's worth.
    const LEAST: usize = 256;
    let memory = handle.memory.clone().binding().downgrade();
    let mut marks = marks();
    if marks.entries.len() >= marks.limit {
        marks.entries.retain(|_, entry| (entry.is_held)());
        marks.limit = LEAST.max(2 * marks.entries.len());
    }
    let place = place(handle);
    let is_weight = |entry: &Entry| entry.mark.role == Role::Weight;
    if mark.role == Role::Weight || !marks.entries.get(&place).is_some_and(is_weight) {
        let is_held = Box::new(move || memory.upgrade().is_some());
        marks.entries.insert(place, Entry { mark, is_held });
    }
    ANY.store(true, Ordering::Release);
}

/// The mark of the memory behind `handle`.
pub(crate) fn get(handle: &Handle) -> Option<Mark> {
    if !ANY.load(Ordering::Acquire) {
        return None;
    }
    marks().entries.get(&place(handle)).map(|entry| entry.mark)
}

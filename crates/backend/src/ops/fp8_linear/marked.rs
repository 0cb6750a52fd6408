//! Which memory is multiplied in 8 bits.
//!
//! Tensors of the stream have no room for a mark, and plans of the stream are kept for all tensors of a
//! kind. So marks belong to allocations, and are looked up when a product runs. An allocation's number is
//! never given to another one.
//!
//! An operation writes in place where it is the last to read a tensor that nobody else holds, and its result
//! would have the mark. So a mark holds the memory too, until nobody else does.

use super::recipe::Recipe;
use cubecl::server::{Handle, WeakBufferBinding};
use std::{
    collections::{HashMap, hash_map::Entry},
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
type Address = (usize, u64);

/// Marked memory.
enum Memory {
    /// Held, so that no operation writes in place there.
    Kept(Handle),
    /// A parameter's: the model holds it, and the optimizer may write there.
    Watched(WeakBufferBinding),
}

impl Memory {
    /// Whether anybody else holds it still.
    fn is_held(&self) -> bool {
        match self {
            // To write there in place, one has to be its only holder.
            Self::Kept(handle) => !handle.can_mut(),
            Self::Watched(binding) => binding.upgrade().is_some(),
        }
    }
}

#[derive(Default)]
struct Marks(HashMap<Address, (Mark, Memory)>);

impl Marks {
    /// A weight stays one, and what is held stays so: to others it seems to be somebody else's.
    fn set(&mut self, address: Address, mark: Mark, memory: Memory) {
        match self.0.entry(address) {
            Entry::Vacant(entry) => {
                entry.insert((mark, memory));
            }
            Entry::Occupied(mut entry) => {
                let (old, held) = entry.get_mut();
                if mark.role == Role::Weight || old.role == Role::Input {
                    *old = mark;
                }
                if !matches!(held, Memory::Kept(_)) {
                    *held = memory;
                }
            }
        }
        ANY.store(true, Ordering::Release);
    }
}

/// Spares programs without marks the look.
static ANY: AtomicBool = AtomicBool::new(false);
static MARKS: LazyLock<Mutex<Marks>> = LazyLock::new(Mutex::default);

fn marks() -> MutexGuard<'static, Marks> {
    MARKS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn address(handle: &Handle) -> Address {
    (handle.memory.descriptor().id.value, handle.offset_start.unwrap_or(0))
}

/// Whether matrix products look at marks.
static SERVED: AtomicBool = AtomicBool::new(false);

/// Says that Burn has taken the provider of matrix products, which look at marks.
pub(crate) fn set_served() {
    SERVED.store(true, Ordering::Release);
}

/// Whether [`set_served`] was called.
pub(super) fn is_served() -> bool {
    SERVED.load(Ordering::Acquire)
}

/// Marks the memory behind `handle`, a weight's, and holds it if nobody else does.
pub(crate) fn set_weight(handle: &Handle, recipe: Recipe) {
    let memory = if handle.can_mut() {
        Memory::Kept(handle.clone())
    } else {
        Memory::Watched(handle.clone().binding().downgrade())
    };
    release();
    marks().set(address(handle), Mark { recipe, role: Role::Weight }, memory);
}

/// Marks the memory behind `handle`, which a weight was multiplied by, and holds it.
pub(crate) fn set_input(handle: &Handle, recipe: Recipe) {
    let memory = Memory::Kept(handle.clone());
    marks().set(address(handle), Mark { recipe, role: Role::Input }, memory);
}

/// The mark of the memory behind `handle`.
pub(crate) fn get(handle: &Handle) -> Option<Mark> {
    if !ANY.load(Ordering::Acquire) {
        return None;
    }
    marks().0.get(&address(handle)).map(|(mark, _)| *mark)
}

/// Lets go of memory that nobody else holds. Each marked product does so: what it does not free waits for the
/// next one.
pub(crate) fn release() {
    marks().0.retain(|_, (_, memory)| memory.is_held());
}

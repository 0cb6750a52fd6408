//! Which memory is multiplied in 8 bits, and what has been cast of it.
//!
//! Tensors of the stream have no room for a mark, and plans of the stream are kept for all tensors of a
//! kind. So marks belong to allocations, and are looked up when a product runs.
//!
//! An operation writes in place where it is the last to read a tensor that nobody else holds, and its result
//! would have the mark. So a mark holds the memory too, until nobody else does.
//!
//! A layer's three products read three matrices, each twice. A [`Cast`] of both layouts is kept with the memory
//! for the second time, and for other layers with the same input. It holds the memory as well, so that operations
//! leave it as it was cast. What writes there all the same calls [`forget_casts`] or [`written()`]: optimizers, replays
//! of recordings, and what overwrites their inputs.

use super::{
    cast_once::{Cast, CastKey, Copies, Operand},
    codes::Quantized,
    recipe::{Recipe, Scaling},
    tally::count_unmet,
};
use crate::tensors::{Address, address};
use blackburn_kernels::magnitude::Magnitudes;
use cubecl::server::{Handle, WeakBufferBinding};
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

/// What is known of a piece of memory.
#[derive(Default)]
struct Known {
    /// None of a layer's output gradient, which is cast and no more.
    mark: Option<Mark>,
    /// Whether a product has looked at the mark.
    is_met: bool,
    /// Held, so that no operation writes in place there.
    held: Option<Handle>,
    /// A parameter's: the model holds it, and the optimizer may write there.
    watched: Option<WeakBufferBinding>,
    cast: Option<Cast>,
    /// The largest magnitudes of so many elements from there on.
    magnitudes: Option<(usize, Magnitudes)>,
}

impl Known {
    /// Whether anybody else holds the memory still.
    fn is_held(&self) -> bool {
        match (&self.held, &self.watched) {
            // To write there in place, one has to be its only holder.
            (Some(handle), _) => !handle.can_mut(),
            (None, Some(binding)) => binding.upgrade().is_some(),
            (None, None) => false,
        }
    }

    /// Whether it is a weight that no product has read.
    fn is_unmet(&self) -> bool {
        !self.is_met && self.mark.is_some_and(|mark| mark.role == Role::Weight)
    }

    /// A weight stays one.
    fn set(&mut self, mark: Mark) {
        let is_weight = self.mark.is_some_and(|old| old.role == Role::Weight);
        if mark.role == Role::Weight || !is_weight {
            self.mark = Some(mark);
        }
        ANY.store(true, Ordering::Release);
    }

    /// Holds the memory as long as it is marked.
    fn hold(&mut self, handle: Handle) {
        self.held = Some(handle);
        self.watched = None;
    }

    /// Whether anything is left without its cast.
    fn forget_cast(&mut self) -> bool {
        self.cast = None;
        self.magnitudes = None;
        if self.watched.is_some() {
            self.held = None;
        }
        self.mark.is_some()
    }
}

/// Spares programs without marks the look.
static ANY: AtomicBool = AtomicBool::new(false);
static MARKS: LazyLock<Mutex<HashMap<Address, Known>>> = LazyLock::new(Mutex::default);

fn marks() -> MutexGuard<'static, HashMap<Address, Known>> {
    MARKS.lock().unwrap_or_else(PoisonError::into_inner)
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
    let held = handle.can_mut().then(|| handle.clone());
    release();
    let mut marks = marks();
    let known = marks.entry(address(handle)).or_default();
    count_unmet(u64::from(known.is_unmet()));
    known.set(Mark { recipe, role: Role::Weight });
    known.is_met = false;
    match held {
        Some(held) => known.hold(held),
        None if known.held.is_none() => {
            known.watched = Some(handle.clone().binding().downgrade());
        }
        None => {}
    }
}

/// Marks the memory behind `handle`, which a weight was multiplied by, and holds it.
pub(crate) fn set_input(handle: &Handle, recipe: Recipe) {
    let mut marks = marks();
    let known = marks.entry(address(handle)).or_default();
    known.set(Mark { recipe, role: Role::Input });
    known.hold(handle.clone());
}

/// The mark of the memory behind `handle`, for a product.
pub(crate) fn get(handle: &Handle) -> Option<Mark> {
    if !ANY.load(Ordering::Acquire) {
        return None;
    }
    let mut marks = marks();
    let known = marks.get_mut(&address(handle))?;
    known.is_met = true;
    known.mark
}

/// The codes of the memory behind `handle` that were kept for `key`, if they are there in those `copies`.
pub(crate) fn kept_cast(handle: &Handle, key: &CastKey, copies: Copies) -> Option<Quantized> {
    let mut marks = marks();
    let known = marks.get(&address(handle))?;
    let codes = known.cast.as_ref()?.codes(key, copies)?;
    // An output's gradient is read twice, and its memory is free then.
    if known.mark.is_none() {
        marks.remove(&address(handle));
    }
    Some(codes)
}

/// Keeps `codes` of the memory behind `handle`, and the memory as it is.
///
/// Forward copies of other inputs go: layers that share an input follow each other.
pub(crate) fn keep_cast(handle: &Handle, key: CastKey, operand: Operand, codes: Quantized) {
    let mut marks = marks();
    if operand == Operand::Input {
        marks.values_mut().filter_map(|known| known.cast.as_mut()).for_each(Cast::end_forward);
    }
    let known = marks.entry(address(handle)).or_default();
    known.held.get_or_insert_with(|| handle.clone());
    known.cast = Some(Cast::new(key, operand, codes));
}

/// Whether the products of any weight round tensors by one scale each.
pub(crate) fn rounds_tensors() -> bool {
    if !ANY.load(Ordering::Acquire) {
        return false;
    }
    release();
    let marks = marks();
    if marks.is_empty() {
        ANY.store(false, Ordering::Release);
    }
    let of_tensors = |mark: &Mark| mark.recipe.scaling == Scaling::Tensor;
    marks.values().any(|known| known.mark.as_ref().is_some_and(of_tensors))
}

/// Keeps what is known of so many elements behind `handle`, and the memory as it is.
pub(crate) fn keep_magnitudes(handle: &Handle, known: (usize, Magnitudes)) {
    let mut marks = marks();
    let entry = marks.entry(address(handle)).or_default();
    entry.held.get_or_insert_with(|| handle.clone());
    entry.magnitudes = Some(known);
}

/// The magnitudes of the `elements` behind `handle`, if they are known. They are asked for once: the cast is kept.
pub(crate) fn take_magnitudes(handle: &Handle, elements: usize) -> Option<Magnitudes> {
    let mut marks = marks();
    let (known, magnitudes) = marks.get_mut(&address(handle))?.magnitudes.take()?;
    (known == elements).then_some(magnitudes)
}

/// Lets go of all casts: memory is written behind the backs of its holders.
pub(crate) fn forget_casts() {
    if ANY.load(Ordering::Acquire) {
        marks().retain(|_, known| known.forget_cast());
    }
}

/// Lets go of casts of what lies in this memory, which is written behind the backs of its holders.
pub(crate) fn written(memory: &Handle) {
    if ANY.load(Ordering::Acquire) {
        let (allocation, _) = address(memory);
        marks().retain(|(of, _), known| *of != allocation || Known::forget_cast(known));
    }
}

/// Lets go of memory that nobody else holds. Each marked product does so: what it does not free waits for the
/// next one.
pub(crate) fn release() {
    let mut unmet = 0;
    marks().retain(|_, known| {
        let is_held = known.is_held();
        unmet += u64::from(!is_held && known.is_unmet());
        is_held
    });
    count_unmet(unmet);
}

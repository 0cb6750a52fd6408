//! Which memory is a copy of which.

use crate::tensors::{Address, address};
use blackburn_kernels::buffer::Rows;
use burn_std::id::StreamId;
use cubecl::server::Handle;
use std::{
    collections::{HashMap, HashSet},
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
};

/// A parameter's copy.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    /// The number of its [`Copies`](super::Copies).
    copies: u32,
    rows: Rows,
    /// Set while the copy is as the parameter is.
    current: Option<Current>,
}

impl Known {
    /// Its memory.
    pub(crate) fn rows(&self) -> Rows {
        self.rows.clone()
    }

    fn is_at(&self, place: Address) -> bool {
        address(&self.rows.buffer.handle) == place
    }
}

/// That a copy is as its parameter is.
#[derive(Clone, Debug)]
struct Current {
    /// Held, so that no operation writes in place there.
    _parameter: Handle,
    /// Whose commands wrote the copy. Those of another stream may be done before.
    stream: StreamId,
}

#[derive(Default)]
struct All {
    /// The numbers of those that are not dropped.
    living: HashSet<u32>,
    /// Copies by the places of their parameters.
    by_parameter: HashMap<Address, Vec<Known>>,
    is_recording: bool,
    /// What was written while a recording was made.
    replayed: HashSet<Address>,
}

static ALL: LazyLock<Mutex<All>> = LazyLock::new(Mutex::default);

fn all() -> MutexGuard<'static, All> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

impl All {
    /// Lets go of copies that are not `kept`.
    fn retain(&mut self, kept: impl Fn(&Known) -> bool) {
        self.by_parameter.retain(|_, copies| {
            copies.retain(&kept);
            !copies.is_empty()
        });
    }
}

/// Copies with that number begin.
pub(super) fn begin(number: u32) {
    all().living.insert(number);
}

/// Copies with that number are no more.
pub(super) fn end(number: u32) {
    let mut all = all();
    all.living.remove(&number);
    all.retain(|known| known.copies != number);
}

/// Recording begins, or is over. No copy is known behind it: where a recording fails, CubeCL counts the memory that it
/// read as failed, and a step that has such a copy among its tensors would be skipped.
pub(crate) fn record(is_recording: bool) {
    let mut all = all();
    all.is_recording = is_recording;
    all.by_parameter.clear();
}

/// Whether the memory `copy` is as that of `parameter` is, for commands of this stream.
pub(crate) fn is_current(copy: &Handle, parameter: &Handle) -> bool {
    let (place, stream) = (address(copy), StreamId::current());
    let all = all();
    if all.is_recording {
        return false;
    }
    let copies = all.by_parameter.get(&address(parameter));
    let known = copies.and_then(|copies| copies.iter().find(|known| known.is_at(place)));
    known.and_then(|known| known.current.as_ref()).is_some_and(|it| it.stream == stream)
}

/// Whether `parameter` has copies.
pub(crate) fn has(parameter: &Handle) -> bool {
    all().by_parameter.contains_key(&address(parameter))
}

/// `copy` has been made of `parameter`, one of the `copies` with that number.
pub(crate) fn register(copies: u32, copy: Rows, parameter: &Handle) {
    let (place, of) = (address(&copy.buffer.handle), address(parameter));
    let mut all = all();
    let is_replayed = [place, of].iter().any(|place| all.replayed.contains(place));
    if all.is_recording || is_replayed || !all.living.contains(&copies) {
        return;
    }
    let is_known = |known: &Known| known.is_at(place);
    if all.by_parameter.get(&of).is_some_and(|known| known.iter().any(is_known)) {
        return;
    }
    // It may have been another parameter's, or a parameter itself.
    all.retain(|known| !known.is_at(place));
    for known in all.by_parameter.get_mut(&place).into_iter().flatten() {
        known.current = None;
    }
    all.by_parameter.entry(of).or_default().push(Known { copies, rows: copy, current: None });
}

/// Takes the copies of a parameter that is about to be written.
pub(crate) fn take(parameter: &Handle) -> Vec<Known> {
    let place = address(parameter);
    let mut all = all();
    let mut copies = all.by_parameter.remove(&place).unwrap_or_default();
    if all.is_recording {
        all.replayed.insert(place);
        copies.clear();
    }
    copies.iter_mut().for_each(|known| known.current = None);
    copies
}

/// Gives copies back that were taken, the first of which is as `parameter` is, by commands of this stream.
pub(crate) fn keep(mut copies: Vec<Known>, parameter: &Handle) {
    let Some(first) = copies.first_mut() else { return };
    let mut all = all();
    first.current = Some(Current { _parameter: parameter.clone(), stream: StreamId::current() });
    copies.retain(|known| all.living.contains(&known.copies));
    all.by_parameter.insert(address(parameter), copies);
}

/// Memory is written, whoever holds it, by something that makes no copy.
pub(crate) fn written(memory: &Handle) {
    let place = address(memory);
    let mut all = all();
    if all.is_recording {
        all.replayed.insert(place);
        all.by_parameter.remove(&place);
        all.retain(|known| !known.is_at(place));
        return;
    }
    for (of, copies) in &mut all.by_parameter {
        for known in copies {
            if *of == place || known.is_at(place) {
                known.current = None;
            }
        }
    }
}

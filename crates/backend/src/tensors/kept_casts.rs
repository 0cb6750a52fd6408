//! Casts of parameters that a step has made for the next pass.
//!
//! A policy of mixed precision has each parameter cast where a pass reads it: a launch each, of which a transformer has
//! more than of products. A step of the optimizer has the parameters at hand, and writes their casts as well. So casts
//! tell which parameters they read, a step looks here which of its own are among them, and the next pass finds their casts.
//!
//! Casts belong to values of the stream: what is computed anew has another [`TensorId`], even in the same memory. What
//! writes to memory behind the backs of its holders says so. A pass that is recorded, or warms up for it, neither takes
//! casts nor asks for any: its replays would read them again, of parameters that have changed.

use super::{Address, Tensors, address, consume, cube_tensor, known_output, register_cube_tensor};
use crate::served::count;
use burn_cubecl::tensor::CubeTensor;
use burn_ir::{TensorId, TensorIr};
use burn_std::{DType, id::StreamId};
use cubecl::server::{Handle, WeakBufferBinding};
use std::{
    collections::HashMap,
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
};

/// Casts that are noted without a step in between. More are of inputs, and of no parameters that a step looks for.
const MOST_WANTED: usize = 1 << 16;

/// A cast that is ready.
struct Kept {
    cast: CubeTensor,
    /// Whose operations it saves.
    by: &'static str,
    /// The parameter's memory. When nobody holds that any more, nobody asks for the cast.
    place: Address,
    parameter: WeakBufferBinding,
}

/// Casts of a queue of commands.
#[derive(Default)]
struct Casts {
    /// Parameters that were cast since the last step, and to what.
    wanted: HashMap<TensorId, DType>,
    kept: HashMap<TensorId, Kept>,
    /// Whether some step has looked for parameters: others have no use for them.
    has_steps: bool,
    /// Whether a step was the last to look.
    is_stepped: bool,
    is_paused: bool,
}

impl Casts {
    /// A pass has begun, if a step was the last to look.
    fn begin_pass(&mut self) {
        if std::mem::take(&mut self.is_stepped) {
            self.wanted.clear();
            self.kept.retain(|_, kept| kept.parameter.upgrade().is_some());
        }
    }
}

static ALL: LazyLock<Mutex<HashMap<StreamId, Casts>>> = LazyLock::new(Mutex::default);

fn all() -> MutexGuard<'static, HashMap<StreamId, Casts>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes `out`, a cast of the parameter `source`, what a step has written, and says whether there was anything. If not, the
/// next step knows that it is asked for.
pub(crate) fn give(tensors: &mut Tensors, source: &TensorIr, out: &TensorIr) -> bool {
    let Some(id) = tensors.tensors.get(&source.id).map(|known| known.id) else { return false };
    let kept = {
        let mut all = all();
        let Some(casts) = all.get_mut(&StreamId::current()) else { return false };
        if casts.is_paused || !casts.has_steps {
            return false;
        }
        casts.begin_pass();
        if casts.wanted.len() >= MOST_WANTED {
            casts.wanted.clear();
        }
        casts.wanted.insert(id, out.dtype);
        casts.kept.remove(&id)
    };
    let Some(Kept { cast, by, .. }) = kept else { return false };
    let is_it = cast.dtype == out.dtype
        && known_output(tensors, out, by).is_ok_and(|known| known.shape == *cast.meta.shape());
    let is_given = is_it && register_cube_tensor(tensors, out, cast, by).is_ok();
    if is_given {
        consume(tensors, source);
        count(by, 1);
    }
    is_given
}

/// What `parameter`, which a step is about to write, was cast to since the last step. What was kept of it goes.
pub(crate) fn wanted(tensors: &Tensors, parameter: &TensorIr) -> Option<DType> {
    let id = tensors.tensors.get(&parameter.id)?.id;
    let mut all = all();
    let casts = all.entry(StreamId::current()).or_default();
    (casts.has_steps, casts.is_stepped) = (true, true);
    casts.kept.remove(&id);
    casts.wanted.remove(&id).filter(|_| !casts.is_paused)
}

/// Keeps `cast` for a cast of `parameter`, which has been made by a step of that name.
pub(crate) fn keep(tensors: &Tensors, parameter: &TensorIr, cast: CubeTensor, by: &'static str) {
    let Some(id) = tensors.tensors.get(&parameter.id).map(|known| known.id) else { return };
    let Ok(stepped) = cube_tensor(tensors, parameter, by) else { return };
    let place = address(&stepped.handle);
    let parameter = stepped.handle.binding().downgrade();
    let mut all = all();
    let casts = all.entry(StreamId::current()).or_default();
    casts.kept.insert(id, Kept { cast, by, place, parameter });
}

/// Lets go of all casts, and keeps none of this queue until [`resume`].
pub(crate) fn pause() {
    forget();
    all().entry(StreamId::current()).or_default().is_paused = true;
}

/// Casts of this queue are kept again.
pub(crate) fn resume() {
    all().entry(StreamId::current()).or_default().is_paused = false;
}

/// Lets go of all casts: memory is written behind the backs of its holders.
pub(crate) fn forget() {
    all().values_mut().for_each(|casts| casts.kept.clear());
}

/// Lets go of casts of what lies in this memory, which is written behind the backs of its holders.
pub(crate) fn written(memory: &Handle) {
    let (allocation, _) = address(memory);
    let is_other = |_: &TensorId, kept: &mut Kept| kept.place.0 != allocation;
    all().values_mut().for_each(|casts| casts.kept.retain(is_other));
}

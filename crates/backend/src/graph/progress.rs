//! How far a replay has come, counted on the device.
//!
//! Whoever wants a tensor of a recorded pass before the pass is over, such as a gradient that other GPUs wait for, has to
//! know when it is there. A graph tells nobody. So while a pass is recorded, [`Milestones`] watches what Burn's fusion
//! runs, and puts a kernel that counts behind the operations whose results are asked for. Operations that launch nothing
//! give the same memory another shape, and are seen through. [`Progress`] then says up to
//! where a replay has to have counted for a tensor to be there.

use super::{GraphError, Identity};
use blackburn_kernels::{ahead::is_looking, buffer::Buffer, milestone::milestone};
use burn::tensor::Device;
use burn_fusion::observer::{BlockOperations, FusionObservation, FusionObserver};
use burn_ir::{OperationIr, TensorId, TensorIr};
use cubecl::{
    client::Client,
    ir::{ElemType, UIntKind},
    logging::{LaunchObservation, LaunchObserver},
};
use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    thread::{self, ThreadId},
};

/// Puts milestones into what is recorded as long as this is held.
///
/// Made before [`prepare`](super::prepare), since it takes memory. The kernel that counts has run once then.
pub struct Milestones {
    watch: Arc<Watch>,
    _observations: (FusionObservation, LaunchObservation),
}

impl Milestones {
    /// For tensors of `shapes`, with a milestone behind every `every` elements of them. A milestone takes the device a few
    /// microseconds.
    ///
    /// # Errors
    ///
    /// [`GraphError`] on devices that record no graphs, and where the kernel cannot be launched.
    pub fn new(
        device: &Device,
        shapes: HashSet<Vec<usize>>,
        every: usize,
    ) -> Result<Self, GraphError> {
        let device = device.clone().without_autodiff();
        let client = super::client(&device).ok_or_else(|| super::unsupported(&device))?;
        let dtype = ElemType::UInt(UIntKind::U32);
        let handle = client.create_from_slice(&0u32.to_ne_bytes());
        let counter = Buffer { handle, elements: 1, dtype };
        // Once outside the recording, in which nothing may be compiled.
        milestone(&client, &counter).map_err(|error| GraphError::Refused {
            step: "the first milestone",
            reason: error.to_string(),
        })?;
        let shapes = shapes.iter().map(|shape| without_ones(shape)).collect();
        let watch = Watch { device, client, counter, every, shapes, state: Mutex::default() };
        let watch = Arc::new(watch);
        let observations =
            (FusionObservation::new(watch.clone()), LaunchObservation::new(watch.clone()));
        Ok(Self { watch, _observations: observations })
    }

    /// Begins, right behind [`start`](super::start).
    pub fn begin(&self) {
        self.watch.state().is_on = true;
    }

    /// What was recorded, right behind [`stop`](super::stop).
    pub fn end(self) -> Progress {
        let Watch { device, client, counter, state, .. } = &*self.watch;
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        state.is_on = false;
        let State { behind, milestones, .. } = std::mem::take(&mut *state);
        Progress {
            device: device.clone(),
            #[cfg(feature = "cuda")]
            address: std::sync::OnceLock::new(),
            client: client.clone(),
            counter: counter.clone(),
            behind,
            milestones,
            // One came by before the recording.
            counted: AtomicU32::new(1),
        }
    }
}

/// What watches the fusion's blocks while a pass is recorded.
struct Watch {
    device: Device,
    client: Client,
    counter: Buffer,
    /// Elements of asked tensors from one milestone to the next.
    every: usize,
    shapes: HashSet<Vec<usize>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    is_on: bool,
    /// Of each thread.
    running: HashMap<ThreadId, Running>,
    /// Made since the last milestone.
    made: Vec<TensorId>,
    elements: usize,
    /// Milestones so far.
    milestones: u32,
    /// The milestone behind each tensor.
    behind: HashMap<TensorId, u32>,
}

/// The block that runs.
#[derive(Default)]
struct Running {
    /// What it makes of what is asked for, with the number of elements.
    makes: Vec<(TensorId, usize)>,
    /// Its only input and its only output, which is the same memory if it launches nothing.
    view: Option<[TensorId; 2]>,
    launches: bool,
}

impl Watch {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_asked(&self, tensor: &TensorIr) -> bool {
        self.shapes.contains(&without_ones(&tensor.shape))
    }
}

/// Sizes other than one: gradients come with further dimensions, which are taken away at the end of a pass.
fn without_ones(shape: &[usize]) -> Vec<usize> {
    shape.iter().copied().filter(|size| *size != 1).collect()
}

impl State {
    /// The tensor `view` has the memory of another one.
    fn see_through(&mut self, [of, view]: [TensorId; 2]) {
        match self.behind.get(&of).copied() {
            Some(milestone) => _ = self.behind.insert(view, milestone),
            None if self.made.contains(&of) => self.made.push(view),
            None => {}
        }
    }
}

impl FusionObserver for Watch {
    fn registered(&self, _operation: &OperationIr) {}

    fn block_starts(&self, block: BlockOperations<'_>) {
        let mut state = self.state();
        if !state.is_on {
            return;
        }
        let mut operations = block.iter();
        let view = match (operations.next(), operations.next()) {
            (Some(only), None) => match (single(only.inputs()), single(only.outputs())) {
                (Some(of), Some(view)) if elements(of) == elements(view) => Some([of.id, view.id]),
                _ => None,
            },
            _ => None,
        };
        let outputs = block.iter().flat_map(OperationIr::outputs);
        let asked = outputs.filter(|output| self.is_asked(output));
        let makes = asked.map(|output| (output.id, elements(output))).collect();
        let running = Running { makes, view, launches: false };
        state.running.insert(thread::current().id(), running);
    }

    fn block_ran(&self) {
        let mut state = self.state();
        let Some(running) = state.running.remove(&thread::current().id()) else { return };
        let Running { makes, view, launches } = running;
        if let (Some(view), false) = (view, launches) {
            return state.see_through(view);
        }
        for (id, elements) in makes {
            state.made.push(id);
            state.elements += elements;
        }
        if state.elements < self.every || state.made.is_empty() {
            return;
        }
        state.elements = 0;
        let made = std::mem::take(&mut state.made);
        // The launch is observed, too.
        drop(state);
        // It was launched before, so it is not refused.
        if milestone(&self.client, &self.counter).is_err() {
            return;
        }
        let mut state = self.state();
        state.milestones += 1;
        let milestone = state.milestones;
        state.behind.extend(made.into_iter().map(|id| (id, milestone)));
    }
}

impl LaunchObserver for Watch {
    fn launched(&self, _kernel: &'static str) {
        if is_looking() {
            return;
        }
        if let Some(running) = self.state().running.get_mut(&thread::current().id()) {
            running.launches = true;
        }
    }
}

fn elements(tensor: &TensorIr) -> usize {
    tensor.shape.num_elements()
}

/// The only one, if there is only one.
fn single<T>(mut all: impl Iterator<Item = T>) -> Option<T> {
    all.next().filter(|_| all.next().is_none())
}

impl std::fmt::Debug for Milestones {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Milestones").finish_non_exhaustive()
    }
}

/// How far replays of a recording have come: a counter on the device, and when which tensor is there.
pub struct Progress {
    #[cfg_attr(
        not(feature = "cuda"),
        allow(dead_code, reason = "only a build with CUDA asks for the address")
    )]
    device: Device,
    #[cfg(feature = "cuda")]
    address: std::sync::OnceLock<u64>,
    client: Client,
    counter: Buffer,
    behind: HashMap<TensorId, u32>,
    /// Of each replay.
    milestones: u32,
    /// Up to where the counter has come when all replays are done that were asked for.
    counted: AtomicU32,
}

impl Progress {
    /// The milestone behind a tensor that the recording makes, counted from 1 in the order in which they come. `None`
    /// where there is none: the tensor is there at the end.
    pub fn milestone(&self, tensor: Identity) -> Option<u32> {
        self.behind.get(&tensor.id).copied()
    }

    /// What the counter has reached or passed, modulo 2^32, once the replay that was asked for last is past `milestone`.
    pub fn count_at(&self, milestone: u32) -> u32 {
        let end = self.counted.load(Ordering::Relaxed);
        end.wrapping_sub(self.milestones).wrapping_add(milestone)
    }

    /// What the counter has counted by now, behind all that this queue was asked for.
    ///
    /// # Errors
    ///
    /// [`GraphError::Refused`] where the device does not give it.
    pub fn count(&self) -> Result<u32, GraphError> {
        let read = self.client.read_one(self.counter.handle.clone());
        let refused = |reason| GraphError::Refused { step: "reading of the counter", reason };
        let bytes = read.map_err(|error| refused(error.to_string()))?;
        let bytes = bytes.first_chunk().ok_or_else(|| refused("too few bytes".into()))?;
        Ok(u32::from_ne_bytes(*bytes))
    }

    /// The address of the counter, four bytes in the device's memory.
    ///
    /// # Errors
    ///
    /// When the runtime does not give it.
    #[cfg(feature = "cuda")]
    pub fn counter(&self) -> Result<u64, crate::cuda_memory::CudaMemoryError> {
        use crate::cuda_memory::CudaMemory;
        if let Some(address) = self.address.get() {
            return Ok(*address);
        }
        let memory = CudaMemory::of_buffer(&self.device, &self.client, &self.counter)?;
        // The buffer keeps it there.
        Ok(*self.address.get_or_init(|| memory.address))
    }

    /// To be said behind each replay of the recording.
    pub fn replayed(&self) {
        self.counted.fetch_add(self.milestones, Ordering::Relaxed);
    }
}

impl std::fmt::Debug for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Progress").field("milestones", &self.milestones).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_shape_of_a_tensor_is_there_when_the_tensor_is() {
        let [made, view, waiting, its_view, unknown, another] =
            [1, 2, 3, 4, 5, 6].map(TensorId::new);
        let mut state = State { made: vec![waiting], ..State::default() };
        state.behind.insert(made, 7);
        for pair in [[made, view], [waiting, its_view], [unknown, another]] {
            state.see_through(pair);
        }
        assert_eq!(state.behind.get(&view), Some(&7));
        assert_eq!(state.made, [waiting, its_view]);
        assert_eq!(state.behind.len(), 2);
    }

    #[test]
    fn sizes_of_one_are_left_out() {
        assert_eq!(without_ones(&[1, 768, 1, 64]), [768, 64]);
        assert!(without_ones(&[1, 1]).is_empty());
    }
}

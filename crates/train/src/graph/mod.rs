//! Forward and backward pass as one command to the device.
//!
//! A training step is a thousand kernels and more, and the host takes tens of microseconds to ask for
//! one, so small models wait for the host. A pass asks for the same kernels in every step. [`GradientGraph`]
//! has the device record them once, and replays the recording: on CUDA as a graph, one command for all.
//! [`InferenceGraph`] does so with a step that has no gradients.
//!
//! ```
//! use blackburn_train::{graph::GradientGraph, precision::PrecisionPolicy};
//! use burn::{nn::LinearConfig, optim::{GradientsParams, SgdConfig}, prelude::*};
//!
//! let device = Device::flex().autodiff();
//! let mut model = LinearConfig::new(4, 1).init(&device);
//! let mut optimizer = SgdConfig::new().init();
//! let mut graph = GradientGraph::new(PrecisionPolicy::default());
//! for _ in 0..3 {
//!     let batch = Tensor::<2>::ones([3, 4], &device);
//!     let (loss, gradients) = graph.run(&model, batch, |model, batch| {
//!         let loss = model.forward(batch).mean();
//!         let value = loss.clone().inner();
//!         (value, GradientsParams::from_grads(loss.backward(), model))
//!     })?;
//!     model = optimizer.step(0.1, model, gradients);
//!     println!("{loss}");
//! }
//! # Ok::<(), blackburn_train::graph::GraphError>(())
//! ```
//!
//! # What a pass may do
//!
//! A replay does what was recorded, at the same addresses. So a pass has to be a function of two things:
//! the model, and the tensors in `inputs`.
//!
//! A pass may change running statistics of the model, as Burn's `BatchNorm` does. A replay changes them, too: the
//! model that you hand in has the new ones after each call.
//!
//! **Pass everything that changes from call to call in `inputs`, as a tensor.** A number or a tensor that
//! the closure captures stays what it was at the recording. This goes for a loss scale, for a coefficient
//! that follows a schedule, and for a mask. The book shows how a loss scale is passed.
//!
//! Two things are not recorded, and then passes run as they are, with a warning that gives the reason:
//!
//! - a pass that changes something else of the model;
//! - a pass that reads or makes a value on the host (`into_scalar`, `from_data`).
//!
//! Random numbers are recorded: those of dropout, and of `Distribution` in floating point. Each replay draws
//! others. The numbers of a call follow from [`random::seed`](blackburn_backend::random::seed), whether the
//! pass is replayed or runs. Random numbers of other kinds (integers, `f64`) repeat in each replay, so passes
//! with these are not recorded.
//!
//! A model may change between calls. Numbers of parameters are copied before each replay. Anything else
//! ends the recording, and a new one is made after two passes: a layer that was frozen, a mask in an `Int`
//! or `Bool` parameter that was replaced, a field that was set. Fields count if the module prints them, as
//! derived modules do. A field that prints a lot makes each step slower. A model that differs in each call
//! is not recorded.
//!
//! # What is checked, and when
//!
//! | when | what is compared | if it differs |
//! |---|---|---|
//! | after each pass of the warm-up | what the model holds, before and after | not recorded, a warning |
//! | at the recording | outputs, gradients and running statistics of a replay, with those of a pass that ran | not recorded, a warning |
//! | at replay 2 | the same, with what the closure captures by then | passes run from then on, a warning |
//! | at replays 10, 100, 1000 and so on | the same | [`GraphError::Stale`]; later calls run the pass |
//!
//! A check takes the time of a few passes: the pass runs in the memory of the recording, which is made anew
//! afterwards. Gradients are compared by a [sketch](blackburn_backend::sketch) of 1 MiB, to 1 % of what they are apart.
//!
//! **What can still go wrong:** a captured value that stays the same up to replay 2 and changes later goes
//! unnoticed until the next check, and steps in between use the old value. The error says how many. It is an
//! error, and not a warning, since the model was trained with wrong gradients: go back to a checkpoint.
//! Differences below rounding are not seen: 0.2 % of the norm in f32 and f16, 1.6 % in bf16.
//!
//! # What else runs without the recording
//!
//! Batches of another shape, devices without graphs (CPUs), and threads other than the one that recorded.
//! Threads may take turns: when the thread changes, the device is waited for. Use results on the thread that
//! called [`run`](GradientGraph::run).
//!
//! Gradients of a replay are the recording's own memory. As long as you keep some, passes run as they are,
//! and yours stay what they are. [`GradientSum`](crate::accumulate::GradientSum) makes a copy, so that
//! replays go on.
//!
//! # What it costs
//!
//! Parameters are copied before each pass to where the recording reads them, in the type that the policy
//! computes in. That replaces the casts that a pass over f32 masters begins with. It takes 2 bytes a
//! parameter for bf16 and f16, and 4 for f32. Running statistics are copied before and after each pass. Memory of
//! the recorded activations stays reserved.

mod compare;
mod error;
mod held;
mod inference;
mod outline;
mod recording;
mod repeat;
mod state;
mod status;
mod tensors;

pub use error::GraphError;
pub use inference::InferenceGraph;
pub use status::GraphStatus;
pub use tensors::{PassTensors, Squares, TensorLayout};

use crate::precision::PrecisionPolicy;
use blackburn_backend::{
    graph::{self, GraphError as DeviceError, Queue},
    random::KeyedPass,
};
use burn::{
    module::{Module, ModuleDisplay},
    optim::GradientsParams,
    tensor::{Device, Int, Tensor},
};
use compare::{Limits, Noise, Results, Schedule, Trace, Verdict, judge};
use error::NoRecording;
use held::HeldModel;
use outline::Outline;
use recording::{Given, Left, Recording, Terms};
use state::State;
use std::{cell::Cell, sync::Arc};

/// Passes before the first recording. Burn's fusion meets a stream of operations a few times before it
/// has settled how to run it, and kernels are compiled then. A recording runs the pass two or three more times
/// before it starts.
const WARM_UP_PASSES: u32 = 2;
/// Recordings that are tried.
const ATTEMPTS: u32 = 3;
/// How often a model may change before a recording of it was replayed ten times.
const RESTARTS: u32 = 8;

/// Runs a model's forward and backward pass, and after a few times replays it.
///
/// `I` and `O` are the tensors that a pass is given and gives: see [`PassTensors`].
#[derive(Debug)]
pub struct GradientGraph<M, I, O> {
    policy: PrecisionPolicy,
    held: Option<HeldModel<M>>,
    /// Of the model that the warm-up or the recording is for.
    outline: Option<Outline>,
    /// What its passes write.
    state: State,
    /// Times that the model has changed, one soon after the other.
    restarts: u32,
    /// Where the last call put its commands.
    queue: Option<Queue>,
    /// What random numbers of a pass are drawn by.
    keyed: Arc<KeyedPass>,
    /// Whether the last pass that ran drew some.
    draws: bool,
    /// Of the replays of this model's pass.
    schedule: Schedule,
    /// Elements of gradients between two milestones.
    milestones: Option<usize>,
    /// Bytes that recordings lacked.
    spare: usize,
    /// How far passes were apart when the first recording was made, until there is a second.
    noise: Option<Noise>,
    /// Whether the last call gave what a replay left.
    is_replayed: bool,
    stage: Stage<I, O>,
}

#[derive(Debug)]
enum Stage<I, O> {
    /// Passes run, so many until now, and so many recordings have failed.
    WarmUp {
        passes: u32,
        failures: u32,
    },
    Recorded(Box<Recording<Given<I>, Left<O>>>),
    /// Passes run, for good.
    Refused {
        reason: String,
    },
}

impl<M: Module + ModuleDisplay, I: PassTensors, O: PassTensors> GradientGraph<M, I, O> {
    /// Nothing is recorded yet. `policy` is what was [applied](PrecisionPolicy::apply) to the model.
    pub fn new(policy: PrecisionPolicy) -> Self {
        let stage = Stage::WarmUp { passes: 0, failures: 0 };
        Self { stage, ..Self::disabled(policy) }
    }

    /// Runs every pass, and never records one.
    pub fn disabled(policy: PrecisionPolicy) -> Self {
        let stage = Stage::Refused { reason: "recording is switched off".into() };
        let schedule = Schedule::default();
        Self {
            policy,
            held: None,
            outline: None,
            state: State::default(),
            restarts: 0,
            queue: None,
            keyed: Arc::default(),
            draws: true,
            schedule,
            milestones: None,
            spare: 0,
            noise: None,
            is_replayed: false,
            stage,
        }
    }

    /// The outputs and gradients of `pass` for `model` and `inputs`. The [module](self) says what a pass may
    /// depend on.
    ///
    /// On GPUs `pass` gets a model like `model`, whose parameters have the types that are computed in and
    /// the same ids. Gradients have these types, too.
    ///
    /// # Errors
    ///
    /// [`GraphError::Device`] when the device did not take a command. [`GraphError::Stale`] when a replay
    /// is found to give other results than the pass, after others of the kind were given away. A recording
    /// that cannot be made is no error: passes then run as they are.
    pub fn run(
        &mut self,
        model: &M,
        inputs: I,
        pass: impl Fn(&M, I) -> (O, GradientsParams),
    ) -> Result<(O, GradientsParams), GraphError> {
        let Some(device) = model.devices().first().map(|device| device.clone().without_autodiff())
        else {
            return Ok(pass(model, inputs));
        };
        if !graph::is_supported(&device) {
            return Ok(pass(model, inputs));
        }
        self.is_replayed = false;
        self.begin(&device, model)?;
        // Passes of one call have one key, and begin with the same state, so that they can be compared.
        let keys = self.keys(&device);
        let state = self.state.clone();
        let given = (inputs, keys, state.read(model));
        let (draws, failure) = (Cell::new(0), Cell::new(None));
        let keyed = self.keyed.clone();
        let pass = |model: &M, (inputs, keys, before): Given<I>| {
            state.write(model, before);
            let (outputs, gradients) = match keys.into_iter().next() {
                None => pass(model, inputs),
                Some(key) => {
                    let result = keyed.run(&device, key, || pass(model, inputs));
                    draws.set(draws.get() + result.draws);
                    if let Err(error) = result.handed_over {
                        failure.set(Some(error));
                    }
                    result.done
                }
            };
            ((outputs, state.read(model)), gradients)
        };
        let is_warm_up = matches!(self.stage, Stage::WarmUp { .. });
        let before = given.2.clone();
        let done = self.run_given(&device, model, given, pass);
        // What the model has by now may be of a pass that was only compared, or in memory of the recording.
        let after = done.as_ref().map_or(&before, |((_, after), _)| after);
        state.write(model, after.clone());
        let ((outputs, _), gradients) = done?;
        if let Some(failure) = failure.into_inner() {
            return Err(failure.into());
        }
        // Later passes are those of the warm-up.
        if is_warm_up || self.is_refused() {
            self.draws = self.draws && draws.get() > 0;
        }
        Ok((outputs, gradients))
    }

    /// That of the random numbers of a call, if it draws some.
    fn keys(&self, device: &Device) -> Vec<Tensor<1, Int>> {
        match self.draws {
            true => vec![KeyedPass::next_key(device)],
            false => Vec::new(),
        }
    }

    fn is_refused(&self) -> bool {
        matches!(self.stage, Stage::Refused { .. })
    }

    /// Whether passes run in the caller's model.
    fn is_idle(&self) -> bool {
        self.is_refused() && !self.policy.casts()
    }

    /// Gets in order with the call before, and takes note of another model.
    fn begin(&mut self, device: &Device, model: &M) -> Result<(), DeviceError> {
        if self.is_idle() {
            // Nothing is gained by a copy then.
            self.held = None;
            return Ok(());
        }
        let here = Queue::current();
        // What another queue was asked to do with this memory has no order with what is asked here.
        if let Some(last) = self.queue.replace(here).filter(|last| *last != here) {
            last.wait(device)?;
        }
        self.compare_with_outline(model);
        if self.outline.is_none() && !self.is_refused() {
            self.state = State::of(model);
            self.outline = Some(Outline::of(model, &self.state));
        }
        Ok(())
    }

    fn run_given(
        &mut self,
        device: &Device,
        model: &M,
        inputs: Given<I>,
        pass: impl Fn(&M, Given<I>) -> Results<Left<O>>,
    ) -> Result<Results<Left<O>>, GraphError> {
        if self.is_idle() {
            return Ok(pass(model, inputs));
        }
        if matches!(self.stage, Stage::WarmUp { passes: WARM_UP_PASSES.., .. })
            && let Some(replayed) = self.record(device, model, &inputs, None, &pass)?
        {
            self.schedule.count();
            self.is_replayed = true;
            return Ok(replayed);
        }
        if let Stage::Recorded(recording) = &mut self.stage
            && recording.serves(&inputs, model)
        {
            return self.replay(device, model, inputs, pass);
        }
        let held = adopted(&mut self.held, device, model, &self.policy)?;
        if let Stage::WarmUp { passes, .. } = &mut self.stage {
            *passes += 1;
        }
        let done = pass(&held.model, inputs);
        if matches!(self.stage, Stage::WarmUp { .. })
            && let Some(reason) = self.moved(model)
        {
            self.refuse(&reason);
        }
        Ok(done)
    }

    /// Begins anew where the model is another one than in the call before.
    fn compare_with_outline(&mut self, model: &M) {
        let Some(what) = self.outline.as_ref().and_then(|outline| outline.change(model)) else {
            return;
        };
        self.outline = None;
        self.noise = None;
        self.draws = true;
        self.restarts += 1;
        if self.restarts > RESTARTS {
            self.refuse(&NoRecording::Restless { what, times: self.restarts });
        } else {
            tracing::debug!(
                "GradientGraph: the model differs in {what}; its pass is recorded anew"
            );
            self.schedule = Schedule::default();
            self.stage = Stage::WarmUp { passes: 0, failures: 0 };
        }
    }

    /// Tries to have a recording, and gives what it makes of these inputs.
    fn record(
        &mut self,
        device: &Device,
        model: &M,
        inputs: &Given<I>,
        ran: Option<Trace<Left<O>>>,
        pass: impl Fn(&M, Given<I>) -> Results<Left<O>>,
    ) -> Result<Option<Results<Left<O>>>, GraphError> {
        let Stage::WarmUp { failures, .. } = self.stage else { return Ok(None) };
        let held = adopted(&mut self.held, device, model, &self.policy)?;
        let terms = Terms {
            limits: Limits::of(&self.policy),
            milestones: self.milestones,
            spare: self.spare,
            noise: self.noise.take(),
        };
        let is_first = ran.is_none();
        let recording = Recording::new(device, &held.model, inputs, terms, ran, pass);
        match self.moved(model).map_or(recording, Err) {
            Ok((recording, replayed)) => {
                self.noise = is_first.then(|| recording.noise());
                self.stage = Stage::Recorded(Box::new(recording));
                return Ok(Some(replayed));
            }
            Err(reason) if failures + 1 < ATTEMPTS && reason.may_pass() => {
                self.spare += reason.missing_bytes();
                self.stage = Stage::WarmUp { passes: 0, failures: failures + 1 };
            }
            Err(reason) => self.refuse(&reason),
        }
        Ok(None)
    }

    /// What the last pass has changed of the model, if it did.
    fn moved(&self, model: &M) -> Option<NoRecording> {
        let what = self.outline.as_ref()?.change(model)?;
        Some(NoRecording::Moves { what })
    }

    /// The recording's results, or where it is time those of the pass, with which they are compared.
    fn replay(
        &mut self,
        device: &Device,
        model: &M,
        inputs: Given<I>,
        pass: impl Fn(&M, Given<I>) -> Results<Left<O>>,
    ) -> Result<Results<Left<O>>, GraphError> {
        let (Stage::Recorded(recording), Some(held)) = (&mut self.stage, &mut self.held) else {
            return Ok(pass(model, inputs));
        };
        held.refresh(model);
        let replayed = recording.replay(&held.model, inputs)?;
        self.schedule.count();
        if !self.schedule.is_due() {
            self.is_replayed = true;
            return Ok(replayed);
        }
        // The pass takes the memory that the recording had, instead of as much again beside it. So the
        // recording goes, and a new one is made.
        let inputs = recording.inputs().clone();
        let seen = Trace::of(&held.model, device, &replayed);
        graph::hand_over(device)?;
        drop(replayed);
        self.stage = Stage::WarmUp { passes: WARM_UP_PASSES, failures: 0 };
        let held = adopted(&mut self.held, device, model, &self.policy)?;
        let run = || {
            graph::hand_over(device)?;
            let done = pass(&held.model, inputs.clone());
            Ok::<_, DeviceError>((Trace::of(&held.model, device, &done), done))
        };
        let (trace, ran) = run()?;
        let limits = Limits::of(&self.policy).of_a_proven_pass();
        let steps = self.schedule.unchecked();
        let noise = Noise::unseen(limits);
        match judge((limits, noise), [&seen, &trace], || run().map(|(trace, _)| trace))? {
            Verdict::Same => {
                self.schedule.set_checked();
                if self.schedule.is_settled() {
                    self.restarts = 0;
                }
                // They would lie between what is recorded, on pages that nothing else can use then.
                drop(ran);
                return self.recorded_anew(device, model, inputs, trace, pass);
            }
            // The next call may tell more.
            Verdict::Unknown => {}
            Verdict::Apart { results, share } if steps == 0 => {
                self.refuse(&NoRecording::Unfaithful { results, share });
            }
            Verdict::Apart { results, share } => {
                let error = GraphError::Stale { results, share, steps };
                self.set_refused(error.to_string());
                return Err(error);
            }
        }
        Ok(ran)
    }

    /// The results of another recording, or of the pass where none can be made.
    fn recorded_anew(
        &mut self,
        device: &Device,
        model: &M,
        inputs: Given<I>,
        ran: Trace<Left<O>>,
        pass: impl Fn(&M, Given<I>) -> Results<Left<O>>,
    ) -> Result<Results<Left<O>>, GraphError> {
        if let Some(replayed) = self.record(device, model, &inputs, Some(ran), &pass)? {
            return Ok(replayed);
        }
        let held = adopted(&mut self.held, device, model, &self.policy)?;
        Ok(pass(&held.model, inputs))
    }
}

/// A copy of `model`, all of it, for a pass that runs.
fn adopted<'a, M: Module>(
    held: &'a mut Option<HeldModel<M>>,
    device: &Device,
    model: &M,
    policy: &PrecisionPolicy,
) -> Result<&'a HeldModel<M>, DeviceError> {
    // The stream knows nothing of what parameters share memory with: what reads them is let through
    // before they are overwritten, and they are overwritten before they are read.
    graph::hand_over(device)?;
    let copy = HeldModel::of(model, policy, held.take());
    graph::hand_over(device)?;
    Ok(held.insert(copy))
}

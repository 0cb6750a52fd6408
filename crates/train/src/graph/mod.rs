//! Forward and backward pass as one command to the device.
//!
//! A training step is a thousand kernels and more, and the host takes tens of microseconds to ask for
//! one: small models wait for it. What a pass asks for is the same in every step, so [`GradientGraph`]
//! has the device record it once, and replays the recording: on CUDA as a graph, one command for all.
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
//! A replay does what was recorded, at the same addresses. A pass therefore has to be a function of the
//! model's parameters and of the tensors that it is given: what else it reads stays what it was at the
//! recording. Dropout would leave out the same units in each step and a running statistic would not run;
//! so before a recording is used, its gradients are compared with those of a pass that ran, and where they
//! differ the recording is dropped, with a warning. Nothing may be read or made on the host in between:
//! no `into_scalar`, no `from_data`.
//!
//! Batches of another shape run without the graph, as does everything on devices that have none and on
//! other threads than the one that recorded.
//!
//! # What it costs
//!
//! Parameters are copied before each pass to where the recording reads them, in the type that the policy
//! computes in: that replaces the casts that a pass over f32 masters begins with. So 2 bytes a parameter
//! for bf16 and f16, 4 for f32. Memory of the recorded activations stays reserved.

mod held;
mod tensors;

pub use blackburn_backend::graph::GraphError;
pub use tensors::{PassTensors, TensorLayout};

use crate::precision::PrecisionPolicy;
use blackburn_backend::{
    graph::{self, Graph},
    square_sum::SquareSum,
};
use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{Device, FloatDType, Tensor},
};
use held::HeldModel;
use std::{
    collections::HashSet,
    panic::{AssertUnwindSafe, catch_unwind},
    thread::{self, ThreadId},
};

/// Passes before the first recording. Burn's fusion meets a stream of operations a few times before it
/// has settled how to run it, and kernels are compiled then.
const WARM_UP_PASSES: u32 = 3;
/// Recordings that are tried.
const ATTEMPTS: u32 = 3;
/// How far gradients of a replay may be from those of a pass that ran, as a share of their norm. Kernels
/// that add in any order make some 1e-3 of it in bf16; dropout makes it the size of 1.
const TOLERANCE: f32 = 0.02;

/// Runs a model's forward and backward pass, and after a few times replays it.
///
/// `I` and `O` are the tensors that a pass is given and gives: see [`PassTensors`].
#[derive(Debug)]
pub struct GradientGraph<M, I, O> {
    policy: PrecisionPolicy,
    held: Option<HeldModel<M>>,
    stage: Stage<I, O>,
}

#[derive(Debug)]
enum Stage<I, O> {
    /// Passes run, so many until now, and so many recordings have failed.
    WarmUp {
        passes: u32,
        failures: u32,
    },
    Recorded(Box<Recording<I, O>>),
    /// Passes run, for good.
    Refused,
}

#[derive(Debug)]
struct Recording<I, O> {
    graph: Graph,
    /// Whose work it is in order with: each thread has a stream of its own.
    thread: ThreadId,
    inputs: I,
    outputs: O,
    gradients: GradientsParams,
}

impl<M: Module, I: PassTensors, O: PassTensors> GradientGraph<M, I, O> {
    /// Nothing is recorded yet. `policy` is what was [applied](PrecisionPolicy::apply) to the model.
    pub fn new(policy: PrecisionPolicy) -> Self {
        Self { policy, held: None, stage: Stage::WarmUp { passes: 0, failures: 0 } }
    }

    /// Runs every pass, and never records one.
    pub fn disabled(policy: PrecisionPolicy) -> Self {
        Self { policy, held: None, stage: Stage::Refused }
    }

    /// Whether passes are replayed.
    pub fn is_recorded(&self) -> bool {
        matches!(self.stage, Stage::Recorded(_))
    }

    /// The outputs and gradients of `pass` for `model` and `inputs`.
    ///
    /// On GPUs `pass` gets a model like `model`, whose parameters have the types that are computed in and
    /// the same ids; so have the gradients. They are valid until the next call, which overwrites them.
    ///
    /// # Errors
    ///
    /// [`GraphError::Refused`] when the device did not take a replay. A recording that fails is none:
    /// passes then run as they are.
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
        if matches!(self.stage, Stage::Refused) && !self.policy.casts() {
            // Nothing is gained by a copy then.
            self.held = None;
            return Ok(pass(model, inputs));
        }
        let held = self.held.get_or_insert_with(|| HeldModel::new(model, &self.policy));
        if let Stage::WarmUp { passes, failures } = &mut self.stage {
            if *passes < WARM_UP_PASSES {
                *passes += 1;
            } else {
                let failures = *failures;
                held.refresh(model);
                self.stage = match Recording::new(&device, &held.model, &inputs, &pass) {
                    Ok(recording) => Stage::Recorded(Box::new(recording)),
                    Err(reason) if failures + 1 < ATTEMPTS && reason.may_pass() => {
                        Stage::WarmUp { passes: 0, failures: failures + 1 }
                    }
                    Err(reason) => {
                        tracing::warn!("GradientGraph: steps run without a graph: {reason}");
                        Stage::Refused
                    }
                };
            }
        }
        if let Stage::Recorded(recording) = &mut self.stage
            && recording.serves(&inputs)
        {
            held.refresh(model);
            recording.inputs = recording.inputs.clone().overwritten(inputs);
            return recording.replay(&held.model);
        }
        // The stream knows nothing of what parameters share memory with: what read them is let through
        // before they are overwritten, and they are overwritten before they are read.
        drain(&device)?;
        held.refresh(model);
        drain(&device)?;
        Ok(pass(&held.model, inputs))
    }
}

impl<I: PassTensors, O: PassTensors> Recording<I, O> {
    /// Records `pass`, and sees that a replay does what `pass` does.
    fn new<M: Module>(
        device: &Device,
        model: &M,
        inputs: &I,
        pass: impl Fn(&M, I) -> (O, GradientsParams),
    ) -> Result<Self, NoRecording> {
        let inputs = inputs.held();
        let run = || {
            drain(device)?;
            let done = pass(model, inputs.clone());
            // Work whose results are let go of before it ran would not run.
            device.sync().map_err(|error| NoRecording::failed("warm-up", &error))?;
            Ok::<_, NoRecording>(done)
        };
        let (_, expected) = run()?;
        graph::prepare(device)?;
        // The memory that a pass takes is there after it, for the recording to take.
        let warm = (0..2).try_for_each(|_| run().map(drop));
        let started = warm.and_then(|()| Ok(graph::start(device)?));
        // A pass that panics must not leave the device recording.
        let recorded = started.and_then(|()| {
            catch_unwind(AssertUnwindSafe(|| pass(model, inputs.clone())))
                .map_err(|_| NoRecording::Panicked)
        });
        let graph = graph::stop(device);
        let (outputs, gradients) = recorded?;
        let thread = thread::current().id();
        let recording = Self { graph: graph?, thread, inputs, outputs, gradients };

        let (_, replayed) = recording.replay(model)?;
        let difference = Difference::between(&expected, &replayed, model, device);
        if !difference.norm.is_finite() {
            return Err(NoRecording::NotFinite);
        }
        if difference.share > TOLERANCE {
            return Err(NoRecording::Unfaithful { share: difference.share });
        }
        Ok(recording)
    }

    /// Whether it may be replayed for `inputs`, here.
    fn serves(&self, inputs: &I) -> bool {
        self.thread == thread::current().id() && self.inputs.layout() == inputs.layout()
    }

    fn replay<M: Module>(&self, model: &M) -> Result<(O, GradientsParams), GraphError> {
        // SAFETY: parameters, inputs, outputs and gradients are held by `self` and the caller's
        // `HeldModel`; what lies between is guarded by the graph. `serves` has seen that this is the
        // thread that recorded it, whose work is in order.
        unsafe { self.graph.replay() }?;
        let mut gradients = GradientsParams::new();
        model.visit(&mut Sharer { from: &self.gradients, to: &mut gradients });
        Ok((self.outputs.held(), gradients))
    }
}

/// Why there is no recording.
#[derive(Debug, thiserror::Error)]
enum NoRecording {
    #[error(transparent)]
    Graph(#[from] GraphError),
    #[error("the pass panicked while it was recorded; it may have asked for a value on the host")]
    Panicked,
    #[error("gradients were not finite")]
    NotFinite,
    #[error(
        "a replay's gradients differ from those of a pass that ran by {share} of their norm, so the pass \
         depends on more than parameters and inputs; dropout and running statistics do that"
    )]
    Unfaithful { share: f32 },
}

impl NoRecording {
    fn failed(step: &'static str, error: &impl ToString) -> Self {
        Self::Graph(GraphError::Refused { step, reason: error.to_string() })
    }

    /// Whether another attempt may go better.
    fn may_pass(&self) -> bool {
        !matches!(self, Self::Unfaithful { .. } | Self::Panicked)
    }
}

/// Has all that this thread asked for handed to the device.
fn drain(device: &Device) -> Result<(), GraphError> {
    device.flush().map_err(|error| GraphError::Refused { step: "flush", reason: error.to_string() })
}

struct Sharer<'a> {
    from: &'a GradientsParams,
    to: &'a mut GradientsParams,
}

impl ModuleVisitor for Sharer<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.from.get::<D>(param.id) {
            self.to.register::<D>(param.id, gradient);
        }
    }
}

/// How far two sets of gradients are from each other.
struct Difference {
    norm: f32,
    share: f32,
}

impl Difference {
    fn between<M: Module>(
        expected: &GradientsParams,
        found: &GradientsParams,
        model: &M,
        device: &Device,
    ) -> Self {
        let mut comparer = Comparer {
            expected,
            found,
            seen: HashSet::new(),
            squares: Some((SquareSum::new(device), SquareSum::new(device))),
        };
        model.visit(&mut comparer);
        let (norm, distance) = comparer.squares.map_or((0.0, 0.0), |(all, differences)| {
            let root = |sum: SquareSum| sum.total().sqrt().into_scalar::<f32>();
            (root(all), root(differences))
        });
        let share = if distance == 0.0 { 0.0 } else { distance / norm };
        Self { norm, share }
    }
}

struct Comparer<'a> {
    expected: &'a GradientsParams,
    found: &'a GradientsParams,
    seen: HashSet<ParamId>,
    squares: Option<(SquareSum, SquareSum)>,
}

impl ModuleVisitor for Comparer<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let pair = self.expected.get::<D>(param.id).zip(self.found.get::<D>(param.id));
        let Some((expected, found)) = pair else { return };
        if !self.seen.insert(param.id) {
            return;
        }
        let [expected, found] = [expected, found].map(|gradient| gradient.cast(FloatDType::F32));
        self.squares = self.squares.take().map(|(all, differences)| {
            (all.with(expected.clone()), differences.with(expected - found))
        });
    }
}

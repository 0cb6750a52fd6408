//! A step of inference as one command to the device.

use super::{
    GraphStatus, WARM_UP_PASSES,
    compare::Limits,
    error::GraphError,
    recording::{Recording, Terms},
    tensors::{PassTensors, TensorLayout},
};
use crate::precision::{Precision, PrecisionPolicy};
use blackburn_backend::graph::{self, GraphError as DeviceError, Queue};
use burn::{
    module::Param,
    optim::GradientsParams,
    tensor::{Device, Tensor},
};

/// A recording is of a module and its gradients. Here the step holds its own.
const NO_MODULE: Option<Param<Tensor<1>>> = None;

/// Runs a step of inference, and after a few times replays it: on CUDA as a graph, one command for all kernels.
///
/// A decoded token is a hundred small kernels and more, which take the device less time than the host takes to ask for
/// them. The step is recorded once, with the addresses of all that it reads.
///
/// ```
/// use blackburn_train::graph::InferenceGraph;
/// use burn::{nn::LinearConfig, prelude::*};
///
/// let device = Device::flex();
/// let model = LinearConfig::new(4, 2).init(&device);
/// let mut graph = InferenceGraph::new(&device, |x: Tensor<2>| model.forward(x));
/// for _ in 0..5 {
///     let y = graph.run(Tensor::ones([1, 4], &device))?;
///     assert_eq!(y.dims(), [1, 2]);
/// }
/// # Ok::<(), blackburn_train::graph::GraphError>(())
/// ```
///
/// # What a step may do
///
/// A replay does what was recorded, at the same addresses. So a step has to be a function of its inputs and of what
/// the closure holds, and:
///
/// - **What changes from call to call comes in as a tensor**, such as tokens and the position of the first of them. A
///   number that the closure reads from a cell, and a tensor that it finds replaced there, stay what they were.
/// - A tensor that the step changes is changed **in its memory**, as
///   [`cached_attention`](blackburn_backend::attention::cached_attention) does with a cache. That memory has to be
///   there before the recording: any earlier call makes it.
/// - The same step may run more than once for the same inputs, and has to do no more than once would: the recording
///   runs it several times. A cache that is written at a position that comes in is such a change. A counter is not.
/// - Nothing is read by the host in between, and no random numbers are drawn.
///
/// A replay is compared with a step that ran when it is recorded, and never again: unlike the closure that
/// [`GradientGraph`](super::GradientGraph) is handed in each call, this one stays the same. A step that cannot be
/// recorded runs as it is, with a warning that says why. So do steps on CPUs, with inputs of another shape, and on
/// another thread than the one that recorded.
#[derive(Debug)]
pub struct InferenceGraph<I, O, F> {
    step: F,
    device: Device,
    /// Where the last call put its commands.
    queue: Option<Queue>,
    stage: Stage<I, O>,
}

#[derive(Debug)]
enum Stage<I, O> {
    /// So many steps ran, one after the other, with inputs of this layout.
    WarmUp(u32, Vec<TensorLayout>),
    Recorded(Box<Recording<I, O>>),
    /// Steps run, for good.
    Refused(String),
}

impl<I: PassTensors, O: PassTensors, F: Fn(I) -> O> InferenceGraph<I, O, F> {
    /// Nothing is recorded yet. The step runs on `device`.
    pub fn new(device: &Device, step: F) -> Self {
        let device = device.clone().without_autodiff();
        Self { step, device, queue: None, stage: Stage::WarmUp(0, Vec::new()) }
    }

    /// Runs every step, and never records one.
    pub fn disabled(device: &Device, step: F) -> Self {
        let stage = Stage::Refused("recording is switched off".into());
        Self { stage, ..Self::new(device, step) }
    }

    /// How steps run, and why they are not replayed where they are not.
    pub fn status(&self) -> GraphStatus {
        let unrecorded = |reason| GraphStatus::Unrecorded { reason };
        match &self.stage {
            Stage::Refused(reason) => unrecorded(reason.clone()),
            _ if !graph::is_supported(&self.device) => {
                let device = format!("{:?}", self.device);
                unrecorded(DeviceError::Unsupported { device }.to_string())
            }
            Stage::WarmUp(..) => GraphStatus::WarmUp,
            Stage::Recorded(_) => GraphStatus::Recorded,
        }
    }

    /// What the step makes of `inputs`. The results are the caller's own: later calls do not change them.
    ///
    /// # Errors
    ///
    /// [`GraphError::Device`] when the device did not take a command. A recording that cannot be made is no error.
    pub fn run(&mut self, inputs: I) -> Result<O, GraphError> {
        let inputs = inputs.untracked();
        if matches!(self.stage, Stage::Refused(_)) || !graph::is_supported(&self.device) {
            return Ok((self.step)(inputs));
        }
        let here = Queue::current();
        // What another queue was asked to do with this memory has no order with what is asked here.
        if let Some(last) = self.queue.replace(here).filter(|last| *last != here) {
            last.wait(&self.device)?;
        }
        if let Stage::WarmUp(steps, layout) = &mut self.stage {
            let given = inputs.layout();
            if *layout != given {
                (*steps, *layout) = (0, given);
            }
            *steps += 1;
            if *steps > WARM_UP_PASSES {
                self.record(&inputs);
            }
        }
        if let Stage::Recorded(recording) = &mut self.stage
            && recording.serves(&inputs, &NO_MODULE)
        {
            return Ok(recording.replay(&NO_MODULE, inputs)?.0);
        }
        Ok((self.step)(inputs))
    }

    fn record(&mut self, inputs: &I) {
        // What the results are rounded to tells nothing of what they were computed in.
        let limits = Limits::of(&PrecisionPolicy::new(Precision::Bf16));
        let step = |_: &_, inputs| ((self.step)(inputs), GradientsParams::new());
        let attempt = |spare| {
            let terms = Terms { limits, milestones: None, spare, noise: None };
            let recorded = Recording::new(&self.device, &NO_MODULE, inputs, terms, None, step);
            recorded.map(|(recording, _)| recording)
        };
        let recording = attempt(0).or_else(|reason| match reason.missing_bytes() {
            0 => Err(reason),
            missing => attempt(missing),
        });
        self.stage = match recording {
            Ok(recording) => Stage::Recorded(Box::new(recording)),
            Err(reason) => {
                tracing::warn!("InferenceGraph: steps run without a graph: {reason}");
                Stage::Refused(reason.to_string())
            }
        };
    }
}

//! A pass that is replayed.

use super::{
    compare::{Limits, Noise, Results, Trace, Verdict, judge},
    error::NoRecording,
    tensors::PassTensors,
};
use blackburn_backend::graph::{self, Graph, GraphError, Identity, Milestones, Progress, Queue};
use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{Device, Int, Tensor},
};
use std::{
    collections::HashSet,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// The inputs of a pass, the key of its random numbers, if it draws some, and the state that it begins with.
pub(super) type Given<I> = (I, Vec<Tensor<1, Int>>, Vec<Tensor<1>>);
/// The outputs of a pass, and the state that it leaves.
pub(super) type Left<O> = (O, Vec<Tensor<1>>);

/// How a pass is recorded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// What a replay may be off.
    pub(super) limits: Limits,
    /// Elements of gradients between two milestones, if there are to be any.
    pub(super) milestones: Option<usize>,
    /// Bytes that the device holds while the pass warms up, and that the recording may take besides. A recording finds
    /// memory in another order than the passes in front of it, beside its inputs, and no memory is added to it.
    pub(super) spare: usize,
    /// How far passes of this model were apart, if that is known.
    pub(super) noise: Option<Noise>,
}

/// A pass that is replayed.
#[derive(Debug)]
pub(super) struct Recording<I, O> {
    graph: Graph,
    /// How far passes were apart.
    noise: Noise,
    /// Which gradients are there before the end of a replay, if anybody asks.
    progress: Option<Progress>,
    /// What a replay is in order with.
    queue: Queue,
    inputs: I,
    outputs: O,
    gradients: GradientsParams,
    /// Gradients whose tensor is that of another parameter too.
    twins: HashSet<ParamId>,
}

impl<I: PassTensors, O: PassTensors> Recording<I, O> {
    /// Records `pass`, and sees that a replay does what `pass` does. The results are those of the replay. `ran` is of a pass
    /// of these inputs, where one ran already.
    pub(super) fn new<M: Module>(
        device: &Device,
        model: &M,
        inputs: &I,
        Terms { limits, milestones, spare, noise }: Terms,
        ran: Option<Trace<O>>,
        pass: impl Fn(&M, I) -> Results<O>,
    ) -> Result<(Self, Results<O>), NoRecording> {
        let inputs = inputs.held();
        let run = || {
            graph::hand_over(device)?;
            let _pass = graph::begin_pass();
            let done = pass(model, inputs.clone());
            let trace = Trace::of(model, device, &done);
            // Work whose results are let go of before it ran would not run.
            device.sync().map_err(|error| NoRecording::failed("warm-up", &error))?;
            Ok::<_, NoRecording>(trace)
        };
        let ran = ran.map_or_else(run, Ok)?;
        let milestones = milestones.map(|every| Milestones::new(device, shapes(model), every));
        let milestones = milestones.transpose()?;
        graph::prepare(device)?;
        // The memory that a pass takes is there after it, for the recording to take. What passes are apart is seen here,
        // unless it is known: beside a recording, a pass would take as much memory again.
        let unseen = Noise::unseen(limits);
        let warm_up = || {
            let spare = graph::hold_spare(device, spare)?;
            let is_known = noise.is_some();
            let mut noise = noise.unwrap_or(unseen).seen([&run()?, &ran]);
            if !is_known && noise.exceeds(unseen) {
                // By one pass alone, a single number can be close by chance.
                noise = noise.seen([&run()?, &ran]);
            }
            drop(spare);
            graph::hand_over(device)?;
            Ok::<_, NoRecording>(noise)
        };
        let started = warm_up().and_then(|noise| {
            graph::start(device)?;
            milestones.iter().for_each(Milestones::begin);
            Ok(noise)
        });
        // A pass that panics must not leave the device recording.
        let recorded = started.and_then(|noise| {
            catch_unwind(AssertUnwindSafe(|| pass(model, inputs.clone())))
                .map_err(|_| NoRecording::Panicked)
                .map(|done| (done, noise))
        });
        let graph = graph::stop(device);
        let progress = milestones.map(Milestones::end);
        let ((outputs, mut gradients), noise) = recorded?;
        let mut holders = Holders { gradients: &mut gradients, shared: HashSet::new() };
        model.visit(&mut holders);
        let twins = holders.shared;
        let recording = Self {
            graph: graph?,
            noise,
            progress,
            queue: Queue::current(),
            inputs: inputs.clone(),
            outputs,
            gradients,
            twins,
        };
        if let Some(progress) = &recording.progress {
            let mut early = Early { progress, gradients: &recording.gradients, counts: [0; 2] };
            model.visit(&mut early);
            let [early, all] = early.counts;
            tracing::debug!("{early} of {all} elements of gradients are there before the end");
        }

        let results = recording.results(model)?;
        let replayed = Trace::of(model, device, &results);
        match judge((limits, noise), [&replayed, &ran], run)? {
            Verdict::Same => Ok((recording, results)),
            Verdict::Unknown => Err(NoRecording::NotFinite),
            Verdict::Apart { results, share } => Err(NoRecording::Unfaithful { results, share }),
        }
    }

    /// Whether it may be replayed for `inputs`, here and now. Gradients of the last replay that somebody
    /// still holds would be overwritten.
    pub(super) fn serves<M: Module>(&mut self, inputs: &I, model: &M) -> bool {
        if self.queue != Queue::current() || self.inputs.layout() != inputs.layout() {
            return false;
        }
        let mut holders = Holders { gradients: &mut self.gradients, shared: HashSet::new() };
        model.visit(&mut holders);
        holders.shared.is_subset(&self.twins)
    }

    /// The results for `inputs`, and the parameters that the memory of `model` has.
    pub(super) fn replay<M: Module>(
        &mut self,
        model: &M,
        inputs: I,
    ) -> Result<Results<O>, GraphError> {
        self.inputs = self.inputs.clone().overwritten(inputs);
        self.results(model)
    }

    /// The same without the gradients, which are where those of the last replay were.
    pub(super) fn replay_in_place(&mut self, inputs: I) -> Result<O, GraphError> {
        self.inputs = self.inputs.clone().overwritten(inputs);
        self.outputs()
    }

    fn results<M: Module>(&self, model: &M) -> Result<Results<O>, GraphError> {
        let outputs = self.outputs()?;
        let mut gradients = GradientsParams::new();
        model.visit(&mut Sharer { from: self, to: &mut gradients });
        Ok((outputs, gradients))
    }

    /// Those of a replay for what is in the inputs' memory.
    fn outputs(&self) -> Result<O, GraphError> {
        // SAFETY: parameters, inputs, outputs and gradients are held by `self` and the caller's
        // `HeldModel`; what lies between is guarded by the graph. This is the queue that recorded it: `new`
        // is called from nowhere else, and `serves` has seen it.
        unsafe { self.graph.replay() }?;
        if let Some(progress) = &self.progress {
            progress.replayed();
        }
        Ok(self.outputs.held())
    }

    /// How far passes were apart before it was made.
    pub(super) fn noise(&self) -> Noise {
        self.noise
    }

    /// How far a replay has come, if milestones were asked for.
    pub(super) fn progress(&self) -> Option<&Progress> {
        self.progress.as_ref()
    }

    /// The inputs of the last replay.
    pub(super) fn inputs(&self) -> &I {
        &self.inputs
    }

    /// The queue that it can be replayed in.
    pub(super) fn queue(&self) -> Queue {
        self.queue
    }
}

/// Of the parameters of `model`.
fn shapes<M: Module>(model: &M) -> HashSet<Vec<usize>> {
    #[derive(Default)]
    struct Shapes(HashSet<Vec<usize>>);
    impl ModuleVisitor for Shapes {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.insert(param.lazy_shape().to_vec());
        }
    }
    let mut shapes = Shapes::default();
    model.visit(&mut shapes);
    shapes.0
}

/// Counts elements of gradients: of those that are there before a replay is over, and of all.
struct Early<'a> {
    progress: &'a Progress,
    gradients: &'a GradientsParams,
    counts: [usize; 2],
}

impl ModuleVisitor for Early<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(gradient) = self.gradients.get::<D>(param.id) else { return };
        let elements = gradient.shape().num_elements();
        let identity = Identity::of(gradient);
        if identity.and_then(|identity| self.progress.milestone(identity)).is_some() {
            self.counts[0] += elements;
        }
        self.counts[1] += elements;
    }
}

/// Finds gradients that not only the recording holds.
struct Holders<'a> {
    gradients: &'a mut GradientsParams,
    shared: HashSet<ParamId>,
}

impl ModuleVisitor for Holders<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(gradient) = self.gradients.remove::<D>(param.id) else { return };
        if !gradient.can_mut() {
            self.shared.insert(param.id);
        }
        self.gradients.register::<D>(param.id, gradient);
    }
}

struct Sharer<'a, I, O> {
    from: &'a Recording<I, O>,
    to: &'a mut GradientsParams,
}

impl<I, O> ModuleVisitor for Sharer<'_, I, O> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(gradient) = self.from.gradients.get::<D>(param.id) else { return };
        // Of twins nobody can tell whether the caller still holds one.
        let gradient = match self.from.twins.contains(&param.id) {
            true => gradient.held(),
            false => gradient,
        };
        self.to.register::<D>(param.id, gradient);
    }
}

//! Replays for those who know that the model is the one of the last call.

use super::{GradientGraph, GraphError, PassTensors, Stage};
use blackburn_backend::graph::Queue;
use burn::{
    module::{Module, ModuleDisplay},
    tensor::Device,
};

impl<M: Module + ModuleDisplay, I: PassTensors, O: PassTensors> GradientGraph<M, I, O> {
    /// Whether the last call of [`run`](Self::run) gave what a replay left: its gradients are in the recording's memory.
    pub(crate) fn was_replayed(&self) -> bool {
        self.is_replayed
    }

    /// Whether the next call would replay for `inputs`, and do nothing else, if the model is that of the last call and
    /// nobody holds its gradients.
    pub(crate) fn repeats(&self, inputs: &I) -> bool {
        let here = Queue::current();
        let Stage::Recorded(recording) = &self.stage else { return false };
        self.is_replayed
            && self.schedule.goes_on()
            && self.queue == Some(here)
            && recording.queue() == here
            && recording.inputs().0.layout() == inputs.layout()
    }

    /// The outputs of a replay, whose gradients are where those of the last one were. It looks at no parameter: `model`
    /// has to be the one of the last call on `device`, what the recording's copies of parameters hold has to be up to
    /// date, and [`repeats`](Self::repeats) has to hold.
    ///
    /// # Errors
    ///
    /// [`GraphError::Device`] when the device did not take a command.
    pub(crate) fn repeat(
        &mut self,
        device: &Device,
        model: &M,
        inputs: I,
    ) -> Result<O, GraphError> {
        let given = (inputs, self.keys(device), self.state.read(model));
        let Stage::Recorded(recording) = &mut self.stage else {
            unreachable!("a recording repeats")
        };
        let (outputs, after) = recording.replay_in_place(given)?;
        self.schedule.count();
        self.state.write(model, after);
        Ok(outputs)
    }
}

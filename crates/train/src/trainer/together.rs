//! What the ranks of a group do together.

use super::{Trainer, TrainerConfig, TrainerError};
use crate::{
    graph::{GraphStatus, PassTensors},
    precision::PrecisionPolicy,
};
use blackburn_distributed::{DistributedError, GradientSums, Group, Sharded};
use burn::{
    module::{Module, ModuleDisplay},
    optim::{GradientsParams, ModuleOptimizer},
    tensor::{Bytes, DType, Tensor},
};
use std::time::{SystemTime, UNIX_EPOCH};

/// The optimizer of this rank.
pub(super) enum Stepper {
    /// It updates all parameters, as on all ranks.
    Whole(ModuleOptimizer),
    /// It updates its own.
    Sharded(Box<Sharded>),
}

impl Stepper {
    pub(super) fn step<M: Module>(
        &mut self,
        learning_rate: f64,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M, DistributedError> {
        match self {
            Self::Whole(optimizer) => Ok(optimizer.step(learning_rate, model, gradients)),
            Self::Sharded(optimizer) => optimizer.step(learning_rate, model, gradients),
        }
    }

    /// The ranks that each have the gradients of some parameters, if not all have all.
    pub(super) fn apart<'a>(&self, group: &'a Group) -> Option<&'a Group> {
        matches!(self, Self::Sharded(_)).then_some(group).filter(|group| group.size() > 1)
    }

    /// The whole state.
    pub(super) fn to_bytes(&self) -> Result<Bytes, DistributedError> {
        match self {
            Self::Whole(optimizer) => optimizer
                .into_bytes()
                .map_err(|error| DistributedError::State { size: 1, reason: error.to_string() }),
            Self::Sharded(optimizer) => optimizer.to_bytes(),
        }
    }

    /// The same optimizer in the state, or this rank's share of it, that `bytes` hold.
    pub(super) fn with_state(self, bytes: Bytes) -> Result<Self, DistributedError> {
        match self {
            Self::Whole(optimizer) => match optimizer.from_bytes(bytes) {
                Ok(optimizer) => Ok(Self::Whole(optimizer)),
                Err(error) => Err(DistributedError::State { size: 1, reason: error.to_string() }),
            },
            Self::Sharded(optimizer) => Ok(Self::Sharded(Box::new(optimizer.from_bytes(bytes)?))),
        }
    }
}

impl TrainerConfig {
    /// Rank 0's seed, if there are others: what they round by chance has to be the same.
    pub(super) fn common_seed(&self) -> Result<Option<u64>, TrainerError> {
        if self.group.size() == 1 {
            return Ok(self.seed);
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let any = now.map_or(0, |time| time.as_nanos() as u64);
        let seeds = self.group.gather("the trainer's seed", &self.seed.unwrap_or(any))?;
        Ok(seeds.first().copied())
    }

    /// Checks that all ranks are about to do the same.
    pub(super) fn agree(
        &self,
        policy: &PrecisionPolicy,
        scales: bool,
        steps_taken: usize,
        seed: Option<u64>,
    ) -> Result<(), TrainerError> {
        let options = [
            ("the trainer's number of steps taken", steps_taken.to_string()),
            ("the trainer's precision", format!("{:?}", policy.precision())),
            ("the trainer's masters", format!("{:?}", policy.masters())),
            ("the trainer's optimizer", format!("{:?}", self.optimizer)),
            ("whether the trainer's optimizer is sharded", self.is_sharded.to_string()),
            ("the trainer's next learning rate", (self.rate)(steps_taken).to_string()),
            ("the trainer's maximum norm", self.max_norm.to_string()),
            ("whether the trainer scales losses", scales.to_string()),
            ("the trainer's average of the weights", format!("{:?}", self.ema)),
            ("the trainer's seed", format!("{seed:?}")),
            ("the trainer's steps between two metrics", self.metrics_every.to_string()),
        ];
        Ok(self.group.agree_on(&options)?)
    }
}

impl<M: Module + ModuleDisplay, I: PassTensors, O: PassTensors> Trainer<M, I, O> {
    /// The sums over all ranks of gradients, and the mean of the loss.
    pub(super) fn meet(
        &mut self,
        gradients: GradientsParams,
        mean_loss: Tensor<1>,
        weight: f64,
    ) -> Result<(GradientSums, Tensor<1>), TrainerError> {
        if self.group.size() == 1 {
            let extras = Vec::new();
            return Ok((GradientSums { gradients, extras, factor: 1.0 }, mean_loss));
        }
        self.agree_on_recording()?;
        let model = self.model.as_ref().ok_or(TrainerError::Lost)?;
        let loss = vec![mean_loss.clone()];
        // A replay writes all of its gradients anew, and nobody else has them.
        let is_in_place = self.passes.is_recorded();
        let mut sums = match (&self.optimizer, is_in_place) {
            (Stepper::Whole(_), false) => self.group.sums(model, gradients, loss, weight),
            (Stepper::Whole(_), true) => {
                let progress = self.passes.progress();
                self.group.sums_in_place(model, gradients, loss, weight, progress)
            }
            (Stepper::Sharded(all), false) => all.sums(model, gradients, loss, weight),
            (Stepper::Sharded(all), true) => all.sums_in_place(model, gradients, loss, weight),
        }?;
        // What follows has to be the same on all ranks.
        self.seed_step(0);
        let mean_loss = sums.extras.pop().unwrap_or(mean_loss);
        Ok((sums, mean_loss))
    }

    /// Stops recording where another rank could not: it would wait for this one in each step, and what one rank
    /// cannot record is as a rule a fault of the model's.
    fn agree_on_recording(&mut self) -> Result<(), TrainerError> {
        if self.is_recording_agreed {
            return Ok(());
        }
        let status = match self.graph_status() {
            GraphStatus::WarmUp => None,
            GraphStatus::Recorded => Some(None),
            GraphStatus::Unrecorded { reason } => Some(Some(reason)),
        };
        let all = self.group.gather("whether passes are recorded", &status)?;
        let refusal = all.iter().enumerate().find_map(|(rank, status)| match status {
            Some(Some(reason)) => Some((rank, reason)),
            _ => None,
        });
        if let Some((rank, reason)) = refusal {
            if rank != self.group.rank() && self.graph_status() != GraphStatus::WarmUp {
                tracing::warn!("passes are not recorded, since rank {rank} cannot: {reason}");
            }
            self.stop_recording();
        }
        self.is_recording_agreed = refusal.is_some() || all.iter().all(Option::is_some);
        Ok(())
    }

    /// The loss of a rank that has no data.
    pub(super) fn nothing(&self) -> Tensor<1> {
        Tensor::zeros([1], (&self.device.clone().without_autodiff(), DType::F32))
    }
}

#[cfg(test)]
mod tests;

//! What a pass itself writes to a model: running statistics.
//!
//! To a recording they are inputs and outputs like others. A pass begins with those that it is given, and gives
//! those that it leaves. The caller's model gets these after each call, in memory that no replay overwrites.

use super::tensors::PassTensors;
use blackburn_backend::graph::Identity;
use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId},
    tensor::Tensor,
};
use std::{any::Any, collections::HashSet, ptr, vec};

/// Which values of a model its passes may write, in the order of the model.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    ids: HashSet<ParamId>,
}

impl State {
    /// Of `model`, on a GPU. Values that its clones share count if they can be replaced: those of Burn's
    /// `RunningState` can.
    pub(super) fn of<M: Module>(model: &M) -> Self {
        let mut state = Self { ids: shared_values(model) };
        if state.is_empty() {
            return state;
        }
        let same = state.read(model).into_iter().map(|value| value.held()).collect();
        let written = state.write(model, same);
        let mut found = Found { state: &state, identities: Vec::new() };
        model.visit(&mut found);
        let pairs = written.into_iter().zip(found.identities);
        state.ids = pairs
            .filter(|((_, new), old)| new.is_some() && new == old)
            .map(|((id, _), _)| id)
            .collect();
        state
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    pub(super) fn contains(&self, id: ParamId) -> bool {
        self.ids.contains(&id)
    }

    /// The values, up to date, each as one row.
    pub(super) fn read<M: Module>(&self, model: &M) -> Vec<Tensor<1>> {
        if self.is_empty() {
            return Vec::new();
        }
        // A running state keeps its last update apart until it is asked for. Going to inference asks, and tells
        // all clones.
        drop(model.valid());
        let mut reader = Reader { state: self, values: Vec::new() };
        model.visit(&mut reader);
        reader.values
    }

    /// Gives `model` and its clones other values, in the order of [`read`](Self::read), which has to be called
    /// first after a pass: an update that nobody has asked for yet would replace them. Says what was handed over
    /// for which.
    pub(super) fn write<M: Module>(
        &self,
        model: &M,
        values: Vec<Tensor<1>>,
    ) -> Vec<(ParamId, Option<Identity>)> {
        if self.is_empty() {
            return Vec::new();
        }
        let mut writer = Writer { state: self, values: values.into_iter(), written: Vec::new() };
        drop(model.clone().map(&mut writer));
        writer.written
    }
}

struct Reader<'a> {
    state: &'a State,
    values: Vec<Tensor<1>>,
}

impl ModuleVisitor for Reader<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.state.contains(param.id) {
            self.values.push(param.base().without_autodiff().flatten(0, D - 1));
        }
    }
}

struct Writer<'a> {
    state: &'a State,
    values: vec::IntoIter<Tensor<1>>,
    written: Vec<(ParamId, Option<Identity>)>,
}

impl ModuleMapper for Writer<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.state.contains(param.id) {
            return param;
        }
        let Some(value) = self.values.next() else { return param };
        let id = param.id;
        param.map(|old| {
            let value = value.reshape(old.dims());
            self.written.push((id, Identity::of(value.clone())));
            match old.gradient_checkpointing_strategy() {
                Some(strategy) => value.autodiff().with_gradient_checkpointing_strategy(strategy),
                None => value,
            }
        })
    }
}

struct Found<'a> {
    state: &'a State,
    identities: Vec<Option<Identity>>,
}

impl ModuleVisitor for Found<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.state.contains(param.id) {
            self.identities.push(Identity::of(param.base()));
        }
    }
}

/// Values that the clones of a model share, such as running statistics. Burn shows them to a visitor as
/// parameters that are made for that visit, so each visit finds them at another place.
pub(super) fn shared_values<M: Module>(model: &M) -> HashSet<ParamId> {
    let mut first = Places::default();
    model.visit(&mut first);
    let mut second = Places::default();
    model.visit(&mut second);
    let pairs = first.found.into_iter().zip(second.found);
    pairs.filter(|(a, b)| a.1 != b.1).map(|(a, _)| a.0).collect()
}

#[derive(Default)]
struct Places {
    found: Vec<(ParamId, usize)>,
    /// Keeps the places taken.
    params: Vec<Box<dyn Any>>,
}

impl ModuleVisitor for Places {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.found.push((param.id, ptr::from_ref::<Tensor<D>>(param).addr()));
        self.params.push(Box::new(param.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::{
        nn::{BatchNorm, BatchNormConfig, LinearConfig},
        tensor::Device,
    };

    #[test]
    fn running_statistics_alone_are_shared_between_clones() {
        let device = Device::flex().autodiff();
        let norm: BatchNorm = BatchNormConfig::new(2).init(&device);
        let frozen = LinearConfig::new(2, 2).init(&device).no_grad();
        let model = (frozen, norm.clone());
        let mut all = Places::default();
        norm.visit(&mut all);
        // Behind gamma and beta.
        let statistics: HashSet<ParamId> = all.found[2..].iter().map(|found| found.0).collect();
        assert_eq!(statistics.len(), 2);
        assert_eq!(shared_values(&model), statistics);
    }

    #[test]
    fn values_that_are_written_replace_updates_and_reach_all_clones() {
        let device = Device::flex().autodiff();
        let norm: BatchNorm = BatchNormConfig::new(2).init(&device);
        let state = State { ids: shared_values(&norm) };
        let x = Tensor::<2>::from_data([[1.0, 2.0], [3.0, 6.0]], &device);
        norm.forward(x.clone());
        let numbers = |values: Vec<Tensor<1>>| {
            Tensor::cat(values, 0).into_data().iter().collect::<Vec<f32>>()
        };
        let after_one = numbers(state.read(&norm));
        assert_eq!(after_one, numbers(state.read(&norm.clone())));
        assert!((after_one[0] - 0.2).abs() < 1e-6 && (after_one[1] - 0.4).abs() < 1e-6);
        norm.forward(x.clone());
        let before = [[5.0, 6.0], [7.0, 8.0]]
            .map(|row| Tensor::<1>::from_data(row, &device.clone().without_autodiff()));
        drop(state.read(&norm));
        let clone = norm.clone();
        state.write(&norm, before.to_vec());
        assert_eq!(numbers(state.read(&clone)), [5.0, 6.0, 7.0, 8.0]);
        norm.forward(x);
        let mean = norm.running_mean.value_sync().into_data().iter().collect::<Vec<f32>>();
        assert!((mean[0] - (0.9 * 5.0 + 0.1 * 2.0)).abs() < 1e-5, "{mean:?}");
    }
}

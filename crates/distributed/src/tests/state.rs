//! Optimizers whose states are split.

use super::on_ranks;
use crate::Group;
use burn::{
    module::ParamGroup,
    nn::{Linear, LinearConfig},
    optim::{
        AdamW, AdamWConfig, DynOptimizer, DynState, GradientsParams, LearningRate, ModuleOptimizer,
        StateSink, StateSource,
    },
    tensor::{Device, Tensor, TensorData, kind::BridgeTensor},
};
use burn_pack::Reader;

/// Burn loads states onto its default device: with CUDA compiled in, a GPU that need not be there.
struct OnCpu(AdamW);

impl DynOptimizer for OnCpu {
    fn step_dyn(
        &self,
        rank: usize,
        lr: LearningRate,
        tensor: BridgeTensor,
        grad: BridgeTensor,
        state: Option<DynState>,
    ) -> (BridgeTensor, Option<DynState>) {
        self.0.step_dyn(rank, lr, tensor, grad, state)
    }

    fn to_device_dyn(&self, state: DynState, device: &Device) -> DynState {
        self.0.to_device_dyn(state, device)
    }

    fn state_flatten(&self, prefix: &str, state: &DynState, out: &mut StateSink) {
        self.0.state_flatten(prefix, state, out);
    }

    fn state_unflatten(
        &self,
        rank: usize,
        prefix: &str,
        source: &mut StateSource,
        _default: &Device,
    ) -> Option<DynState> {
        self.0.state_unflatten(rank, prefix, source, &Device::flex())
    }
}

fn optimizer() -> ModuleOptimizer {
    let adamw = AdamWConfig::new().build();
    ModuleOptimizer::from(adamw.clone()).with_group(ParamGroup::all(), OnCpu(adamw), None)
}

fn step_gradients(model: &Linear, step: usize) -> GradientsParams {
    let numbers = |length: usize, of: usize| -> Vec<f32> {
        (0..length).map(|i| ((i + of + 31 * step) as f32).sin()).collect()
    };
    let device = Device::flex();
    let mut gradients = GradientsParams::new();
    let weight = TensorData::new(numbers(12, 0), [3, 4]);
    gradients.register(model.weight.id, Tensor::<2>::from_data(weight, &device));
    let bias = TensorData::new(numbers(4, 100), [4]);
    let bias_id = model.bias.as_ref().expect("there is one").id;
    gradients.register(bias_id, Tensor::<1>::from_data(bias, &device));
    gradients
}

fn values(model: &Linear) -> Vec<f32> {
    let mut values: Vec<f32> = model.weight.val().into_data().iter::<f32>().collect();
    let bias = model.bias.as_ref().expect("there is one");
    values.extend(bias.val().into_data().iter::<f32>());
    values
}

/// The model after steps on `size` ranks, and the whole state; the state is saved and loaded in between.
fn trained(size: usize, start: &Linear) -> Vec<(Vec<f32>, usize, usize)> {
    on_ranks(size, |group: Group| {
        let mut model = start.clone();
        let mut sharded = group.sharded(optimizer(), &model).expect("the state is empty");
        for step in 0..3 {
            model = sharded.step(0.1, model.clone(), step_gradients(&model, step)).expect("sound");
        }
        let whole = sharded.to_bytes().expect("the state is sound");
        let entries = Reader::from_bytes(whole.clone()).expect("a record").tensor_names().len();
        let mut restored = group
            .sharded(optimizer(), &model)
            .and_then(|fresh| fresh.from_bytes(whole))
            .expect("the state is sound");
        let owned = [model.weight.id, model.bias.as_ref().expect("there is one").id]
            .into_iter()
            .filter(|id| restored.owns(*id))
            .count();
        for step in 3..5 {
            model = restored.step(0.1, model.clone(), step_gradients(&model, step)).expect("sound");
        }
        (values(&model), entries, owned)
    })
}

#[test]
fn a_split_state_updates_like_a_whole_one_and_is_saved_as_one() {
    let start = LinearConfig::new(3, 4).init(&Device::flex().autodiff());
    let mut model = start.clone();
    let mut whole = optimizer();
    for step in 0..5 {
        let gradients = step_gradients(&model, step);
        model = whole.step(0.1, model, gradients);
    }
    let expected = values(&model);
    let record = whole.into_bytes().expect("the state is sound");
    let entries = Reader::from_bytes(record).expect("a record").tensor_names().len();
    for size in [1, 2, 3] {
        let all = trained(size, &start);
        for (values, its_entries, _) in &all {
            assert_eq!(*values, expected, "{size} ranks");
            assert_eq!(*its_entries, entries, "{size} ranks");
        }
        let owned: Vec<usize> = all.iter().map(|(.., owned)| *owned).collect();
        let split: &[usize] = match size {
            1 => &[2],
            2 => &[1, 1],
            _ => &[1, 1, 0],
        };
        assert_eq!(owned, split);
    }
}

#[test]
fn a_whole_state_is_split_when_an_optimizer_is() {
    let start: Linear = LinearConfig::new(3, 4).init(&Device::flex().autodiff());
    let mut whole = optimizer();
    let gradients = step_gradients(&start, 0);
    let model = whole.step(0.1, start, gradients);
    let expected = {
        let mut whole = whole.clone();
        values(&whole.step(0.1, model.clone(), step_gradients(&model, 1)))
    };
    let all = on_ranks(2, |group| {
        let mut sharded = group.sharded(whole.clone(), &model).expect("the state is sound");
        let gradients = step_gradients(&model, 1);
        values(&sharded.step(0.1, model.clone(), gradients).expect("nothing is wrong"))
    });
    assert!(all.iter().all(|values| *values == expected));
}

/// One of a rank's gradients.
fn rank_gradients(model: &[Linear], rank: usize) -> GradientsParams {
    let mut gradients = GradientsParams::new();
    for (index, layer) in model.iter().enumerate() {
        let own = step_gradients(layer, 7 * index + rank);
        let bias = layer.bias.as_ref().expect("there is one").id;
        if let Some(gradient) = own.get::<2>(layer.weight.id) {
            gradients.register(layer.weight.id, gradient);
        }
        if let Some(gradient) = own.get::<1>(bias) {
            gradients.register(bias, gradient);
        }
    }
    gradients
}

#[test]
fn owners_update_in_buckets_by_sums_that_come_to_them_alone() {
    let device = Device::flex().autodiff();
    let start: Vec<Linear> = (0..4).map(|_| LinearConfig::new(3, 4).init(&device)).collect();
    let all = on_ranks(3, |group| {
        let numbers = |model: &Vec<Linear>| model.iter().flat_map(values).collect::<Vec<f32>>();
        let own = || rank_gradients(&start, group.rank());
        let mean = group.mean(&start, own(), 1.0).expect("nothing is wrong");
        let expected = numbers(&optimizer().step(0.1, start.clone(), mean));

        // Each parameter of a rank's in a bucket of its own.
        let mut split = group.sharded_in(1, optimizer(), &start).expect("the state is empty");
        let mut sums = split.sums(&start, own(), Vec::new(), 1.0).expect("nothing is wrong");
        let foreign = start.iter().filter(|layer| {
            !split.owns(layer.weight.id) && sums.gradients.get::<2>(layer.weight.id).is_some()
        });
        assert_eq!(foreign.count(), 0, "gradients of others' parameters");
        let means = sums.means(&start);
        let updated = split.step(0.1, start.clone(), means).expect("nothing is wrong");
        group.same(&updated).expect("all have the same");
        (expected, numbers(&updated), split.buckets())
    });
    for (expected, updated, buckets) in all {
        assert_eq!(updated, expected);
        assert!(buckets > 1, "one bucket has no order");
    }
}

#[test]
fn ranks_with_other_numbers_are_told_which() {
    let start: Linear = LinearConfig::new(3, 4).init(&Device::flex().autodiff());
    let all = on_ranks(3, |group| {
        group.same(&start).expect("all have the same");
        let mut own = start.clone();
        if group.rank() == 1 {
            own.bias = own.bias.map(|bias| bias.map(|bias| bias + 1e-6));
        }
        group.same(&own).expect_err("rank 1 differs").to_string()
    });
    for message in all {
        let expected = "the ranks differ in the numbers of a parameter: ranks [0, 2] have bias with the checksum";
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn what_is_no_state_is_refused() {
    let model: Linear = LinearConfig::new(3, 4).init(&Device::flex().autodiff());
    let sharded = Group::alone().sharded(optimizer(), &model).expect("the state is empty");
    let refused = sharded.from_bytes(burn::tensor::Bytes::from_bytes_vec(vec![1, 2, 3]));
    let message = refused.map(drop).expect_err("three bytes are no record").to_string();
    assert!(message.contains("optimizer's state of 1 ranks"), "{message}");
}

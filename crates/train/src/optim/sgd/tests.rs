use super::*;
use crate::optim::{
    OnDevice,
    tests::{
        check_mean, check_resumed, mean_after_small_updates, ones, reading, step, trained, values,
    },
};
use burn::{
    module::ParamGroup,
    optim::{SgdConfig, decay::WeightDecayConfig, momentum::MomentumConfig},
};

const ALL_DECAY: SgdGroups = SgdGroups {
    momentum: 0.9,
    dampening: 0.0,
    nesterov: false,
    weight_decay: 0.05,
    decays_vectors: true,
    stochastic_rounding: false,
};

/// With and without momentum, dampening and Nesterov's form.
const VARIANTS: [SgdGroups; 5] = [
    ALL_DECAY,
    SgdGroups { dampening: 0.25, ..ALL_DECAY },
    SgdGroups { nesterov: true, ..ALL_DECAY },
    SgdGroups { nesterov: true, dampening: 0.25, ..ALL_DECAY },
    SgdGroups { momentum: 0.0, ..ALL_DECAY },
];

fn burns(groups: &SgdGroups) -> ModuleOptimizer {
    let SgdGroups { momentum, dampening, nesterov, weight_decay, .. } = *groups;
    let momentum = (momentum != 0.0).then(|| {
        MomentumConfig::new()
            .with_momentum(momentum)
            .with_dampening(dampening)
            .with_nesterov(nesterov)
    });
    let sgd = SgdConfig::new()
        .with_weight_decay(Some(WeightDecayConfig::new(weight_decay as f32)))
        .with_momentum(momentum)
        .build();
    // Else its state would load onto Burn's default device: with CUDA compiled in, a GPU that need not be there.
    let on_cpu = OnDevice::new(sgd.clone(), &Device::flex());
    ModuleOptimizer::from(sgd).with_group(ParamGroup::all(), on_cpu, None)
}

/// Five steps at a rate of 0.1, of some ten roundings each of numbers below 10, and of the parameter.
const BOUND: f32 = 5.0 * (10.0 * 0.1 * 10.0 + 2.0) * f32::EPSILON / 2.0;

#[test]
fn without_a_gate_it_is_burns() {
    let device = Device::flex().autodiff();
    for groups in VARIANTS {
        let ours = trained(groups.init(&ones(&device), &device), &device);
        for (a, b) in ours.iter().zip(trained(burns(&groups), &device)) {
            assert!((a - b).abs() < BOUND, "{groups:?}: {a} against {b}");
        }
    }
    let [plain, dampened, nesterov, ..] =
        VARIANTS.map(|groups| trained(groups.init(&ones(&device), &device), &device));
    assert!(plain[0] - dampened[0] != 0.0 && plain[0] - nesterov[0] != 0.0, "all are one");
}

#[test]
fn matrices_decay_and_vectors_only_if_they_are_asked_to() {
    let device = Device::flex().autodiff();
    for (decays_vectors, expected) in [(false, 1.0), (true, 0.95)] {
        let groups = SgdGroups { weight_decay: 0.5, decays_vectors, ..SgdGroups::default() };
        let mut optimizer = groups.init(&ones(&device), &device);
        // A zero gradient leaves the decay alone: 1 - 0.1 * 0.5.
        let (weight, bias) = values(&step(&mut optimizer, ones(&device), 0.0));
        assert!((weight - 0.95).abs() < 1e-6, "{weight}");
        assert!((bias - expected).abs() < 1e-6, "{bias}");
    }
}

#[test]
fn an_open_gate_changes_nothing_and_a_closed_one_lets_nothing_pass() {
    let device = Device::flex().autodiff();
    for groups in VARIANTS {
        let gate = StepGate::new();
        gate.set(Some(reading(1.0, 0.0)));
        let gated = trained(groups.init_gated(&ones(&device), &device, &gate), &device);
        assert_eq!(gated, trained(groups.init(&ones(&device), &device), &device), "{groups:?}");
        gate.set(Some(reading(0.0, 0.0)));
        let mut closed = groups.init_gated(&ones(&device), &device, &gate);
        let model = step(&mut closed, ones(&device), f32::NAN);
        assert_eq!(values(&model), (1.0, 1.0), "{groups:?}");
    }
}

/// Steps that were taken back before it leave the first step the first, and those between leave nothing.
#[test]
fn steps_that_were_taken_back_leave_no_trace() {
    let device = Device::flex().autodiff();
    for groups in VARIANTS {
        let mut straight = groups.init(&ones(&device), &device);
        let mut model = ones(&device);
        for gradient in [0.3, -0.7, 2.0] {
            model = step(&mut straight, model, gradient);
        }
        let expected = values(&model);

        let gate = StepGate::new();
        let mut optimizer = groups.init_gated(&ones(&device), &device, &gate);
        let mut model = ones(&device);
        let mut skipped = 0.0;
        let bad = f32::INFINITY;
        for gradient in [bad, bad, 0.3, bad, -0.7, 2.0] {
            let taken = if gradient == bad { 0.0 } else { 1.0 };
            gate.set(Some(reading(taken, skipped)));
            model = step(&mut optimizer, model, gradient);
            skipped += 1.0 - taken;
        }
        assert_eq!(values(&model), expected, "{groups:?}");
    }
}

/// A parameter whose gradients begin late has momentum from its second step on, however many steps were
/// taken back before its first.
#[test]
fn parameters_that_join_late_gain_momentum_at_once() {
    let device = Device::flex().autodiff();
    let run = |skipped: Option<f32>| {
        let gate = StepGate::new();
        gate.set(skipped.map(|skipped| reading(1.0, skipped)));
        let optimizer = ALL_DECAY.init_gated(&ones(&device), &device, &gate);
        trained(optimizer, &device)
    };
    assert_eq!(run(Some(7.0)), run(None));
}

#[test]
fn small_updates_of_16_bit_parameters_count_in_the_mean() {
    let train = |stochastic_rounding: bool| {
        let groups = SgdGroups {
            // In the long run gradients count ten times; dampened as much, once.
            momentum: 0.9,
            dampening: 0.9,
            weight_decay: 0.0,
            stochastic_rounding,
            ..SgdGroups::default()
        };
        mean_after_small_updates(|model, device| groups.init(model, device))
    };
    assert_eq!(train(false), 1.0, "the control kept updates of a fortieth of a unit");
    check_mean(train(true));
}

#[test]
fn a_saved_and_loaded_optimizer_continues_bit_for_bit() {
    for groups in &VARIANTS[..4] {
        check_resumed(|model, device| groups.init(model, device));
    }
}

#[test]
fn records_load_both_ways_between_this_and_burns() {
    let device = Device::flex().autodiff();
    for groups in VARIANTS {
        let ours = |model: &_| groups.init(model, &device);
        let start = ones(&device);
        let mut optimizers = [ours(&start), burns(&groups)];
        let [model, _] = optimizers.each_mut().map(|optimizer| step(optimizer, start.clone(), 0.3));
        let bytes = optimizers
            .each_ref()
            .map(|optimizer| optimizer.into_bytes().expect("the state serializes"));
        let [from_ours, from_burns] = bytes;
        let mut crossed = [
            burns(&groups).from_bytes(from_ours).expect("Burn loads ours"),
            ours(&model).from_bytes(from_burns).expect("ours loads Burn's"),
        ];
        let expected = values(&step(&mut optimizers[0], model.clone(), -0.7));
        for optimizer in &mut crossed {
            let found = values(&step(optimizer, model.clone(), -0.7));
            for (a, b) in [(found.0, expected.0), (found.1, expected.1)] {
                assert!((a - b).abs() < BOUND, "{groups:?}: {a} against {b}");
            }
        }
        if groups.momentum != 0.0 {
            let fresh = values(&step(&mut ours(&model), model, -0.7));
            assert!((fresh.0 - expected.0).abs() > BOUND, "the state made no difference");
        }
    }
}

/// Burn keeps the velocity of a parameter in 16 bits in those.
#[test]
fn velocities_in_16_bits_load_in_f32() {
    let device = Device::flex();
    let halves = Tensor::<1>::from_data([0.5, -3.0], (&device, DType::BF16));
    let mut source = StateSource::default();
    source.insert_tensor("7.momentum.velocity".into(), halves.into_data());
    let state = SgdState::<1>::state_unflatten("7", &mut source, &device).expect("a state");
    let velocity = state.velocity.expect("a velocity");
    assert_eq!(velocity.dtype(), DType::F32);
    assert_eq!(velocity.into_data().try_to_vec::<f32>().expect("f32"), [0.5, -3.0]);
    assert_eq!(state.time, SgdState::<1>::UNCOUNTED);
}

#[test]
#[should_panic(expected = "sgd: argument `momentum`: expected a finite number from 0, got -0.5")]
fn a_negative_momentum_is_named() {
    let device = Device::flex().autodiff();
    SgdGroups { momentum: -0.5, ..ALL_DECAY }.init(&ones(&device), &device);
}

#[test]
#[should_panic(expected = "sgd: argument `dampening`: expected a finite number, got NaN")]
fn a_dampening_that_is_no_number_is_named() {
    let device = Device::flex().autodiff();
    SgdGroups { dampening: f64::NAN, ..ALL_DECAY }.init(&ones(&device), &device);
}

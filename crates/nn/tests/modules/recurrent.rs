use crate::compare::{assert_close, assert_same, gradients, tensor};
use blackburn_nn::recurrent;
use burn::{
    module::{Module, ModuleMapper, Param},
    nn::{
        BiGruConfig, BiLstmConfig, BiRnnConfig, GruConfig, LstmConfig, LstmState, RnnConfig,
        RnnState,
    },
    prelude::*,
    tensor::{DType, FloatDType},
};
use std::panic::{AssertUnwindSafe, catch_unwind};

const BATCH: usize = 3;
const SEQ: usize = 5;
const INPUT: usize = 4;
const HIDDEN: usize = 6;

fn device() -> Device {
    Device::flex().autodiff()
}

fn input() -> Tensor<3> {
    tensor([BATCH, SEQ, INPUT], 0.7, &device())
}

/// `module` with parameters that are the same each time: gradients must not depend on a draw that clips every state.
fn fixed<M: Module>(module: M) -> M {
    module.map(&mut Fixed { start: 0.0 })
}

struct Fixed {
    start: f32,
}

impl ModuleMapper for Fixed {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.start += 0.9;
        param.map(|old| {
            let new = tensor(old.dims(), self.start, &old.device()) * 0.5;
            new.detach().require_grad()
        })
    }
}

/// Whether a function and Burn's own make the same of one module, forward and backward.
#[track_caller]
fn assert_alike<M: Module>(name: &str, module: &M, [ours, burns]: [Tensor<3>; 2]) {
    let [ours_gradients, burns_gradients] =
        [ours.clone(), burns.clone()].map(|output| gradients(module, output));
    assert_same(name, ours, burns);
    for (ours, burns) in ours_gradients.iter().zip(&burns_gradients) {
        assert_close(&format!("a gradient of {name}"), ours, burns);
    }
    assert!(burns_gradients.iter().flatten().any(|gradient| gradient.abs() > 1e-3), "{name}");
}

#[test]
fn an_lstm_is_burns_with_every_option() {
    let config = || LstmConfig::new(INPUT, HIDDEN, true);
    for (name, config) in [
        ("plain", config()),
        ("reverse", config().with_reverse(true)),
        ("time first", config().with_batch_first(false)),
        ("clipped", config().with_clip(Some(0.1))),
        ("coupled", config().with_input_forget(true)),
        ("without bias", LstmConfig::new(INPUT, HIDDEN, false)),
    ] {
        let module = fixed(config.init(&device()));
        let batch = if module.batch_first { BATCH } else { SEQ };
        let state = |start| tensor([batch, HIDDEN], start, &device());
        for state in [None, Some(LstmState::new(state(0.1), state(0.2)))] {
            let (ours, our_state) = recurrent::lstm(&module, input(), state.clone());
            let (burns, burns_state) = module.forward(input(), state);
            assert_same(name, our_state.cell, burns_state.cell);
            assert_same(name, our_state.hidden, burns_state.hidden);
            assert_alike(name, &module, [ours, burns]);
        }
    }
}

#[test]
fn a_gru_is_burns_with_every_option() {
    let config = || GruConfig::new(INPUT, HIDDEN, true);
    for (name, config) in [
        ("reset after", config()),
        ("reset before", config().with_reset_after(false)),
        ("clipped", config().with_clip(Some(0.1))),
        ("without bias", GruConfig::new(INPUT, HIDDEN, false)),
    ] {
        let module = fixed(config.init(&device()));
        for state in [None, Some(tensor([BATCH, HIDDEN], 0.1, &device()))] {
            let ours = recurrent::gru(&module, input(), state.clone());
            let burns = module.forward(input(), state);
            assert_alike(name, &module, [ours, burns]);
        }
    }
}

#[test]
fn an_rnn_is_burns_with_every_option() {
    let config = || RnnConfig::new(INPUT, HIDDEN, true);
    for (name, config) in [
        ("plain", config()),
        ("reverse", config().with_reverse(true)),
        ("time first", config().with_batch_first(false)),
        ("clipped", config().with_clip(Some(0.1))),
    ] {
        let module = fixed(config.init(&device()));
        let batch = if module.batch_first { BATCH } else { SEQ };
        for hidden in [None, Some(tensor([batch, HIDDEN], 0.1, &device()))] {
            let state = || hidden.clone().map(RnnState::new);
            let (ours, our_state) = recurrent::rnn(&module, input(), state());
            let (burns, burns_state) = module.forward(input(), state());
            assert_same(name, our_state.hidden, burns_state.hidden);
            assert_alike(name, &module, [ours, burns]);
        }
    }
}

#[test]
fn both_directions_are_burns() {
    for batch_first in [true, false] {
        let batch = if batch_first { BATCH } else { SEQ };
        let state = |start| tensor([2, batch, HIDDEN], start, &device());
        let lstm = BiLstmConfig::new(INPUT, HIDDEN, true).with_batch_first(batch_first);
        let lstm = fixed(lstm.init(&device()));
        for state in [None, Some(LstmState::new(state(0.1), state(0.2)))] {
            let (ours, our_state) = recurrent::bi_lstm(&lstm, input(), state.clone());
            let (burns, burns_state) = lstm.forward(input(), state);
            assert_same("bi_lstm", our_state.cell, burns_state.cell);
            assert_same("bi_lstm", our_state.hidden, burns_state.hidden);
            assert_alike("bi_lstm", &lstm, [ours, burns]);
        }
        let gru = BiGruConfig::new(INPUT, HIDDEN, true).with_batch_first(batch_first);
        let gru = fixed(gru.init(&device()));
        let rnn = BiRnnConfig::new(INPUT, HIDDEN, true).with_batch_first(batch_first);
        let rnn = fixed(rnn.init(&device()));
        for state in [None, Some(state(0.3))] {
            let (ours, our_state) = recurrent::bi_gru(&gru, input(), state.clone());
            let (burns, burns_state) = gru.forward(input(), state.clone());
            assert_same("bi_gru", our_state, burns_state);
            assert_alike("bi_gru", &gru, [ours, burns]);
            let state = || state.clone().map(RnnState::new);
            let (ours, our_state) = recurrent::bi_rnn(&rnn, input(), state());
            let (burns, burns_state) = rnn.forward(input(), state());
            assert_same("bi_rnn", our_state.hidden, burns_state.hidden);
            assert_alike("bi_rnn", &rnn, [ours, burns]);
        }
    }
}

#[test]
fn a_sequence_of_nothing_has_outputs_of_nothing() {
    let module = LstmConfig::new(INPUT, HIDDEN, true).init(&device());
    let x = Tensor::<3>::zeros([BATCH, 0, INPUT], &device());
    let (y, state) = recurrent::lstm(&module, x, None);
    assert_eq!((y.dims(), state.hidden.dims()), ([BATCH, 0, HIDDEN], [BATCH, HIDDEN]));
}

/// Stores parameters in another type.
struct Stored(FloatDType);

impl ModuleMapper for Stored {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| tensor.cast(self.0).detach().require_grad())
    }
}

/// Weights in 16 bits, with inputs in them or in f32.
#[test]
fn weights_in_16_bits_run_where_burns_own_code_fails() {
    for stored in [FloatDType::BF16, FloatDType::F16] {
        let lstm = fixed(LstmConfig::new(INPUT, HIDDEN, true).init(&device()));
        let lstm = lstm.map(&mut Stored(stored));
        let exact = lstm.clone().map(&mut Stored(FloatDType::F32));
        let x = input().cast(stored);
        let expected = exact.forward(x.clone().cast(FloatDType::F32), None).0;
        for given in [stored, FloatDType::F32] {
            let (y, state) = recurrent::lstm(&lstm, x.clone().cast(given), None);
            assert_eq!((y.dtype(), state.cell.dtype()), (given.into(), stored.into()));
            assert_eq!(state.hidden.dtype(), DType::from(stored));
            let wrong = y.cast(FloatDType::F32) - expected.clone();
            let [noise, signal]: [f32; 2] =
                [wrong, expected.clone()].map(|x| x.square().sum().into_scalar());
            // 25 dB, as of a layer's output in 16 bits.
            assert!(signal > 316.0 * noise, "{stored:?}: {noise} of {signal}");
        }
        // The control: without this module there would be no need for it.
        let fails = catch_unwind(AssertUnwindSafe(|| lstm.forward(x, None).0.into_data()));
        assert!(fails.is_err(), "Burn's own code takes {stored:?} by now: it can be called again");
    }
}

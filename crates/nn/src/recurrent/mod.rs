//! Recurrent layers of `burn::nn` on sequences of any type: modules, and functions that run Burn's own.
//!
//! Burn makes initial states, and the memory for outputs, in the device's default type, f32, which fails where
//! weights and inputs are in 16 bits. Here the same modules run in the type that their weights are
//! read in: bf16 or f16 under a `PrecisionPolicy`, f32 where it keeps them. Outputs have the type of the input,
//! states that of the weights.
//!
//! ```
//! use blackburn_nn::recurrent;
//! use burn::{nn::LstmConfig, prelude::*};
//!
//! let device = Device::flex();
//! let module = LstmConfig::new(4, 8, true).init(&device);
//!
//! // Instead of `module.forward(x, None)`:
//! let (y, state) = recurrent::lstm(&module, Tensor::ones([2, 5, 4], &device), None);
//! assert_eq!((y.dims(), state.hidden.dims()), ([2, 5, 8], [2, 8]));
//! ```
//!
//! Equations and shapes are those of Burn's modules. Weights are read once a call, not once a time step.

mod modules;

pub use modules::{
    BiGru, BiGruConfig, BiLstm, BiLstmConfig, BiRnn, BiRnnConfig, Gru, GruConfig, Lstm, LstmConfig,
    Rnn, RnnConfig,
};

use blackburn_backend::lstm::lstm as lstm_sequence;
use burn::{
    nn::{self as burns, GateController, LstmState, RnnState, activation::Activation},
    tensor::{DType, FloatDType, Tensor, module::linear, s},
};

/// What Burn's [`Lstm`](burns::Lstm) makes of `x` and `state`: the hidden state of each time step, and the last state.
///
/// # Panics
///
/// As `forward` of Burn's module, where shapes do not fit the module.
pub fn lstm(
    module: &burns::Lstm,
    x: Tensor<3>,
    state: Option<LstmState<2>>,
) -> (Tensor<3>, LstmState<2>) {
    in_layout(module.batch_first, x, |x| lstm_steps(module, x, state, module.reverse))
}

/// What Burn's [`BiLstm`](burns::BiLstm) makes of `x` and `state`: the hidden states of both directions for each time step,
/// and their last states.
///
/// # Panics
///
/// As `forward` of Burn's module, where shapes do not fit the module.
pub fn bi_lstm(
    module: &burns::BiLstm,
    x: Tensor<3>,
    state: Option<LstmState<3>>,
) -> (Tensor<3>, LstmState<3>) {
    in_layout(module.batch_first, x, |x| {
        let of = |direction: i64| {
            state.clone().map(|state| state.slice(s![direction]).squeeze_dim::<2>(0))
        };
        let forward = &module.forward;
        let (there, last) = lstm_steps(forward, x.clone(), of(0), forward.reverse);
        let (back, first) = lstm_steps(&module.reverse, x, of(1), true);
        (Tensor::cat(vec![there, back], 2), LstmState::stack(vec![last, first], 0))
    })
}

/// What Burn's [`Gru`](burns::Gru) makes of `x` and `state`: the hidden state of each time step.
///
/// # Panics
///
/// As `forward` of Burn's module, where shapes do not fit the module.
pub fn gru(module: &burns::Gru, x: Tensor<3>, state: Option<Tensor<2>>) -> Tensor<3> {
    gru_steps(module, x, state, false).0
}

/// What Burn's [`BiGru`](burns::BiGru) makes of `x` and `state`: the hidden states of both directions for each time step,
/// and the last ones.
///
/// # Panics
///
/// As `forward` of Burn's module, where shapes do not fit the module.
pub fn bi_gru(
    module: &burns::BiGru,
    x: Tensor<3>,
    state: Option<Tensor<3>>,
) -> (Tensor<3>, Tensor<3>) {
    in_layout(module.batch_first, x, |x| {
        let of = |direction| direction_of(&state, direction);
        let (there, last) = gru_steps(&module.forward, x.clone(), of(0), false);
        let (back, first) = gru_steps(&module.reverse, x, of(1), true);
        (Tensor::cat(vec![there, back], 2), Tensor::stack(vec![last, first], 0))
    })
}

/// What Burn's [`Rnn`](burns::Rnn) makes of `x` and `state`: the hidden state of each time step, and the last state.
///
/// # Panics
///
/// As `forward` of Burn's module, where shapes do not fit the module.
pub fn rnn(
    module: &burns::Rnn,
    x: Tensor<3>,
    state: Option<RnnState<2>>,
) -> (Tensor<3>, RnnState<2>) {
    in_layout(module.batch_first, x, |x| {
        let hidden = state.map(|state| state.hidden);
        let (y, last) = rnn_steps(module, x, hidden, module.reverse);
        (y, RnnState::new(last))
    })
}

/// What Burn's [`BiRnn`](burns::BiRnn) makes of `x` and `state`: the hidden states of both directions for each time step,
/// and their last states.
///
/// # Panics
///
/// As `forward` of Burn's module, where shapes do not fit the module.
pub fn bi_rnn(
    module: &burns::BiRnn,
    x: Tensor<3>,
    state: Option<RnnState<3>>,
) -> (Tensor<3>, RnnState<3>) {
    in_layout(module.batch_first, x, |x| {
        let state = state.map(|state| state.hidden);
        let of = |direction| direction_of(&state, direction);
        let forward = &module.forward;
        let (there, last) = rnn_steps(forward, x.clone(), of(0), forward.reverse);
        let (back, first) = rnn_steps(&module.reverse, x, of(1), true);
        let last = RnnState::new(Tensor::stack(vec![last, first], 0));
        (Tensor::cat(vec![there, back], 2), last)
    })
}

/// A state of one direction.
fn direction_of(state: &Option<Tensor<3>>, direction: i64) -> Option<Tensor<2>> {
    state.as_ref().map(|state| state.clone().slice(s![direction]).squeeze_dim(0))
}

/// Runs `forward` on sequences `[batch, seq, ..]` in whichever order `x` has its dimensions.
fn in_layout<S>(
    batch_first: bool,
    x: Tensor<3>,
    forward: impl FnOnce(Tensor<3>) -> (Tensor<3>, S),
) -> (Tensor<3>, S) {
    if batch_first {
        return forward(x);
    }
    let (y, state) = forward(x.swap_dims(0, 1));
    (y.swap_dims(0, 1), state)
}

/// A gate's parameters in the type that they are read in.
struct Gate {
    /// Of the input.
    input: Affine,
    /// Of the hidden state.
    hidden: Affine,
}

/// A weight and its bias.
struct Affine {
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
}

impl Affine {
    fn of(&self, x: &Tensor<2>) -> Tensor<2> {
        linear(x.clone(), self.weight.clone(), self.bias.clone())
    }
}

impl Gate {
    fn of(gate: &GateController) -> Self {
        let [input, hidden] =
            [&gate.input_transform, &gate.hidden_transform].map(|linear| Affine {
                weight: linear.weight.val(),
                bias: linear.bias.as_ref().map(|bias| bias.val()),
            });
        Self { input, hidden }
    }

    fn sum(&self, x: &Tensor<2>, hidden: &Tensor<2>) -> Tensor<2> {
        self.input.of(x) + self.hidden.of(hidden)
    }

    /// What both add to the sum.
    fn bias(&self) -> Option<Tensor<1>> {
        match (self.input.bias.clone(), self.hidden.bias.clone()) {
            (Some(input), Some(hidden)) => Some(input + hidden),
            (input, hidden) => input.or(hidden),
        }
    }

    fn dtype(&self) -> DType {
        self.hidden.weight.dtype()
    }
}

/// A given state, or zeros, in that type.
fn state_or_zeros(
    state: Option<Tensor<2>>,
    x: &Tensor<3>,
    d_hidden: usize,
    dtype: DType,
) -> Tensor<2> {
    match state {
        Some(state) => state.cast(FloatDType::from(dtype)),
        None => Tensor::zeros([x.dims()[0], d_hidden], (&x.device(), dtype)),
    }
}

/// The outputs of `step` for each time step of `x`, `[batch, seq, d_input]`, which it gets in that type.
fn each_step(
    x: Tensor<3>,
    d_hidden: usize,
    dtype: DType,
    reverse: bool,
    mut step: impl FnMut(Tensor<2>) -> Tensor<2>,
) -> Tensor<3> {
    let (given, [batch, seq, _]) = (x.dtype(), x.dims());
    if seq == 0 {
        return Tensor::zeros([batch, 0, d_hidden], (&x.device(), given));
    }
    let x = x.cast(FloatDType::from(dtype));
    let mut at = |t: usize| step(x.clone().slice(s![.., t..t + 1, ..]).squeeze_dim(1));
    let outputs: Vec<_> = if reverse {
        let mut outputs: Vec<_> = (0..seq).rev().map(&mut at).collect();
        outputs.reverse();
        outputs
    } else {
        (0..seq).map(&mut at).collect()
    };
    Tensor::stack::<3>(outputs, 1).cast(FloatDType::from(given))
}

fn lstm_steps(
    module: &burns::Lstm,
    x: Tensor<3>,
    state: Option<LstmState<2>>,
    reverse: bool,
) -> (Tensor<3>, LstmState<2>) {
    if let Some(gates) = usual_gates(module).filter(|_| !x.dims().contains(&0)) {
        return lstm_at_once(gates.map(Gate::of), x, state, reverse);
    }
    let [input, output, cell] =
        [&module.input_gate, &module.output_gate, &module.cell_gate].map(Gate::of);
    // Without one, what the input gate takes is what is forgotten.
    let forget = module.forget_gate.as_ref().filter(|_| !module.input_forget).map(Gate::of);
    let dtype = input.dtype();
    let (cell_state, hidden_state) = state.map(LstmState::unpack).unzip();
    let [mut c, mut h] =
        [cell_state, hidden_state].map(|state| state_or_zeros(state, &x, module.d_hidden, dtype));
    let y = each_step(x, module.d_hidden, dtype, reverse, |x| {
        let gate = |gate: &Gate| module.gate_activation.forward(gate.sum(&x, &h));
        let taken = gate(&input);
        let kept = match &forget {
            Some(forget) => gate(forget),
            None => taken.clone().neg().add_scalar(1.0),
        };
        let shown = gate(&output);
        let candidate = module.cell_activation.forward(cell.sum(&x, &h));
        c = kept * c.clone() + taken * candidate;
        if let Some(clip) = module.clip {
            c = c.clone().clamp(-clip, clip);
        }
        h = shown * module.hidden_activation.forward(c.clone());
        h.clone()
    });
    (y, LstmState::new(c, h))
}

/// The gates in the order of [`lstm_sequence`], if they are the usual ones, with the usual functions.
fn usual_gates(module: &burns::Lstm) -> Option<[&GateController; 4]> {
    let forget = module.forget_gate.as_ref().filter(|_| !module.input_forget)?;
    let is_usual = module.clip.is_none()
        && matches!(module.gate_activation, Activation::Sigmoid(_))
        && matches!(module.cell_activation, Activation::Tanh(_))
        && matches!(module.hidden_activation, Activation::Tanh(_));
    is_usual.then_some([&module.input_gate, forget, &module.cell_gate, &module.output_gate])
}

/// All gates of all steps take the input by one product. The rest is one operation.
fn lstm_at_once(
    gates: [Gate; 4],
    x: Tensor<3>,
    state: Option<LstmState<2>>,
    reverse: bool,
) -> (Tensor<3>, LstmState<2>) {
    let (given, [batch, seq, d_input]) = (x.dtype(), x.dims());
    let dtype = gates[0].dtype();
    let d_hidden = gates[0].hidden.weight.dims()[0];
    let (c, h) = state.map(LstmState::unpack).unzip();
    let [c, h] = [c, h].map(|state| state_or_zeros(state, &x, d_hidden, dtype));

    let of_input = gates.each_ref().map(|gate| gate.input.weight.clone());
    let of_hidden = gates.each_ref().map(|gate| gate.hidden.weight.clone());
    let biases: Option<Vec<_>> = gates.iter().map(Gate::bias).collect();
    let x = x.cast(FloatDType::from(dtype)).swap_dims(0, 1).reshape([seq * batch, d_input]);
    let bias = biases.map(|biases| Tensor::cat(biases, 0));
    let projected = linear(x, Tensor::cat(of_input.into(), 1), bias);
    let projected = projected.reshape([seq, batch, 4 * d_hidden]);
    let weight = Tensor::cat(of_hidden.into(), 1);
    let (y, c) = lstm_sequence(projected, weight, h, c, reverse);
    let last = if reverse { 0 } else { seq - 1 };
    let h = y.clone().slice(s![last..last + 1, .., ..]).squeeze_dim::<2>(0);
    (y.swap_dims(0, 1).cast(FloatDType::from(given)), LstmState::new(c, h))
}

fn gru_steps(
    module: &burns::Gru,
    x: Tensor<3>,
    state: Option<Tensor<2>>,
    reverse: bool,
) -> (Tensor<3>, Tensor<2>) {
    let [update, reset, new] =
        [&module.update_gate, &module.reset_gate, &module.new_gate].map(Gate::of);
    let dtype = update.dtype();
    let mut h = state_or_zeros(state, &x, module.d_hidden, dtype);
    let y = each_step(x, module.d_hidden, dtype, reverse, |x| {
        let gate = |gate: &Gate| module.gate_activation.forward(gate.sum(&x, &h));
        let (kept, seen) = (gate(&update), gate(&reset));
        let candidate = if module.reset_after {
            new.input.of(&x) + seen * new.hidden.of(&h)
        } else {
            new.sum(&x, &(h.clone() * seen))
        };
        let candidate = module.hidden_activation.forward(candidate);
        let replaced = kept.clone().neg().add_scalar(1.0);
        h = candidate * replaced + kept * h.clone();
        if let Some(clip) = module.clip {
            h = h.clone().clamp(-clip, clip);
        }
        h.clone()
    });
    (y, h)
}

fn rnn_steps(
    module: &burns::Rnn,
    x: Tensor<3>,
    state: Option<Tensor<2>>,
    reverse: bool,
) -> (Tensor<3>, Tensor<2>) {
    let gate = Gate::of(&module.gate);
    let dtype = gate.dtype();
    let mut h = state_or_zeros(state, &x, module.d_hidden, dtype);
    let y = each_step(x, module.d_hidden, dtype, reverse, |x| {
        h = module.hidden_activation.forward(gate.sum(&x, &h));
        if let Some(clip) = module.clip {
            h = h.clone().clamp(-clip, clip);
        }
        h.clone()
    });
    (y, h)
}

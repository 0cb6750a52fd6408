//! The recurrent layers as modules.

use super::{bi_gru, bi_lstm, bi_rnn, gru, lstm, rnn};
use crate::drop_in::{drop_in, same_config};
use burn::{
    config::Config,
    nn::{self as burns, Initializer, LstmState, RnnState, activation::ActivationConfig},
    tensor::{Device, Tensor},
};

/// Configuration of [`Rnn`], as of Burn's.
#[derive(Config, Debug)]
pub struct RnnConfig {
    /// Size of the input's features.
    pub d_input: usize,
    /// Size of the hidden state.
    pub d_hidden: usize,
    /// Whether gates have biases.
    pub bias: bool,
    /// How weights begin. Default: Xavier's normal numbers
    #[config(default = "Initializer::XavierNormal { gain: 1.0 }")]
    pub initializer: Initializer,
    /// Whether sequences are `[batch, seq, d_input]`, and not `[seq, batch, d_input]`. Default: true
    #[config(default = true)]
    pub batch_first: bool,
    /// Whether the last time step comes first. Default: false
    #[config(default = false)]
    pub reverse: bool,
    /// Bounds the hidden state to plus and minus this. Default: none
    pub clip: Option<f64>,
    /// Activation of the hidden state. Default: hyperbolic tangent
    #[config(default = "ActivationConfig::Tanh")]
    pub hidden_activation: ActivationConfig,
}

same_config!(
    RnnConfig,
    burns::RnnConfig,
    d_input,
    d_hidden,
    bias,
    initializer,
    batch_first,
    reverse,
    clip,
    hidden_activation
);

impl RnnConfig {
    /// Creates the module with fresh weights.
    pub fn init(&self, device: &Device) -> Rnn {
        burns::RnnConfig::from(self.clone()).init(device).into()
    }
}

drop_in! {
    /// Burn's [`Rnn`](burns::Rnn), a recurrent layer, on sequences of any type; [`RnnConfig`] makes it.
    Rnn, burns::Rnn
}

impl Rnn {
    /// Runs the layer on `x`, `[batch, seq, d_input]`, and returns the hidden state of each time step, `[batch, seq,
    /// d_hidden]`, and the last one. `state` and the last state are `[batch, d_hidden]`; without one it
    /// begins with zeros. Batch and sequence are the other way round where `batch_first` is not set.
    ///
    /// # Panics
    ///
    /// Where shapes do not fit the module.
    pub fn forward(&self, x: Tensor<3>, state: Option<RnnState<2>>) -> (Tensor<3>, RnnState<2>) {
        rnn(self, x, state)
    }
}

/// Configuration of [`BiRnn`], as of Burn's.
#[derive(Config, Debug)]
pub struct BiRnnConfig {
    /// Size of the input's features.
    pub d_input: usize,
    /// Size of the hidden state.
    pub d_hidden: usize,
    /// Whether gates have biases.
    pub bias: bool,
    /// How weights begin. Default: Xavier's normal numbers
    #[config(default = "Initializer::XavierNormal { gain: 1.0 }")]
    pub initializer: Initializer,
    /// Whether sequences are `[batch, seq, d_input]`, and not `[seq, batch, d_input]`. Default: true
    #[config(default = true)]
    pub batch_first: bool,
    /// Bounds the hidden state to plus and minus this. Default: none
    pub clip: Option<f64>,
    /// Activation of the hidden state. Default: hyperbolic tangent
    #[config(default = "ActivationConfig::Tanh")]
    pub hidden_activation: ActivationConfig,
}

same_config!(
    BiRnnConfig,
    burns::BiRnnConfig,
    d_input,
    d_hidden,
    bias,
    initializer,
    batch_first,
    clip,
    hidden_activation
);

impl BiRnnConfig {
    /// Creates the module with fresh weights.
    pub fn init(&self, device: &Device) -> BiRnn {
        burns::BiRnnConfig::from(self.clone()).init(device).into()
    }
}

drop_in! {
    /// Burn's [`BiRnn`](burns::BiRnn), a recurrent layer of both directions, on sequences of any type; [`BiRnnConfig`] makes it.
    BiRnn, burns::BiRnn
}

impl BiRnn {
    /// Runs the layer on `x`, `[batch, seq, d_input]`, and returns the hidden state of each time step, `[batch, seq,
    /// 2 d_hidden]`, and the last one. `state` and the last states are `[2, batch, d_hidden]`; without one it
    /// begins with zeros. Batch and sequence are the other way round where `batch_first` is not set.
    ///
    /// # Panics
    ///
    /// Where shapes do not fit the module.
    pub fn forward(&self, x: Tensor<3>, state: Option<RnnState<3>>) -> (Tensor<3>, RnnState<3>) {
        bi_rnn(self, x, state)
    }
}

/// Configuration of [`Lstm`], as of Burn's.
#[derive(Config, Debug)]
pub struct LstmConfig {
    /// Size of the input's features.
    pub d_input: usize,
    /// Size of the hidden state.
    pub d_hidden: usize,
    /// Whether gates have biases.
    pub bias: bool,
    /// How weights begin. Default: Xavier's normal numbers
    #[config(default = "Initializer::XavierNormal { gain: 1.0 }")]
    pub initializer: Initializer,
    /// Whether sequences are `[batch, seq, d_input]`, and not `[seq, batch, d_input]`. Default: true
    #[config(default = true)]
    pub batch_first: bool,
    /// Whether the last time step comes first. Default: false
    #[config(default = false)]
    pub reverse: bool,
    /// Bounds the cell's state to plus and minus this. Default: none
    pub clip: Option<f64>,
    /// Whether what the input gate takes is what is forgotten, so that there is no forget gate. Default: false
    #[config(default = false)]
    pub input_forget: bool,
    /// Activation of the gates. Default: sigmoid
    #[config(default = "ActivationConfig::Sigmoid")]
    pub gate_activation: ActivationConfig,
    /// Activation of what the cell is offered. Default: hyperbolic tangent
    #[config(default = "ActivationConfig::Tanh")]
    pub cell_activation: ActivationConfig,
    /// Activation of the cell's state, for the hidden one. Default: hyperbolic tangent
    #[config(default = "ActivationConfig::Tanh")]
    pub hidden_activation: ActivationConfig,
}

same_config!(
    LstmConfig,
    burns::LstmConfig,
    d_input,
    d_hidden,
    bias,
    initializer,
    batch_first,
    reverse,
    clip,
    input_forget,
    gate_activation,
    cell_activation,
    hidden_activation
);

impl LstmConfig {
    /// Creates the module with fresh weights.
    pub fn init(&self, device: &Device) -> Lstm {
        burns::LstmConfig::from(self.clone()).init(device).into()
    }
}

drop_in! {
    /// Burn's [`Lstm`](burns::Lstm), a LSTM, on sequences of any type; [`LstmConfig`] makes it.
    Lstm, burns::Lstm
}

impl Lstm {
    /// Runs the layer on `x`, `[batch, seq, d_input]`, and returns the hidden state of each time step, `[batch, seq,
    /// d_hidden]`, and the last one. The parts of `state` and of the last state are `[batch, d_hidden]`; without one it
    /// begins with zeros. Batch and sequence are the other way round where `batch_first` is not set.
    ///
    /// # Panics
    ///
    /// Where shapes do not fit the module.
    pub fn forward(&self, x: Tensor<3>, state: Option<LstmState<2>>) -> (Tensor<3>, LstmState<2>) {
        lstm(self, x, state)
    }
}

/// Configuration of [`BiLstm`], as of Burn's.
#[derive(Config, Debug)]
pub struct BiLstmConfig {
    /// Size of the input's features.
    pub d_input: usize,
    /// Size of the hidden state.
    pub d_hidden: usize,
    /// Whether gates have biases.
    pub bias: bool,
    /// How weights begin. Default: Xavier's normal numbers
    #[config(default = "Initializer::XavierNormal { gain: 1.0 }")]
    pub initializer: Initializer,
    /// Whether sequences are `[batch, seq, d_input]`, and not `[seq, batch, d_input]`. Default: true
    #[config(default = true)]
    pub batch_first: bool,
    /// Bounds the cell's state to plus and minus this. Default: none
    pub clip: Option<f64>,
    /// Whether what the input gate takes is what is forgotten, so that there is no forget gate. Default: false
    #[config(default = false)]
    pub input_forget: bool,
    /// Activation of the gates. Default: sigmoid
    #[config(default = "ActivationConfig::Sigmoid")]
    pub gate_activation: ActivationConfig,
    /// Activation of what the cell is offered. Default: hyperbolic tangent
    #[config(default = "ActivationConfig::Tanh")]
    pub cell_activation: ActivationConfig,
    /// Activation of the cell's state, for the hidden one. Default: hyperbolic tangent
    #[config(default = "ActivationConfig::Tanh")]
    pub hidden_activation: ActivationConfig,
}

same_config!(
    BiLstmConfig,
    burns::BiLstmConfig,
    d_input,
    d_hidden,
    bias,
    initializer,
    batch_first,
    clip,
    input_forget,
    gate_activation,
    cell_activation,
    hidden_activation
);

impl BiLstmConfig {
    /// Creates the module with fresh weights.
    pub fn init(&self, device: &Device) -> BiLstm {
        burns::BiLstmConfig::from(self.clone()).init(device).into()
    }
}

drop_in! {
    /// Burn's [`BiLstm`](burns::BiLstm), a LSTM of both directions, on sequences of any type; [`BiLstmConfig`] makes it.
    BiLstm, burns::BiLstm
}

impl BiLstm {
    /// Runs the layer on `x`, `[batch, seq, d_input]`, and returns the hidden state of each time step, `[batch, seq,
    /// 2 d_hidden]`, and the last one. The parts of `state` and of the last states are `[2, batch, d_hidden]`; without one it
    /// begins with zeros. Batch and sequence are the other way round where `batch_first` is not set.
    ///
    /// # Panics
    ///
    /// Where shapes do not fit the module.
    pub fn forward(&self, x: Tensor<3>, state: Option<LstmState<3>>) -> (Tensor<3>, LstmState<3>) {
        bi_lstm(self, x, state)
    }
}

/// Configuration of [`Gru`], as of Burn's.
#[derive(Config, Debug)]
pub struct GruConfig {
    /// Size of the input's features.
    pub d_input: usize,
    /// Size of the hidden state.
    pub d_hidden: usize,
    /// Whether gates have biases.
    pub bias: bool,
    /// Whether the reset gate is applied behind the product with the hidden state's weight, as PyTorch does, and not
    /// in front of it. Default: true
    #[config(default = "true")]
    pub reset_after: bool,
    /// How weights begin. Default: Xavier's normal numbers
    #[config(default = "Initializer::XavierNormal { gain: 1.0 }")]
    pub initializer: Initializer,
    /// Activation of the gates. Default: sigmoid
    #[config(default = "ActivationConfig::Sigmoid")]
    pub gate_activation: ActivationConfig,
    /// Activation of the candidate for the hidden state. Default: hyperbolic tangent
    #[config(default = "ActivationConfig::Tanh")]
    pub hidden_activation: ActivationConfig,
    /// Bounds the hidden state to plus and minus this. Default: none
    pub clip: Option<f64>,
}

same_config!(
    GruConfig,
    burns::GruConfig,
    d_input,
    d_hidden,
    bias,
    reset_after,
    initializer,
    gate_activation,
    hidden_activation,
    clip
);

impl GruConfig {
    /// Creates the module with fresh weights.
    pub fn init(&self, device: &Device) -> Gru {
        burns::GruConfig::from(self.clone()).init(device).into()
    }
}

drop_in! {
    /// Burn's [`Gru`](burns::Gru), a GRU, on sequences of any type; [`GruConfig`] makes it.
    Gru, burns::Gru
}

impl Gru {
    /// Runs the layer on `x`, `[batch, seq, d_input]`, and returns the hidden state of each time step, `[batch, seq,
    /// d_hidden]`. `state` is `[batch, d_hidden]`; without one it
    /// begins with zeros.
    ///
    /// # Panics
    ///
    /// Where shapes do not fit the module.
    pub fn forward(&self, x: Tensor<3>, state: Option<Tensor<2>>) -> Tensor<3> {
        gru(self, x, state)
    }
}

/// Configuration of [`BiGru`], as of Burn's.
#[derive(Config, Debug)]
pub struct BiGruConfig {
    /// Size of the input's features.
    pub d_input: usize,
    /// Size of the hidden state.
    pub d_hidden: usize,
    /// Whether gates have biases.
    pub bias: bool,
    /// Whether the reset gate is applied behind the product with the hidden state's weight, as PyTorch does, and not
    /// in front of it. Default: true
    #[config(default = "true")]
    pub reset_after: bool,
    /// How weights begin. Default: Xavier's normal numbers
    #[config(default = "Initializer::XavierNormal { gain: 1.0 }")]
    pub initializer: Initializer,
    /// Whether sequences are `[batch, seq, d_input]`, and not `[seq, batch, d_input]`. Default: true
    #[config(default = true)]
    pub batch_first: bool,
    /// Activation of the gates. Default: sigmoid
    #[config(default = "ActivationConfig::Sigmoid")]
    pub gate_activation: ActivationConfig,
    /// Activation of the candidate for the hidden state. Default: hyperbolic tangent
    #[config(default = "ActivationConfig::Tanh")]
    pub hidden_activation: ActivationConfig,
    /// Bounds the hidden state to plus and minus this. Default: none
    pub clip: Option<f64>,
}

same_config!(
    BiGruConfig,
    burns::BiGruConfig,
    d_input,
    d_hidden,
    bias,
    reset_after,
    initializer,
    batch_first,
    gate_activation,
    hidden_activation,
    clip
);

impl BiGruConfig {
    /// Creates the module with fresh weights.
    pub fn init(&self, device: &Device) -> BiGru {
        burns::BiGruConfig::from(self.clone()).init(device).into()
    }
}

drop_in! {
    /// Burn's [`BiGru`](burns::BiGru), a GRU of both directions, on sequences of any type; [`BiGruConfig`] makes it.
    BiGru, burns::BiGru
}

impl BiGru {
    /// Runs the layer on `x`, `[batch, seq, d_input]`, and returns the hidden state of each time step, `[batch, seq,
    /// 2 d_hidden]`, and the last one. `state` and the last states are `[2, batch, d_hidden]`; without one it
    /// begins with zeros. Batch and sequence are the other way round where `batch_first` is not set.
    ///
    /// # Panics
    ///
    /// Where shapes do not fit the module.
    pub fn forward(&self, x: Tensor<3>, state: Option<Tensor<3>>) -> (Tensor<3>, Tensor<3>) {
        bi_gru(self, x, state)
    }
}

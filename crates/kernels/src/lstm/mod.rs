//! A long short-term memory (LSTM) over a sequence, and its gradients.
//!
//! With four gates side by side, input i, forget f, candidate g and output o, and `projected` what the input and the
//! biases give them:
//!
//! ```text
//! forward:   a     = projected[t] + h[t - 1] weight                i, f, o = sigmoid(a_i, a_f, a_o),  g = tanh(a_g)
//!            c[t]  = f c[t - 1] + i g                              h[t]    = o tanh(c[t])
//!
//! backward:  dh    = dout[t] + da[t + 1] weight^T                  dc      = dh o (1 - tanh(c[t])^2) + f[t + 1] dc[t + 1]
//!            da_i  = dc g i (1 - i)                                da_f    = dc c[t - 1] f (1 - f)
//!            da_g  = dc i (1 - g^2)                                da_o    = dh tanh(c[t]) o (1 - o)
//!            dprojected[t] = da                                    dweight = sum_t h[t - 1]^T da[t]
//! ```
//!
//! | tensor | shape | dtype |
//! |---|---|---|
//! | projected, dprojected | steps, batch, 4 hidden | f32, f16 or bf16 |
//! | weight, dweight | hidden, 4 hidden | that of projected |
//! | the first h, dh | batch, hidden | that of projected |
//! | the first c, dc | batch, hidden | f32 |
//! | out, dout | steps + 1, batch, hidden: all h, and the last c behind them | that of projected |
//!
//! All are contiguous. Saved for backward: the gates behind their functions and each step's former h, in that type, and
//! all c, in f32. A sequence may be walked from its end: then "before" is the step behind.
//!
//! A step is two launches: the product, whose sums stay in f32, and the cell, which widens what it reads to f32 and rounds
//! once. Products of weights with all inputs, and the weights' gradients, are one each over all steps, and not one a step;
//! the former is not made here. The cell moves some hundred kilobytes: what takes time is the chain of launches, and the
//! weight, which each product reads from the L2 cache.
//!
//! Source: Hochreiter, Schmidhuber, "Long short-term memory" (1997); Gers, Schmidhuber, Cummins, "Learning to forget"
//! (2000), for the forget gate.
//!
//! Not served: empty tensors, and tensors of 2^31 elements and more.

mod cell;
mod launch;
mod problem;
pub mod variants;

pub use launch::{lstm_backward, lstm_forward};
pub use problem::{LstmForward, LstmGradients, LstmProblem, LstmSaved};
pub(crate) use variants::variants;

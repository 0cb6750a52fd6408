//! One step of stochastic gradient descent with momentum, by one kernel: on one parameter, or on several in
//! one launch.
//!
//! With gradient `g`, rate `lr`, decay `wd`, momentum `mu` and dampening `d`:
//!
//! ```text
//! g = g + wd p
//! v = g                        in the first step that is taken
//! v = mu v + (1 - d) g         in those after it
//! p = p - lr v                 or, by Nesterov,  p = p - lr (g + mu v)
//! ```
//!
//! These are the equations of PyTorch's `torch.optim.SGD`, which dampens no first step either. With
//! Nesterov's momentum it refuses a dampening; Burn does not, and neither does this.
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | p | rows x columns | rows, each tensor with its pitch | f32, f16 or bf16 |
//! | g | that of p | rows | f32, f16 or bf16 |
//! | v | that of p | rows | f32 |
//! | taken, skipped, factor | 1 | | f32 |
//! | seed | 2 | | any of 32 bits |
//!
//! Everything is widened to f32 and computed there; p is rounded once. p and v are overwritten where
//! nobody else holds their memory, and go to new memory otherwise. Gradients are not written to. What
//! lies between rows, the walks, and rounding by [`Chance`] are as for [`adamw`](crate::adamw), by the same
//! kernel: see [`step`](crate::step).
//!
//! # Steps that are taken back
//!
//! With a [`Gate`], a step that is not taken leaves p and v as they are, bit for bit, and the gradient is
//! multiplied by a factor first, as in [`adamw`](crate::adamw). Which step is the first, the device finds
//! out: of `time` steps that the host counted, `skipped` were not taken before this one, and if that leaves
//! one, it is this. What v holds then is not used.
//!
//! # Traffic
//!
//! p and v are read and written and g is read: 20 bytes an element in f32, 18 with g in 16 bits, 14 where
//! p is, too. [`sgd_update_many`] divides the cubes of a launch among up to 16 parameters by what these have
//! to move. Numbers of the step may differ among them; gate and seed are shared, and so is whether they step
//! in Nesterov's form, which is compiled apart.
//!
//! Not served: parameters of 2^32 elements or nearly so.
//!
//! Sources: Sutskever, Martens, Dahl and Hinton, "On the importance of initialization and momentum in deep
//! learning", ICML 2013, for Nesterov's form; PyTorch's documentation of `torch.optim.SGD` for the order of
//! decay, momentum and dampening.

mod problem;
mod rule;
mod variants;

pub use crate::step::{
    Blueprint as SgdBlueprint, Chance, Gate, MOST_TENSORS, Tuning as SgdTuning, Walk as SgdWalk,
    update as sgd_update, update_many as sgd_update_many, update_many_with as sgd_update_many_with,
    update_with as sgd_update_with,
};
pub use problem::{SgdProblem, SgdStep, SgdTensors};
pub(crate) use variants::variants;

/// A parameter's step, of several in one launch.
pub type SgdUpdate = crate::step::Update<SgdStep, SgdTensors>;

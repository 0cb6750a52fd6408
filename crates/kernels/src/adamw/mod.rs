//! One step of AdamW, by one kernel: on one parameter, or on several in one launch.
//!
//! With gradient `g`, rate `lr`, decay `wd`, and `t` the number of steps that were taken, this one
//! among them:
//!
//! ```text
//! m = m + (1 - beta_1) (g - m)                 v = v + (1 - beta_2) (g^2 - v)
//! p = p - lr wd p - lr / (1 - beta_1^t) m / (sqrt(v / (1 - beta_2^t)) + epsilon)
//! ```
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | p | rows x columns | rows, each tensor with its pitch | f32, f16 or bf16 |
//! | g | that of p | rows | f32, f16 or bf16 |
//! | m, v | that of p | rows | f32 |
//! | taken, skipped, factor | 1 | | f32 |
//! | seed | 2 | | any of 32 bits |
//!
//! Everything is widened to f32 and computed there; p is rounded once. p, m and v are overwritten
//! where nobody else holds their memory, and go to new memory otherwise. What lies between rows is not
//! looked at for what it holds, and may be overwritten where p, m or v has something there: it belongs to
//! them.
//!
//! # Steps that are taken back
//!
//! The device may know better than the host whether a step counts, as where the gradients of scaled
//! losses overflowed. With a [`Gate`], the kernel reads from the device whether the step is `taken`,
//! and leaves p, m and v as they are, bit for bit, where it is not, whatever the gradient holds; and how
//! many of the steps that the host counted were `skipped` before; and by which `factor` the gradient is
//! multiplied first, which is where a loss's scale and the clipping by a global norm go, for nothing. `1 - beta^t` is then computed by each
//! unit, as the series of `-expm1` where it is small, since `1 - exp` would lose the digits of the first
//! steps. Without a gate the host computes it.
//!
//! # Rounding by chance
//!
//! A parameter in bf16 has 8 bits: an update below a 512th of it is lost to rounding to the nearest
//! value, every time. With a [`Chance`], p becomes one of the two values around the result, the nearer
//! the likelier, so that the mean is right. The neighbor is found by integer arithmetic on the bits of
//! f32, or, where f16 has subnormal numbers, by exact arithmetic in f32. The choice is a function of the
//! seed, the draw and the element's place: word `i % 4` of Philox's counter `(i / 4, draw, 0, 0)`.
//!
//! # Copies
//!
//! A parameter may have a copy in another type, which is computed with. [`adamw_update_many`] writes it with the parameter,
//! rounded from what the parameter's type holds, for the bytes of the copy alone. A gate that is closed leaves the
//! parameter, and makes the copy the same. Copies by rows, and those of parameters that are walked by rows, are made by
//! a launch of [`overwrite_many`](crate::overwrite::overwrite_many) behind the step.
//!
//! # Traffic
//!
//! p, m and v are read and written and g is read: 28 bytes an element in f32, 26 with g in 16 bits, 22
//! where p is, too. Each cube goes through one parameter in steps of all the cubes that this one has. Loading
//! two or four vectors before computing with any gained nothing on an H200.
//!
//! A launch of its own for each of GPT-2's 148 parameters takes the device 1.35 ms of one H200, and the host
//! more, 1.6 ms and up. [`adamw_update_many`] divides the cubes of a launch among up to 16 by what these have
//! to move: 1.20 ms, 3.8 TB/s. Numbers of the step may differ among them; gate and seed are shared.
//!
//! On NVIDIA GPUs root and quotient are the hardware's approximations: rounded correctly they are code that
//! branches, eight times a vector, and the kernel took as long with 22 bytes as with 28.
//!
//! CUDA's runtime begins rows at addresses that 512 divides, in every type, so that p and g of a layer with
//! odd columns differ in pitch. Three [walks](AdamwWalk) serve that: one for tensors without anything
//! between rows; one by rows, by vectors wherever all pitches allow; and one for a pitched gradient of a
//! contiguous parameter, which reads the gradient by elements, rather than everything.
//!
//! Not served: parameters of 2^32 elements or nearly so.
//!
//! Sources: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101; for
//! rounding by chance, Gupta et al., "Deep Learning with Limited Numerical Precision",
//! arXiv:1502.02551, section 3.

mod problem;
mod rule;
mod variants;

pub use crate::step::{
    Blueprint as AdamwBlueprint, Chance, Gate, MOST_TENSORS, Tuning as AdamwTuning,
    Walk as AdamwWalk, update as adamw_update, update_many as adamw_update_many,
    update_many_with as adamw_update_many_with, update_with as adamw_update_with,
};
pub use problem::{AdamwFactors, AdamwProblem, AdamwStep, AdamwTensors};
pub(crate) use variants::variants;

/// A parameter's step, of several in one launch.
pub type AdamwUpdate = crate::step::Update<AdamwStep, AdamwTensors>;

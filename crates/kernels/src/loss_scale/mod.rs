//! What a loss scaler computes of single numbers, in one launch each: by operations they are some twenty.
//!
//! From the sums that [`square_sum`](crate::square_sum) leaves, the scale `s` of the loss and the largest
//! norm:
//!
//! ```text
//! norm = sqrt(sum of sums) / s                  finite = 1 if norm s is a finite number, else 0
//! factor = 1 / s min(1, largest / (norm + 1e-6))         the minimum is 1 where norm is not finite
//! ```
//!
//! and after a step, with `clean` the number of finite steps since the last change, and `skipped` and
//! `in_a_row` those that were not, all in all and one after another:
//!
//! ```text
//! grows = finite and clean + 1 >= interval
//! s = clamp(s growth if grows, s backoff if not finite, else s)
//! clean = clean + 1 if finite and not grows, else 0
//! skipped = skipped + 1 and in_a_row = in_a_row + 1 if not finite; in_a_row = 0 else
//! ```
//!
//! | tensor | elements | dtype |
//! |---|---|---|
//! | sums | [`PLACES`](crate::square_sum::PLACES) | f32 |
//! | all others, in and out | 1 | f32 |
//!
//! Results go to new memory, since the old numbers may be held by who reads them later. The rules are those
//! of `PyTorch`'s `GradScaler` and `clip_grad_norm_`.

mod forward;
mod launch;
mod variants;

pub use launch::{Measured, Scaler, ScalerRules, loss_scale_measure, loss_scale_update};
pub(crate) use variants::variants;

//! A training toolkit for unmodified Burn modules: what Burn leaves to the training loop.
//!
//! | module | gives |
//! |---|---|
//! | [`accumulate`] | micro-batches that add up to the gradient of the whole batch, by weight |
//! | [`trainer`] | all of a training step as one call: passes, accumulation, scaling, clipping, the optimizer, averages, schedules, checkpoints |
//! | [`checkpoint`] | folders of files that are whole, or not there |
//! | [`auto_batch`] | the largest micro-batch that fits the device, found by trial |
//! | [`clip`] | clipping by the global norm, without waiting for the device, or by value |
//! | [`ema`] | exponential moving averages of the weights, for validation and export |
//! | [`graph`] | forward and backward pass recorded once and replayed by one command, as a CUDA graph |
//! | [`nonfinite`] | gradients with NaN or infinities, by the parameters' paths |
//! | [`precision`] | bf16, f16 and 8-bit floats in unmodified modules, with f32 masters |
//! | [`optim`] | AdamW, and gradient descent with momentum, that decay matrices only, train 16-bit parameters, and leave out steps that overflowed; on GPUs one kernel for up to 16 parameters |
//! | [`profile`] | where a step's time goes, by kernel and operation, and what to change |
//! | [`plateau`] | learning rates that fall when a metric stops improving |
//! | [`record_log`] | a run's metrics as lines of JSON that survive kills and resumed steps |
//! | [`replace`] | files that are replaced as a whole |
//! | [`scaler`] | dynamic loss scaling for f16, on the device |
//! | [`schedule`] | learning rates by step: linear warm-up, then cosine or linear decay |
//! | [`throughput`] | tokens or images per second, and model FLOPs utilization |
//! | [`memory`] | what the device's memory pools hold, what a step will take, a limit, and memory given back |
//! | `gpu` (feature `nvml`) | utilization, temperature and power of NVIDIA GPUs |
//! | `learner` (feature `burn-train`) | all of it inside burn-train's learner |
//! | [`tensorboard`] | event files for TensorBoard |
//!
//! Begin with a [`Trainer`](trainer::Trainer). The pieces are independent, too. Use them one by one in a loop of
//! your own:
//!
//! ```
//! use blackburn_train::{accumulate::GradientSum, clip::clip_global_norm, optim::AdamWGroups};
//! use burn::{nn::LinearConfig, optim::GradientsParams, prelude::*, tensor::Distribution};
//!
//! let device = Device::flex().autodiff();
//! let mut model = LinearConfig::new(4, 1).init(&device);
//! let mut optimizer = AdamWGroups::default().init(&model, &device);
//!
//! let mut sum = GradientSum::new();
//! for rows in [3, 5] {
//!     let x = Tensor::<2>::random([rows, 4], Distribution::Default, &device);
//!     let loss = model.forward(x).mean();
//!     sum.add(&model, GradientsParams::from_grads(loss.backward(), &model), rows as f64);
//! }
//! let mut gradients = sum.mean(&model).expect("two micro-batches were added");
//! let norm = clip_global_norm(&mut gradients, &model, 1.0);
//! model = optimizer.step(1e-3, model, gradients);
//! # let norm: f32 = norm.into_scalar();
//! # assert!(norm.is_finite());
//! ```

pub mod accumulate;
pub mod auto_batch;
pub mod checkpoint;
pub mod clip;
pub mod ema;
#[cfg(feature = "nvml")]
pub mod gpu;
pub mod graph;
#[cfg(feature = "burn-train")]
pub mod learner;
pub mod memory;
pub mod nonfinite;
pub mod optim;
mod path;
pub mod plateau;
pub mod precision;
pub mod profile;
pub mod record_log;
pub mod replace;
pub mod scaler;
pub mod schedule;
pub mod tensorboard;
pub mod throughput;
pub mod trainer;

pub use blackburn_backend::readback;

#[cfg(test)]
mod ranks;

//! Data-parallel training: one process a GPU, each with a copy of the model and a part of each batch.
//!
//! The processes of a training are its *ranks*. They are started by what starts such processes anyhow
//! (`torchrun --no-python`, Slurm's `srun`, `mpirun`, Kubernetes), or by the program itself on one machine: see
//! [`launch`]. Each joins the [`Group`], which knows what the launcher has put into the environment. A process that
//! nobody has started that way is a group of one, and pays nothing.
//!
//! ```
//! use blackburn_distributed::{Group, GroupConfig};
//! use burn::{
//!     nn::LinearConfig,
//!     optim::{AdamWConfig, GradientsParams},
//!     prelude::*,
//! };
//!
//! let group = Group::join(&GroupConfig::default())?;
//! let device = Device::flex().autodiff();
//! // All ranks begin with rank 0's numbers.
//! let mut model = group.broadcast(LinearConfig::new(4, 1).init(&device))?;
//! let mut optimizer = AdamWConfig::new().init();
//! for step in 0..3 {
//!     group.at_step(step)?;
//!     // Each rank has its own rows: here as many as its number says.
//!     let rows = group.rank() + 1;
//!     let loss = model.forward(Tensor::<2>::ones([rows, 4], &device)).mean();
//!     let gradients = GradientsParams::from_grads(loss.backward(), &model);
//!     // The gradient of the mean over the rows of all ranks.
//!     let gradients = group.mean(&model, gradients, rows as f64)?;
//!     model = optimizer.step(1e-3, model, gradients);
//! }
//! # Ok::<(), blackburn_distributed::DistributedError>(())
//! ```
//!
//! # Failures
//!
//! Training that has lost a rank cannot go on, and must not hang. A rank that dies, is stopped, or comes to
//! another point of the program than the others ends all of them: each function here returns
//! [`DistributedError::Failed`] with the rank, its machine, its step and the newest checkpoint, within
//! [`GroupConfig::timeout`]. A process that does not come back from what it does by then is ended. Start all
//! ranks again to go on from the checkpoint.
//!
//! # What moves the numbers
//!
//! All ranks have the same bits after a sum, and a sum of two is rounded once.
//!
//! - On CUDA devices: NCCL, in a build with the feature `cuda`. It is loaded at run time, from the path in
//!   `BLACKBURN_NCCL` or as `libnccl.so.2`. With `BLACKBURN_NCCL=off` numbers go through the host. Sums of more
//!   than two ranks are rounded at each addition, in NCCL's order.
//!   It has run on two GPUs of one machine. Two of one machine copy gradients of recorded passes while the pass goes on:
//!   through memory of the host where steps are long for it, else into each other's memory. `BLACKBURN_COPIES` is `host`,
//!   `links`, or `off`, to choose.
//! - Elsewhere: TCP between each two ranks. Sums are in f32, in the order of ranks.

mod batches;
mod control;
mod engine;
mod error;
mod fingerprint;
mod flat;
mod group;
mod launch;
mod sharded;
mod world;

pub use batches::StepShape;
pub use engine::Moved;
pub use error::{DistributedError, Failure};
pub use group::{GradientSums, Group, GroupConfig, Wire};
pub use launch::{Launched, Started, launch, start};
pub use sharded::Sharded;
pub use world::{Launcher, World};

#[cfg(test)]
mod tests;

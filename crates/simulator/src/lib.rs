//! Executes the PTX that our kernels compile to, so that tests can check them without a GPU: results, and what
//! no test of results can see, such as a wait or a fence that is missing.
//!
//! ```
//! use blackburn_simulator::{Argument, Device, Launch, Options, Program};
//!
//! let program = Program::parse(
//!     ".version 8.7
//!      .target sm_80
//!      .address_size 64
//!      .visible .entry doubled(.param .u64 x) {
//!          .reg .b32 %r<3>;
//!          .reg .b64 %rd<4>;
//!          ld.param.u64 %rd1, [x];
//!          mov.u32 %r1, %tid.x;
//!          mul.wide.u32 %rd2, %r1, 4;
//!          add.s64 %rd3, %rd1, %rd2;
//!          ld.global.u32 %r2, [%rd3];
//!          add.s32 %r2, %r2, %r2;
//!          st.global.u32 [%rd3], %r2;
//!          ret;
//!      }",
//! )?;
//! let mut device = Device::new();
//! let x = device.allocate(128);
//! device.write(x, &[1; 128])?;
//! let launch = Launch {
//!     kernel: "doubled".into(),
//!     grid: [1; 3],
//!     block: [32, 1, 1],
//!     dynamic_shared: 0,
//!     arguments: vec![Argument::address(x)],
//!     reach: None,
//! };
//! device.launch(&program, &launch, &Options::default())?;
//! assert_eq!(device.read(x, 128)?.0, [2; 128]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What is known
//!
//! The instructions that our launchers' kernels for `sm_80` and `sm_90a` contain, and those of `tcgen05`: arithmetic,
//! `cp.async`, `mbarrier`, bulk copies of tiles and of pixels (im2col) with swizzle, `ldmatrix`, `movmatrix`, `mma.sync`,
//! `wgmma`, tensor memory and its products. An instruction that is not known is an error with its line. Atomic operations,
//! local memory, functions and stores by the copy engine are not known: no kernel of ours has them.
//!
//! Of clusters, whose size the kernel names (`.reqnctapercluster`): `barrier.cluster`, `mapa`, accesses and arrivals to
//! `shared::cluster`, and copies to several blocks.
//!
//! Of `tcgen05`, for a block and for a pair of blocks: `alloc`, `dealloc` and `relinquish_alloc_permit`; `mma` in
//! `kind::f16`, `kind::tf32` and `kind::f8f6f4` (E4M3 and E5M2) with sums in f32, of a pair with 256 rows and both
//! operands in shared memory; `commit`, to several blocks, too; `ld` and `st` as `16x256b`, `16x128b` and `32x32b`, with
//! their waits and fences. For a block alone: A in tensor memory; products whose blocks of k are scaled, of 8 bits
//! (`kind::mxf8f6f4`) and of 4 (`kind::mxf4`, `kind::mxf4nvf4`), as `mma.sync` has them, too; and copies of their scales
//! (`cp.32x128b.warpx4`). Sparse operands, whole numbers and other shapes of `cp` are not known.
//!
//! # What is reported
//!
//! | [`FaultKind`] | what it means here |
//! |---|---|
//! | `OutOfBounds`, `Misaligned` | an access outside what the launch was given, or at an odd place |
//! | `Uninitialized` | a value that nobody wrote reaches global memory, an address, a branch or a count; shared memory, tensor memory and buffers begin unwritten |
//! | `Race` | accesses to shared or tensor memory that no barrier orders, tensor memory without `tcgen05.fence::after_thread_sync` behind the barrier, registers of a product or load under way, copies that nobody waited for |
//! | `ProxyFence` | the copy engine or a product meets what threads wrote, without a fence between the proxies |
//! | `Deadlock`, `Runaway` | nothing can go on, or it never ends |
//! | `Misuse` | a barrier with more arrivals than it was made for, a descriptor with undefined bits, threads that part where they have to be together, a warp outside its lanes of tensor memory, columns in use at a block's end |
//!
//! Each is told with kernel, line of the PTX, block and thread.
//!
//! # How it runs
//!
//! The threads of a warp that stand at the same instruction run together; those that are behind go first, so
//! that threads meet again where paths do. A [`Schedule`] chooses which warp goes on, and when each copy and
//! each product lands: at once, as late as possible, or at any time in between. Blocks run one after another,
//! in an order that the schedule draws; those of a cluster run at once.
//!
//! # What the model takes for granted
//!
//! - Products of two elements are exact, and sums are taken in f32 along k, unless [`Device::arithmetic`] asks for
//!   a generation's tensor cores, which add several terms at once and cut off. Where all sums are exact, as with
//!   small whole numbers, all agree.
//! - Approximate instructions are computed in f64 and rounded once: within the error that PTX states, and exact
//!   where the exact result is a float. [`Device::arithmetic`] may hold what a device gave instead.
//! - A group of products is done for all four warps of a warpgroup when one of them has waited for it. Pipelines
//!   that let one thread of a warpgroup give memory back count on that.
//! - Accumulators of a product under way may be moved to other registers, which the compiler does in name only.
//! - Products of `tcgen05` land in the order in which a warp issued them, wherever their sums and operands lie: one may
//!   overwrite the operand in tensor memory of the one before it, as `FlashAttention-4` counts on. One warp's products
//!   are issued and committed by one lane. A commit tells what its thread knew of others' accesses, but not its own.
//! - `elect.sync` elects the same lane of a block each time; which one, the schedule draws. So does it with the columns
//!   that an allocation gets. One that would have to wait is a deadlock, for blocks run alone.
//! - Behind a barrier for copied blocks a product needs no `tcgen05.fence`: it orders tensor memory alone.
//! - The rank of a block in its cluster stands in bits 24 and up of its shared addresses. Kernels of others find the
//!   barrier of a pair's first block by clearing bit 24, which is right on GPUs.
//! - Arrivals release and waits acquire among the threads of a block unless they say `.cluster`, as PTX has it: an arrival
//!   of another block's thread counts without it, and tells nothing. Copies and products tell whoever waits for them.
//! - Of the blocks of a pair the first one to ask for tensor memory waits for the other one; where they give it back
//!   neither does.
//! - Registers are not counted, nor are cycles.
//! - Races between blocks, in global memory, are not looked for; within a warp, a write behind another lane's
//!   read is not either.
//!
//! # Against a GPU
//!
//! `cargo xtask simulate --all --dump DIR` writes each launch as files: the PTX, the parameters, and every buffer before
//! and after. The example `on_gpu` runs the same PTX on the same bytes on a CUDA device and compares every byte; where
//! some differ, it simulates the launch again with the device's [`Arithmetic`]. `benches/results/simulator.tsv` of the
//! workspace has what came out.

#![deny(missing_docs)]

mod arithmetic;
mod async_;
mod device;
mod error;
mod machine;
mod memory;
mod ptx;
mod race;
mod schedule;
mod tensor;

pub use arithmetic::{Approximations, Arithmetic, TensorCores};
pub use async_::{CopyBox, Im2col, Swizzle, TensorMap};
pub use device::{Argument, Device, Launch, Options, Report};
pub use error::{Fault, FaultKind, ParseError, Place, SimulatorError};
pub use ptx::Program;
pub use schedule::{Landing, Schedule};

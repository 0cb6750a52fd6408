//! Matrix products: `out = act(alpha lhs rhs + bias) + beta residual`, over strided and broadcast
//! batches.
//!
//! ```text
//! sum[b, m, n]  = sum_k lhs[b, m, k] rhs[b, k, n]
//! z[b, m, n]    = alpha s_lhs s_rhs sum[b, m, n] + bias[n]
//! out[b, m, n]  = act(z[b, m, n]) + beta residual[b, m, n]
//! ```
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | lhs, rhs | b, m, k and b, k, n | any strides; a matrix may serve all batches | f32, f16, bf16, e4m3, e5m2 |
//! | bias | n | contiguous | that of out |
//! | residual, out, z | b, m, n | contiguous | that of the operands, or f32; of 8-bit operands f32, f16, bf16 |
//!
//! Sums are accumulated in f32 and rounded once. bf16, f16 and 8-bit operands enter exactly; f32
//! ones are cut to TF32 unless [`F32Precision::Full`] is asked for. Tensor cores add with less than
//! f32's rounding (they cut off bits instead), Hopper's for 8-bit operands keep 14 bits of mantissa
//! or so unless sums are promoted now and then (DeepSeek-V3 technical report, section 3.3.2). The
//! output is overwritten. The same input gives the same bits each time.
//!
//! The residual is BLAS's C in a buffer of its own, and beta is for it alone: both meet the
//! activation's value in a multiply-add in f32. With beta = 0 the residual is not read, so that NaN in
//! it stays there: the kernel without a residual runs. The residual may be a factor instead, `out = act(z) residual`:
//! dropout's mask, by which a gradient is multiplied.
//!
//! | family | instructions | serves |
//! |---|---|---|
//! | [`Family::Wgmma`](crate::Family::Wgmma) | `wgmma` fed by TMA | Hopper (`sm_90a`) |
//! | [`Family::Mma`](crate::Family::Mma) | `mma.sync` fed by `cp.async`; on Blackwell's workstations by TMA, too, and with scales of 1 in 8 bits | Ampere and later, Blackwell too |
//! | [`Family::Portable`](crate::Family::Portable) | multiply-adds in f32 | every runtime; f32 in full precision |
//!
//! Operands of 8 and 4 bits whose blocks of k have scales are multiplied by [`mx_matmul`] (MXFP8, MXFP4) and
//! [`nvfp4_matmul`] (NVFP4).
//!
//! Products of at most eight rows have a kernel of the portable family that reads the right operand with the whole
//! device.
//!
//! The tensor-core families want 16-byte aligned rows. 16-bit operands may lie along k or across it, TF32 across it
//! for [`Family::Mma`](crate::Family::Mma) alone, and 8-bit ones for some plans of
//! [`Family::Tcgen05`](crate::Family::Tcgen05). Operands that lie otherwise are copied into shape first, which costs
//! their bytes twice and less than a product that crawls.
//!
//! Which plan runs is a model's choice ([`MatmulBlueprint::plan`]), remembered for each problem, or
//! the fastest of the model's first few as measured on the device ([`matmul_tuned`]).

#[cfg(feature = "cuda")]
mod bias_tile;
mod block_scaled;
mod blueprint;
mod budget;
#[cfg(feature = "cuda")]
mod bulk_ring;
mod cost;
mod epilogue;
mod few_rows;
mod kept;
mod launch;
mod layout;
mod memo;
#[cfg(feature = "cuda")]
mod mma;
#[cfg(feature = "cuda")]
mod mma_bulk;
#[cfg(feature = "cuda")]
mod mma_tile;
mod mx;
#[cfg(feature = "cuda")]
mod mx_mma;
#[cfg(feature = "cuda")]
mod mx_scales;
#[cfg(feature = "cuda")]
mod mx_tcgen05;
mod nvfp4;
#[cfg(feature = "cuda")]
mod operand;
#[cfg(feature = "cuda")]
mod pack;
mod pairs;
mod portable;
mod problem;
#[cfg(feature = "cuda")]
mod ring;
mod split;
#[cfg(feature = "cuda")]
mod store;
#[cfg(feature = "cuda")]
mod tcgen05;
#[cfg(feature = "cuda")]
mod tcgen05_blocks;
#[cfg(feature = "cuda")]
mod tcgen05_pair;
#[cfg(feature = "cuda")]
mod tensor_core;
mod tune;
pub mod variants;
#[cfg(feature = "cuda")]
mod wgmma;
#[cfg(feature = "cuda")]
mod work;
mod workstation;

pub use block_scaled::BlockScales;
pub use blueprint::MatmulBlueprint;
pub(crate) use budget::{mma_bytes, most_stages, wgmma_bytes};
pub use epilogue::{Activation, Epilogue, MatmulOutput};
pub(crate) use epilogue::{EpilogueBlueprint, bias_of};
pub use kept::keep_plans;
pub use launch::{matmul, matmul_tuned, matmul_with};
pub use mx::{MxOperand, SCALE_DTYPE, SCALED_BY, mx_matmul, mx_matmul_with};
pub use nvfp4::{
    NVFP4_SCALE_DTYPE, NVFP4_SCALED_BY, Nvfp4Operand, nvfp4_matmul, nvfp4_matmul_with,
};
pub(crate) use portable::{DEPTH as PORTABLE_DEPTH, UNITS as PORTABLE_UNITS, multiply_tiles};
pub use problem::{F32Precision, MatmulProblem, Operand, TensorLayout};
pub(crate) use split::sum_splits;
pub(crate) use variants::variants;

/// What other products on tensor cores are made of.
#[cfg(feature = "cuda")]
pub(crate) mod mma_parts {
    pub(crate) use super::{
        bias_tile::{element_bytes as bias_element_bytes, fetch_bias},
        mma::{Pitch, PitchLaunch, load_operand},
        operand::MatrixSource,
        ring::{Blocks, BlocksExpand, MmaBlueprint, UNITS, chunk_bytes, fragments, multiply},
        store::{Finish, Fragment, dense_fragment, store_fragment},
        tensor_core::store_width,
        work::{Extent, Work, extent, work_at},
    };
}

/// What other products by Hopper's instructions are made of.
#[cfg(feature = "cuda")]
pub(crate) mod wgmma_parts {
    pub(crate) use super::{
        epilogue::{EpilogueTensors, Outputs},
        store::fragment_of,
        tensor_core::tensor_map,
        wgmma::{
            BulkBlocks, BulkBlocksExpand, CHUNK_BYTES, OutputRows, OutputRowsExpand, TILE_M, UNITS,
            WgmmaBlueprint, accumulator_width, persistent_product,
        },
    };
}

//! Variants of the kernels that only pass over memory: overwriting, summing squares with what a loss scaler
//! makes of the sums, and adding up the gradient of an embedding.

use super::{
    CudaKernel, EVERY_ARCHITECTURE, Promise, SourceError, properties, settings, settings_1d,
    variant,
};
use crate::{
    embedding::{
        DIGITS, WIDEST, embedding_backward_kernel, embedding_count_kernel, embedding_join_kernel,
        embedding_sort_kernel,
    },
    loss_scale::{
        MEASURE_UNITS, RulesCompilationArg, loss_scale_measure_kernel, loss_scale_update_kernel,
    },
    overwrite::{self, overwrite_kernel},
    square_sum::{self, MOST_TENSORS, PartCompilationArg, square_sum_kernel},
};
use cubecl::{
    ir::{ElemType, FloatKind, IntKind},
    prelude::*,
};
use std::sync::Arc;

const F32: (ElemType, &str) = (ElemType::Float(FloatKind::F32), "f32");
const F16: (ElemType, &str) = (ElemType::Float(FloatKind::F16), "f16");
const BF16: (ElemType, &str) = (ElemType::Float(FloatKind::BF16), "bf16");
const I32: (ElemType, &str) = (ElemType::Int(IntKind::I32), "i32");

/// What training overwrites and sums.
pub(super) fn variants() -> Result<Vec<CudaKernel>, SourceError> {
    let overwrites = [(F32, F32), (F32, F16), (F32, BF16), (BF16, BF16), (F16, F16), (I32, I32)];
    let mut all = Vec::new();
    for (source, target) in overwrites {
        let kernel = overwrite_kernel::OverwriteKernel::new(
            settings_1d(overwrite::UNITS),
            properties(),
            Arc::default(),
            BufferCompilationArg { inplace: None },
            BufferCompilationArg { inplace: None },
            (),
            (),
            (),
            (),
            (),
            16 / source.0.size(),
            source.0,
            target.0,
        );
        // Eight cubes of 256 threads a multiprocessor.
        all.push(variant(
            format!("overwrite_{}_with_{}", target.1, source.1),
            kernel,
            promise(32),
        )?);
    }
    for input in [F32, F16, BF16] {
        all.push(square_sum_of(MOST_TENSORS, input, false, true)?);
        all.push(square_sum_of(1, input, true, true)?);
        all.push(square_sum_of(8, input, true, false)?);
    }
    all.extend(loss_scales()?);
    all.extend(embeddings()?);
    Ok(all)
}

fn embeddings() -> Result<Vec<CudaKernel>, SourceError> {
    let buffer = || BufferCompilationArg { inplace: None };
    let mut all = Vec::new();
    let count = embedding_count_kernel::EmbeddingCountKernel::new(
        settings_1d(DIGITS),
        properties(),
        Arc::default(),
        buffer(),
        buffer(),
        (),
        (),
        (),
        (),
    );
    all.push(variant("embedding_count".into(), count, promise(32))?);
    for (is_first, name) in [(true, "embedding_sort_first"), (false, "embedding_sort")] {
        let sort = embedding_sort_kernel::EmbeddingSortKernel::new(
            settings_1d(DIGITS),
            properties(),
            Arc::default(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            (),
            (),
            (),
            (),
            is_first,
        );
        all.push(variant(name.into(), sort, promise(32))?);
    }
    for input in [F32, F16, BF16] {
        let kernel = embedding_backward_kernel::EmbeddingBackwardKernel::new(
            settings(),
            properties(),
            Arc::default(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            (),
            (),
            (),
            WIDEST,
            input.0,
        );
        // Six cubes of 256 threads, which wait for rows that lie anywhere.
        all.push(variant(format!("embedding_backward_{}", input.1), kernel, promise(40))?);
        let join = embedding_join_kernel::EmbeddingJoinKernel::new(
            settings(),
            properties(),
            Arc::default(),
            buffer(),
            buffer(),
            buffer(),
            (),
            (),
            (),
            WIDEST,
            input.0,
        );
        all.push(variant(format!("embedding_join_{}", input.1), join, promise(40))?);
    }
    Ok(all)
}

fn square_sum_of(
    tensors: usize,
    input: (ElemType, &str),
    by_rows: bool,
    in_place: bool,
) -> Result<CudaKernel, SourceError> {
    let buffer = || BufferCompilationArg { inplace: None };
    let part = || PartCompilationArg { end: (), vectors: (), columns: (), last: (), pitch: () };
    let kernel = square_sum_kernel::SquareSumKernel::new(
        settings_1d(square_sum::UNITS),
        properties(),
        Arc::default(),
        (0..tensors).map(|_| buffer()).collect(),
        buffer(),
        BufferCompilationArg { inplace: in_place.then_some(tensors) },
        (0..tensors).map(|_| part()).collect(),
        (),
        16 / input.0.size(),
        by_rows,
        input.0,
    );
    let mut name = format!("square_sum_of_{tensors}_{}", input.1);
    for (is_it, part) in [(by_rows, "_by_rows"), (!in_place, "_copied")] {
        if is_it {
            name += part;
        }
    }
    // Six cubes of 256 threads, each with four loads of 16 bytes on the way; four where every vector may be
    // a row's last, and in bf16 of many tensors: where branches meet, its halves have registers of their own.
    let is_split = tensors > 1 && input == BF16;
    variant(name, kernel, promise(if by_rows || is_split { 64 } else { 40 }))
}

/// Neither is many at once.
fn loss_scales() -> Result<Vec<CudaKernel>, SourceError> {
    let buffer = || BufferCompilationArg { inplace: None };
    let mut all = Vec::new();
    for (scaled, clipped, name) in [
        (true, true, "scaled_clipped"),
        (true, false, "scaled"),
        (false, true, "clipped"),
        (false, false, "plain"),
    ] {
        let measure = loss_scale_measure_kernel::LossScaleMeasureKernel::new(
            settings_1d(MEASURE_UNITS),
            properties(),
            Arc::default(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            (),
            scaled,
            clipped,
        );
        all.push(variant(format!("loss_scale_measure_{name}"), measure, promise(64))?);
    }
    let rules =
        RulesCompilationArg { growth: (), backoff: (), interval: (), least: (), largest: () };
    let update = loss_scale_update_kernel::LossScaleUpdateKernel::new(
        settings_1d(1),
        properties(),
        Arc::default(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        rules,
    );
    all.push(variant("loss_scale_update".into(), update, promise(64))?);
    Ok(all)
}

fn promise(max_registers: u32) -> Promise {
    Promise {
        architectures: EVERY_ARCHITECTURE.to_vec(),
        tensor_core: None,
        max_registers: Some(max_registers),
    }
}

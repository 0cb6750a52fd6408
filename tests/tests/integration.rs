//! One binary for all integration tests, a module an op.
//!
//! It has a harness of its own because a kernel test knows only at run time whether its device is
//! there, and has to say so. With `--fuzz` first, the binary draws random shapes instead: what
//! `cargo xtask fuzz` runs.

#[path = "integration/adamw.rs"]
mod adamw;
#[path = "integration/adamw_plain.rs"]
mod adamw_plain;
#[path = "integration/attention.rs"]
mod attention;
#[path = "integration/attention_op.rs"]
mod attention_op;
#[path = "integration/attention_provider.rs"]
mod attention_provider;
#[path = "integration/batch_norm.rs"]
mod batch_norm;
#[path = "integration/batch_norm_provider.rs"]
mod batch_norm_provider;
#[path = "integration/blocks.rs"]
mod blocks;
#[path = "integration/casts.rs"]
mod casts;
#[path = "integration/channel_sum.rs"]
mod channel_sum;
#[path = "integration/channels.rs"]
mod channels;
#[path = "integration/column_sum.rs"]
mod column_sum;
#[cfg(feature = "cuda")]
#[path = "integration/compile_ahead.rs"]
mod compile_ahead;
#[path = "integration/config.rs"]
mod config;
#[path = "integration/conv.rs"]
mod conv;
#[path = "integration/copies.rs"]
mod copies;
#[path = "integration/cross_entropy.rs"]
mod cross_entropy;
#[path = "integration/doctor.rs"]
mod doctor;
#[path = "integration/dropout.rs"]
mod dropout;
#[path = "integration/embedding.rs"]
mod embedding;
#[path = "integration/empty.rs"]
mod empty;
#[path = "integration/facade.rs"]
mod facade;
#[path = "integration/fp8.rs"]
mod fp8;
#[path = "integration/fuzz.rs"]
mod fuzz;
#[path = "integration/gelu.rs"]
mod gelu;
#[path = "integration/gradient_graph.rs"]
mod gradient_graph;
#[path = "integration/group_norm.rs"]
mod group_norm;
#[path = "integration/group_norm_op.rs"]
mod group_norm_op;
#[path = "integration/group_norm_provider.rs"]
mod group_norm_provider;
#[path = "integration/inference_graph.rs"]
mod inference_graph;
#[path = "integration/interpolate.rs"]
mod interpolate;
#[path = "integration/interpolate_provider.rs"]
mod interpolate_provider;
#[path = "integration/layer_norm.rs"]
mod layer_norm;
#[path = "integration/layer_norm_provider.rs"]
mod layer_norm_provider;
#[path = "integration/linear.rs"]
mod linear;
#[path = "integration/linear_cross_entropy.rs"]
mod linear_cross_entropy;
#[path = "integration/loss_scale.rs"]
mod loss_scale;
#[path = "integration/loss_scaling.rs"]
mod loss_scaling;
#[path = "integration/lstm.rs"]
mod lstm;
#[path = "integration/matmul.rs"]
mod matmul;
#[path = "integration/memory.rs"]
mod memory;
#[path = "integration/naive_attention.rs"]
mod naive_attention;
#[path = "integration/nn_attention.rs"]
mod nn_attention;
#[path = "integration/nn_matrix.rs"]
mod nn_matrix;
#[path = "integration/parameter_copies.rs"]
mod parameter_copies;
#[path = "integration/pool.rs"]
mod pool;
#[path = "integration/pool_provider.rs"]
mod pool_provider;
#[path = "integration/precision_modules.rs"]
mod precision_modules;
#[path = "integration/profile.rs"]
mod profile;
#[path = "integration/random.rs"]
mod random;
#[path = "integration/readback.rs"]
mod readback;
#[cfg(feature = "cuda")]
#[path = "integration/recorder.rs"]
mod recorder;
#[path = "integration/reduce.rs"]
mod reduce;
#[path = "integration/reduce_cases.rs"]
mod reduce_cases;
#[path = "integration/reduce_fused.rs"]
mod reduce_fused;
#[path = "integration/reduce_integers.rs"]
mod reduce_integers;
#[path = "integration/resources.rs"]
mod resources;
#[path = "integration/rotary.rs"]
mod rotary;
#[path = "integration/row_sum.rs"]
mod row_sum;
#[path = "integration/scan.rs"]
mod scan;
#[path = "integration/scatter.rs"]
mod scatter;
#[path = "integration/sgd.rs"]
mod sgd;
#[path = "integration/size_one.rs"]
mod size_one;
#[path = "integration/sketch.rs"]
mod sketch;
#[path = "integration/slice_gradient.rs"]
mod slice_gradient;
#[path = "integration/small_models/mod.rs"]
mod small_models;
#[path = "integration/softmax.rs"]
mod softmax;
#[path = "integration/square_sum.rs"]
mod square_sum;
#[path = "integration/step_copies.rs"]
mod step_copies;
#[path = "integration/step_kind.rs"]
mod step_kind;
#[path = "integration/step_layouts.rs"]
mod step_layouts;
#[path = "integration/step_many.rs"]
mod step_many;
#[path = "integration/step_model.rs"]
mod step_model;
#[path = "integration/step_one.rs"]
mod step_one;
#[path = "integration/step_training.rs"]
mod step_training;
#[path = "integration/swiglu.rs"]
mod swiglu;
#[path = "integration/top_k.rs"]
mod top_k;
#[path = "integration/trainer.rs"]
mod trainer;
#[path = "integration/training.rs"]
mod training;
#[path = "integration/vision.rs"]
mod vision;

use blackburn_tests::{
    fuzz::command,
    shards::{self, CommandLine},
};
use clap::Parser;
use libtest_mimic::Trial;
use std::{io::Write, process::ExitCode};

/// Tests that others beside them would disturb: they fill the GPU's memory, take times, or start processes that have a
/// limit of time.
const ALONE: [&str; 4] = ["doctor::", "memory::", "profile::", "resources::"];

fn main() -> ExitCode {
    // Examinations start this program for their cases.
    blackburn::doctor::work_if_asked();
    // Providers have to be registered before any test touches a tensor.
    let init = || blackburn::init().map(drop).map_err(|error| eprintln!("error: {error}"));
    if std::env::args().nth(1).is_some_and(|first| first == "--fuzz") {
        let is_right = command::run(std::env::args().skip(1), init);
        leave(!is_right);
    }
    let command_line = CommandLine::parse();
    if init().is_err() {
        return ExitCode::FAILURE;
    }
    let trials = [
        adamw::trials(),
        adamw_plain::trials(),
        attention::trials(),
        attention_op::trials(),
        attention_provider::trials(),
        batch_norm::trials(),
        batch_norm_provider::trials(),
        blocks::trials(),
        casts::trials(),
        channel_sum::trials(),
        channels::trials(),
        copies::trials(),
        slice_gradient::trials(),
        column_sum::trials(),
        #[cfg(feature = "cuda")]
        compile_ahead::trials(),
        config::trials(),
        conv::trials(),
        cross_entropy::trials(),
        doctor::trials(),
        dropout::trials(),
        embedding::trials(),
        empty::trials(),
        facade::trials(),
        fp8::trials(),
        fuzz::trials(),
        gelu::trials(),
        gradient_graph::trials(),
        group_norm::trials(),
        group_norm_op::trials(),
        group_norm_provider::trials(),
        inference_graph::trials(),
        interpolate::trials(),
        interpolate_provider::trials(),
        layer_norm::trials(),
        layer_norm_provider::trials(),
        linear::trials(),
        linear_cross_entropy::trials(),
        loss_scale::trials(),
        loss_scaling::trials(),
        lstm::trials(),
        matmul::trials(),
        memory::trials(),
        parameter_copies::trials(),
        pool::trials(),
        pool_provider::trials(),
        precision_modules::trials(),
        naive_attention::trials(),
        nn_attention::trials(),
        nn_matrix::trials(),
        #[cfg(feature = "cuda")]
        recorder::trials(),
        random::trials(),
        readback::trials(),
        reduce::trials(),
        reduce_fused::trials(),
        reduce_integers::trials(),
        resources::trials(),
        rotary::trials(),
        row_sum::trials(),
        profile::trials(),
        scan::trials(),
        scatter::trials(),
        sgd::trials(),
        size_one::trials(),
        small_models::trials(),
        softmax::trials(),
        sketch::trials(),
        square_sum::trials(),
        swiglu::trials(),
        top_k::trials(),
        trainer::trials(),
        training::trials(),
        vision::trials(),
    ];
    let trials: Vec<Trial> = trials.into_iter().flatten().collect();
    if command_line.shard_worker {
        shards::work(trials);
        leave(false)
    } else if command_line.shards.is_some() && !command_line.tests.list {
        let well = shards::run(&command_line, &trials, &ALONE);
        leave(!well.unwrap_or_else(|error| {
            eprintln!("error: {error}");
            false
        }))
    } else {
        leave(libtest_mimic::run(&command_line.tests, trials).has_failed())
    }
}

/// Ends the process at once. An ordinary exit destroys Mesa's statics while its threads still run,
/// which now and then ends in a crash after all tests have passed.
fn leave(failed: bool) -> ! {
    let _ = std::io::stdout().flush();
    // SAFETY: nothing is left to do that an exit handler would do.
    unsafe { libc::_exit(i32::from(failed) * 101) }
}

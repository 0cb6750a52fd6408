//! The GPUs that kernels are recorded for without one, beside the GPU at hand.

use blackburn_kernels::recorder::{Gpu, Recorder};
use blackburn_tests::on_cuda;
use cubecl::{client::Client, ir::DeviceProperties};
use libtest_mimic::{Completion, Failed, Trial};
use std::fmt::Debug;

pub(crate) fn trials() -> Vec<Trial> {
    vec![Trial::ignorable_test("recorder::a_gpu_is_as_kernels_are_recorded_for", || {
        on_cuda(compare)
    })]
}

/// All that plans and kernels may depend on; multiprocessors and memory are a model's, not an
/// architecture's.
fn compare(client: &Client) -> Result<Completion, Failed> {
    let properties = client.properties();
    let DeviceProperties { hardware, memory, identity, .. } = properties;
    let fingerprint = |gpu: &Gpu| format!("ptx_sm{}", gpu.capability);
    let Some(gpu) = Gpu::ALL.into_iter().find(|gpu| fingerprint(gpu) == identity.fingerprint)
    else {
        let reason = format!("nothing is recorded for {}", identity.fingerprint);
        return Ok(Completion::ignored_with(reason));
    };
    let model = Gpu {
        multiprocessors: hardware.num_streaming_multiprocessors.unwrap_or(gpu.multiprocessors),
        memory_bytes: memory.max_memory().unwrap_or(gpu.memory_bytes),
        ..gpu
    };
    let recorder = Recorder::new(model);
    let recorded = recorder.client().properties();
    same("hardware", &recorded.hardware, hardware)?;
    same("memory", &recorded.memory, memory)?;
    same("types", &recorded.features.types, &properties.features.types)?;
    same("matrix products", &recorded.features.matmul, &properties.features.matmul)?;
    same("features", &recorded.features, &properties.features)?;
    same("timing", &recorded.timing_method, &properties.timing_method)?;
    same("width of loads", &recorded.io_width(), &properties.io_width())?;
    same("name", &recorder.client().name(), &client.name())?;
    // A function is part of it, which two clients do not share; its name is all that is printed.
    let [recorded, actual] =
        [recorder.client(), client].map(|client| format!("{:?}", client.target_properties()));
    same("instructions", &recorded, &actual)?;
    Ok(Completion::Completed)
}

fn same<T: Debug + PartialEq>(what: &str, recorded: &T, actual: &T) -> Result<(), Failed> {
    if recorded == actual {
        return Ok(());
    }
    Err(format!("{what}: recorded for {recorded:#?}\nthe GPU has {actual:#?}").into())
}

//! What a run learns from and starts at, for another program.

use crate::{
    checkpoint,
    cli::{ExportArgs, TrainArgs},
    loader::Batch,
    metrics::replace_file,
    run::{self, Run},
    settings::RunSettings,
};
use anyhow::{Context, Result, bail};
use blackburn::{Report, distributed::Group};
use burn::tensor::Device;
use burn_store::{BurnToPyTorchAdapter, ModuleSnapshot, SafetensorsStore};
use safetensors::{Dtype, tensor::TensorView};
use std::{fs, path::Path};

/// Writes parameters, and the batches of the next steps with their learning rates.
pub(crate) fn export(args: &ExportArgs, mut device: Device, report: &Report) -> Result<()> {
    let run = prepare(&args.run, &mut device, report)?;
    let steps = run.settings.steps - run.step().min(run.settings.steps);
    if args.batches > steps {
        bail!("--batches: the run has {steps} steps left, got {}", args.batches);
    }
    let cannot = || format!("cannot write to {}", args.to.display());
    fs::create_dir_all(&args.to).with_context(cannot)?;
    write_model(&run, &args.to.join("model.safetensors")).with_context(cannot)?;
    write_batches(&run, args.batches, &args.to.join("batches.safetensors")).with_context(cannot)?;
    write_description(&run, args.batches, &args.to.join("run.json")).with_context(cannot)?;
    eprintln!(
        "wrote {}: parameters of step {}, and {} steps of {} x {} batches of {} tokens",
        args.to.display(),
        run.step(),
        args.batches,
        run.settings.accumulate,
        run.settings.batch,
        run.settings.model.context
    );
    Ok(())
}

/// The run, with a checkpoint of where it is.
fn prepare(args: &TrainArgs, device: &mut Device, report: &Report) -> Result<Run> {
    let folder = args.out.clone().unwrap_or_else(|| run::default_folder(args));
    let group = Group::alone();
    if args.resume {
        return Run::resume(args, folder, device, report, &group);
    }
    let settings = RunSettings::resolve(args, group.size(), device)?;
    let mut run = Run::start(args, folder, settings, device, report, &group)?;
    run.save(1)?;
    eprintln!(
        "the run in {} begins with these parameters: `train --resume` goes on with it",
        checkpoint::of_run(&run.folder).folder().display()
    );
    Ok(run)
}

/// Parameters by the names of their modules, without that of the family.
fn write_model(run: &Run, path: &Path) -> Result<()> {
    let mut store = SafetensorsStore::from_file(path)
        .with_to_adapter(BurnToPyTorchAdapter)
        .with_key_remapping(r"^trunk\.[^.]+\.", "")
        .overwrite(true);
    run.model()?.save_into(&mut store)?;
    Ok(())
}

/// `inputs` and `targets`, `[steps * accumulate, batch, context]` of i32.
fn write_batches(run: &Run, steps: usize, path: &Path) -> Result<()> {
    let settings = &run.settings;
    let count = steps * settings.accumulate;
    let mut source = run.batches()?;
    let (mut inputs, mut targets) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let Batch { inputs: ids, targets: following, .. } = source.next_batch()?;
        inputs.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
        targets.extend(following.iter().flat_map(|id| id.to_le_bytes()));
    }
    let shape = vec![count, settings.batch, settings.model.context];
    let view = |bytes| TensorView::new(Dtype::I32, shape.clone(), bytes);
    let tensors = [("inputs", view(&inputs)?), ("targets", view(&targets)?)];
    replace_file(path, |temporary| Ok(safetensors::serialize_to_file(tensors, None, temporary)?))
}

fn write_description(run: &Run, steps: usize, path: &Path) -> Result<()> {
    let schedule = run.settings.schedule();
    let rates: Vec<f64> = (run.step()..run.step() + steps).map(|step| schedule.at(step)).collect();
    let groups = run.settings.groups();
    let description = serde_json::json!({
        "step": run.step(),
        "settings": run.settings,
        "learning_rates": rates,
        "adamw": { "betas": [groups.beta_1, groups.beta_2], "epsilon": groups.epsilon },
    });
    let text = serde_json::to_string_pretty(&description)?;
    replace_file(path, |temporary| Ok(fs::write(temporary, &text)?))
}

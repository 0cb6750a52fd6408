//! Writes what launchers launch on each GPU as CUDA C++, with a manifest of what each kernel promises:
//! `cargo run -p blackburn-kernels --features recorder --example record -- DIR [sm_90a ...]`.
//!
//! `cargo xtask sass` runs this and checks the result.

use anyhow::{Context, Result, bail};
use blackburn_kernels::recorder::{Gpu, record};
use std::{env, fs, path::PathBuf};

fn main() -> Result<()> {
    let mut arguments = env::args().skip(1);
    let folder = PathBuf::from(arguments.next().context("usage: record DIR [ARCHITECTURE...]")?);
    let asked: Vec<_> = arguments.collect();
    let known = Gpu::ALL.map(|gpu| gpu.architecture);
    if let Some(unknown) = asked.iter().find(|name| !known.contains(&name.as_str())) {
        bail!("`{unknown}` is no architecture that is known; expected one of {}", known.join(", "));
    }
    let mut kernels = Vec::new();
    for gpu in Gpu::ALL {
        if !asked.is_empty() && !asked.iter().any(|name| name == gpu.architecture) {
            continue;
        }
        let of_gpu = folder.join(gpu.architecture);
        fs::create_dir_all(&of_gpu)
            .with_context(|| format!("cannot create {}", of_gpu.display()))?;
        kernels.extend(record(gpu)?);
    }
    for kernel in &kernels {
        let path = folder.join(&kernel.file);
        fs::write(&path, &kernel.source)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    let manifest = folder.join("manifest.json");
    fs::write(&manifest, serde_json::to_vec_pretty(&kernels)?)
        .with_context(|| format!("cannot write {}", manifest.display()))?;
    Ok(())
}

//! Writes every kernel variant as CUDA C++, with a manifest of what each one promises:
//! `cargo run -p blackburn-kernels --features cuda-source --example emit_cuda -- DIR`.
//!
//! `cargo xtask sass` runs this and checks the result.

use anyhow::{Context, Result};
use std::{env, fs, path::PathBuf};

fn main() -> Result<()> {
    let folder = PathBuf::from(env::args().nth(1).context("usage: emit_cuda DIR")?);
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let kernels = blackburn_kernels::cuda_source::variants()?;
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

//! The CUDA compilers: NVRTC, ptxas and nvdisasm. None of them needs a GPU or a driver.

use crate::tools;
use anyhow::{Context, Result, bail};
use std::{
    env,
    path::{Path, PathBuf},
};

/// CUDA 13.0, the version this project measures with. The `crt` headers belong to the runtime's.
/// The disassembler has wheels of its own from 13.2 on only; it reads older machine code.
const WHEELS: [&str; 6] = [
    "nvidia-cuda-nvrtc==13.0.88",
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-nvdisasm==13.2.78",
];

/// Paths of an installation.
pub(crate) struct Toolkit {
    pub(crate) root: PathBuf,
    pub(crate) nvrtc: PathBuf,
    pub(crate) ptxas: PathBuf,
    pub(crate) nvdisasm: PathBuf,
}

impl Toolkit {
    /// `CUDA_WHEELS` (the `nvidia/cu13` folder of unpacked wheels) or `CUDA_PATH` (an installed
    /// toolkit), else wheels that are fetched once. Register counts differ between versions, so an
    /// installed toolkit is taken only when it is asked for.
    pub(crate) fn locate() -> Result<Self> {
        for variable in ["CUDA_WHEELS", "CUDA_PATH"] {
            if let Some(root) = env::var_os(variable) {
                return Self::at(Path::new(&root)).with_context(|| format!("{variable} is set"));
            }
        }
        let dir = tools::tool_dir("cuda", "13.0");
        tools::install_wheels(&dir, &WHEELS)
            .context("cannot fetch the CUDA compilers; CUDA_PATH may name an installed toolkit")?;
        Self::at(&dir.join("nvidia/cu13"))
    }

    fn at(root: &Path) -> Result<Self> {
        let find = |folders: &[&str], names: &[&str]| {
            folders
                .iter()
                .flat_map(|folder| names.iter().map(move |name| root.join(folder).join(name)))
                .find(|path| path.exists())
                .with_context(|| format!("{} has no {}", root.display(), names.join(" or ")))
        };
        if !root.join("include/cuda_fp16.h").exists() {
            bail!("{} has no include/cuda_fp16.h", root.display());
        }
        Ok(Self {
            nvrtc: find(
                &["lib", "lib64", "targets/x86_64-linux/lib"],
                &["libnvrtc.so.13", "libnvrtc.so.12"],
            )?,
            ptxas: find(&["bin"], &["ptxas"])?,
            nvdisasm: find(&["bin"], &["nvdisasm"])?,
            root: root.to_path_buf(),
        })
    }

    /// NVRTC's options: those of `CubeCL`'s CUDA runtime (`compile_to_ptx` in cubecl-cuda), so that
    /// what is checked is what runs.
    pub(crate) fn options(&self, architecture: &str) -> Vec<String> {
        let include = self.root.join("include");
        let mut options = vec![
            format!("--gpu-architecture={architecture}"),
            format!("--include-path={}", include.display()),
            "-lineinfo".to_owned(),
        ];
        let cccl = include.join("cccl");
        if cccl.exists() {
            options.push(format!("--include-path={}", cccl.display()));
        }
        options
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_a_toolkit_is_refused_with_what_it_lacks() {
        let message = Toolkit::at(Path::new("/nonexistent")).err().unwrap().to_string();
        assert_eq!(message, "/nonexistent has no include/cuda_fp16.h");
    }
}

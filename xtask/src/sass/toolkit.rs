//! The CUDA compilers: NVRTC, ptxas and nvdisasm. None of them needs a GPU or a driver.

use crate::tools;
use anyhow::{Context, Result, bail};
use blackburn_nvrtc::CudaVersion;
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

/// The first version whose compilers know an architecture, where not every CUDA that serves does.
const FIRST_VERSIONS: [(&str, CudaVersion); 2] =
    [("sm_103a", CudaVersion(12, 9)), ("sm_121a", CudaVersion(12, 9))];

/// Refuses architectures that this version does not know.
pub(crate) fn check_architectures<'a>(
    version: CudaVersion,
    architectures: impl Iterator<Item = &'a String>,
) -> Result<()> {
    for architecture in architectures {
        let first = FIRST_VERSIONS.iter().find(|(name, _)| *name == architecture);
        if let Some((_, first)) = first.filter(|(_, first)| version < *first) {
            bail!(
                "CUDA {version} does not know {architecture}: CUDA_PATH has to name {first} or newer, or \
                 --arch other architectures"
            );
        }
    }
    Ok(())
}

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
        let find = |name: &str| {
            let path = root.join("bin").join(name);
            if !path.exists() {
                bail!("{} has no bin/{name}", root.display());
            }
            Ok(path)
        };
        Ok(Self {
            nvrtc: blackburn_nvrtc::find(root)?,
            ptxas: find("ptxas")?,
            nvdisasm: find("nvdisasm")?,
            root: root.to_path_buf(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_architecture_that_is_newer_than_the_compilers_is_refused() {
        let checked = |version, name: &str| {
            check_architectures(version, [name.to_owned()].iter())
                .map_err(|error| error.to_string())
        };
        assert_eq!(checked(CudaVersion(12, 8), "sm_120a"), Ok(()));
        assert_eq!(checked(CudaVersion(12, 9), "sm_121a"), Ok(()));
        assert_eq!(checked(CudaVersion(13, 0), "sm_103a"), Ok(()));
        let message = checked(CudaVersion(12, 8), "sm_103a").unwrap_err();
        assert!(message.starts_with("CUDA 12.8 does not know sm_103a"), "{message}");
    }

    #[test]
    fn a_folder_without_a_toolkit_is_refused_with_what_it_lacks() {
        let message = Toolkit::at(Path::new("/nonexistent")).err().unwrap().to_string();
        assert_eq!(message, "/nonexistent has no include/cuda_fp16.h");
    }
}

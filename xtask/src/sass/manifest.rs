//! The list of kernels to check, which `crates/kernels/examples/record.rs` writes beside the CUDA C++
//! files.

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::{fs, path::Path};

/// A kernel and what is asked of its machine code. Kernels of one name have no architecture in common.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    /// CUDA C++ file beside the manifest.
    pub(crate) file: String,
    /// The kernel's symbol; empty if the file holds one kernel only.
    #[serde(default)]
    pub(crate) entry: String,
    /// As `CubeCL` names them to NVRTC: `sm_89`, and `sm_90a` from 9.0 on.
    pub(crate) architectures: Vec<String>,
    /// An instruction that must occur, such as `HMMA` or `HGMMA.64x256x16`.
    #[serde(default)]
    pub(crate) tensor_core: Option<String>,
    #[serde(default)]
    pub(crate) max_registers: Option<u32>,
    /// Bytes of registers that are known to spill, stores and loads together.
    #[serde(default)]
    pub(crate) spill_bytes: u64,
    /// Dynamic shared memory that a launch asks for. What the source declares statically comes on
    /// top of it.
    #[serde(default)]
    pub(crate) shared_memory_bytes: u64,
}

/// Reads `folder`'s manifest, refusing what would let a kernel go unchecked.
pub(crate) fn read(folder: &Path) -> Result<Vec<Kernel>> {
    let path = folder.join("manifest.json");
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    parse(&text).with_context(|| path.display().to_string())
}

fn parse(text: &str) -> Result<Vec<Kernel>> {
    let kernels: Vec<Kernel> = serde_json::from_str(text)?;
    let mut names = std::collections::HashSet::new();
    for kernel in &kernels {
        let name = &kernel.name;
        // Names become file names.
        if name.is_empty() || name.contains(['/', '\\']) {
            bail!("`{name}` is no name for a kernel");
        }
        if kernel.architectures.is_empty() {
            bail!("`{name}` names no architecture");
        }
        if let Some(odd) = kernel.architectures.iter().find(|arch| !is_architecture(arch)) {
            bail!("`{name}`: `{odd}` is no architecture; expected `sm_80`, `sm_90a` ...");
        }
        if let Some(arch) = kernel.architectures.iter().find(|arch| !names.insert((name, *arch))) {
            bail!("two kernels for `{arch}` are named `{name}`");
        }
    }
    Ok(kernels)
}

fn is_architecture(name: &str) -> bool {
    name.strip_prefix("sm_").is_some_and(|version| {
        let digits = version.trim_end_matches(['a', 'f']);
        digits.len() >= 2 && digits.bytes().all(|digit| digit.is_ascii_digit())
    })
}

/// The (kernel, architecture) pairs that the filters leave.
pub(crate) fn select(
    kernels: &[Kernel],
    architectures: &[String],
    filter: &str,
) -> Result<Vec<(Kernel, String)>> {
    let wanted = |arch: &String| architectures.is_empty() || architectures.contains(arch);
    let pairs: Vec<_> = kernels
        .iter()
        .filter(|kernel| kernel.name.contains(filter))
        .flat_map(|kernel| {
            let archs = kernel.architectures.iter().filter(|arch| wanted(arch));
            archs.map(|arch| (kernel.clone(), arch.clone()))
        })
        .collect();
    if pairs.is_empty() {
        // An empty check must not read as a passed one.
        bail!("no kernel is left to check; the manifest has {}", kernels.len());
    }
    Ok(pairs)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = r#"[
        {"name": "gelu_forward_f32", "file": "gelu_forward_f32.cu", "entry": "gelu",
         "architectures": ["sm_80", "sm_90a"], "tensor_core": null, "max_registers": 64,
         "shared_memory_bytes": 0},
        {"name": "matmul_wgmma_bf16", "file": "matmul.cu", "entry": "", "tensor_core": "HGMMA",
         "architectures": ["sm_90a"], "max_registers": null, "shared_memory_bytes": 196672}
    ]"#;

    fn selected(architectures: &[&str], filter: &str) -> Vec<String> {
        let architectures: Vec<_> = architectures.iter().map(ToString::to_string).collect();
        let pairs = select(&parse(TWO).unwrap(), &architectures, filter).unwrap_or_default();
        pairs.into_iter().map(|(kernel, arch)| format!("{} {arch}", kernel.name)).collect()
    }

    #[test]
    fn every_architecture_of_every_kernel_is_checked() {
        let all = ["gelu_forward_f32 sm_80", "gelu_forward_f32 sm_90a", "matmul_wgmma_bf16 sm_90a"];
        assert_eq!(selected(&[], ""), all);
    }

    #[test]
    fn filters_narrow_by_name_and_architecture() {
        assert_eq!(selected(&["sm_80"], ""), ["gelu_forward_f32 sm_80"]);
        assert_eq!(selected(&[], "matmul"), ["matmul_wgmma_bf16 sm_90a"]);
    }

    #[test]
    fn an_empty_selection_is_an_error() {
        assert!(select(&parse(TWO).unwrap(), &[], "no_such_kernel").is_err());
        assert!(select(&[], &[], "").is_err());
    }

    #[test]
    fn a_kernel_may_differ_from_one_architecture_to_another() {
        let apart = TWO
            .replace("matmul_wgmma_bf16", "gelu_forward_f32")
            .replace("[\"sm_80\", \"sm_90a\"]", "[\"sm_80\"]");
        assert_eq!(parse(&apart).unwrap().len(), 2);
    }

    #[test]
    fn faults_of_the_manifest_are_named() {
        let planted = [
            (TWO.replace("matmul_wgmma_bf16", "gelu_forward_f32"), "two kernels for `sm_90a`"),
            (TWO.replace("\"sm_90a\"]", "\"90a\"]"), "is no architecture"),
            (TWO.replace("[\"sm_90a\"]", "[]"), "names no architecture"),
            (TWO.replace("max_registers", "max_register"), "unknown field"),
        ];
        for (text, expected) in planted {
            let message = format!("{:#}", parse(&text).unwrap_err());
            assert!(message.contains(expected), "{message}");
        }
    }
}

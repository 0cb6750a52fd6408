//! The GPU that is measured on, and its table of stored results.

use anyhow::{Context, Result, anyhow, bail};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// As the driver describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// Such as `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Version of the driver.
    pub driver: String,
}

impl Device {
    /// Asks `nvidia-smi` for the first GPU that programs see.
    ///
    /// # Errors
    ///
    /// When it is not installed, or finds none.
    pub fn ask() -> Result<Self> {
        let mut command = Command::new("nvidia-smi");
        command.args(["--query-gpu=name,driver_version", "--format=csv,noheader"]);
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_default();
        if let Some(first) = visible.split(',').next().filter(|first| !first.is_empty()) {
            command.args(["-i", first]);
        }
        let output =
            command.output().map_err(|error| anyhow!("`nvidia-smi` does not start: {error}"))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let device = text.lines().next().and_then(|line| line.split_once(", "));
        match device {
            Some((name, driver)) if output.status.success() => {
                Ok(Self { name: name.trim().into(), driver: driver.trim().into() })
            }
            _ => {
                let told = [&output.stdout, &output.stderr].map(|s| String::from_utf8_lossy(s));
                bail!("`nvidia-smi` finds no GPU: {}", told.concat().trim())
            }
        }
    }

    /// End of a row's note.
    pub fn note(&self) -> String {
        format!("driver {}, {}", self.driver, self.name)
    }
}

/// The table of a device in a folder: of those whose names are made of words of the device's, the one with the most.
/// `nvidia-h100.tsv` is the table of `NVIDIA H100 80GB HBM3`.
///
/// # Errors
///
/// When there is none.
pub fn table_of(folder: &Path, device: &str) -> Result<PathBuf> {
    let entries = fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))?;
    let words: Vec<String> = device.to_lowercase().split([' ', '-']).map(str::to_owned).collect();
    let mut found: Option<(usize, PathBuf)> = None;
    let mut names = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "tsv") {
            continue;
        }
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().to_lowercase();
        let parts: Vec<&str> = stem.split('-').collect();
        let is_named = parts.iter().all(|part| words.iter().any(|word| word == part));
        if is_named && found.as_ref().is_none_or(|(most, _)| parts.len() > *most) {
            found = Some((parts.len(), path));
        }
        names.push(stem);
    }
    names.sort();
    found.map(|(_, path)| path).with_context(|| {
        format!(
            "{} has no table of `{device}`, only {}; --against names a file",
            folder.display(),
            names.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_the_one_whose_name_is_made_of_the_devices_words() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["nvidia-h100.tsv", "nvidia-h100-pcie.tsv", "nvidia-h200.tsv", "fuzz.tsv"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        let of = |device| {
            let path = table_of(folder.path(), device)?;
            anyhow::Ok(path.file_name().unwrap_or_default().to_string_lossy().into_owned())
        };
        assert_eq!(of("NVIDIA H100 80GB HBM3").unwrap(), "nvidia-h100.tsv");
        assert_eq!(of("NVIDIA H100 PCIe").unwrap(), "nvidia-h100-pcie.tsv");
        let error = of("NVIDIA L40S").unwrap_err().to_string();
        assert!(error.contains("no table of `NVIDIA L40S`, only fuzz, nvidia-h100"), "{error}");
    }
}

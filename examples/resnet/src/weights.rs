//! torchvision's parameters.
//!
//! A file in the safetensors format names the tensors as torchvision does: `conv1.weight`, `bn1.running_mean`,
//! `layer2.0.downsample.1.bias`, `fc.weight`. PyTorch's own `.pth` files become such by two lines of Python:
//!
//! ```text
//! from safetensors.torch import save_file
//! save_file(torchvision.models.resnet50(weights="DEFAULT").state_dict(), "resnet50.safetensors")
//! ```

use crate::model::{Depth, ModelConfig, ResNet};
use anyhow::{Context, Result, anyhow, bail, ensure};
use burn::tensor::DType;
use burn_store::{
    BurnToPyTorchAdapter, FloatCastAdapter, ModuleAdapter, ModuleSnapshot, ModuleStore,
    PyTorchToBurnAdapter, SafetensorsStore,
};
use std::{
    collections::BTreeSet,
    fmt::Write,
    path::{Path, PathBuf},
};

/// The last layer, by torchvision's names.
const HEAD: &str = "fc.";
/// A count that PyTorch's norms keep and nothing reads.
const IGNORED: &str = "num_batches_tracked";
/// Tensors that a message names.
const NAMED: usize = 4;

/// A file's tensors, looked at and not yet read.
pub(crate) struct Weights {
    path: PathBuf,
    tensors: Vec<burn_pack::Tensor>,
    model: ModelConfig,
}

impl Weights {
    /// Looks at a file: which network is it of?
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let shown = path.display();
        ensure!(path.is_file(), "--weights: expected a file, {shown} is none");
        let is_safetensors = path.extension().is_some_and(|extension| extension == "safetensors");
        ensure!(
            is_safetensors,
            "--weights: expected a .safetensors file, got {shown}. In Python: from safetensors.torch import \
             save_file; save_file(model.state_dict(), \"model.safetensors\")"
        );
        let mut store = SafetensorsStore::from_file(path);
        let tensors = store.get_all_tensors();
        let tensors =
            tensors.map_err(|error| anyhow!("--weights: {shown} cannot be read: {error}"))?;
        let tensors: Vec<_> =
            tensors.values().filter(|tensor| !tensor.name.ends_with(IGNORED)).cloned().collect();
        let model = recognize(&tensors).with_context(|| {
            format!("--weights: {shown} is not of a residual network with torchvision's names")
        })?;
        Ok(Self { path: path.to_owned(), tensors, model })
    }

    /// The network that the file is of.
    pub(crate) fn model(&self) -> ModelConfig {
        self.model
    }

    /// Puts the file's numbers into `model`, which is of `config` and computes in the type that it is stored in. With
    /// `new_head` the last layer stays as it is.
    pub(crate) fn load(
        &self,
        mut model: ResNet,
        config: &ModelConfig,
        new_head: bool,
    ) -> Result<ResNet> {
        // The names and shapes that PyTorch would save this model with.
        let expected = model.collect(None, Some(Box::new(BurnToPyTorchAdapter)), false);
        let expected: Vec<(String, burn_pack::Tensor)> = expected
            .into_iter()
            .map(|tensor| (torch_name(&tensor.name, config.depth), tensor))
            .filter(|(name, _)| !(new_head && name.starts_with(HEAD)))
            .collect();
        self.check(&expected, config, new_head)?;
        let tensors = expected.iter().filter_map(|(name, target)| {
            let mut tensor = self.tensors.iter().find(|tensor| tensor.name == *name)?.clone();
            tensor.name.clone_from(&target.name);
            Some(tensor)
        });
        let adapter = PyTorchToBurnAdapter.chain(FloatCastAdapter::to(DType::F32));
        let result = model.apply(tensors.collect(), None, Some(Box::new(adapter)), false);
        let path = self.path.display();
        if let Some(error) = result.errors.first() {
            bail!("--weights: {path} cannot be loaded: {error}");
        }
        ensure!(
            result.applied.len() == expected.len(),
            "--weights: {path}: expected to load {} tensors, got {}",
            expected.len(),
            result.applied.len()
        );
        Ok(model)
    }

    fn check(
        &self,
        expected: &[(String, burn_pack::Tensor)],
        config: &ModelConfig,
        new_head: bool,
    ) -> Result<()> {
        let path = self.path.display();
        if self.model.depth != config.depth || self.model.width != config.width {
            bail!(
                "--weights: {path} is of a ResNet-{} of width {}, and the run has --depth {} and --width {}",
                self.model.depth,
                self.model.width,
                config.depth,
                config.width
            );
        }
        if self.model.classes != config.classes && !new_head {
            bail!(
                "--weights: {path} tells {} classes apart, and the images have {}. --new-head leaves the \
                 file's last layer out and begins a new one",
                self.model.classes,
                config.classes
            );
        }
        let names: BTreeSet<&str> = expected.iter().map(|(name, _)| name.as_str()).collect();
        let found: BTreeSet<&str> =
            self.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        let missing: Vec<_> = names.difference(&found).map(ToString::to_string).collect();
        let unexpected: Vec<_> = found
            .difference(&names)
            .filter(|name| !(new_head && name.starts_with(HEAD)))
            .map(ToString::to_string)
            .collect();
        let mismatched: Vec<_> = expected
            .iter()
            .filter_map(|(name, target)| {
                let found = self.tensors.iter().find(|tensor| tensor.name == *name)?;
                let (target, found) = (&target.shape[..], &found.shape[..]);
                (target != found).then(|| format!("{name} (expected {target:?}, got {found:?})"))
            })
            .collect();
        let mut faults = String::new();
        for (what, names) in
            [("missing", missing), ("unexpected", unexpected), ("of another shape", mismatched)]
        {
            if !names.is_empty() {
                let more = names.len().saturating_sub(NAMED);
                let more = if more > 0 { format!(" and {more} more") } else { String::new() };
                let named = names[..names.len().min(NAMED)].join(", ");
                let _ = write!(faults, "; {what}: {named}{more}");
            }
        }
        ensure!(
            faults.is_empty(),
            "--weights: {path} does not fit a ResNet-{}{faults}",
            config.depth
        );
        Ok(())
    }
}

/// Which network tensors are of, by their names and shapes.
fn recognize(tensors: &[burn_pack::Tensor]) -> Result<ModelConfig> {
    let shape = |name: &str, rank: usize| -> Result<Vec<usize>> {
        let tensor = tensors.iter().find(|tensor| tensor.name == name);
        let tensor = tensor.with_context(|| format!("it has no tensor {name}"))?;
        let shape = tensor.shape.to_vec();
        ensure!(shape.len() == rank, "{name}: expected {rank} dimensions, got {shape:?}");
        Ok(shape)
    };
    let has = |name: String| tensors.iter().any(|tensor| tensor.name == name);
    let blocks = [1, 2, 3, 4].map(|stage| {
        (0..).take_while(|block| has(format!("layer{stage}.{block}.conv1.weight"))).count()
    });
    let has_bottlenecks = has("layer1.0.conv3.weight".into());
    let depth = Depth::ALL
        .into_iter()
        .find(|depth| depth.blocks() == blocks && depth.has_bottlenecks() == has_bottlenecks);
    let width = shape("conv1.weight", 4)?[0];
    let classes = shape("fc.weight", 2)?[0];
    let depth = depth.with_context(|| {
        let kind = if has_bottlenecks { "three" } else { "two" };
        format!("its stages have {blocks:?} blocks of {kind} convolutions, as no depth here has")
    })?;
    Ok(ModelConfig { depth, width, classes })
}

/// What torchvision calls the tensor at a path of [`ResNet`], whose last part is PyTorch's already.
fn torch_name(path: &str, depth: Depth) -> String {
    let parts: Vec<&str> = path.split('.').collect();
    match parts[..] {
        ["stem", "conv", last] => format!("conv1.{last}"),
        ["stem", "norm", last] => format!("bn1.{last}"),
        ["head", last] => format!("{HEAD}{last}"),
        ["blocks", block, "shortcut", kind, last] => {
            let index = if kind == "conv" { 0 } else { 1 };
            format!("{}.downsample.{index}.{last}", torch_block(block, depth))
        }
        ["blocks", block, "layers", layer, kind, last] => {
            let kind = if kind == "conv" { "conv" } else { "bn" };
            let number = layer.parse::<usize>().map_or(0, |layer| layer + 1);
            format!("{}.{kind}{number}.{last}", torch_block(block, depth))
        }
        // Reported as missing, under the name that it has.
        _ => path.to_owned(),
    }
}

/// `layer2.0`, of the block that is the fourth of all in a network whose first stage has three.
fn torch_block(block: &str, depth: Depth) -> String {
    let mut index = block.parse().unwrap_or(usize::MAX);
    for (stage, count) in depth.blocks().into_iter().enumerate() {
        if index < count {
            return format!("layer{}.{index}", stage + 1);
        }
        index -= count;
    }
    format!("block {block}")
}

#[cfg(test)]
mod tests;

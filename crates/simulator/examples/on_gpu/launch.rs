//! A launch as `cargo xtask simulate --dump` writes it.

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;
use std::{collections::BTreeMap, fs, path::Path};

/// How a kernel is launched.
#[derive(Debug, Deserialize)]
pub(crate) struct Launch {
    pub(crate) entry: String,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) dynamic_shared: u32,
    pub(crate) schedules: u64,
    pub(crate) parameters: Vec<Parameter>,
}

/// What a kernel gets for a parameter.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Parameter {
    /// Its bytes, as hexadecimal digits.
    Bytes(String),
    /// A tensor that the copy engine reads.
    Tensor(Tensor),
}

/// A tensor map. Dimensions stand in the order of memory.
#[derive(Debug, Deserialize)]
pub(crate) struct Tensor {
    pub(crate) address: u64,
    pub(crate) element_bytes: u64,
    pub(crate) shape: Vec<u64>,
    pub(crate) strides: Vec<u64>,
    pub(crate) taken: Taken,
    pub(crate) swizzle_bytes: u32,
}

/// What a copy takes.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Taken {
    Tile(Vec<u32>),
    Pixels { lower: Vec<i32>, upper: Vec<i32>, steps: Vec<u32>, channels: u32, pixels: u32 },
}

/// Allocations by their address in the simulator.
pub(crate) type Memory = BTreeMap<u64, Vec<u8>>;

/// Where buffers of a recording lie on another device.
#[derive(Debug, Default)]
pub(crate) struct Places {
    /// The recorded address, the length, and the address there.
    buffers: Vec<(u64, usize, u64)>,
}

impl Places {
    pub(crate) fn add(&mut self, recorded: u64, bytes: usize, there: u64) {
        self.buffers.push((recorded, bytes, there));
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = (u64, usize, u64)> {
        self.buffers.iter().copied()
    }

    /// The address there for a recorded one, if a buffer holds it.
    pub(crate) fn address(&self, recorded: u64) -> Option<u64> {
        let holds = |(first, bytes, _): &(u64, usize, u64)| {
            (*first..*first + (*bytes).max(1) as u64).contains(&recorded)
        };
        let (first, _, there) = self.all().find(holds)?;
        Some(there + (recorded - first))
    }

    /// A parameter's bytes: a recorded address becomes the one there.
    pub(crate) fn bytes(&self, digits: &str) -> Result<Vec<u8>> {
        ensure!(digits.len().is_multiple_of(2), "an odd number of digits: {digits}");
        let byte = |place: usize| u8::from_str_radix(&digits[place..place + 2], 16);
        let bytes: Vec<u8> =
            (0..digits.len()).step_by(2).map(byte).collect::<std::result::Result<_, _>>()?;
        let recorded = <[u8; 8]>::try_from(bytes.as_slice()).map(u64::from_le_bytes);
        Ok(match recorded.ok().and_then(|recorded| self.address(recorded)) {
            Some(address) => address.to_le_bytes().to_vec(),
            None => bytes,
        })
    }
}

/// A launch, and the memory before and after it.
pub(crate) struct Recorded {
    pub(crate) ptx: String,
    pub(crate) launch: Launch,
    pub(crate) before: Memory,
    pub(crate) after: Memory,
}

impl Recorded {
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let text = |name: &str| fs::read_to_string(folder.join(name)).context(name.to_owned());
        Ok(Self {
            ptx: text("kernel.ptx")?,
            launch: serde_json::from_str(&text("launch.json")?)?,
            before: memory(folder, "before-")?,
            after: memory(folder, "after-")?,
        })
    }
}

fn memory(folder: &Path, when: &str) -> Result<Memory> {
    /// Where the simulator keeps a module's variables, which a GPU keeps itself.
    const MODULE: u64 = 0x6000_0000_0000;
    let mut memory = Memory::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let address = name.strip_prefix(when).and_then(|rest| rest.strip_suffix(".bin"));
        let Some(address) = address else { continue };
        let address = u64::from_str_radix(address, 16).with_context(|| name.clone())?;
        if address != MODULE {
            memory.insert(address, fs::read(entry.path())?);
        }
    }
    Ok(memory)
}

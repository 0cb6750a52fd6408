//! A device: its memory, and the launches that run on it.

use crate::{
    arithmetic::Arithmetic,
    async_::TensorMap,
    error::SimulatorError,
    machine::{Setting, place_within, run_block},
    memory::Global,
    ptx::{Kernel, Program},
    schedule::{Dice, Landing, Schedule},
};
use std::{collections::BTreeSet, ops::Range};

/// What a kernel gets for a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Argument {
    /// The parameter's bytes: an address, or a structure. What is missing at its end is zero.
    Bytes(Vec<u8>),
    /// A tensor that the copy engine reads.
    TensorMap(TensorMap),
}

impl Argument {
    /// An address in the device's memory.
    pub fn address(address: u64) -> Self {
        Self::Bytes(address.to_le_bytes().to_vec())
    }
}

/// How a kernel is launched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The kernel's entry point.
    pub kernel: String,
    /// Blocks along x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block along x, y, z.
    pub block: [u32; 3],
    /// Bytes of shared memory whose size the kernel leaves to the launch.
    pub dynamic_shared: u64,
    /// A value for each parameter.
    pub arguments: Vec<Argument>,
    /// The memory that the kernel may touch; `None` allows all buffers.
    pub reach: Option<Vec<Range<u64>>>,
}

/// How a launch is simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Which warp runs when, and when asynchronous work lands.
    pub schedule: Schedule,
    /// Whether accesses to shared memory that nothing orders are looked for. It takes several times as long.
    pub find_races: bool,
    /// Instructions of warps after which a block is given up.
    pub most_instructions: u64,
}

impl Default for Options {
    fn default() -> Self {
        let schedule = Schedule { seed: 0, landing: Landing::Earliest };
        Self { schedule, find_races: true, most_instructions: 200_000_000 }
    }
}

/// What a launch did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Blocks that were run.
    pub blocks: u64,
    /// Instructions that their warps ran.
    pub instructions: u64,
    /// Lines of the PTX whose instruction some thread ran.
    pub lines: BTreeSet<u32>,
}

/// A simulated device.
#[derive(Clone, Debug)]
pub struct Device {
    memory: Global,
    /// How it computes where PTX allows more than one result.
    pub arithmetic: Arithmetic,
}

impl Default for Device {
    fn default() -> Self {
        Self::new()
    }
}

impl Device {
    /// A device whose memory is empty.
    pub fn new() -> Self {
        Self { memory: Global::new(), arithmetic: Arithmetic::default() }
    }

    /// Memory of `bytes` bytes, which nobody has written. Its address is a multiple of 512.
    pub fn allocate(&mut self, bytes: u64) -> u64 {
        self.memory.allocate(bytes)
    }

    /// Gives back what [`allocate`](Self::allocate) gave. False if there is no memory at that address.
    pub fn free(&mut self, address: u64) -> bool {
        self.memory.free(address)
    }

    /// Copies `data` to the device.
    ///
    /// # Errors
    ///
    /// The part that lies outside the device's memory.
    pub fn write(&mut self, address: u64, data: &[u8]) -> Result<(), String> {
        self.memory.restrict(None);
        if data.is_empty() {
            return Ok(());
        }
        self.memory.write(address, data).map_err(|trouble| trouble.reason)
    }

    /// Copies `bytes` bytes from the device. False if some of them were never written.
    ///
    /// # Errors
    ///
    /// The part that lies outside the device's memory.
    pub fn read(&mut self, address: u64, bytes: usize) -> Result<(Vec<u8>, bool), String> {
        self.memory.restrict(None);
        let mut data = vec![0; bytes];
        if bytes == 0 {
            return Ok((data, true));
        }
        let known = self.memory.read(address, &mut data).map_err(|trouble| trouble.reason)?;
        Ok((data, known))
    }

    /// The address of the first byte in which two devices with the same allocations differ.
    pub fn difference(&self, other: &Self) -> Option<u64> {
        self.memory.difference(&other.memory)
    }

    /// Addresses and bytes of all allocations.
    pub fn contents(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.memory.contents()
    }

    /// Runs a kernel to its end, one block or cluster of blocks after another in an order that the schedule draws.
    ///
    /// # Errors
    ///
    /// A launch that contradicts the kernel, or the first fault that is found.
    pub fn launch(
        &mut self,
        program: &Program,
        launch: &Launch,
        options: &Options,
    ) -> Result<Report, SimulatorError> {
        let refuse =
            |reason: String| SimulatorError::Launch { kernel: launch.kernel.clone(), reason };
        let kernel = program.kernels.iter().find(|kernel| kernel.name == launch.kernel);
        let kernel = kernel.ok_or_else(|| {
            let known: Vec<_> = program.kernels().collect();
            refuse(format!("the module has no such kernel, only {}", known.join(", ")))
        })?;
        let threads: u64 = launch.block.iter().map(|side| u64::from(*side)).product();
        if !(1..=1024).contains(&threads) {
            return Err(refuse(format!("{threads} threads a block; 1 to 1024 are possible")));
        }
        let (parameters, maps) = arguments(kernel, &launch.arguments).map_err(refuse)?;
        self.memory.place_module(&program.data);
        self.memory.restrict(launch.reach.as_deref());
        let setting = Setting {
            kernel,
            arithmetic: &self.arithmetic,
            parameters: &parameters,
            maps: &maps,
            grid: launch.grid,
            threads: launch.block,
            dynamic_shared: launch.dynamic_shared,
            landing: options.schedule.landing,
            find_races: options.find_races,
        };
        let [cluster, grid] = [kernel.cluster, launch.grid];
        if cluster.iter().zip(grid).any(|(blocks, side)| !side.is_multiple_of(*blocks)) {
            return Err(refuse(format!("a grid of {grid:?} blocks, in clusters of {cluster:?}")));
        }
        let clusters = [0, 1, 2].map(|axis| grid[axis] / cluster[axis]);
        let count: u64 = clusters.iter().map(|side| u64::from(*side)).product();
        let mut dice = Dice::new(options.schedule.seed);
        let mut order: Vec<u64> = (0..count).collect();
        for place in (1..order.len()).rev() {
            order.swap(place, dice.roll(place as u64 + 1) as usize);
        }
        let mut report = Report::default();
        let mut reached = vec![false; kernel.code(0).len()];
        for number in order {
            let place = place_within(number as u32, clusters);
            let index = [0, 1, 2].map(|axis| place[axis] * cluster[axis]);
            let seed = dice.roll(u64::MAX);
            let most = options.most_instructions;
            report.instructions +=
                run_block(setting, &mut self.memory, index, (seed, most), &mut reached)?;
            report.blocks += u64::from(cluster.iter().product::<u32>());
        }
        let ran = kernel.code(0).iter().zip(&reached).filter(|(_, reached)| **reached);
        report.lines = ran.map(|(instruction, _)| instruction.line).collect();
        Ok(report)
    }
}

type Arguments = (Vec<u8>, Vec<(u64, TensorMap)>);

/// The bytes of all parameters, and the tensor maps among them.
fn arguments(kernel: &Kernel, given: &[Argument]) -> Result<Arguments, String> {
    let expected = kernel.parameters.len();
    if given.len() != expected {
        return Err(format!("{expected} parameters expected, {} given", given.len()));
    }
    let mut bytes = vec![0; kernel.parameter_bytes as usize];
    let mut maps = Vec::new();
    for (place, (parameter, argument)) in kernel.parameters.iter().zip(given).enumerate() {
        let (offset, size) = (parameter.offset as usize, parameter.bytes as usize);
        match argument {
            Argument::Bytes(data) if data.len() <= size => {
                bytes[offset..offset + data.len()].copy_from_slice(data);
            }
            Argument::Bytes(data) => {
                let found = data.len();
                return Err(format!("parameter {place} has {size} bytes, {found} are given"));
            }
            Argument::TensorMap(map) => {
                if size != 128 {
                    return Err(format!("parameter {place} has {size} bytes: no tensor map"));
                }
                map.check().map_err(|reason| format!("tensor map {place}: {reason}"))?;
                maps.push((parameter.offset, map.clone()));
            }
        }
    }
    Ok((bytes, maps))
}

//! Modules and kernels that can be launched.

use super::{
    decode::Decoder,
    instruction::{Instruction, Op, Space},
    names::RegisterCounts,
    syntax::{self, Entry, Item, Source, Variable},
};
use crate::{
    error::ParseError,
    memory::{MODULE_BASE, MOST_BLOCKS, SHARED_BASE, in_block},
};
use std::collections::BTreeSet;

/// A module of PTX that was accepted: every instruction in it is known.
#[derive(Clone, Debug)]
pub struct Program {
    /// What the module was compiled for.
    pub target: String,
    pub(crate) kernels: Vec<Kernel>,
    /// Initial bytes of the module's variables.
    pub(crate) data: Vec<u8>,
}

/// A parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parameter {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// A kernel that can be launched.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) parameter_bytes: u64,
    /// Where shared variables of a known size end.
    pub(crate) static_shared_end: u64,
    /// Where dynamic shared memory begins.
    pub(crate) dynamic_shared: u64,
    pub(crate) registers: RegisterCounts,
    /// Blocks of a cluster along x, y, z.
    pub(crate) cluster: [u32; 3],
    /// The code of the blocks of a cluster, by their rank: addresses of shared variables are each block's own.
    codes: Vec<Vec<Instruction>>,
}

impl Program {
    /// Reads a module.
    ///
    /// # Errors
    ///
    /// The line and the text that are not understood: text that is no PTX, and instructions, types and
    /// directives that the simulator does not know.
    pub fn parse(ptx: &str) -> Result<Self, ParseError> {
        let source = syntax::read(ptx)?;
        let mut data = Vec::new();
        let mut places = Vec::new();
        for variable in source.variables.iter().filter(|variable| variable.space != ".shared") {
            places.push((variable.name.clone(), MODULE_BASE + place_data(&mut data, variable)?));
        }
        let kernels = source.entries.iter().map(|entry| kernel(&source, entry, &places));
        let kernels = kernels.collect::<Result<Vec<_>, _>>()?;
        Ok(Self { target: source.target, kernels, data })
    }

    /// The names of the module's kernels.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.kernels.iter().map(|kernel| kernel.name.as_str())
    }

    /// The opcodes that occur, each once.
    pub fn opcodes(&self) -> BTreeSet<&str> {
        self.kernels
            .iter()
            .flat_map(|kernel| kernel.code(0))
            .map(|instruction| instruction.opcode.as_str())
            .collect()
    }
}

impl Kernel {
    /// The code of the block of that rank in its cluster: the same instructions for all.
    pub(crate) fn code(&self, rank: usize) -> &[Instruction] {
        &self.codes[rank]
    }

    /// The narrowest access to shared memory, in bytes: what races are told apart by.
    pub(crate) fn shared_granule(&self) -> u64 {
        let shared =
            |space: &Space| matches!(space, Space::Shared | Space::Cluster | Space::Generic);
        let widths = self.code(0).iter().filter_map(|instruction| match &instruction.op {
            Op::Load { space, ty, dst, .. } if shared(space) => Some(ty.bytes() * dst.len() as u64),
            Op::Store { space, ty, src, .. } if shared(space) => {
                Some(ty.bytes() * src.len() as u64)
            }
            Op::CopyAsync { bytes, .. } => Some(*bytes),
            _ => None,
        });
        widths.min().unwrap_or(16).clamp(1, 16)
    }
}

fn place_data(data: &mut Vec<u8>, variable: &Variable) -> Result<u64, ParseError> {
    let Some(count) = variable.count else {
        return Err(ParseError::new(variable.line, format!("`{}` has no size", variable.name)));
    };
    let offset = (data.len() as u64).next_multiple_of(variable.align.max(16));
    data.resize((offset + count * variable.element) as usize, 0);
    for (place, value) in variable.values.iter().enumerate() {
        let at = offset as usize + place * variable.element as usize;
        let bytes = value.to_le_bytes();
        data[at..at + variable.element as usize]
            .copy_from_slice(&bytes[..variable.element as usize]);
    }
    Ok(offset)
}

/// That all instructions of tensor memory are of a block, or all of a pair of blocks.
fn check_groups(code: &[Instruction]) -> Result<(), ParseError> {
    let group = |instruction: &Instruction| {
        let is_one = || instruction.opcode.contains("cta_group::1");
        let tensor = matches!(instruction.op, Op::Tcgen05(_));
        (tensor && instruction.opcode.contains("cta_group")).then(is_one)
    };
    let mut groups = code.iter().filter_map(|instruction| Some((instruction, group(instruction)?)));
    let Some((_, first)) = groups.next() else { return Ok(()) };
    match groups.find(|(_, group)| *group != first) {
        None => Ok(()),
        Some((other, _)) => {
            let reason =
                format!("`{}`: the kernel has instructions of the other `cta_group`", other.opcode);
            Err(ParseError::new(other.line, reason))
        }
    }
}

fn kernel(source: &Source, entry: &Entry, module: &[(String, u64)]) -> Result<Kernel, ParseError> {
    let mut parameters = Vec::new();
    let mut parameter_bytes = 0_u64;
    let mut names = module.to_vec();
    for parameter in &entry.parameters {
        let bytes = parameter.element * parameter.count.unwrap_or(1);
        let offset = parameter_bytes.next_multiple_of(parameter.align);
        names.push((parameter.name.clone(), offset));
        parameters.push(Parameter { offset, bytes });
        parameter_bytes = offset + bytes;
    }

    let within = entry.items.iter().filter_map(|item| match item {
        Item::Variable(variable) => Some(variable),
        _ => None,
    });
    let variables = source.variables.iter().filter(|variable| variable.space == ".shared");
    let (mut end, mut dynamic) = (SHARED_BASE, 16);
    let mut shared = Vec::new();
    for variable in variables.chain(within) {
        let bytes = variable.element * variable.count.unwrap_or(0);
        match (variable.space.as_str(), variable.count) {
            (_, None) => dynamic = dynamic.max(variable.align),
            (".local", _) => {
                let reason = "local memory is not supported: shipped kernels may not spill";
                return Err(ParseError::new(variable.line, reason));
            }
            _ => {
                let offset = end.next_multiple_of(variable.align);
                shared.push((variable.name.clone(), offset));
                end = offset + bytes;
            }
        }
    }
    let dynamic_shared = end.next_multiple_of(dynamic);
    for variable in source.variables.iter().filter(|variable| variable.count.is_none()) {
        shared.push((variable.name.clone(), dynamic_shared));
    }

    let blocks: u32 = entry.cluster.iter().product();
    if !(1..=MOST_BLOCKS).contains(&blocks) {
        let reason = format!("a cluster of {blocks} blocks; 1 to {MOST_BLOCKS} are possible");
        return Err(ParseError::new(entry.line, reason));
    }
    let mut registers = RegisterCounts::default();
    let mut codes = Vec::with_capacity(blocks as usize);
    for rank in 0..blocks as usize {
        let mut decoder = Decoder::new(&source.target);
        // A variable of an inner scope is known by its name everywhere; names are unique in what is compiled.
        for (name, address) in &names {
            decoder.names.define(name, *address);
        }
        for (name, address) in &shared {
            decoder.names.define(name, in_block(rank, *address));
        }
        for item in &entry.items {
            decoder.item(item)?;
        }
        let (code, counts) = decoder.finish()?;
        registers = counts;
        codes.push(code);
    }
    check_groups(&codes[0])?;
    Ok(Kernel {
        name: entry.name.clone(),
        parameters,
        parameter_bytes,
        static_shared_end: end,
        dynamic_shared,
        registers,
        cluster: entry.cluster,
        codes,
    })
}

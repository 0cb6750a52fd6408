//! What may stand behind a recorder's client: memory that holds bytes, and something that runs kernels.

use super::{Compiled, compile};
use cubecl::{
    ir::DeviceProperties,
    prelude::{Im2colArgs, TensorMapFormat, TensorMapSwizzle, TiledArgs},
};
use cubecl_common::bytes::Bytes;
use cubecl_server::{
    id::KernelId,
    kernel::CubeKernel,
    server::{
        BufferBinding, CopyDescriptor, CubeCount, KernelArguments, KernelResource, TensorMapBinding,
    },
};
use std::{collections::HashMap, ops::Range};

/// Memory and execution units of a device that is not there.
///
/// Messages of errors say what, where, and what was expected.
pub trait Machine: Send + 'static {
    /// Memory of `bytes` bytes, at an address that is a multiple of 512.
    fn allocate(&mut self, bytes: u64) -> u64;

    /// Copies `data` to memory.
    ///
    /// # Errors
    ///
    /// What lies outside of it.
    fn write(&mut self, address: u64, data: &[u8]) -> Result<(), String>;

    /// Copies from memory, until `data` is full.
    ///
    /// # Errors
    ///
    /// What lies outside of it, or was never written.
    fn read(&mut self, address: u64, data: &mut [u8]) -> Result<(), String>;

    /// Runs a kernel to its end.
    ///
    /// # Errors
    ///
    /// A kernel that cannot be compiled, or that goes wrong.
    fn run(&mut self, launch: MachineLaunch<'_>) -> Result<(), String>;
}

/// What a copy of a mapped tensor takes of it. Dimensions are in the order of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MappedBox {
    /// So many elements along each dimension.
    Tile(Vec<u32>),
    /// Channels, the contiguous dimension, of pixels, all dimensions but that one and the last.
    Pixels {
        /// The box that pixels stand in: its first pixel, from the image's first one.
        lower: Vec<i32>,
        /// Its last pixel, from the image's last one.
        upper: Vec<i32>,
        /// From one pixel to the next.
        steps: Vec<u32>,
        /// Channels of a copy.
        channels: u32,
        /// Pixels of a copy.
        pixels: u32,
    },
}

/// A tensor that a kernel reads by the copy engine. Dimensions are in the order of memory, the contiguous one
/// first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedTensor {
    /// Address of the first element.
    pub address: u64,
    /// Bytes of an element.
    pub element_bytes: u64,
    /// Elements along each dimension.
    pub shape: Vec<u64>,
    /// Bytes from one element to the next, along each dimension but the first.
    pub strides: Vec<u64>,
    /// What a copy takes.
    pub taken: MappedBox,
    /// Bytes within which a copy's rows are swizzled; 0 for copies that are not.
    pub swizzle_bytes: u32,
}

/// What a kernel gets for a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MachineArgument {
    /// Bytes of the parameter.
    Bytes(Vec<u8>),
    /// A tensor map.
    Tensor(MappedTensor),
}

/// A launch, as CubeCL's CUDA runtime would hand it to the driver.
#[derive(Clone, Debug)]
pub struct MachineLaunch<'a> {
    /// CUDA C++ of the kernel, and its entry point.
    pub source: &'a str,
    /// Symbol of the entry point.
    pub entry: &'a str,
    /// Cubes along x, y, z.
    pub cubes: [u32; 3],
    /// Units of a cube along x, y, z.
    pub units: [u32; 3],
    /// Dynamic shared memory, in bytes.
    pub shared_memory_bytes: usize,
    /// The parameters, in order.
    pub arguments: Vec<MachineArgument>,
    /// The memory that the kernel was given.
    pub reach: Vec<Range<u64>>,
}

/// The memory of a server, and its machine.
pub(super) struct Hardware {
    machine: Box<dyn Machine>,
    /// Where each allocation lies, and how long it is.
    addresses: HashMap<usize, u64>,
    compiled: HashMap<KernelId, Compiled>,
}

impl Hardware {
    pub(super) fn new(machine: Box<dyn Machine>) -> Self {
        Self { machine, addresses: HashMap::new(), compiled: HashMap::new() }
    }

    pub(super) fn allocate(&mut self, id: usize, bytes: u64) {
        let address = self.machine.allocate(bytes);
        self.addresses.insert(id, address);
    }

    fn range(&self, binding: &BufferBinding) -> Result<Range<u64>, String> {
        let id = binding.memory.id().value;
        let base = self.addresses.get(&id).ok_or("a buffer that was never allocated")?;
        let Range { start, end } = binding.range();
        Ok(base + start..base + end)
    }

    /// The rows of a copy: their addresses, and the bytes of one.
    fn rows(&self, copy: &CopyDescriptor) -> Result<(Vec<u64>, usize), String> {
        let address = self.range(&copy.handle)?.start;
        let (shape, strides) = (&copy.shape, &copy.strides);
        let Some((columns, outer)) = shape.split_last() else {
            return Ok((vec![address], copy.elem_size));
        };
        let rows: usize = outer.iter().product();
        let place = |row: usize| {
            let mut rest = row;
            let mut offset = 0;
            for (length, stride) in outer.iter().zip(strides.iter()).rev() {
                offset += rest % length * stride;
                rest /= length;
            }
            address + (offset * copy.elem_size) as u64
        };
        Ok(((0..rows).map(place).collect(), columns * copy.elem_size))
    }

    pub(super) fn read(&mut self, copy: &CopyDescriptor) -> Result<Vec<u8>, String> {
        let (rows, bytes) = self.rows(copy)?;
        let mut data = vec![0; rows.len() * bytes];
        if bytes > 0 {
            for (address, part) in rows.into_iter().zip(data.chunks_exact_mut(bytes)) {
                self.machine.read(address, part)?;
            }
        }
        Ok(data)
    }

    pub(super) fn write(&mut self, copy: &CopyDescriptor, data: &Bytes) -> Result<(), String> {
        let (rows, bytes) = self.rows(copy)?;
        if bytes > 0 {
            for (address, part) in rows.into_iter().zip(data.chunks_exact(bytes)) {
                self.machine.write(address, part)?;
            }
        }
        Ok(())
    }

    /// Compiles a kernel once, and runs it with what `arguments` bind: buffers and tensor maps in order, then
    /// the address of the metadata whose length varies, then scalars and the other metadata.
    pub(super) fn launch(
        &mut self,
        kernel: &dyn CubeKernel,
        count: CubeCount,
        arguments: &KernelArguments,
        compiler: (&super::Gpu, &DeviceProperties),
    ) -> Result<(), String> {
        let id = kernel.id();
        if !self.compiled.contains_key(&id) {
            let (gpu, properties) = compiler;
            let compiled = compile(kernel, gpu.capability, properties)?;
            self.compiled.insert(id.clone(), compiled);
        }
        let cubes = match count {
            CubeCount::Static(x, y, z) => [x, y, z],
            CubeCount::Dynamic(binding) => {
                let address = self.range(&binding)?.start;
                let mut words = [0; 12];
                self.machine.read(address, &mut words)?;
                let word = |at: usize| {
                    u32::from_le_bytes([words[at], words[at + 1], words[at + 2], words[at + 3]])
                };
                [word(0), word(4), word(8)]
            }
        };
        if cubes.contains(&0) {
            return Ok(());
        }
        let mut given = Vec::new();
        let mut reach = Vec::new();
        for resource in &arguments.resources {
            match resource {
                KernelResource::Buffer(binding) => {
                    let range = self.range(binding)?;
                    given.push(MachineArgument::Bytes(range.start.to_le_bytes().to_vec()));
                    reach.push(range);
                }
                KernelResource::TensorMap(binding) => {
                    let range = self.range(&binding.binding)?;
                    given.push(MachineArgument::Tensor(mapped(binding, range.start, &id)?));
                    reach.push(range);
                }
            }
        }
        let bytes = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let info = &arguments.info;
        let (fixed, varying) =
            info.data.split_at(info.dynamic_metadata_offset.min(info.data.len()));
        if !varying.is_empty() {
            let data: Vec<u8> = bytes(varying);
            let address = self.machine.allocate(data.len() as u64);
            self.machine.write(address, &data)?;
            given.push(MachineArgument::Bytes(address.to_le_bytes().to_vec()));
            reach.push(address..address + data.len() as u64);
        }
        if !info.data.is_empty() {
            given.push(MachineArgument::Bytes(bytes(fixed)));
        }
        let compiled = &self.compiled[&id];
        let units = id.cube_dim;
        self.machine.run(MachineLaunch {
            source: &compiled.source,
            entry: &compiled.entry,
            cubes,
            units: [units.x, units.y, units.z],
            shared_memory_bytes: compiled.shared_memory_bytes,
            arguments: given,
            reach,
        })
    }
}

/// A tensor map, with its dimensions turned around as CubeCL's CUDA runtime does.
fn mapped(binding: &TensorMapBinding, address: u64, id: &KernelId) -> Result<MappedTensor, String> {
    let map = &binding.map;
    let steps = map.elem_stride.iter().rev().map(|step| *step as u32);
    let is_stepped = steps.clone().any(|step| step != 1);
    let taken = match &map.format {
        TensorMapFormat::Tiled(TiledArgs { tile_size }) if !is_stepped => {
            MappedBox::Tile(tile_size.iter().rev().map(|length| *length as u32).collect())
        }
        TensorMapFormat::Im2col(args) => {
            let Im2colArgs { pixel_box_lower_corner, pixel_box_upper_corner, .. } = args;
            let turned = |corner: &[i32]| corner.iter().rev().copied().collect();
            MappedBox::Pixels {
                lower: turned(pixel_box_lower_corner),
                upper: turned(pixel_box_upper_corner),
                steps: steps.skip(1).take(pixel_box_lower_corner.len()).collect(),
                channels: args.channels_per_pixel,
                pixels: args.pixels_per_column,
            }
        }
        other => {
            let steps = &map.elem_stride;
            return Err(format!(
                "tensor maps of the form {other:?} with steps of {steps:?} elements are not known here"
            ));
        }
    };
    let swizzle_bytes = match map.swizzle {
        TensorMapSwizzle::None => 0,
        TensorMapSwizzle::B32 => 32,
        TensorMapSwizzle::B64 => 64,
        TensorMapSwizzle::B128 => 128,
        other => return Err(format!("the swizzle {other:?} of a tensor map is not known here")),
    };
    let element_bytes = map.elem_ty.expand_size(id.address_type) as u64;
    let strides = map.metadata.strides().iter().rev().skip(1);
    Ok(MappedTensor {
        address,
        element_bytes,
        shape: map.metadata.shape().iter().rev().map(|length| *length as u64).collect(),
        strides: strides.map(|stride| *stride as u64 * element_bytes).collect(),
        taken,
        swizzle_bytes,
    })
}

//! Recorded launches simulated again, with the device's own answers where PTX allows more than one.

use crate::{
    device::Gpu,
    launch::{Launch, Memory, Parameter, Places, Recorded, Taken, Tensor},
};
use anyhow::{Context as _, Result, bail};
use blackburn_simulator::{
    Approximations, Argument, Arithmetic, CopyBox, Device, Im2col, Launch as Simulated, Options,
    Program, Swizzle, TensorCores, TensorMap,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

/// A launch whose approximations become the device's.
pub(crate) struct Again {
    program: Program,
    launch: Simulated,
    device: Device,
    places: Places,
}

impl Again {
    /// As a device of that compute capability.
    pub(crate) fn new(recorded: &Recorded, capability: u32) -> Result<Self> {
        let tensor_cores = match capability {
            ..90 => TensorCores::Ampere,
            90..100 => TensorCores::Hopper,
            100.. => TensorCores::Blackwell,
        };
        let mut device = Device::new();
        let approximations = Some(Approximations::default());
        device.arithmetic = Arithmetic { tensor_cores, approximations };
        let mut places = Places::default();
        for (simulated, data) in &recorded.before {
            let address = device.allocate(data.len() as u64);
            device.write(address, data).map_err(anyhow::Error::msg)?;
            places.add(*simulated, data.len(), address);
        }
        let Launch { entry, grid, block, dynamic_shared, parameters, .. } = &recorded.launch;
        let argument = |parameter: &Parameter| match parameter {
            Parameter::Bytes(digits) => Ok(Argument::Bytes(places.bytes(digits)?)),
            Parameter::Tensor(tensor) => Ok(Argument::TensorMap(map(tensor, &places)?)),
        };
        let launch = Simulated {
            kernel: entry.clone(),
            grid: *grid,
            block: *block,
            dynamic_shared: u64::from(*dynamic_shared),
            arguments: parameters.iter().map(argument).collect::<Result<_>>()?,
            reach: None,
        };
        Ok(Self { program: Program::parse(&recorded.ptx)?, launch, device, places })
    }

    /// Memory behind the launch, and what has to be asked before it is the device's.
    pub(crate) fn run(&mut self) -> Result<(Memory, BTreeMap<String, BTreeSet<u32>>)> {
        let mut device = self.device.clone();
        // The recording has looked for races.
        let options = Options { find_races: false, ..Options::default() };
        device.launch(&self.program, &self.launch, &options)?;
        let approximations = device.arithmetic.approximations.as_mut();
        let missing = approximations.map(Approximations::take_missing).unwrap_or_default();
        let read = |(simulated, bytes, address): (u64, usize, u64)| {
            let (data, _) = device.read(address, bytes).map_err(anyhow::Error::msg)?;
            Ok((simulated, data))
        };
        let memory = self.places.all().map(read).collect::<Result<_>>()?;
        Ok((memory, missing))
    }

    pub(crate) fn answer(&mut self, opcode: &str, answers: impl Iterator<Item = (u32, u32)>) {
        let approximations = self.device.arithmetic.approximations.get_or_insert_default();
        answers.for_each(|(argument, result)| approximations.insert(opcode, argument, result));
    }
}

fn map(tensor: &Tensor, places: &Places) -> Result<TensorMap> {
    let Tensor { address, element_bytes, shape, strides, taken, swizzle_bytes } = tensor;
    let taken = match taken {
        Taken::Tile(tile) => CopyBox::Tile(tile.clone()),
        Taken::Pixels { lower, upper, steps, channels, pixels } => CopyBox::Pixels(Im2col {
            lower: lower.clone(),
            upper: upper.clone(),
            steps: steps.clone(),
            channels: *channels,
            pixels: *pixels,
        }),
    };
    let swizzle = match swizzle_bytes {
        0 => Swizzle::None,
        32 => Swizzle::Bytes32,
        64 => Swizzle::Bytes64,
        128 => Swizzle::Bytes128,
        other => bail!("a swizzle of {other} bytes"),
    };
    Ok(TensorMap {
        address: places.address(*address).context("a tensor lies in no buffer")?,
        element_bytes: *element_bytes,
        shape: shape.clone(),
        strides: strides.clone(),
        taken,
        swizzle,
    })
}

/// How many results of an instruction were asked for, and the largest error among them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Errors {
    pub(crate) asked: usize,
    /// A share of the error that PTX states.
    pub(crate) of_stated: f64,
}

impl Errors {
    /// Asks the device, and holds each answer against the error that the PTX ISA 9.0 states.
    pub(crate) fn ask(
        &mut self,
        gpu: &Gpu,
        opcode: &str,
        arguments: &[u32],
    ) -> Result<BTreeMap<u32, u32>> {
        let results = gpu.compute(opcode, arguments)?;
        for (argument, result) in arguments.iter().zip(&results) {
            let share = share_of_stated(opcode, *argument, *result)?;
            self.of_stated = self.of_stated.max(share);
        }
        self.asked += arguments.len();
        Ok(arguments.iter().copied().zip(results).collect())
    }
}

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} arguments, error at most {:.3} of the stated one", self.asked, self.of_stated)
    }
}

/// The error of a result over the largest that PTX allows; infinite where a special value is another one.
fn share_of_stated(opcode: &str, argument: u32, result: u32) -> Result<f64> {
    let (x, y) = (f64::from(f32::from_bits(argument)), f32::from_bits(result));
    let (exact, in_ulp) = match opcode.split('.').next() {
        Some("ex2") => (x.exp2(), Some(2.0)),
        Some("rcp") => (1.0 / x, Some(1.0)),
        // 2^-22.9 of the result.
        Some("rsqrt") => (1.0 / x.sqrt(), None),
        _ => bail!("PTX's error of {opcode} is not known here"),
    };
    let rounded = exact as f32;
    let is_zero = opcode.contains(".ftz") && rounded.is_subnormal() && y == 0.0;
    if is_zero || rounded.is_nan() && y.is_nan() || rounded == y {
        return Ok(0.0);
    }
    if !rounded.is_finite() || !y.is_finite() {
        return Ok(f64::INFINITY);
    }
    Ok(match in_ulp {
        Some(most) => f64::from(rounded.to_bits().abs_diff(y.to_bits())) / most,
        None => (f64::from(y) / exact - 1.0).abs() / 2.0_f64.powf(-22.9),
    })
}

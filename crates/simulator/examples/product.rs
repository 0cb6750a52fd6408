//! Runs a matrix product whose PTX somebody else wrote, on whole numbers, and compares every element:
//! `cargo run -p blackburn-simulator --example product -- kernel.ptx --product 256x256x512 --grid 4 --block 128
//! --shared 229376 a,map=64x256x8/1024x128/64x128x1/128 b,map=64x256x8/1024x128/64x128x1/128 c 256 256 512`.
//!
//! `--product` is `MxNxK`, of `--kernel`, the first one of the PTX if it is left out. What stands alone is a parameter
//! of the kernel: a number of 32 bits, or one of the matrices: A of M rows and B of N rows of K elements, C of M rows
//! of N. `a` is its address, `at` makes K rows of it, and `,map=SHAPE/STRIDES/BOX/SWIZZLE` makes a tensor map, the
//! contiguous dimension first and strides in bytes. A and B are bf16; C too, or f32 with `--f32`. The kernel runs
//! under `--schedules`, 20 if that is left out.

use blackburn_simulator::{
    Argument, CopyBox, Device, Launch, Options, Program, Schedule, Swizzle, TensorMap,
};
use std::{env, error::Error, fs, process::ExitCode, str::FromStr};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// What is asked for.
struct Asked {
    ptx: String,
    kernel: Option<String>,
    sizes: [usize; 3],
    grid: u32,
    block: u32,
    shared: u64,
    f32: bool,
    schedules: u64,
    parameters: Vec<String>,
}

/// The numbers of `2x3x4`.
fn numbers<T: FromStr>(text: &str) -> Outcome<Vec<T>> {
    let number = |part: &str| part.parse().map_err(|_| format!("`{text}` is no list of numbers"));
    Ok(text.split('x').map(number).collect::<Result<_, _>>()?)
}

impl Asked {
    fn read(mut words: impl Iterator<Item = String>) -> Outcome<Self> {
        let mut asked = Self {
            ptx: words.next().ok_or("usage: product kernel.ptx ...; see the head of its source")?,
            kernel: None,
            sizes: [0; 3],
            grid: 1,
            block: 128,
            shared: 0,
            f32: false,
            schedules: 20,
            parameters: Vec::new(),
        };
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("`{word}` needs a value"));
            match word.as_str() {
                "--kernel" => asked.kernel = Some(value()?),
                "--product" => {
                    let sizes = numbers(&value()?)?;
                    asked.sizes = sizes.try_into().map_err(|_| "--product is MxNxK")?;
                }
                "--grid" => asked.grid = value()?.parse()?,
                "--block" => asked.block = value()?.parse()?,
                "--shared" => asked.shared = value()?.parse()?,
                "--schedules" => asked.schedules = value()?.parse()?,
                "--f32" => asked.f32 = true,
                _ => asked.parameters.push(word),
            }
        }
        Ok(asked)
    }

    /// An element of C, exact in f32.
    fn expected(&self, row: usize, column: usize) -> f32 {
        let term = |k| element(row, k, 1) * element(column, k, 2);
        (0..self.sizes[2]).map(term).sum()
    }
}

/// A whole number of an operand.
fn element(row: usize, k: usize, salt: usize) -> f32 {
    ((row * 7 + k * 3 + row * k % 5 + salt) % 7) as f32 - 3.0
}

/// A number's upper half, of which bf16 is made.
fn bf16(number: f32) -> [u8; 2] {
    let bits = number.to_bits();
    // To the nearest, and to an even one between two.
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).to_le_bytes()[..2].try_into().unwrap_or_default()
}

/// A tensor map, from `SHAPE/STRIDES/BOX/SWIZZLE`.
fn map(address: u64, text: &str) -> Outcome<Argument> {
    let parts: Vec<_> = text.split('/').collect();
    let [shape, strides, tile, swizzle] = parts[..] else {
        return Err(format!("`{text}`: expected SHAPE/STRIDES/BOX/SWIZZLE").into());
    };
    let swizzle = match swizzle {
        "0" => Swizzle::None,
        "32" => Swizzle::Bytes32,
        "64" => Swizzle::Bytes64,
        "128" => Swizzle::Bytes128,
        _ => return Err(format!("a swizzle of `{swizzle}` bytes").into()),
    };
    Ok(Argument::TensorMap(TensorMap {
        address,
        element_bytes: 2,
        shape: numbers(shape)?,
        strides: numbers(strides)?,
        taken: CopyBox::Tile(numbers(tile)?),
        swizzle,
    }))
}

/// Runs it under one schedule, and gives the elements of C that are wrong, the first one with what it is.
fn run(asked: &Asked, program: &Program, schedule: Schedule) -> Outcome<(usize, Option<String>)> {
    let [m, n, k] = asked.sizes;
    let mut device = Device::new();
    let mut operand = |rows: usize, salt: usize, turned: bool| -> Outcome<u64> {
        let bytes = (0..rows * k).flat_map(|at| match turned {
            false => bf16(element(at / k, at % k, salt)),
            true => bf16(element(at % rows, at / rows, salt)),
        });
        let address = device.allocate(2 * (rows * k) as u64);
        device.write(address, &bytes.collect::<Vec<_>>())?;
        Ok(address)
    };
    let turned = |name: &str| {
        asked.parameters.iter().any(|word| word == name || word.starts_with(&format!("{name},")))
    };
    let (a, b) = (operand(m, 1, turned("at"))?, operand(n, 2, turned("bt"))?);
    let width = if asked.f32 { 4 } else { 2 };
    let c = device.allocate((m * n * width) as u64);
    let argument = |word: &String| -> Outcome<Argument> {
        let (name, rest) = word.split_once(',').unwrap_or((word, ""));
        let address = match name {
            "a" | "at" => a,
            "b" | "bt" => b,
            "c" => c,
            number => return Ok(Argument::Bytes(number.parse::<i32>()?.to_le_bytes().to_vec())),
        };
        match rest.strip_prefix("map=") {
            Some(text) => map(address, text),
            None => Ok(Argument::address(address)),
        }
    };
    let first = || program.kernels().next().map(str::to_owned);
    let launch = Launch {
        kernel: asked.kernel.clone().or_else(first).ok_or("the PTX has no kernel")?,
        grid: [asked.grid, 1, 1],
        block: [asked.block, 1, 1],
        dynamic_shared: asked.shared,
        arguments: asked.parameters.iter().map(argument).collect::<Outcome<_>>()?,
        reach: None,
    };
    device.launch(program, &launch, &Options { schedule, ..Options::default() })?;
    let (bytes, is_written) = device.read(c, m * n * width)?;
    if !is_written {
        return Err("a part of C was never written".into());
    }
    let mut wrong = 0;
    let mut told = None;
    for (at, found) in bytes.chunks_exact(width).enumerate() {
        let expected = asked.expected(at / n, at % n);
        let bytes =
            if asked.f32 { expected.to_le_bytes().to_vec() } else { bf16(expected).to_vec() };
        if found != bytes {
            wrong += 1;
            let (row, column) = (at / n, at % n);
            told.get_or_insert_with(|| {
                format!("row {row}, column {column}: {bytes:?} expected, {found:?} found")
            });
        }
    }
    Ok((wrong, told))
}

fn all() -> Outcome<bool> {
    let asked = Asked::read(env::args().skip(1))?;
    let program = Program::parse(&fs::read_to_string(&asked.ptx)?)?;
    let mut right = true;
    for schedule in Schedule::several(asked.schedules) {
        match run(&asked, &program, schedule) {
            Ok((0, _)) => {}
            Ok((wrong, told)) => {
                right = false;
                println!("{schedule:?}: {wrong} elements are wrong, {}", told.unwrap_or_default());
            }
            Err(error) => {
                right = false;
                println!("{schedule:?}: {error}");
            }
        }
    }
    let [m, n, k] = asked.sizes;
    let verdict = if right { "every element is right" } else { "not right" };
    println!("{}: {m}x{n}x{k} under {} schedules: {verdict}", asked.ptx, asked.schedules);
    Ok(right)
}

fn main() -> ExitCode {
    match all() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

//! Launches as files, so that a GPU can run the same PTX on the same bytes and compare every bit of what
//! comes out.
//!
//! A folder for each launch, named `architecture-case-number`:
//!
//! | file | holds |
//! |---|---|
//! | `kernel.ptx` | the module |
//! | `launch.json` | entry point, grid, block, dynamic shared memory, the schedules that gave these bytes, and the parameters: `bytes` as hexadecimal digits, or a `tensor` with address, bytes of an element, shape, strides, what a copy takes, and swizzle |
//! | `before-ADDRESS.bin`, `after-ADDRESS.bin` | an allocation at that hexadecimal address, of those that the kernel was given |
//!
//! Addresses are the simulator's: whoever runs a launch allocates each buffer, and puts its own address in
//! the place of those that are parameters or begin a tensor. The example `on_gpu` of `blackburn-simulator` does so.

use super::{
    Case,
    machine::{Recording, Recordings},
};
use blackburn_simulator::{Argument, CopyBox, Device, Swizzle, TensorMap};
use serde_json::{Value, json};
use std::{fs, io, path::Path};

/// Writes what a case launched to folders in `folder`.
pub(super) fn write(folder: &Path, case: Case, recordings: &Recordings) -> Result<(), String> {
    let recordings = recordings.lock().map_err(|error| error.to_string())?;
    for (number, recording) in recordings.iter().enumerate() {
        let name = format!("{}-{}-{number}", case.gpu.architecture, case.name);
        let place = folder.join(name);
        one(&place, recording).map_err(|error| format!("{}: {error}", place.display()))?;
    }
    Ok(())
}

fn one(folder: &Path, recording: &Recording) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    fs::write(folder.join("kernel.ptx"), &*recording.ptx)?;
    let launch = &recording.launch;
    let text = json!({
        "entry": launch.kernel,
        "grid": launch.grid,
        "block": launch.block,
        "dynamic_shared": launch.dynamic_shared,
        "schedules": recording.schedules,
        "parameters": launch.arguments.iter().map(parameter).collect::<Vec<_>>(),
    });
    fs::write(folder.join("launch.json"), format!("{text:#}"))?;
    // Other buffers are none of the launch's business.
    let reached = |address: u64, bytes: &[u8]| {
        let end = address + bytes.len() as u64;
        let mut reach = launch.reach.iter().flatten();
        launch.reach.is_none() || reach.any(|r| r.start < end && address < r.end)
    };
    let contents = |when: &str, device: &Device| {
        let mut buffers = device.contents().filter(|(address, bytes)| reached(*address, bytes));
        buffers.try_for_each(|(address, bytes)| {
            fs::write(folder.join(format!("{when}-{address:x}.bin")), bytes)
        })
    };
    contents("before", &recording.before)?;
    contents("after", &recording.after)
}

fn parameter(argument: &Argument) -> Value {
    match argument {
        Argument::Bytes(bytes) => {
            json!({ "bytes": bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>() })
        }
        Argument::TensorMap(map) => json!({ "tensor": tensor(map) }),
    }
}

fn tensor(map: &TensorMap) -> Value {
    let taken = match &map.taken {
        CopyBox::Tile(tile) => json!({ "tile": tile }),
        CopyBox::Pixels(pixels) => json!({ "pixels": {
            "lower": pixels.lower,
            "upper": pixels.upper,
            "steps": pixels.steps,
            "channels": pixels.channels,
            "pixels": pixels.pixels,
        }}),
    };
    let swizzle = match map.swizzle {
        Swizzle::None => 0,
        Swizzle::Bytes32 => 32,
        Swizzle::Bytes64 => 64,
        Swizzle::Bytes128 => 128,
    };
    json!({
        "address": map.address,
        "element_bytes": map.element_bytes,
        "shape": map.shape,
        "strides": map.strides,
        "taken": taken,
        "swizzle_bytes": swizzle,
    })
}

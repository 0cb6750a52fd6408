//! Launches as files, so that a GPU can run the same PTX on the same bytes and compare every bit of what
//! comes out.
//!
//! A folder for each launch, named `architecture-case-number`:
//!
//! | file | holds |
//! |---|---|
//! | `kernel.ptx` | the module |
//! | `launch.txt` | entry point, grid, block, dynamic shared memory, then a line for each parameter: `bytes` and hexadecimal digits, or `tensor` with address, bytes of an element, shape, strides, what a copy takes, and swizzle |
//! | `before-ADDRESS.bin`, `after-ADDRESS.bin` | an allocation at that hexadecimal address |
//!
//! Addresses are the simulator's: whoever runs a launch allocates each buffer, and puts its own address in
//! the place of those that are parameters or begin a tensor.

use super::{
    Case,
    machine::{Recording, Recordings},
};
use blackburn_simulator::{Argument, Device};
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
    let mut text = format!(
        "entry {}\ngrid {:?}\nblock {:?}\ndynamic_shared {}\n",
        launch.kernel, launch.grid, launch.block, launch.dynamic_shared
    );
    for argument in &launch.arguments {
        match argument {
            Argument::Bytes(bytes) => {
                text += "bytes ";
                text.extend(bytes.iter().map(|byte| format!("{byte:02x}")));
            }
            Argument::TensorMap(map) => {
                text += &format!(
                    "tensor {:#x} {} {:?} {:?} {:?} {:?}",
                    map.address, map.element_bytes, map.shape, map.strides, map.taken, map.swizzle
                );
            }
        }
        text.push('\n');
    }
    fs::write(folder.join("launch.txt"), text)?;
    let contents = |when: &str, device: &Device| {
        device.contents().try_for_each(|(address, bytes)| {
            fs::write(folder.join(format!("{when}-{address:x}.bin")), bytes)
        })
    };
    contents("before", &recording.before)?;
    contents("after", &recording.after)
}

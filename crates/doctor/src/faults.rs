//! Faults that an examination has to find, planted by an environment variable. For tests: no program that is
//! shipped has the feature.

use crate::{
    check::{Check, Flaw, Stop},
    process::answer,
    target::Target,
};
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};
use std::{env, process, ptr, thread, time::Duration};

/// The variable: a fault's name, and behind an `@` the group that has it.
pub const VARIABLE: &str = "BLACKBURN_DOCTOR_FAULT";

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// A process does not come as far as having the device.
    NoStart,
    /// A case does not end.
    Hang,
    /// The process aborts.
    Abort,
    /// Something writes where nothing is: on CUDA a kernel, elsewhere the process.
    IllegalAddress,
    /// The process ends as if all were well.
    Exit,
    /// A case panics.
    Panic,
    /// The process answers what no answer is.
    Garbled,
    /// A launcher reports that the device refused.
    Refused,
    /// The first result that shows it is wrong.
    Wrong(Flaw),
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 13] = [
        Self::NoStart,
        Self::Hang,
        Self::Abort,
        Self::IllegalAddress,
        Self::Exit,
        Self::Panic,
        Self::Garbled,
        Self::Refused,
        Self::Wrong(Flaw::OutOfBounds),
        Self::Wrong(Flaw::Nan),
        Self::Wrong(Flaw::LostTile),
        Self::Wrong(Flaw::Doubled),
        Self::Wrong(Flaw::Swapped),
    ];

    /// What the variable is set to.
    ///
    /// # Errors
    ///
    /// What serde says.
    pub fn planted_in(self, group: &str) -> Result<String, serde_json::Error> {
        Ok(format!("{}@{group}", serde_json::to_string(&self)?))
    }
}

/// The fault that is planted, and the group that has it.
fn planted() -> Option<(Fault, String)> {
    let value = env::var(VARIABLE).ok()?;
    let (fault, group) = value.split_once('@')?;
    Some((serde_json::from_str(fault).ok()?, group.to_owned()))
}

/// Does what a fault does before the device is open.
pub(crate) fn at_start() {
    if planted().is_some_and(|(fault, _)| fault == Fault::NoStart) {
        hang();
    }
}

/// Does what a fault does in a case of its group.
pub(crate) fn at_case(on: &Target, group: &str, check: &mut Check) -> Result<(), Stop> {
    let Some((fault, _)) = planted().filter(|(_, there)| there == group) else { return Ok(()) };
    match fault {
        Fault::NoStart => {}
        Fault::Hang => hang(),
        Fault::Abort => process::abort(),
        Fault::IllegalAddress => return write_nowhere(on),
        Fault::Exit => process::exit(0),
        Fault::Panic => panic!("a planted panic"),
        Fault::Garbled => answer("a word that is none"),
        Fault::Refused => return Err(Stop::Wrong("an error: the device refused a launch".into())),
        Fault::Wrong(flaw) => *check = Check::new(Some(flaw)),
    }
    Ok(())
}

fn hang() -> ! {
    loop {
        thread::sleep(Duration::from_secs(3600));
    }
}

/// Writes far behind a buffer.
#[cube(launch_unchecked)]
fn stray_write_kernel(out: &mut [f32], place: u32) {
    out[place as usize] = 1.0f32;
}

fn write_nowhere(on: &Target) -> Result<(), Stop> {
    if !on.is_cuda() {
        // A software device lies in this process.
        // SAFETY: it is not: the process is to die of it.
        unsafe { ptr::without_provenance_mut::<u8>(8).write_volatile(1) };
    }
    let client = &on.client;
    let out = client.empty(4);
    // SAFETY: it is not: the device is to report it.
    unsafe {
        stray_write_kernel::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(1),
            BufferArg::from_raw_parts(out.clone(), 1),
            u32::MAX,
        );
    }
    client.read_one(out).map(drop).map_err(|error| Stop::Wrong(error.to_string()))
}

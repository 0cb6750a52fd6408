//! The program `gpt` as its users meet it: runs that are killed, disks that are full, files that
//! are damaged, and options that make no sense. All on the CPU, with models of a few thousand
//! parameters.

#[path = "cli/checkpoints.rs"]
mod checkpoints;
#[path = "cli/damage.rs"]
mod damage;
#[path = "cli/folders.rs"]
mod folders;
#[path = "cli/input.rs"]
mod input;
#[path = "cli/interruption.rs"]
mod interruption;
#[path = "cli/reading.rs"]
mod reading;
#[path = "cli/sandbox.rs"]
mod sandbox;
#[path = "cli/training.rs"]
mod training;

//! The program `resnet` as its users meet it: runs from their beginning to their end, runs that are killed, folders
//! that are no classes, and options that make no sense. All on the CPU, with networks of a few thousand parameters.

#[path = "cli/folders.rs"]
mod folders;
#[path = "cli/input.rs"]
mod input;
#[path = "cli/ranks.rs"]
mod ranks;
#[path = "cli/sandbox.rs"]
mod sandbox;
#[path = "cli/training.rs"]
mod training;

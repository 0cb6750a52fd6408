//! Proves Blackburn's kernels on a device.
//!
//! Each operation has *cases* ([`ops`]): shapes, layouts, types and options, told or drawn from a seed, whose results
//! and gradients are held against a reference in f64 within derived bounds, or to the last bit where sums are of
//! whole numbers. Tests draw thousands of them. An *examination* takes chosen ones by *groups* ([`groups`]), one for
//! each operation, family of instructions and type, and runs them in processes of its own ([`examine`]): a kernel
//! that hangs, or writes where it must not, ruins its process and nothing else, and that is a verdict like others.
//!
//! | module | gives |
//! |---|---|
//! | [`ops`] | the cases of each operation |
//! | [`draw`] | what a case is made of |
//! | [`check`] | comparisons with the reference, and planted flaws |
//! | [`target`] | the device, and what it computes in |
//! | [`buffers`] | buffers of a device |
//! | [`groups`] | which cases an examination runs |
//! | [`tune`] | which plans of products are fastest |
//! | [`serve`] | the process that runs them |
//! | [`examine`] | the process that asks for them |
//! | [`process`] | a process that is asked, and may crash or hang |
//!
//! Programs use it through `blackburn::doctor`, which knows devices and keeps verdicts.

#![deny(missing_docs)]

pub mod buffers;
mod cases;
pub mod check;
pub mod draw;
pub mod examine;
#[cfg(feature = "faults")]
pub mod faults;
pub mod groups;
mod memory;
pub mod ops;
pub mod process;
pub mod serve;
pub mod target;
pub mod tune;

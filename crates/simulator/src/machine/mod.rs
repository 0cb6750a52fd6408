//! A block of threads: registers, arithmetic, and the order in which its warps run.

mod access;
mod arithmetic;
mod block;
mod convert;
mod execute;
mod float;
mod half_precision;
mod integer;
mod issue;
mod matrix;
mod registers;
mod run;
mod tcgen05;
mod tcgen05_scales;
mod warp;

pub(crate) use arithmetic::{compare as compare_floats, float};
pub(crate) use block::{Block, Setting, place_within};
pub(crate) use convert::Conversion;
pub(crate) use float::{E4M3, E5M2, F16, Format};
pub(crate) use integer::{Alu, Comparison, compare as compare_integers, integer};
pub(crate) use registers::Registers;
pub(crate) use run::run_block;

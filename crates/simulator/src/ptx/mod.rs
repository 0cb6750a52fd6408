//! PTX: from text to instructions whose registers and targets are resolved.

mod decode;
mod decode_async;
mod decode_memory;
mod instruction;
mod lexer;
mod names;
mod program;
mod syntax;
mod tcgen05;
mod types;

pub(crate) use instruction::{
    Address, CopyTargets, Fence, File, Instruction, Join, MmaScales, Op, Operand, Reach, Reg,
    Scope, Shuffle, Space, Special, Wgmma,
};
pub(crate) use program::Kernel;
pub use program::Program;
pub(crate) use tcgen05::{LeftOperand, Tcgen05};
pub(crate) use types::Ty;

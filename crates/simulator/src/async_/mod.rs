//! What goes on while threads do: copies, the barriers that count them, and products.

mod barrier;
mod bulk;
mod copies;
mod im2col;
mod operand;
mod products;
mod tcgen05;
mod tcgen05_scales;
mod tensor_map;

pub(crate) use barrier::Barriers;
pub(crate) use bulk::BulkCopy;
pub(crate) use copies::{Copies, Copy16};
pub use im2col::Im2col;
pub(crate) use products::{Product, Products};
pub(crate) use tcgen05::{
    OPERAND_COLUMNS, ProductRows, TensorProduct, TensorWork, Transfer, TransferRegisters,
    TransferShape, Transfers, stored_words,
};
pub(crate) use tcgen05_scales::{
    COPIED_COLUMNS, ScaleCopy, ScaledProduct, TensorScales, TensorTask,
};
pub use tensor_map::{CopyBox, Swizzle, TensorMap};

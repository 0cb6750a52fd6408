//! Tensors as kernels take them: memory, rows, element types, and where they are.

mod casting;
#[cfg(feature = "gpu")]
mod channels;
#[cfg(feature = "gpu")]
mod copies;
mod device;
#[cfg(feature = "gpu")]
mod handles;
#[cfg(feature = "gpu")]
mod images;
#[cfg(feature = "gpu")]
pub(crate) mod kept_casts;
mod optional;
#[cfg(feature = "gpu")]
mod rows;
mod together;

#[cfg(feature = "gpu")]
pub(crate) use blackburn_kernels::buffer::{Address, address};
pub(crate) use casting::{cast, wide};
#[cfg(feature = "gpu")]
pub(crate) use channels::Channels;
#[cfg(feature = "gpu")]
pub(crate) use copies::{contiguous, copied, places, span};
pub(crate) use device::{is_counted_in_32_bits, is_gpu};
#[cfg(feature = "gpu")]
pub(crate) use handles::{
    Input, Location, Tensors, consume, contiguous_buffer, contiguous_strides, contiguous_tensor,
    cube_tensor, is_made, known_output, register_cube_tensor, register_in_order, register_output,
    register_with_strides, register_zeros, rows, rows_of, shape_of, take_cube_tensor,
    tensor_of_rows, zeros,
};
#[cfg(feature = "gpu")]
pub(crate) use images::Images;
pub use optional::Optional;
#[cfg(feature = "gpu")]
pub use optional::OptionalMetadata;
#[cfg(feature = "gpu")]
pub(crate) use rows::{RowLayout, TensorRows};
pub use together::Together;

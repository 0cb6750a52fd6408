//! Extension operations: what the stream cannot express. Those that are differentiable run on the CPU too.

pub mod attention;
pub mod cross_entropy;
pub mod dropout;
pub mod embedding;
pub mod fp8_linear;
pub mod layer_norm;
pub mod linear_cross_entropy;
pub mod loss_scale;
pub mod overwrite;
pub mod square_sum;

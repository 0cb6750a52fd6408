//! Extension operations: what the stream cannot express. Those that are differentiable run on the CPU too.

/// Implements an operation on every backend below autodiff by the same code, over the primitives that each of
/// them has. Burn's fusion is among them: its stream is to hold the primitives, and not the operation.
macro_rules! on_plain_backends {
    (impl $operation:ident by $primitives:ident { $($body:tt)* }) => {
        #[cfg(feature = "flex")]
        impl $operation for burn::backend::Flex { $($body)* }

        #[cfg(feature = "gpu")]
        impl $operation for burn_cubecl::CubeBackend { $($body)* }

        #[cfg(feature = "gpu")]
        impl<B: burn_fusion::FusionBackend + $primitives> $operation for burn_fusion::Fusion<B> {
            $($body)*
        }
    };
}

pub mod attention;
pub mod batch_norm;
pub mod copies;
pub mod cross_entropy;
pub mod dropout;
pub mod embedding;
pub mod fp8_linear;
pub mod gelu_dropout;
pub mod group_norm;
pub mod layer_norm;
pub mod linear_cross_entropy;
pub mod loss_scale;
pub mod lstm;
pub mod overwrite;
pub mod rotary;
pub mod sketch;
pub mod square_sum;
pub mod swiglu;
#[cfg(feature = "gpu")]
pub(crate) mod written;

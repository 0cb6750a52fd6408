//! All of `burn::nn::transformer`, with its modules on flash attention, fused norms and dropout that keeps nothing.
//!
//! ```text
//! norm first:  x += dropout(attention(norm(x)));      x += dropout(feed_forward(norm(x)))
//! norm last:   x = norm(x + dropout(attention(x)));   x = norm(x + dropout(feed_forward(x)))
//! ```
//!
//! Burn numbers norms in its own way, which records follow: in an encoder's layer, `norm_2` comes
//! before attention and `norm_1` before the feed-forward part when norms come first; when they come
//! last, `norm_1` follows attention and `norm_2` the feed-forward part. A decoder has `norm_3`,
//! `norm_1`, `norm_2` before its three parts, or `norm_1`, `norm_2`, `norm_3` behind them.

mod decoder;
mod decoder_layer;
mod encoder;
mod encoder_layer;
mod feed_forward;

pub use burn::nn::transformer::*;
pub use decoder::{TransformerDecoder, TransformerDecoderConfig, TransformerDecoderInput};
pub use decoder_layer::TransformerDecoderLayer;
pub(crate) use encoder::encode;
pub use encoder::{
    TransformerCache, TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
pub use encoder_layer::TransformerEncoderLayer;
pub use feed_forward::{PositionWiseFeedForward, PositionWiseFeedForwardConfig};

//! Fusion providers: what they look for in the stream, and the kernels that they run in its place.

pub(crate) mod attention;
pub(crate) mod batch_norm;
pub(crate) mod burns;
pub(crate) mod casts;
pub(crate) mod channel_sum;
pub(crate) mod channels;
pub(crate) mod column_sum;
pub(crate) mod conv;
pub(crate) mod dropped;
pub(crate) mod embedding;
pub(crate) mod gelu;
pub(crate) mod group_norm;
pub(crate) mod interpolate;
pub(crate) mod layer_norm;
pub(crate) mod loss_gradient;
pub(crate) mod mask_fill;
pub(crate) mod matmul;
pub(crate) mod overwrite;
pub(crate) mod pool;
pub(crate) mod random;
pub(crate) mod reduce;
pub(crate) mod row_sum;
pub(crate) mod scan;
pub(crate) mod scatter;
pub(crate) mod softmax;
pub(crate) mod top_k;

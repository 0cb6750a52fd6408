//! Attention of new tokens over a cache of keys and values, in memory that stays where it is.

use super::{AttentionOptions, Settings, checks::Operands};
#[cfg(feature = "flex")]
use super::{AttentionPrimitives, Inputs, Mask};
#[cfg(feature = "gpu")]
use burn::backend::fusion::custom::TensorSpec;
use burn::{
    backend::{
        Backend, Dispatch, ExtensionType, backend_extension,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Int, IntDType, Tensor},
};
#[cfg(feature = "flex")]
use burn::{
    backend::{TensorMetadata, try_read_sync},
    tensor::Slice,
};
#[cfg(feature = "flex")]
use std::ops::Range;

/// New tokens, and the cache.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct CachedInputs<B: Backend> {
    /// `[batch, heads_q, seq, head_dim]`.
    pub q: FloatTensor<B>,
    /// `[batch, heads_kv, seq, head_dim]`, in the type of q.
    pub k: FloatTensor<B>,
    /// As k.
    pub v: FloatTensor<B>,
    /// `[batch, heads_kv, capacity, head_dim]`, in the type of q.
    pub keys: FloatTensor<B>,
    /// As keys.
    pub values: FloatTensor<B>,
    /// `[1]` or `[batch]`: where the first new token stands.
    pub position: IntTensor<B>,
}

/// What queries found, and the cache with the new tokens in it.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct CachedOutput<B: Backend> {
    /// In the shape of q.
    pub out: FloatTensor<B>,
    /// On GPUs the memory that came in.
    pub keys: FloatTensor<B>,
    /// As keys.
    pub values: FloatTensor<B>,
}

/// The operation under [`cached_attention`]. It is not differentiable.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait CachedAttentionPrimitives: Backend {
    /// Puts new keys and values into the cache, and has the queries attend to it.
    #[fusion(meta = output_of)]
    fn cached_attention(
        #[extension_type] inputs: CachedInputs<Self>,
        settings: Settings,
    ) -> CachedOutput<Self>;
}

#[cfg(feature = "gpu")]
fn output_of(inputs: &CachedInputsMetadata, _settings: &Settings) -> CachedOutputMetadata {
    let of = |spec: &TensorSpec| spec.clone();
    CachedOutputMetadata { out: of(&inputs.q), keys: of(&inputs.keys), values: of(&inputs.values) }
}

/// What new tokens find among those in a cache and themselves; the cache with their keys and values comes second.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | q, result | `[batch, heads_q, seq, head_dim]` | f32, f16, bf16; on the CPU f64, too |
/// | k, v | `[batch, heads_kv, seq, head_dim]` | that of q |
/// | cache: keys, values | `[batch, heads_kv, capacity, head_dim]` | that of q |
/// | position | `[1]`, or `[batch]` for sequences of different lengths | integers |
///
/// The new token i stands at `position + i`. Its key and value are put there, and tokens from `position + seq` on are
/// seen by nobody, whatever the cache holds there. `options` may be causal, which has each token see those before it
/// and itself, with a scale, a window and a soft cap.
///
/// On GPUs the cache's memory is written where it lies: **all clones of its tensors have the new tokens**, and nothing
/// is copied. The position is read by the kernels and not by the host, so a recorded step may be replayed for each
/// token. It is up to the caller that `position + seq` is within the capacity: tokens beyond it are lost on GPUs, and
/// see what is before. The CPU panics.
///
/// Nothing is differentiable: the results are off the graph of gradients.
///
/// Sources: Dao et al., "Flash-Decoding for long-context inference" (2023); Ainslie et al., "GQA" (2023).
///
/// # Panics
///
/// With a message that names the argument: when shapes, dtypes or devices do not go together, a dimension is zero, a
/// mask, padding, bias or dropout is asked for, or a number is out of its range.
pub fn cached_attention(
    [q, k, v]: [Tensor<4>; 3],
    [keys, values]: [Tensor<4>; 2],
    position: Tensor<1, Int>,
    options: AttentionOptions,
) -> (Tensor<4>, [Tensor<4>; 2]) {
    let [q, k, v, keys, values] = [q, k, v, keys, values].map(Tensor::without_autodiff);
    let operands =
        Operands { tensors: [&q, &keys, &values], shapes: [q.dims(), keys.dims(), values.dims()] };
    operands.check();
    operands.check_new([&k, &v], &position);
    operands.check_cached(&options);
    let settings = options.settings(&operands, None);
    let position = match position.dtype() {
        DType::I32 | DType::U32 => position,
        _ => position.cast(IntDType::I32),
    };
    let inputs = CachedInputs {
        q: q.into_dispatch(),
        k: k.into_dispatch(),
        v: v.into_dispatch(),
        keys: keys.into_dispatch(),
        values: values.into_dispatch(),
        position: position.without_autodiff().into_dispatch(),
    };
    let CachedOutput { out, keys, values } =
        <Dispatch as CachedAttentionPrimitives>::cached_attention(inputs, settings);
    (Tensor::from_dispatch(out), [keys, values].map(Tensor::from_dispatch))
}

#[cfg(feature = "flex")]
impl CachedAttentionPrimitives for burn::backend::Flex {
    fn cached_attention(inputs: CachedInputs<Self>, settings: Settings) -> CachedOutput<Self> {
        composed::<Self>(inputs, &settings)
    }
}

/// By a backend's own operations, with the position on the host: for the CPU.
#[cfg(feature = "flex")]
fn composed<B: AttentionPrimitives>(
    inputs: CachedInputs<B>,
    settings: &Settings,
) -> CachedOutput<B> {
    let CachedInputs { q, k, v, mut keys, mut values, position } = inputs;
    let positions: Vec<i64> = match try_read_sync(B::int_into_data(position)) {
        Some(Ok(data)) => data.iter().collect(),
        _ => panic!("attention: argument `position`: expected numbers that can be read"),
    };
    let (shape, capacity) = (q.shape(), keys.shape()[2]);
    let (seq, each) = (shape[2], shape[0] / positions.len());
    let mut outs = Vec::new();
    for (at, position) in positions.into_iter().enumerate() {
        let start = usize::try_from(position).ok().filter(|start| start + seq <= capacity);
        let Some(start) = start else {
            panic!(
                "attention: argument `position`: expected at most {} for {seq} tokens and room for {capacity}, \
                 got {position}",
                capacity.saturating_sub(seq)
            );
        };
        let sequences = Slice::from(at * each..(at + 1) * each);
        let rows =
            |rows: Range<usize>| [sequences, Slice::full(), Slice::from(rows), Slice::full()];
        let new = |tensor: &FloatTensor<B>| B::float_slice(tensor.clone(), &[sequences]);
        keys = B::float_slice_assign(keys, &rows(start..start + seq), new(&k));
        values = B::float_slice_assign(values, &rows(start..start + seq), new(&v));
        let seen = rows(0..start + seq);
        let inputs = Inputs {
            q: new(&q),
            k: B::float_slice(keys.clone(), &seen),
            v: B::float_slice(values.clone(), &seen),
            mask: Mask::Absent,
            bias: None.into(),
        };
        outs.push(B::attention_forward(inputs, settings.clone()).out);
    }
    CachedOutput { out: B::float_cat(outs, 0), keys, values }
}

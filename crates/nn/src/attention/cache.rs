//! Keys and values of the tokens so far.

use crate::refuse;
use blackburn_backend::attention::{AttentionOptions, cached_attention};
use burn::tensor::{Int, Tensor};

/// Keys and values of the tokens that one attention has seen. The next token then costs no more than a look at
/// each of them.
///
/// The first tokens decide about batch, type and device. Memory for `capacity` tokens,
/// `[batch, n_kv_heads, capacity, d_k]` twice, is taken when they come. The cache is for inference: automatic
/// differentiation would keep every step.
///
/// Two kinds of forward passes fill it. One appends, and the cache counts its tokens. The other places tokens at a
/// position that is a number on the device: the host need not know it, so that a step can be recorded and replayed.
/// Whoever calls it counts, and the cache's own length stays as it was. Fill a cache by one of them.
#[derive(Clone, Debug)]
pub struct KvCache {
    tensors: Option<[Tensor<4>; 2]>,
    capacity: usize,
    length: usize,
}

impl KvCache {
    /// An empty cache with room for so many tokens.
    pub fn new(capacity: usize) -> Self {
        Self { tensors: None, capacity, length: 0 }
    }

    /// Tokens in it.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Tokens that it has room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets all tokens, and keeps the memory.
    pub fn clear(&mut self) {
        self.length = 0;
    }

    /// Takes keys and values `[batch, n_kv_heads, seq, d_k]` up, and gives all there are.
    pub(super) fn append(&mut self, new: [Tensor<4>; 2]) -> [Tensor<4>; 2] {
        let [batch, heads, added, d_k] = new[0].dims();
        let (start, end) = (self.length, self.length + added);
        if end > self.capacity {
            refuse("kv_cache", "capacity", &format!("at least {end}"), self.capacity);
        }
        // Memory of another batch is of no use once the cache was cleared.
        if start == 0 {
            let shape = [batch, heads, self.capacity, d_k];
            self.tensors = self.tensors.take().filter(|[keys, _]| keys.dims() == shape);
        }
        let [all_keys, all_values] = self.memory(&new[0]);
        let [keys, values] = new;
        // Handed over and not cloned, it is written in place.
        let place = [0..batch, 0..heads, start..end, 0..d_k];
        let tensors =
            [all_keys.slice_assign(place.clone(), keys), all_values.slice_assign(place, values)];
        self.length = end;
        let filled = [0..batch, 0..heads, 0..end, 0..d_k];
        let seen = tensors.clone().map(|tensor| tensor.slice(filled.clone()));
        self.tensors = Some(tensors);
        seen
    }

    /// What queries `[batch, n_heads, seq, d_k]` find among the tokens before `position` and the new ones, whose keys
    /// and values `[batch, n_kv_heads, seq, d_k]` are put there, in the memory that the cache has.
    pub(super) fn attend(
        &mut self,
        q: Tensor<4>,
        new: [Tensor<4>; 2],
        position: Tensor<1, Int>,
        options: AttentionOptions,
    ) -> Tensor<4> {
        let memory = self.memory(&new[0]);
        let [k, v] = new;
        let (out, memory) = cached_attention([q, k, v], memory, position, options);
        self.tensors = Some(memory);
        out
    }

    /// Takes the memory, which is made for tokens like `new` if there is none.
    fn memory(&mut self, new: &Tensor<4>) -> [Tensor<4>; 2] {
        let [batch, heads, _, d_k] = new.dims();
        let shape = [batch, heads, self.capacity, d_k];
        let memory = self.tensors.take().unwrap_or_else(|| {
            let options = (&new.device(), new.dtype());
            [Tensor::zeros(shape, options), Tensor::zeros(shape, options)]
        });
        if memory[0].dims() != shape {
            let expected = format!("keys of shape {:?}, as it was begun with", memory[0].dims());
            refuse("kv_cache", "key", &expected, format!("{shape:?}"));
        }
        memory
    }
}

//! Maps of masks that several calls share.

use super::{
    Pairs,
    call::Call,
    mask_map::{MaskMap, Words},
};
use crate::{
    KernelError,
    buffer::{Address, Buffer, address},
};
use cubecl::{ir::ElemType, server::Handle};
use cubecl_common::device::ServiceId;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Masks whose maps are kept: an encoder-decoder has three, and layers that each build their own gain nothing.
const MOST_MASKS: usize = 4;

/// Maps of masks, kept for the layers of a model and for both of their passes, which read the same mask.
///
/// It holds the masks, so that no operation writes there in place. Whatever writes there all the same has to have them
/// [forgotten](Self::forget). All calls that share it have to be of one queue of commands.
#[derive(Debug, Default)]
pub struct MaskMaps(Mutex<Vec<Kept>>);

#[derive(Debug)]
struct Kept {
    mask: MaskKey,
    words: Words,
    map: MaskMap,
    _mask: Buffer,
}

/// What the map of a mask depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MaskKey {
    device: ServiceId,
    place: Address,
    dtype: ElemType,
    pairs: Pairs,
    /// Sequences, and rows and columns of the mask.
    sizes: [usize; 3],
}

impl MaskKey {
    fn of<'a>(call: &Call<'a>) -> Option<(Self, &'a Buffer)> {
        let (mask, pairs) = (call.inputs.mask?, call.problem.mask?);
        let problem = call.problem;
        let key = Self {
            device: call.client.service_id(),
            place: address(&mask.handle),
            dtype: mask.dtype,
            pairs,
            sizes: [problem.batch, problem.seq_q, problem.seq_kv],
        };
        Some((key, mask))
    }
}

impl MaskMaps {
    /// Lets go of masks in the allocation that `memory` is of, and of their maps.
    pub fn forget(&self, memory: &Handle) {
        let (allocation, _) = address(memory);
        self.kept().retain(|one| one.mask.place.0 != allocation);
    }

    /// The map of the call's mask with those words, if it has a mask: a kept one, or one that is found now.
    pub(super) fn map(
        &self,
        call: &Call<'_>,
        words: Words,
    ) -> Result<Option<MaskMap>, KernelError> {
        let Some((mask, buffer)) = MaskKey::of(call) else { return Ok(None) };
        let mut kept = self.kept();
        let serves = |one: &&Kept| one.mask == mask && one.words.have(words);
        if let Some(known) = kept.iter().find(serves) {
            return Ok(Some(known.map.clone()));
        }
        let Some(map) = MaskMap::of(call, words)? else { return Ok(None) };
        // The backward pass may need more words than the forward pass had.
        kept.retain(|one| one.mask != mask);
        if kept.len() == MOST_MASKS {
            kept.remove(0);
        }
        kept.push(Kept { mask, words, map: map.clone(), _mask: buffer.clone() });
        Ok(Some(map))
    }

    fn kept(&self) -> MutexGuard<'_, Vec<Kept>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(all(test, feature = "recorder"))]
mod tests {
    use super::*;
    use crate::{
        attention::{AttentionInputs, AttentionProblem},
        buffer::F32,
        recorder::{Gpu, Recorder},
    };
    use cubecl::{client::Client, ir::UIntKind};

    const FORWARD: Words = Words { of_queries: true, of_keys: false };
    const BACKWARD: Words = Words { of_queries: true, of_keys: true };

    fn mask(client: &Client) -> Buffer {
        Buffer::empty(client, 64 * 64, ElemType::UInt(UIntKind::U8))
    }

    /// Where the map of a causal mask over 64 tokens lies.
    fn place(client: &Client, maps: &MaskMaps, mask: &Buffer, words: Words) -> Address {
        let pairs = Pairs { row: 64, column: 1, ..Pairs::default() };
        let plain = AttentionProblem::dense([2, 4, 64, 16], 64, F32);
        let problem = AttentionProblem { mask: Some(pairs), ..plain };
        let x = Buffer::empty(client, problem.out_elements(), F32);
        let inputs = AttentionInputs { mask: Some(mask), ..AttentionInputs::of(&x, &x, &x) };
        let call = Call::new(client, &problem, &inputs).unwrap();
        address(&maps.map(&call, words).unwrap().unwrap().buffer.handle)
    }

    #[test]
    fn layers_and_passes_share_the_map_of_a_mask() {
        let recorder = Recorder::new(Gpu::SM_80);
        let (client, maps) = (recorder.client(), MaskMaps::default());
        let [one, other] = [(); 2].map(|()| mask(client));
        let map = |mask, words| place(client, &maps, mask, words);
        let forward = map(&one, FORWARD);
        assert_eq!(map(&one, FORWARD), forward);
        assert_ne!(map(&other, FORWARD), forward);
        assert_eq!(map(&one, FORWARD), forward);
        // The words that are missing take another map, which has all.
        let backward = map(&one, BACKWARD);
        assert_ne!(backward, forward);
        assert_eq!([FORWARD, BACKWARD].map(|words| map(&one, words)), [backward; 2]);
    }

    #[test]
    fn a_mask_is_held_until_it_is_written() {
        let recorder = Recorder::new(Gpu::SM_80);
        let (client, maps) = (recorder.client(), MaskMaps::default());
        let [one, other] = [(); 2].map(|()| mask(client));
        let map = |mask| place(client, &maps, mask, FORWARD);
        let [first, second] = [map(&one), map(&other)];
        assert!(!one.handle.can_mut());
        maps.forget(&one.handle);
        assert!(one.handle.can_mut());
        assert_eq!(map(&other), second);
        assert_ne!(map(&one), first);
    }

    #[test]
    fn few_masks_are_held_at_a_time() {
        let recorder = Recorder::new(Gpu::SM_80);
        let (client, maps) = (recorder.client(), MaskMaps::default());
        let masks: Vec<_> = (0..=MOST_MASKS).map(|_| mask(client)).collect();
        let map = |mask| place(client, &maps, mask, FORWARD);
        let places: Vec<_> = masks.iter().map(map).collect();
        let held = masks.iter().filter(|mask| !mask.handle.can_mut());
        assert_eq!(held.count(), MOST_MASKS);
        assert_eq!(map(&masks[MOST_MASKS]), places[MOST_MASKS]);
        assert_ne!(map(&masks[0]), places[0]);
    }
}

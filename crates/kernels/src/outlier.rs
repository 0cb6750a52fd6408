//! Memory for a tensor that is much larger than the other ones of its program, such as logits over a vocabulary.
//!
//! CubeCL's pages are as large as the largest tensor that was asked of them. With GPT-2's logits of 64 by 1024 tokens that
//! is 6 GiB, of which the last page is nearly empty. A recorded pass keeps its pages for itself, so the rest of a step
//! has another one. Outliers have memory of their own instead, in CubeCL's pool of persistent memory, where a later
//! tensor of the same size takes it over.

use crate::buffer::Buffer;
use cubecl::{client::Client, ir::ElemType};
use cubecl_common::device::ServiceId;
use std::{
    collections::HashMap,
    sync::{LazyLock, Mutex, PoisonError},
};

/// Smaller ones make no pages that matter.
const LEAST_BYTES: usize = 64 << 20;

/// Sizes that a device has memory apart for: a batch for training, and one for validation. Such memory waits for its
/// size, so programs whose sizes change all the time have the others on pages.
const MOST_SIZES: usize = 2;

/// Sizes in bytes that each device has memory apart for.
static SIZES: LazyLock<Mutex<HashMap<ServiceId, Vec<usize>>>> = LazyLock::new(Mutex::default);

/// Memory for `elements` elements, with whatever it held before: apart from other tensors' where that is worth it.
pub(crate) fn empty(client: &Client, elements: usize, dtype: ElemType) -> Buffer {
    let bytes = elements * dtype.size();
    let of_usual = || Buffer::empty(client, elements, dtype);
    if bytes < LEAST_BYTES || !is_apart(client, bytes) {
        return of_usual();
    }
    client.memory_persistent_allocation((), |()| of_usual())
}

/// Whether tensors of that size have memory apart.
fn is_apart(client: &Client, bytes: usize) -> bool {
    let mut sizes = SIZES.lock().unwrap_or_else(PoisonError::into_inner);
    let sizes = sizes.entry(client.service_id()).or_default();
    if !sizes.contains(&bytes) && sizes.len() < MOST_SIZES {
        sizes.push(bytes);
    }
    sizes.contains(&bytes)
}

#[cfg(all(test, feature = "recorder"))]
mod tests {
    use super::*;
    use crate::recorder::{Gpu, Recorder};

    #[test]
    fn two_sizes_of_a_device_have_memory_apart() {
        let [one, other] = [(); 2].map(|()| Recorder::new(Gpu::SM_90A));
        let is_apart = |of: &Recorder, bytes| is_apart(of.client(), bytes);
        assert!(is_apart(&one, LEAST_BYTES));
        assert!(is_apart(&one, 2 * LEAST_BYTES));
        assert!(!is_apart(&one, 3 * LEAST_BYTES));
        assert!(is_apart(&one, 2 * LEAST_BYTES));
        assert!(is_apart(&other, 3 * LEAST_BYTES));
    }
}

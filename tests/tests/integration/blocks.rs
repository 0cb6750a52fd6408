//! What tests see of the blocks that ran: their own, and nobody else's.

use blackburn_reference::storage::Storage;
use blackburn_tests::{
    blocks::{Block, blocks_of},
    on_burn_device,
    tensors::{tensor, values},
};
use burn::{nn::Gelu, prelude::*};
use libtest_mimic::{Failed, Trial};
use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
};

pub(crate) fn trials() -> Vec<Trial> {
    vec![Trial::ignorable_test("blocks::work_of_other_threads_does_not_show", || {
        on_burn_device(|device| others(&device))
    })]
}

fn gelus(blocks: &[Block]) -> usize {
    let kernels = blocks.iter().flat_map(|block| &block.kernels);
    kernels.filter(|kernel| kernel.ends_with("GeluForwardKernel")).count()
}

/// Of numbers from the host: behind an operation that makes them, Burn's own fusion takes GELU, too.
fn gelu(device: &Device) -> Result<(), Failed> {
    let x = tensor(&[1.0; 8 * 32], [8, 32], Storage::F32, device);
    values(Gelu::new().forward(x)).map(drop)
}

/// Another thread runs GELU all the while; only this one's shows.
fn others(device: &Device) -> Result<(), Failed> {
    let (is_done, by_others) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) && gelu(device).is_ok() {
                by_others.fetch_add(1, Ordering::Relaxed);
            }
        });
        // Until the other has run one, and one more while it is watched.
        let wait = || {
            let seen = by_others.load(Ordering::Relaxed);
            while by_others.load(Ordering::Relaxed) < seen + 2 {
                thread::yield_now();
            }
        };
        wait();
        let nothing = blocks_of(device, || {
            wait();
            Ok(())
        });
        let one = blocks_of(device, || {
            wait();
            gelu(device)
        });
        is_done.store(true, Ordering::Relaxed);
        match (gelus(&nothing?.1), gelus(&one?.1)) {
            (0, 1) => Ok(()),
            found => Err(format!("GELU ran {found:?} times, and not 0 and 1").into()),
        }
    })
}

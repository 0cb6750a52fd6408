//! Windows of tokens for next-token prediction, in an order that can be resumed anywhere.
//!
//! An epoch cuts the tokens into windows of `context` inputs that do not overlap; a window holds
//! one token more, the last target. The cut starts at a random offset that differs between
//! epochs, as far as the tokens left over at the end allow, and the windows come in a random
//! permutation. Both follow from (seed, epoch) alone, so that window `i` of a run is a pure
//! function of (seed, `i`): a resumed run needs no state but the number of its next batch.

use std::{
    any::Any,
    sync::mpsc::{Receiver, sync_channel},
    thread::{self, JoinHandle},
};

use anyhow::{Context, Result, anyhow, ensure};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};

/// Batches that may wait for the training loop: enough to bridge a slow page of the token store,
/// few enough that they never matter for memory.
const PREFETCH_DEPTH: usize = 4;

/// The stream of draws that orders the corpus' files; epochs use the streams from 0 up.
pub(crate) const FILE_ORDER: u64 = u64::MAX;

/// Draws that are a function of (seed, stream) and nothing else. `ChaCha8` is specified down to
/// the bit. Seeding it with the numbers as they are and drawing with the two functions below keeps the order of the data from changing under a run when a release
/// of `rand` changes how it expands seeds or shuffles, which its minor releases may.
pub(crate) fn rng(seed: u64, stream: u64) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&stream.to_le_bytes());
    ChaCha8Rng::from_seed(key)
}

/// Uniform in `0..bound` up to a bias of bound / 2^64.
fn below(rng: &mut ChaCha8Rng, bound: usize) -> usize {
    // Less than `bound`, so it fits again.
    ((u128::from(rng.next_u64()) * bound as u128) >> 64) as usize
}

/// Fisher and Yates' shuffle.
pub(crate) fn shuffle<T>(items: &mut [T], rng: &mut ChaCha8Rng) {
    for last in (1..items.len()).rev() {
        items.swap(last, below(rng, last + 1));
    }
}

/// `batch` windows, row by row: row `r` is `[r * context..][..context]` of both arrays.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Batch {
    /// Position in the order that produced it.
    pub(crate) index: u64,
    /// Tokens, `[batch, context]`.
    pub(crate) inputs: Vec<i32>,
    /// The token that follows each input, `[batch, context]`.
    pub(crate) targets: Vec<i32>,
    /// Number of rows.
    pub(crate) batch: usize,
    /// Number of columns.
    pub(crate) context: usize,
}

impl Batch {
    fn with_capacity(index: u64, batch: usize, context: usize) -> Self {
        Self {
            index,
            inputs: Vec::with_capacity(batch * context),
            targets: Vec::with_capacity(batch * context),
            batch,
            context,
        }
    }

    /// Appends a window of `context + 1` tokens as a row.
    fn push(&mut self, window: &[u16]) {
        debug_assert_eq!(window.len(), self.context + 1);
        self.inputs.extend(window[..self.context].iter().map(|&token| i32::from(token)));
        self.targets.extend(window[1..].iter().map(|&token| i32::from(token)));
    }
}

/// Number of windows, or why there is none.
fn count_windows(tokens: usize, context: usize) -> Result<usize> {
    ensure!(context > 0, "the context must hold at least one token, got 0: raise --context");
    ensure!(
        tokens > context,
        "a context of {context} needs at least {} tokens (one more than the context, the last \
         target), but there are {tokens}: choose a smaller --context or provide more data",
        context.saturating_add(1)
    );
    Ok((tokens - 1) / context)
}

/// The windows of all epochs, by index.
pub(crate) struct Windows<T> {
    tokens: T,
    context: usize,
    seed: u64,
    per_epoch: usize,
    epoch: Epoch,
}

/// The draws of one epoch, kept because consecutive windows nearly always share them.
struct Epoch {
    number: u64,
    offset: usize,
    order: Vec<u32>,
}

impl Epoch {
    fn draw(seed: u64, number: u64, windows: usize, leftover: usize) -> Self {
        let mut rng = rng(seed, number);
        let offset = below(&mut rng, leftover + 1);
        // `Windows::new` has checked that the indices fit.
        let mut order: Vec<u32> = (0..windows as u32).collect();
        shuffle(&mut order, &mut rng);
        Self { number, offset, order }
    }
}

impl<T: AsRef<[u16]>> Windows<T> {
    /// Windows of `context` inputs over `tokens`.
    pub(crate) fn new(tokens: T, context: usize, seed: u64) -> Result<Self> {
        let count = tokens.as_ref().len();
        let per_epoch = count_windows(count, context)?;
        ensure!(
            u32::try_from(per_epoch).is_ok(),
            "at most {} windows fit an epoch, but {count} tokens make {per_epoch} windows of \
             {context}: choose a larger --context or less data",
            u32::MAX
        );
        let epoch = Epoch::draw(seed, 0, per_epoch, (count - 1) % context);
        Ok(Self { tokens, context, seed, per_epoch, epoch })
    }

    /// Number of windows in an epoch.
    #[cfg(test)]
    fn per_epoch(&self) -> usize {
        self.per_epoch
    }

    /// The epoch of window `index` and its `context + 1` tokens. Depends on nothing but the
    /// tokens, the context, the seed and `index`.
    pub(crate) fn window(&mut self, index: u64) -> (u64, &[u16]) {
        let per_epoch = self.per_epoch as u64;
        let number = index / per_epoch;
        let tokens = self.tokens.as_ref();
        if self.epoch.number != number {
            let leftover = (tokens.len() - 1) % self.context;
            self.epoch = Epoch::draw(self.seed, number, self.per_epoch, leftover);
        }
        let position = self.epoch.order[(index % per_epoch) as usize] as usize;
        let start = self.epoch.offset + position * self.context;
        (number, &tokens[start..=start + self.context])
    }

    /// Batch `index`: windows `index * batch..(index + 1) * batch`. A batch may span two epochs,
    /// so that all have the same size and no window is dropped.
    pub(crate) fn batch(&mut self, index: u64, batch: usize) -> Batch {
        let mut filled = Batch::with_capacity(index, batch, self.context);
        let first = index * batch as u64;
        for row in 0..batch as u64 {
            filled.push(self.window(first + row).1);
        }
        filled
    }
}

/// Prepares batches on a thread of its own while the training loop computes.
pub(crate) struct Prefetcher {
    /// `None` only while dropping.
    receiver: Option<Receiver<Batch>>,
    /// `None` once the thread has been joined.
    thread: Option<JoinHandle<()>>,
}

impl Prefetcher {
    /// Starts to prepare batches of `batch` windows each: every `stride`th, from `start` on.
    pub(crate) fn new<T>(
        mut windows: Windows<T>,
        batch: usize,
        start: u64,
        stride: usize,
    ) -> Result<Self>
    where
        T: AsRef<[u16]> + Send + 'static,
    {
        ensure!(batch > 0, "a batch must hold at least one window, got 0: raise --batch");
        let (sender, receiver) = sync_channel(PREFETCH_DEPTH);
        let thread = thread::Builder::new()
            .name("prefetch".to_string())
            .spawn(move || {
                // Sending fails once the receiver is gone, which is how this thread is told to end.
                let _closed = (start..)
                    .step_by(stride)
                    .try_for_each(|index| sender.send(windows.batch(index, batch)));
            })
            .context("cannot start the thread that prepares batches")?;
        Ok(Self { receiver: Some(receiver), thread: Some(thread) })
    }

    /// The next batch; waits for it if need be.
    pub(crate) fn next_batch(&mut self) -> Result<Batch> {
        let received = self.receiver.as_ref().map(Receiver::recv);
        if let Some(Ok(batch)) = received {
            return Ok(batch);
        }
        // The thread ends by itself only by a panic: the order of batches has no end.
        let reason = match self.thread.take().map(JoinHandle::join) {
            Some(Err(panic)) => panic_message(panic.as_ref()),
            Some(Ok(())) | None => "it has ended before".to_string(),
        };
        Err(anyhow!("the thread that prepares batches failed: {reason}"))
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        // First the receiver: a thread that waits in `send` wakes up by it, then it can be joined.
        self.receiver = None;
        if let Some(thread) = self.thread.take() {
            // A panic there has printed its message; raising it again here could abort.
            let _panicked = thread.join();
        }
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "it panicked without a message".to_string())
}

/// At most `max_batches` batches of windows spread evenly over `tokens`, for validation: the same
/// ones each time, so that losses compare across steps and runs. The last batch may be partial.
pub(crate) fn sequential_batches(
    tokens: &[u16],
    batch: usize,
    context: usize,
    max_batches: usize,
) -> Result<impl ExactSizeIterator<Item = Batch>> {
    ensure!(batch > 0, "a batch must hold at least one window, got 0: raise --batch");
    ensure!(max_batches > 0, "validation needs at least one batch, got 0");
    let windows = count_windows(tokens.len(), context)?;
    let wanted = windows.min(batch.saturating_mul(max_batches));
    Ok((0..wanted.div_ceil(batch)).map(move |index| {
        let rows = index * batch..wanted.min((index + 1) * batch);
        let mut filled = Batch::with_capacity(index as u64, rows.len(), context);
        for row in rows {
            // In u128: the product may pass the word size of small machines.
            let start = (row as u128 * windows as u128 / wanted as u128) as usize * context;
            filled.push(&tokens[start..=start + context]);
        }
        filled
    }))
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
        time::{Duration, Instant},
    };

    use super::*;

    fn tokens(count: u16) -> Vec<u16> {
        (0..count).collect()
    }

    fn windows(count: u16, context: usize, seed: u64) -> Windows<Vec<u16>> {
        Windows::new(tokens(count), context, seed).unwrap()
    }

    fn starts(windows: &mut Windows<Vec<u16>>, epoch: u64) -> Vec<u16> {
        let per_epoch = windows.per_epoch() as u64;
        (epoch * per_epoch..(epoch + 1) * per_epoch)
            .map(|index| {
                let (number, window) = windows.window(index);
                assert_eq!(number, epoch);
                window[0]
            })
            .collect()
    }

    #[test]
    fn an_epoch_covers_each_window_once_and_shifts_from_the_others() {
        let (context, mut windows) = (16, windows(1000, 16, 3));
        assert_eq!(windows.per_epoch(), 62);
        let mut orders = BTreeSet::new();
        let mut offsets = BTreeSet::new();
        for epoch in 0..40 {
            let order = starts(&mut windows, epoch);
            let mut sorted = order.clone();
            sorted.sort_unstable();
            let offset = sorted[0];
            let expected: Vec<u16> = (0..62).map(|i| offset + i * context).collect();
            assert_eq!(sorted, expected);
            assert_ne!(order, sorted);
            orders.insert(order);
            offsets.insert(offset);
        }
        assert_eq!(orders.len(), 40);
        // 999 = 62 * 16 + 7: eight offsets leave room for all windows.
        assert_eq!(offsets, (0..8).collect());
    }

    #[test]
    fn all_tokens_are_used_when_they_fill_the_windows_exactly() {
        let mut windows = windows(33, 8, 0);
        let mut order = starts(&mut windows, 5);
        order.sort_unstable();
        assert_eq!(order, [0, 8, 16, 24]);
        let ends = (0..4).map(|index| windows.window(index).1[8]);
        assert_eq!(ends.max(), Some(32));
    }

    #[test]
    fn a_batch_is_a_function_of_seed_and_index_only() {
        let mut forward = windows(500, 7, 11);
        let batches: Vec<Batch> = (0..40).map(|index| forward.batch(index, 5)).collect();
        let mut backward = windows(500, 7, 11);
        for index in (0..40).rev() {
            assert_eq!(backward.batch(index, 5), batches[index as usize]);
        }
        let mut other = windows(500, 7, 12);
        assert!((0..40).all(|index| other.batch(index, 5) != batches[index as usize]));
    }

    #[test]
    fn the_order_never_changes_between_releases() {
        let mut items: Vec<u8> = (0..8).collect();
        shuffle(&mut items, &mut rng(42, FILE_ORDER));
        assert_eq!(items, [1, 4, 6, 0, 2, 5, 3, 7]);
        assert_eq!(starts(&mut windows(30, 4, 42), 1), [25, 1, 21, 13, 17, 9, 5]);
    }

    #[test]
    fn targets_are_the_inputs_shifted_by_one() {
        let batch = windows(100, 9, 1).batch(3, 4);
        assert_eq!((batch.index, batch.batch, batch.context), (3, 4, 9));
        assert_eq!((batch.inputs.len(), batch.targets.len()), (36, 36));
        for (input, target) in batch.inputs.iter().zip(&batch.targets) {
            assert_eq!(input + 1, *target);
        }
        for row in batch.inputs.chunks(9) {
            assert!(row.is_sorted_by(|a, b| a + 1 == *b));
        }
    }

    #[test]
    fn too_few_tokens_are_an_error_that_counts_them() {
        for count in [0, 1, 8] {
            let message = Windows::new(tokens(count), 8, 0).err().unwrap().to_string();
            assert!(message.contains("at least 9 tokens"), "{message}");
            assert!(message.contains(&format!("there are {count}:")), "{message}");
            assert!(message.contains("--context"), "{message}");
            assert!(sequential_batches(&tokens(count), 1, 8, 1).is_err());
        }
        assert_eq!(windows(9, 8, 0).per_epoch(), 1);
        assert!(Windows::new(tokens(9), 0, 0).is_err());
        assert!(Windows::new(tokens(9), usize::MAX, 0).is_err());
    }

    #[test]
    fn the_prefetcher_delivers_the_batches_of_the_direct_order_from_any_start() {
        for start in [0, 17] {
            let mut prefetcher = Prefetcher::new(windows(300, 6, 5), 3, start, 1).unwrap();
            let mut direct = windows(300, 6, 5);
            for index in start..start + 50 {
                assert_eq!(prefetcher.next_batch().unwrap(), direct.batch(index, 3));
            }
        }
        assert!(Prefetcher::new(windows(300, 6, 5), 0, 0, 1).is_err());
    }

    /// Counts how often it is read and panics at the read that it is told.
    struct Watched {
        tokens: Vec<u16>,
        reads: Arc<AtomicUsize>,
        panic_at: usize,
    }

    impl AsRef<[u16]> for Watched {
        fn as_ref(&self) -> &[u16] {
            let read = self.reads.fetch_add(1, Ordering::SeqCst);
            assert!(read != self.panic_at, "planted fault");
            &self.tokens
        }
    }

    fn watched(panic_at: usize) -> (Windows<Watched>, Arc<AtomicUsize>) {
        let reads = Arc::new(AtomicUsize::new(0));
        let tokens = Watched { tokens: tokens(100), reads: reads.clone(), panic_at };
        (Windows::new(tokens, 9, 0).unwrap(), reads)
    }

    #[test]
    fn dropping_the_prefetcher_ends_its_thread_even_when_the_channel_is_full() {
        let (windows, reads) = watched(usize::MAX);
        let prefetcher = Prefetcher::new(windows, 1, 0, 1).unwrap();
        // One read by `new`, one for each batch that fits the channel, one for the batch that the
        // thread then waits to send.
        let full = 1 + PREFETCH_DEPTH + 1;
        let patience = Instant::now() + Duration::from_secs(30);
        while reads.load(Ordering::SeqCst) < full && Instant::now() < patience {
            thread::yield_now();
        }
        assert_eq!(reads.load(Ordering::SeqCst), full);
        drop(prefetcher);
        assert_eq!(Arc::strong_count(&reads), 1, "the thread still runs");
    }

    #[test]
    fn a_panic_of_the_thread_arrives_as_an_error_after_the_batches_before_it() {
        let (windows, _) = watched(3);
        let mut prefetcher = Prefetcher::new(windows, 1, 0, 1).unwrap();
        assert_eq!(prefetcher.next_batch().unwrap().index, 0);
        assert_eq!(prefetcher.next_batch().unwrap().index, 1);
        let message = prefetcher.next_batch().unwrap_err().to_string();
        assert!(message.contains("planted fault"), "{message}");
        assert!(prefetcher.next_batch().is_err(), "and stays one");
    }

    #[test]
    fn validation_windows_are_spread_evenly_and_the_last_batch_may_be_partial() {
        let all = tokens(1001);
        let batches: Vec<Batch> = sequential_batches(&all, 4, 10, 1000).unwrap().collect();
        assert_eq!(batches.len(), 25);
        let inputs = batches.iter().flat_map(|batch| &batch.inputs).copied();
        assert!(inputs.eq(0..1000), "with room for all, all come in order");

        let batches = sequential_batches(&all, 4, 10, 2).unwrap();
        let inputs: Vec<i32> = batches.flat_map(|batch| batch.inputs).collect();
        let starts: Vec<i32> = inputs.chunks(10).map(|row| row[0]).collect();
        assert_eq!(starts, [0, 120, 250, 370, 500, 620, 750, 870]);

        let batches = sequential_batches(&all[..71], 4, 10, 9).unwrap();
        let sizes: Vec<_> = batches.map(|b| (b.index, b.batch, b.targets.len())).collect();
        assert_eq!(sizes, [(0, 4, 40), (1, 3, 30)]);
    }
}

//! Batches, made by threads ahead of the training loop.
//!
//! Each of `workers` threads makes its rows of every batch (the rows that are its number modulo `workers`), and
//! another thread puts them together. All channels between them are bounded: threads that are ahead wait, so
//! that memory does not grow, and the loop finds [`AHEAD`] batches ready unless it is faster than all of them.
//! Which images a batch has follows from its number, whatever the number of threads.

use super::{
    CHANNELS, Source,
    order::{Order, Stream, rng},
};
use anyhow::{Context, Result, anyhow, bail};
use std::{
    any::Any,
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Batches that wait for the training loop.
const AHEAD: usize = 2;
/// Images in a row that cannot be used, after which there is no point in going on.
const HOPELESS: u64 = 100;

/// Images `[rows, 3, size, size]`, normalized, and their classes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Batch {
    pub(crate) images: Vec<f32>,
    pub(crate) classes: Vec<i32>,
    pub(crate) size: usize,
}

impl Batch {
    pub(crate) fn rows(&self) -> usize {
        self.classes.len()
    }
}

/// Which images batches are made of.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Plan {
    /// Without end, every `stride`th batch from `first` on: epochs in random orders, images changed at random.
    Train { seed: u64, first: u64, stride: usize },
    /// Once through the images that are held out. The last batch may have fewer rows, and so has each with
    /// images that cannot be used.
    Validation,
}

/// How batches are made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) batch: usize,
    pub(crate) size: usize,
    pub(crate) workers: usize,
}

/// The rows that one thread makes of a batch; none for an image that cannot be used.
struct Part {
    images: Vec<f32>,
    classes: Vec<Option<i32>>,
}

/// Gives batches in order.
pub(crate) struct Loader {
    batches: Option<Receiver<Result<Batch>>>,
    threads: Vec<JoinHandle<()>>,
    waited: Duration,
}

impl Loader {
    /// Starts the threads. `shape` has at least one of everything.
    pub(crate) fn start(source: Arc<dyn Source>, plan: Plan, shape: Shape) -> Result<Self> {
        let workers = shape.workers.min(shape.batch);
        let mut threads = Vec::new();
        let mut parts = Vec::new();
        for worker in 0..workers {
            let (sender, receiver) = sync_channel(AHEAD);
            parts.push(receiver);
            let maker = Maker { source: source.clone(), plan, shape, worker, workers };
            threads.push(spawn(format!("images {worker}"), move || maker.run(&sender))?);
        }
        let (sender, batches) = sync_channel(AHEAD);
        threads.push(spawn("batches".into(), move || assemble(&parts, shape, &sender))?);
        Ok(Self { batches: Some(batches), threads, waited: Duration::ZERO })
    }

    /// The next batch; none after the last.
    pub(crate) fn next_batch(&mut self) -> Result<Option<Batch>> {
        let started = Instant::now();
        let received = self.batches.as_ref().map(Receiver::recv);
        self.waited += started.elapsed();
        match received {
            Some(Ok(batch)) => batch.map(Some),
            // The threads are done, or one of them has panicked.
            _ => {
                self.batches = None;
                match self.threads.drain(..).filter_map(|thread| thread.join().err()).next() {
                    Some(panic) => bail!("a loader thread failed: {}", message(&*panic)),
                    None => Ok(None),
                }
            }
        }
    }

    /// How long the caller has waited for batches since it last asked.
    pub(crate) fn take_waited(&mut self) -> Duration {
        std::mem::take(&mut self.waited)
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // Threads that cannot hand on what they made end.
        self.batches = None;
        for thread in self.threads.drain(..) {
            // A panic is of no more interest.
            let _ = thread.join();
        }
    }
}

fn spawn(name: String, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    thread::Builder::new().name(name).spawn(work).context("cannot start a loader thread")
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given").to_owned()
}

/// Puts parts together until there are no more, or nobody wants them.
fn assemble(parts: &[Receiver<Result<Part>>], shape: Shape, batches: &SyncSender<Result<Batch>>) {
    loop {
        let received: Vec<_> = parts.iter().map_while(|part| part.recv().ok()).collect();
        if received.len() < parts.len() {
            return;
        }
        let batch = received.into_iter().collect::<Result<Vec<_>>>();
        let is_failed = batch.is_err();
        if batches.send(batch.map(|parts| interleave(&parts, shape))).is_err() || is_failed {
            return;
        }
    }
}

/// Rows of the parts in turn, without those that could not be made.
fn interleave(parts: &[Part], shape: Shape) -> Batch {
    let row = CHANNELS * shape.size * shape.size;
    let rows: usize = parts.iter().map(|part| part.classes.len()).sum();
    let mut batch = Batch {
        images: Vec::with_capacity(rows * row),
        classes: Vec::with_capacity(rows),
        size: shape.size,
    };
    for index in 0..rows {
        let (part, own) = (&parts[index % parts.len()], index / parts.len());
        if let Some(class) = part.classes[own] {
            batch.images.extend(&part.images[own * row..][..row]);
            batch.classes.push(class);
        }
    }
    batch
}

/// What one thread makes.
struct Maker {
    source: Arc<dyn Source>,
    plan: Plan,
    shape: Shape,
    worker: usize,
    workers: usize,
}

impl Maker {
    fn run(&self, parts: &SyncSender<Result<Part>>) {
        let (first, stride) = match self.plan {
            Plan::Train { first, stride, .. } => (first, stride),
            Plan::Validation => (0, 1),
        };
        for number in (first..).step_by(stride) {
            let rows = self.rows(number);
            if rows == 0 {
                return;
            }
            let part = self.part(number, rows);
            let is_failed = part.is_err();
            if parts.send(part).is_err() || is_failed {
                return;
            }
        }
    }

    /// Rows of a batch, of all threads.
    fn rows(&self, number: u64) -> usize {
        let batch = self.shape.batch as u64;
        match self.plan {
            Plan::Train { .. } => self.shape.batch,
            Plan::Validation => {
                let left = self.source.validation_images().saturating_sub(number * batch);
                left.min(batch) as usize
            }
        }
    }

    fn part(&self, number: u64, rows: usize) -> Result<Part> {
        let row = CHANNELS * self.shape.size * self.shape.size;
        let own = (self.worker..rows).step_by(self.workers);
        let mut part = Part { images: vec![0.0; own.len() * row], classes: Vec::new() };
        for (index, pixels) in own.zip(part.images.chunks_exact_mut(row)) {
            let position = number * self.shape.batch as u64 + index as u64;
            part.classes.push(match self.plan {
                Plan::Train { seed, .. } => Some(self.train(seed, position, pixels)?),
                Plan::Validation => {
                    let class = self.source.validation(position, self.shape.size, pixels);
                    class.ok().map(|class| class as i32)
                }
            });
        }
        Ok(part)
    }

    /// Image number `position` of the run, or the one that follows it in the epoch and can be used.
    fn train(&self, seed: u64, position: u64, pixels: &mut [f32]) -> Result<i32> {
        let count = self.source.train_images();
        let (epoch, place) = (position / count, position % count);
        let order = Order::new(seed, epoch, count);
        let mut rng = rng(seed, Stream::Augmentation, position);
        let mut last = None;
        for next in 0..count.min(HOPELESS) {
            let image = order.at((place + next) % count);
            match self.source.train(image, self.shape.size, &mut rng, pixels) {
                Ok(class) => return Ok(class as i32),
                Err(error) => last = Some(error),
            }
        }
        Err(anyhow!(
            "none of {} images in a row can be used, the last because {}",
            count.min(HOPELESS),
            last.map_or("there are none".into(), |error| error.to_string())
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Unusable;
    use rand_chacha::{ChaCha8Rng, rand_core::Rng};
    use std::collections::BTreeSet;

    const COUNT: u64 = 10;

    /// Images whose pixels are all their number, plus a random share of one. Some cannot be used.
    struct Numbers {
        classes: Vec<String>,
        unusable: fn(u64) -> bool,
    }

    impl Numbers {
        fn source(unusable: fn(u64) -> bool) -> Arc<dyn Source> {
            Arc::new(Self { classes: vec!["even".into(), "odd".into()], unusable })
        }

        fn check(&self, image: u64) -> Result<usize, Unusable> {
            match (self.unusable)(image) {
                true => Err(Unusable { path: format!("{image}.png").into(), reason: "so".into() }),
                false => Ok(image as usize % 2),
            }
        }
    }

    impl Source for Numbers {
        fn classes(&self) -> &[String] {
            &self.classes
        }

        fn train_images(&self) -> u64 {
            COUNT
        }

        fn validation_images(&self) -> u64 {
            COUNT
        }

        fn train(
            &self,
            image: u64,
            _size: usize,
            rng: &mut ChaCha8Rng,
            pixels: &mut [f32],
        ) -> Result<usize, Unusable> {
            pixels.fill(image as f32 + (rng.next_u32() >> 16) as f32 / 131_072.0);
            self.check(image)
        }

        fn validation(&self, image: u64, _: usize, pixels: &mut [f32]) -> Result<usize, Unusable> {
            pixels.fill(image as f32);
            self.check(image)
        }

        fn fingerprint(&self) -> String {
            String::new()
        }

        fn summary(&self) -> String {
            String::new()
        }
    }

    fn batches(source: &Arc<dyn Source>, plan: Plan, workers: usize, count: usize) -> Vec<Batch> {
        let shape = Shape { batch: 4, size: 2, workers };
        let mut loader = Loader::start(source.clone(), plan, shape).expect("threads");
        (0..count).map_while(|_| loader.next_batch().expect("a batch")).collect()
    }

    fn numbers(batches: &[Batch]) -> Vec<u64> {
        let rows = batches.iter().flat_map(|batch| batch.images.chunks(CHANNELS * 4));
        rows.map(|row| row[0] as u64).collect()
    }

    #[test]
    fn batches_do_not_depend_on_the_number_of_threads_or_on_where_they_start() {
        let source = Numbers::source(|_| false);
        let all = batches(&source, Plan::Train { seed: 3, first: 0, stride: 1 }, 1, 12);
        for workers in [2, 3, 4, 9] {
            assert_eq!(
                batches(&source, Plan::Train { seed: 3, first: 0, stride: 1 }, workers, 12),
                all
            );
        }
        let later = batches(&source, Plan::Train { seed: 3, first: 5, stride: 1 }, 2, 7);
        assert_eq!(later, all[5..]);
        assert_ne!(batches(&source, Plan::Train { seed: 4, first: 0, stride: 1 }, 2, 12), all);
    }

    #[test]
    fn an_epoch_has_every_image_once_with_its_class() {
        let source = Numbers::source(|_| false);
        // Five batches of four are two epochs of ten.
        let all = batches(&source, Plan::Train { seed: 3, first: 0, stride: 1 }, 3, 5);
        let numbers = numbers(&all);
        for epoch in numbers.chunks(COUNT as usize) {
            let once: BTreeSet<&u64> = epoch.iter().collect();
            assert_eq!(once.len() as u64, COUNT);
        }
        assert_ne!(numbers[..10], numbers[10..]);
        let classes = all.iter().flat_map(|batch| &batch.classes);
        assert!(classes.zip(&numbers).all(|(class, number)| *class as u64 == number % 2));
    }

    #[test]
    fn validation_goes_once_through_and_leaves_out_what_cannot_be_used() {
        let all = batches(&Numbers::source(|_| false), Plan::Validation, 3, 99);
        assert_eq!(numbers(&all), Vec::from_iter(0..COUNT));
        assert_eq!(all.iter().map(Batch::rows).collect::<Vec<_>>(), [4, 4, 2]);
        let all = batches(&Numbers::source(|image| image % 3 == 1), Plan::Validation, 2, 99);
        assert_eq!(numbers(&all), [0, 2, 3, 5, 6, 8, 9]);
    }

    #[test]
    fn training_takes_another_image_for_one_that_cannot_be_used() {
        let source = Numbers::source(|image| image < 3);
        let all = batches(&source, Plan::Train { seed: 3, first: 0, stride: 1 }, 2, 10);
        assert_eq!(all.iter().map(Batch::rows).sum::<usize>(), 40);
        assert!(numbers(&all).iter().all(|number| *number >= 3));
        let hopeless = Numbers::source(|_| true);
        let shape = Shape { batch: 4, size: 2, workers: 2 };
        let plan = Plan::Train { seed: 3, first: 0, stride: 1 };
        let mut loader = Loader::start(hopeless, plan, shape).expect("threads");
        let error = loader.next_batch().expect_err("nothing to learn from").to_string();
        assert!(error.contains("none of 10 images in a row"), "{error}");
    }

    #[test]
    fn a_thread_that_panics_is_an_error_and_not_an_end() {
        struct Panicking;
        impl Source for Panicking {
            fn classes(&self) -> &[String] {
                &[]
            }
            fn train_images(&self) -> u64 {
                1
            }
            fn validation_images(&self) -> u64 {
                1
            }
            fn train(
                &self,
                _: u64,
                _: usize,
                _: &mut ChaCha8Rng,
                _: &mut [f32],
            ) -> Result<usize, Unusable> {
                panic!("a fault")
            }
            fn validation(&self, _: u64, _: usize, _: &mut [f32]) -> Result<usize, Unusable> {
                panic!("a fault")
            }
            fn fingerprint(&self) -> String {
                String::new()
            }
            fn summary(&self) -> String {
                String::new()
            }
        }
        let shape = Shape { batch: 4, size: 2, workers: 2 };
        let mut loader =
            Loader::start(Arc::new(Panicking), Plan::Validation, shape).expect("threads");
        let error = loader.next_batch().expect_err("a panic").to_string();
        assert!(error.contains("a loader thread failed: a fault"), "{error}");
    }

    /// Threads make no more than fits the channels while nobody takes batches.
    #[test]
    fn threads_wait_for_a_reader_and_end_with_it() {
        use std::sync::atomic::{AtomicUsize, Ordering};
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let source = Numbers::source(|_| {
            MADE.fetch_add(1, Ordering::SeqCst);
            false
        });
        let shape = Shape { batch: 4, size: 2, workers: 2 };
        let loader = Loader::start(source, Plan::Train { seed: 1, first: 0, stride: 1 }, shape)
            .expect("threads");
        thread::sleep(Duration::from_millis(300));
        let made = MADE.load(Ordering::SeqCst);
        // Two batches wait and one is handed over; each thread has two parts waiting and one at hand.
        assert!(made <= 4 * (AHEAD + 1) + 4 * (AHEAD + 1) + 4, "{made}");
        drop(loader);
        let made = MADE.load(Ordering::SeqCst);
        thread::sleep(Duration::from_millis(50));
        assert_eq!(MADE.load(Ordering::SeqCst), made);
    }
}

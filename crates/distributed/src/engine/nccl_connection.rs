//! A rank's communicator of NCCL, its stream, and the events that put them in order with CubeCL's streams.

use super::{
    Clock,
    cuda_library::{Context, Cuda, Event},
    library::{CallFailed, Stream},
    nccl_library::{Communicator, Nccl as Library},
};
use std::{
    collections::VecDeque,
    ffi::c_void,
    sync::{
        Arc,
        atomic::{AtomicPtr, Ordering},
    },
    time::{Duration, Instant},
};

/// How long a rank that ends waits for numbers that still move.
const LAST_NUMBERS: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(1);

/// How long numbers have moved, and of that, beside other work.
#[derive(Default)]
pub(super) struct Clocks {
    pub(super) all: Clock,
    pub(super) beside: Clock,
}

/// What the device does that is asked for something behind a move.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Device {
    Waits,
    GoesOn,
}

/// A communicator that is ended once.
pub(super) struct Line {
    pub(super) nccl: Library,
    communicator: AtomicPtr<c_void>,
}

impl Line {
    pub(super) fn new(nccl: Library, communicator: Communicator) -> Self {
        Self { nccl, communicator: AtomicPtr::new(communicator) }
    }

    /// Null once it was ended.
    pub(super) fn communicator(&self) -> Communicator {
        self.communicator.load(Ordering::Acquire)
    }

    /// Ends it, once. Ends kernels that wait for a rank that is gone, too.
    pub(super) fn end(&self) -> Result<(), CallFailed> {
        let communicator = self.communicator.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if communicator.is_null() {
            return Ok(());
        }
        // SAFETY: nobody else has it any more, but for calls that wait for others, which this ends.
        unsafe { self.nccl.end(communicator) }
    }
}

/// A rank's communicator, and its stream.
pub(super) struct Connection {
    cuda: Cuda,
    context: Context,
    pub(super) line: Arc<Line>,
    stream: Stream,
    /// What the device was asked for before.
    ready: Event,
    /// Start and end of moves whose time was not taken yet, and what the device did meanwhile.
    moving: VecDeque<(Event, Event, Device)>,
    /// Events to use again.
    spare: Vec<(Event, Event)>,
    /// The end of what the device was not told to wait for.
    behind: Option<Event>,
    is_sound: bool,
}

// SAFETY: streams, events and the context may be used by any thread, one at a time, which the mutex around them
// sees to.
unsafe impl Send for Connection {}

impl Connection {
    /// In the current context.
    pub(super) fn new(cuda: Cuda, context: Context, line: Arc<Line>) -> Result<Self, CallFailed> {
        // NCCL's few blocks must not wait until a kernel with many, beside which they run, has begun the last of its own.
        let (stream, ready) = (cuda.urgent_stream()?, cuda.event()?);
        let (moving, spare, behind, is_sound) = (VecDeque::new(), Vec::new(), None, true);
        Ok(Self { cuda, context, line, stream, ready, moving, spare, behind, is_sound })
    }

    /// Asks for `calls` behind what the device was asked for.
    pub(super) fn in_turn(
        &mut self,
        clocks: &Clocks,
        communicator: Communicator,
        device_then: Device,
        calls: impl FnOnce(&Library, Communicator, Stream) -> Result<(), CallFailed>,
    ) -> Result<(), CallFailed> {
        let begun = Instant::now();
        let asked = self.take_times(clocks).and_then(|()| {
            let (start, end) = self.events()?;
            let Self { cuda, context, line, stream, ready, .. } = &*self;
            // SAFETY: all of them live as long as this, and belong together.
            unsafe {
                line.nccl.look(communicator)?;
                cuda.wait_for_context(*stream, *context, *ready)?;
                cuda.record(start, *stream)?;
                calls(&line.nccl, communicator, *stream)?;
                cuda.record(end, *stream)?;
            }
            self.moving.push_back((start, end, device_then));
            self.behind = Some(end);
            match device_then {
                Device::Waits => self.join(),
                Device::GoesOn => Ok(()),
            }
        });
        self.is_sound &= asked.is_ok();
        tracing::trace!("the host's time for calls of NCCL: {:?}", begun.elapsed());
        asked
    }

    /// Two events, for the start and the end of a move.
    pub(super) fn events(&mut self) -> Result<(Event, Event), CallFailed> {
        self.spare.pop().map_or_else(|| Ok((self.cuda.event()?, self.cuda.event()?)), Ok)
    }

    /// Has the device wait for the end of a move beside a pass, from now on.
    pub(super) fn wait_for(&mut self, (start, end): (Event, Event)) -> Result<(), CallFailed> {
        self.moving.push_back((start, end, Device::GoesOn));
        // SAFETY: they live as long as this, and belong together.
        unsafe { self.cuda.context_waits(self.context, end) }
    }

    /// Adds the times of moves that are over.
    pub(super) fn take_times(&mut self, clocks: &Clocks) -> Result<(), CallFailed> {
        // SAFETY: it is this device's.
        unsafe { self.cuda.enter(self.context) }?;
        while let Some((start, end, device_then)) = self.moving.front().copied() {
            // SAFETY: the events live and were recorded.
            let Some(elapsed_ms) = unsafe { self.cuda.elapsed_ms(start, end) }? else { break };
            let elapsed = Duration::from_secs_f64(f64::from(elapsed_ms.max(0.0)) / 1e3);
            clocks.all.add(elapsed);
            if device_then == Device::GoesOn {
                clocks.beside.add(elapsed);
            }
            self.moving.pop_front();
            self.spare.push((start, end));
        }
        Ok(())
    }

    /// Has the device wait for all that moves, before it does what it is asked for from now on.
    pub(super) fn join(&mut self) -> Result<(), CallFailed> {
        let Some(end) = self.behind.take() else { return Ok(()) };
        // SAFETY: they live as long as this, and belong together.
        unsafe { self.cuda.context_waits(self.context, end) }
    }

    /// Waits until all numbers have come, unless they never will.
    fn finish(&self) -> Result<(), CallFailed> {
        let since = Instant::now();
        let is_alive = || !self.line.communicator().is_null();
        // SAFETY: it lives as long as this.
        while self.is_sound && is_alive() && !unsafe { self.cuda.is_done(self.stream) }? {
            if since.elapsed() > LAST_NUMBERS {
                tracing::debug!("numbers still move {LAST_NUMBERS:?} after the last step");
                break;
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: it is this device's. Nobody uses stream and events any more, and they belong to the context. To
        // abort is the way to end a communicator whose ranks may be gone.
        let ended = unsafe { self.cuda.enter(self.context) }.and_then(|()| {
            let finished = self.finish();
            self.line.end()?;
            let moving = self.moving.drain(..).map(|(start, end, _)| (start, end));
            let pairs = moving.chain(self.spare.drain(..));
            let events: Vec<Event> = pairs.flat_map(<[Event; 2]>::from).collect();
            for event in events.into_iter().chain([self.ready]) {
                // SAFETY: as above.
                unsafe { self.cuda.end_event(event) }?;
            }
            // SAFETY: as above.
            unsafe { self.cuda.end(self.stream) }?;
            finished
        });
        if let Err(error) = ended {
            tracing::debug!("at the end: {error}");
        }
    }
}

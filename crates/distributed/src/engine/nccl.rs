//! Numbers over NCCL, between the memories of NVIDIA GPUs.
//!
//! The communicator is made when the first tensor moves, since only then is its device known. It has a stream of
//! its own, and events put that in order with CubeCL's: numbers begin to move when the device has done what it was
//! asked for before, and what it is asked for later waits until they have come. The host waits for neither. Nothing
//! here is called between the start and the end of a recording, which such events would spoil.
//!
//! Two ranks of one machine move gradients of a recorded pass by [`exchange`](super::exchange) while it goes on, and all
//! else by NCCL.
//!
//! Results are in memory of their own: two gradients may be one and the same memory, which must not be added up
//! twice, and whoever holds a tensor sees no other numbers in it.
//!
//! With two ranks a sum is rounded once. With more, NCCL rounds at each addition, in an order of its own.

use super::{
    Engine, EngineError, Moved,
    cuda_library::{Cuda, Event},
    exchange::{Exchange, Reach},
    exchange_meeting::may_meet,
    exchange_plan::{Piece, VECTOR_BYTES},
    library::{CallFailed, Stream},
    nccl_connection::{Clocks, Connection, Device, Line},
    nccl_library::{Communicator, NCCL_VARIABLE, Nccl as Library, UniqueId},
    nccl_moves::{Move, Moves, paired},
    places::{Place, overlap},
};
use crate::control::{Control, lock};
use blackburn_backend::{
    cuda_memory::{AnyTensor, CudaMemory, is_cuda},
    graph::{Identity, Progress},
};
use burn::tensor::{Device as TensorDevice, Tensor};
use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// How long one that has failed waits until the program is in no call of NCCL's.
const COURTESY: Duration = Duration::from_millis(300);
const PAUSE: Duration = Duration::from_millis(1);
/// How long a process has to end after a failure.
const LAST_GRACE: Duration = Duration::from_secs(5);

/// NCCL for tensors on CUDA devices, and `host` for all else.
pub(crate) struct Nccl<E> {
    pub(super) rank: usize,
    pub(super) size: usize,
    host: E,
    pub(super) control: Arc<Control>,
    /// Made by the first tensor.
    connection: Arc<Mutex<Option<Connection>>>,
    /// Where tensors lie that were added up in place last: those of a recording stay where they are, and
    /// to ask for each takes the host longer than all else.
    pub(super) places: Mutex<HashMap<Identity, Place>>,
    /// What moves gradients beside their pass, once the ranks have tried to reach each other so.
    pub(super) exchange: Mutex<Option<Option<Exchange>>>,
    /// The connection's and the exchange's, for whoever ends them while the program may be in a call.
    line: Mutex<Option<Arc<Line>>>,
    pub(super) reach: Mutex<Option<Arc<Reach>>>,
    is_aborted: AtomicBool,
    clocks: Clocks,
}

impl<E> fmt::Debug for Nccl<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nccl").field("rank", &self.rank).finish_non_exhaustive()
    }
}

/// Tensors that move beside the pass that they are of.
struct Early<'a> {
    exchange: &'a mut Exchange,
    pieces: Vec<Piece>,
    progress: &'a Progress,
    /// Where it counts.
    counter: u64,
}

impl Early<'_> {
    fn begin(self, (start, end): (Event, Event)) -> Result<(), CallFailed> {
        let Self { exchange, pieces, progress, counter } = self;
        let count_at = |milestone| progress.count_at(milestone);
        // SAFETY: a recording's gradients stay where they are; CubeCL's streams wait for the end before they are asked to
        // use them again. Layouts and milestones are the same on both ranks.
        unsafe { exchange.add(pieces, counter, count_at, [start, end]) }
    }
}

/// What a kernel of NCCL's is asked for.
type Call<'a> = dyn Fn(&Library, Communicator, Stream, Move) -> Result<(), CallFailed> + 'a;

impl<E: Engine> Nccl<E> {
    pub(crate) fn new(host: E, control: Arc<Control>) -> Self {
        Self {
            rank: control.rank(),
            size: control.size(),
            host,
            control,
            connection: Arc::default(),
            places: Mutex::default(),
            exchange: Mutex::default(),
            line: Mutex::default(),
            reach: Mutex::default(),
            is_aborted: AtomicBool::new(false),
            clocks: Clocks::default(),
        }
    }

    pub(super) fn wrong(&self, what: impl fmt::Display) -> EngineError {
        EngineError { rank: self.rank, what: what.to_string() }
    }

    /// Moves `tensors`, each of which is told its root. Those whose roots `comes` accepts go into memory of their
    /// own; the others stay what they are.
    fn moved(
        &self,
        tensors: Vec<(Tensor<1>, Option<usize>)>,
        comes: impl Fn(Option<usize>) -> bool,
        device_then: Device,
        call: &Call<'_>,
    ) -> Result<Vec<Tensor<1>>, EngineError> {
        let (results, pairs) = paired(tensors, comes);
        let Some(Moves { moves, ordinal, _memory }) = self.moves(pairs)? else {
            return Ok(results);
        };
        self.ask(&moves, None, ordinal, device_then, call).map(|()| results)
    }

    /// Asks for all `moves` at once, and for `early` beside the pass that they are of.
    fn ask(
        &self,
        moves: &[Move],
        early: Option<Early<'_>>,
        ordinal: usize,
        device_then: Device,
        call: &Call<'_>,
    ) -> Result<(), EngineError> {
        let mut held = lock(&self.connection);
        let connection = match &mut *held {
            Some(connection) => connection,
            none => none.insert(self.connect(ordinal)?),
        };
        let mut begin = None;
        if let Some(early) = early {
            let events = connection.take_times(&self.clocks).and_then(|()| connection.events());
            let events = events.map_err(|error| self.wrong(error))?;
            begin = Some((early, events));
        }
        let events = begin.as_ref().map(|(_, events)| *events);
        let done = self.in_turn(connection, device_then, |nccl, communicator, stream| {
            // First of all: what waits for the device has asked for its wait by now, and would wait for this, too.
            if let Some((early, events)) = begin {
                early.begin(events)?;
            }
            nccl.grouped(|| moves.iter().try_for_each(|it| call(nccl, communicator, stream, *it)))
        });
        let done = done.and_then(|()| match events {
            Some(events) => connection.wait_for(events).map_err(|error| self.wrong(error)),
            None => Ok(()),
        });
        if done.is_err() {
            // Its kernels may still wait for a rank that is gone. They end before the memory is given free that they
            // would write to.
            *held = None;
        }
        done
    }

    /// Asks for `calls` behind what the device was asked for.
    fn in_turn(
        &self,
        connection: &mut Connection,
        device_then: Device,
        calls: impl FnOnce(&Library, Communicator, Stream) -> Result<(), CallFailed>,
    ) -> Result<(), EngineError> {
        let communicator = connection.line.communicator();
        if self.is_aborted.load(Ordering::Relaxed) || communicator.is_null() {
            return Err(self.wrong("was stopped by the failure of another"));
        }
        let asked = connection.in_turn(&self.clocks, communicator, device_then, calls);
        asked.map_err(|error| self.wrong(error))
    }

    fn spread_then(
        &self,
        tensors: Vec<(Tensor<1>, usize)>,
        device_then: Device,
    ) -> Result<Vec<Tensor<1>>, EngineError> {
        let (own, size) = (self.rank, self.size);
        let tensors = tensors.into_iter().map(|(tensor, root)| (tensor, Some(root))).collect();
        self.moved(tensors, |root| root != Some(own), device_then, &|nccl, line, stream, it| {
            let Move { from, to, count, dtype, root } = it;
            match (to, root) {
                // SAFETY: the memory is held until this is asked for, and CubeCL's streams wait before they use it
                // again; it has `count` numbers of that type.
                (Some(to), Some(root)) => unsafe {
                    nccl.receive(to, count, dtype, root, line, stream)
                },
                _ => (0..size).filter(|other| *other != own).try_for_each(|other| {
                    // SAFETY: as above.
                    unsafe { nccl.send(from, count, dtype, other, line, stream) }
                }),
            }
        })
    }

    /// The calls of sums: for all, or for one rank.
    fn sum_call(
        &self,
        nccl: &Library,
        line: Communicator,
        stream: Stream,
        Move { from, to, count, dtype, root }: Move,
    ) -> Result<(), CallFailed> {
        // Others than the root need not say where: nothing comes to them.
        let to = to.unwrap_or(0);
        // SAFETY: the memory is held until this is asked for, and CubeCL's streams wait before they use it again; it has
        // `count` numbers of that type.
        unsafe {
            match root {
                None => nccl.sum(from, to, count, dtype, line, stream),
                Some(root) => nccl.sum_at(from, to, count, dtype, root, line, stream),
            }
        }
    }

    /// Meets all ranks.
    fn connect(&self, ordinal: usize) -> Result<Connection, EngineError> {
        let loaded = Library::load(std::env::var(NCCL_VARIABLE).ok())
            .and_then(|nccl| Ok((nccl, Cuda::load()?)));
        let begun = loaded.and_then(|(nccl, cuda)| {
            let prepared = cuda.context(ordinal).and_then(|context| {
                // SAFETY: it is this device's.
                unsafe { cuda.enter(context) }?;
                let id = match self.rank {
                    0 => nccl.unique_id()?,
                    _ => UniqueId([0; 128]),
                };
                Ok((context, nccl.version()?, id))
            });
            let (context, version, id) = prepared.map_err(|error| error.to_string())?;
            Ok((nccl, cuda, context, version, id))
        });
        // All ranks hear of all, so that none waits for one that has no library.
        let told = match &begun {
            Ok((.., version, id)) => [b"ok".as_slice(), &version.to_le_bytes(), &id.0].concat(),
            Err(reason) => reason.clone().into_bytes(),
        };
        let shared = self.control.share("NCCL", told).map_err(|error| self.wrong(error))?;
        let (nccl, cuda, context, version, _) = begun.map_err(|reason| self.wrong(reason))?;
        let mut id = UniqueId([0; 128]);
        for (rank, told) in shared.iter().enumerate() {
            let Some(sound) = told.strip_prefix(b"ok").filter(|sound| sound.len() == 132) else {
                let what = String::from_utf8_lossy(told).into_owned();
                return Err(EngineError { rank, what });
            };
            let (its_version, its_id) = sound.split_at(4);
            if its_version != version.to_le_bytes() {
                let what =
                    format!("has another version of NCCL than rank {} ({version})", self.rank);
                return Err(EngineError { rank, what });
            }
            if rank == 0 {
                id.0.copy_from_slice(its_id);
            }
        }
        let made = nccl.communicator(shared.len(), id, self.rank);
        let communicator = made.map_err(|error| self.wrong(error))?;
        tracing::debug!("NCCL {version} between {} ranks, device {ordinal}", shared.len());
        let line = Arc::new(Line::new(nccl, communicator));
        *lock(&self.line) = Some(line.clone());
        Connection::new(cuda, context, line).map_err(|error| self.wrong(error))
    }
}

impl<E: Engine> Engine for Nccl<E> {
    fn sum(&self, tensors: Vec<Tensor<1>>) -> Result<Vec<Tensor<1>>, EngineError> {
        if !tensors.iter().all(|tensor| is_cuda(&tensor.device())) {
            return self.host.sum(tensors);
        }
        let tensors = tensors.into_iter().map(|tensor| (tensor, None)).collect();
        self.moved(tensors, |_| true, Device::Waits, &|nccl, line, stream, it| {
            self.sum_call(nccl, line, stream, it)
        })
    }

    fn sum_at(&self, tensors: Vec<(Tensor<1>, usize)>) -> Result<Vec<Tensor<1>>, EngineError> {
        if !tensors.iter().all(|(tensor, _)| is_cuda(&tensor.device())) {
            return self.host.sum_at(tensors);
        }
        let own = Some(self.rank);
        let tensors = tensors.into_iter().map(|(tensor, root)| (tensor, Some(root))).collect();
        self.moved(tensors, |root| root == own, Device::Waits, &|nccl, line, stream, it| {
            self.sum_call(nccl, line, stream, it)
        })
    }

    fn layout(
        &self,
        tensors: &[AnyTensor],
        progress: Option<&Progress>,
    ) -> Result<Option<u32>, EngineError> {
        if tensors.is_empty() || !tensors.iter().all(|tensor| is_cuda(tensor.device())) {
            return Ok(None);
        }
        let Some(places) = self.placed(tensors)?.filter(|places| !overlap(places)) else {
            return Ok(None);
        };
        let mut sizes = Vec::new();
        for (place, tensor) in places.iter().zip(tensors) {
            sizes.extend(place.bytes.to_le_bytes());
            sizes.push(self.data_type(tensor.dtype())? as u8);
            let milestone = self.milestone(tensor, place, progress)?;
            sizes.extend(milestone.unwrap_or_default().to_le_bytes());
        }
        Ok(Some(crc32c::crc32c(&sizes)))
    }

    fn moves_beside(&self, device: &TensorDevice) -> bool {
        is_cuda(device) && may_meet(&self.control).is_ok()
    }

    fn sum_in_place(
        &self,
        tensors: Vec<(AnyTensor, Option<usize>)>,
        extras: Vec<Tensor<1>>,
        progress: Option<&Progress>,
    ) -> Result<Vec<Tensor<1>>, EngineError> {
        let (tensors, roots): (Vec<AnyTensor>, Vec<Option<usize>>) = tensors.into_iter().unzip();
        let places = self.placed(&tensors)?.unwrap_or_default();
        let (results, pairs) =
            paired(extras.into_iter().map(|extra| (extra, None)).collect(), |_| true);
        if let (true, Some(first)) = (pairs.is_empty(), tensors.first()) {
            // What computes them is asked for when one of them is.
            CudaMemory::spans_of(vec![first.clone()]).map_err(|error| self.wrong(error))?;
        }
        let extras = self.moves(pairs)?;
        let mut seen = HashSet::new();
        let mut moves = Vec::new();
        let ordinal = places.first().map(|place| place.ordinal);
        for ((place, root), tensor) in places.into_iter().zip(roots).zip(&tensors) {
            let Place { address, bytes, .. } = place;
            // Two gradients may be one and the same memory.
            if bytes > 0 && seen.insert(address) {
                let milestone = match root {
                    None => self.milestone(tensor, &place, progress)?,
                    Some(_) => None,
                };
                let (dtype, size) = (self.data_type(tensor.dtype())?, tensor.dtype().size());
                // What moves beside the pass is whole vectors. Rows with gaps between them end anywhere.
                let first = match milestone {
                    Some(_) => bytes - bytes % VECTOR_BYTES,
                    None => bytes,
                };
                for (part, milestone) in [(0..first, milestone), (first..bytes, None)] {
                    let from = address + part.start as u64;
                    let (to, count) = (Some(from), part.len() / size);
                    if count > 0 {
                        moves.push((Move { from, to, count, dtype, root }, milestone));
                    }
                }
            }
        }
        let ordinal = ordinal.or(extras.as_ref().map(|extras| extras.ordinal));
        let Some(ordinal) = ordinal else { return Ok(results) };
        let pieces = self.early(&mut moves, ordinal)?;
        let mut moves: Vec<Move> = moves.into_iter().map(|(it, _)| it).collect();
        moves.extend(extras.iter().flat_map(|extras| &extras.moves));
        if moves.is_empty() && pieces.is_empty() {
            return Ok(results);
        }
        let mut met = lock(&self.exchange);
        let early = match (&mut *met, progress) {
            (Some(Some(exchange)), Some(progress)) if !pieces.is_empty() => {
                let counter = progress.counter().map_err(|error| self.wrong(error))?;
                Some(Early { exchange, pieces, progress, counter })
            }
            _ => None,
        };
        self.ask(&moves, early, ordinal, Device::Waits, &|nccl, line, stream, it| {
            self.sum_call(nccl, line, stream, it)
        })?;
        Ok(results)
    }

    fn spread(&self, tensors: Vec<(Tensor<1>, usize)>) -> Result<Vec<Tensor<1>>, EngineError> {
        if !tensors.iter().all(|(tensor, _)| is_cuda(&tensor.device())) {
            return self.host.spread(tensors);
        }
        self.spread_then(tensors, Device::Waits)
    }

    fn spread_beside(
        &self,
        tensors: Vec<(Tensor<1>, usize)>,
    ) -> Result<Vec<Tensor<1>>, EngineError> {
        if !tensors.iter().all(|(tensor, _)| is_cuda(&tensor.device())) {
            return self.host.spread(tensors);
        }
        self.spread_then(tensors, Device::GoesOn)
    }

    fn join(&self) -> Result<(), EngineError> {
        match &mut *lock(&self.connection) {
            Some(connection) => connection.join().map_err(|error| self.wrong(error)),
            None => Ok(()),
        }
    }

    fn spread_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Vec<u8>, EngineError> {
        self.host.spread_bytes(bytes, root)
    }

    fn moving(&self) -> Moved {
        if let Some(connection) = &mut *lock(&self.connection) {
            // What fails here fails again where numbers move.
            let _ = connection.take_times(&self.clocks);
        }
        let Moved { all, beside } = self.host.moving();
        let Clocks { all: own, beside: own_beside } = &self.clocks;
        Moved { all: all + own.total(), beside: beside + own_beside.total() }
    }

    fn abort(&self) {
        self.is_aborted.store(true, Ordering::Relaxed);
        self.host.abort();
        if let Some(reach) = lock(&self.reach).clone() {
            let ended = reach.end();
            tracing::debug!("after a failure waits for the other rank have ended: {ended:?}");
        }
        let Some(line) = lock(&self.line).clone() else { return };
        let connection = self.connection.clone();
        // The device waits for numbers that do not come, and the program may wait for the device. Whoever calls this
        // must not wait.
        std::thread::spawn(move || {
            let since = Instant::now();
            let mut held = connection.try_lock();
            while held.is_err() && since.elapsed() < COURTESY {
                std::thread::sleep(PAUSE);
                held = connection.try_lock();
            }
            let ended = line.end();
            tracing::debug!("after a failure NCCL has ended in {:?}: {ended:?}", since.elapsed());
        });
        // Where NCCL does not come back, the process would not end: CUDA waits for its kernels then.
        let control = self.control.clone();
        std::thread::spawn(move || {
            std::thread::sleep(LAST_GRACE);
            control.end_process();
        });
    }
}

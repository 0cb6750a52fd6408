//! Numbers over NCCL, between the memories of NVIDIA GPUs.
//!
//! The communicator is made when the first tensor moves, since only then is its device known. It has a stream of
//! its own. Before it begins, the device has done what computes the numbers; and the call returns when they have
//! come. So nothing here runs beside a kernel of CubeCL's, and nothing between the start and the end of a
//! recording.
//!
//! Results are in memory of their own: two gradients may be one and the same memory, which must not be added up
//! twice.
//!
//! With two ranks a sum is rounded once. With more, NCCL rounds at each addition, in an order of its own.

use super::{
    Clock, Engine, EngineError,
    nccl_library::{
        CallFailed, Communicator, Cuda, DataType, NCCL_VARIABLE, Nccl as Library, Stream, UniqueId,
    },
};
use crate::control::{Control, lock};
use blackburn_backend::cuda_memory::{CudaMemory, is_cuda};
use burn::tensor::{DType, Tensor};
use std::{
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// How long a wait asks again and again, before it sleeps in between.
const BUSY: Duration = Duration::from_millis(20);
const PAUSE: Duration = Duration::from_micros(50);

/// NCCL for tensors on CUDA devices, and `host` for all else.
pub(crate) struct Nccl<E> {
    rank: usize,
    host: E,
    control: Arc<Control>,
    /// Made by the first tensor.
    connection: Mutex<Option<Connection>>,
    is_aborted: AtomicBool,
    clock: Clock,
}

impl<E> fmt::Debug for Nccl<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nccl").field("rank", &self.rank).finish_non_exhaustive()
    }
}

/// A rank's communicator.
struct Connection {
    nccl: Library,
    cuda: Cuda,
    communicator: Communicator,
    stream: Stream,
    ordinal: usize,
}

// SAFETY: the communicator and the stream may be used by any thread, one at a time, which the mutex around them
// sees to.
unsafe impl Send for Connection {}

/// Where one tensor is, and where it goes.
struct Move {
    from: CudaMemory,
    to: CudaMemory,
    count: usize,
    dtype: DataType,
    root: usize,
}

impl<E: Engine> Nccl<E> {
    pub(crate) fn new(host: E, control: Arc<Control>) -> Self {
        Self {
            rank: control.rank(),
            host,
            control,
            connection: Mutex::new(None),
            is_aborted: AtomicBool::new(false),
            clock: Clock::default(),
        }
    }

    fn wrong(&self, what: impl fmt::Display) -> EngineError {
        EngineError { rank: self.rank, what: what.to_string() }
    }

    /// Moves `tensors`, each of which is told its root, into memory of their own.
    fn moved(
        &self,
        tensors: Vec<(Tensor<1>, usize)>,
        call: impl Fn(&Connection, &Move) -> Result<(), CallFailed>,
    ) -> Result<Vec<Tensor<1>>, EngineError> {
        let mut results = Vec::with_capacity(tensors.len());
        let mut moves = Vec::with_capacity(tensors.len());
        let mut device = None;
        for (tensor, root) in tensors {
            let (count, dtype, place) = (tensor.dims()[0], tensor.dtype(), tensor.device());
            let result = Tensor::<1>::empty([count], (&place, dtype));
            results.push(result.clone());
            if count == 0 {
                continue;
            }
            let of = |tensor| CudaMemory::of(tensor).map_err(|error| self.wrong(error));
            let dtype = data_type(dtype).map_err(|error| self.wrong(error))?;
            moves.push(Move { from: of(tensor)?, to: of(result)?, count, dtype, root });
            device = Some(place);
        }
        let Some(device) = device else { return Ok(results) };
        device.sync().map_err(|error| self.wrong(format!("the device failed: {error}")))?;
        let mut held = lock(&self.connection);
        let connection = match &mut *held {
            Some(connection) => connection,
            none => none.insert(self.connect(moves[0].from.ordinal)?),
        };
        let done = self.clock.timed(|| {
            let called = connection.cuda.use_device(connection.ordinal).and_then(|()| {
                connection.nccl.grouped(|| moves.iter().try_for_each(|it| call(connection, it)))
            });
            called.map_err(|error| self.wrong(error))?;
            self.wait(connection)
        });
        if done.is_err() {
            // Its kernels may still wait for a rank that is gone. They end before the memory is given free that they
            // would write to.
            *held = None;
        }
        done.map(|()| results)
    }

    /// Waits until the numbers have come, or a rank has failed.
    fn wait(&self, connection: &Connection) -> Result<(), EngineError> {
        let Connection { nccl, cuda, communicator, stream, .. } = connection;
        let since = Instant::now();
        loop {
            // SAFETY: both live as long as the connection.
            let done = unsafe { nccl.look(*communicator).and_then(|()| cuda.is_done(*stream)) };
            if done.map_err(|error| self.wrong(error))? {
                return Ok(());
            }
            if self.is_aborted.load(Ordering::Relaxed) {
                return Err(self.wrong("was stopped while it waited for the others"));
            }
            if since.elapsed() > BUSY {
                std::thread::sleep(PAUSE);
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// Meets all ranks.
    fn connect(&self, ordinal: usize) -> Result<Connection, EngineError> {
        let loaded = Library::load(std::env::var(NCCL_VARIABLE).ok())
            .and_then(|nccl| Ok((nccl, Cuda::load()?)));
        let begun = loaded.and_then(|(nccl, cuda)| {
            let version = cuda
                .use_device(ordinal)
                .and_then(|()| nccl.version())
                .map_err(|error| error.to_string())?;
            let id = match self.rank {
                0 => nccl.unique_id().map_err(|error| error.to_string())?,
                _ => UniqueId([0; 128]),
            };
            Ok((nccl, cuda, version, id))
        });
        // All ranks hear of all, so that none waits for one that has no library.
        let told = match &begun {
            Ok((.., version, id)) => [b"ok".as_slice(), &version.to_le_bytes(), &id.0].concat(),
            Err(reason) => reason.clone().into_bytes(),
        };
        let shared = self.control.share("NCCL", told).map_err(|error| self.wrong(error))?;
        let (nccl, cuda, version, _) = begun.map_err(|reason| self.wrong(reason))?;
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
        let made = nccl
            .communicator(shared.len(), id, self.rank)
            .and_then(|communicator| Ok((communicator, cuda.stream()?)));
        let (communicator, stream) = made.map_err(|error| self.wrong(error))?;
        tracing::debug!("NCCL {version} between {} ranks, device {ordinal}", shared.len());
        Ok(Connection { nccl, cuda, communicator, stream, ordinal })
    }
}

impl<E: Engine> Engine for Nccl<E> {
    fn sum(&self, tensors: Vec<Tensor<1>>) -> Result<Vec<Tensor<1>>, EngineError> {
        if !tensors.iter().all(|tensor| is_cuda(&tensor.device())) {
            return self.host.sum(tensors);
        }
        let tensors = tensors.into_iter().map(|tensor| (tensor, 0)).collect();
        self.moved(tensors, |connection, Move { from, to, count, dtype, .. }| {
            let Connection { nccl, communicator, stream, .. } = connection;
            // SAFETY: the memory is held, has `count` numbers of that type, and the call waits for the stream.
            unsafe { nccl.sum(from.address, to.address, *count, *dtype, *communicator, *stream) }
        })
    }

    fn spread(&self, tensors: Vec<(Tensor<1>, usize)>) -> Result<Vec<Tensor<1>>, EngineError> {
        if !tensors.iter().all(|(tensor, _)| is_cuda(&tensor.device())) {
            return self.host.spread(tensors);
        }
        self.moved(tensors, |connection, Move { from, to, count, dtype, root }| {
            let Connection { nccl, communicator, stream, .. } = connection;
            let (from, to) = (from.address, to.address);
            // SAFETY: as above.
            unsafe { nccl.copy(from, to, *count, *dtype, *root, *communicator, *stream) }
        })
    }

    fn spread_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Vec<u8>, EngineError> {
        self.host.spread_bytes(bytes, root)
    }

    fn moving(&self) -> Duration {
        self.clock.total() + self.host.moving()
    }

    fn abort(&self) {
        self.is_aborted.store(true, Ordering::Relaxed);
        self.host.abort();
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let used = self.cuda.use_device(self.ordinal);
        // SAFETY: nobody uses them any more. To abort is the way to end a communicator whose ranks may be gone.
        let ended = used.and_then(|()| unsafe {
            self.nccl.end(self.communicator)?;
            self.cuda.end(self.stream)
        });
        if let Err(error) = ended {
            tracing::debug!("at the end: {error}");
        }
    }
}

fn data_type(dtype: DType) -> Result<DataType, String> {
    match dtype {
        DType::F16 => Ok(DataType::Float16),
        DType::BF16 => Ok(DataType::Bfloat16),
        DType::F32 => Ok(DataType::Float32),
        DType::F64 => Ok(DataType::Float64),
        other => Err(format!("was asked to move {other:?}, and moves floats")),
    }
}

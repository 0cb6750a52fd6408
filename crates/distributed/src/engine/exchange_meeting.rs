//! How two ranks find each other's memory, and agree on the way that numbers take.

use super::{
    cuda_copies::{Address, CudaCopies, SharedMemory},
    cuda_library::{Context, Cuda},
    exchange::{Exchange, Functions, LAPS, Plan, Reach, Streams},
    exchange_kernels::kernels,
    exchange_memory::{COPIES_VARIABLE, Met, Passage, Way, check_length, check_speed, size_for},
    exchange_plan::STAGES,
    host_memory::HostMemory,
    library::{CallFailed, Stream},
};
use crate::control::{Control, lock};
use std::{
    ffi::CString,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

/// How long the ranks wait for their first words.
const FIRST_WORDS: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(1);

/// Whether the ranks may try to reach each other's memory.
///
/// # Errors
///
/// With the reason why they may not.
pub(super) fn may_meet(control: &Control) -> Result<(), String> {
    if control.size() != 2 {
        return Err(format!("there are {} ranks, and two can", control.size()));
    }
    if Way::wanted() == Way::Off {
        return Err(format!("{COPIES_VARIABLE} is off"));
    }
    match control.hosts() {
        [one, two] if one == two => Ok(()),
        _ => Err("the ranks are on two machines".into()),
    }
}

/// Gives the other rank `part` for its own: what it gave, or what stands against it on either rank.
fn shared<E: ToString>(
    control: &Control,
    what: &str,
    part: Result<Vec<u8>, E>,
) -> Result<Result<Vec<u8>, String>, String> {
    let part = match part {
        Ok(bytes) => [b"ok".as_slice(), &bytes].concat(),
        Err(reason) => reason.to_string().into_bytes(),
    };
    let parts = control.share(what, part).map_err(|error| error.to_string())?;
    let refusal = parts.iter().find(|part| !part.starts_with(b"ok"));
    let theirs = parts.get(1 - control.rank()).map_or(&[][..], |part| part);
    Ok(match refusal {
        Some(reason) => Err(String::from_utf8_lossy(reason).into_owned()),
        None => Ok(theirs.strip_prefix(b"ok").unwrap_or_default().to_vec()),
    })
}

impl Exchange {
    /// Finds the other rank, for pieces that come to `bytes`. `None` where one of the two cannot reach the other's memory.
    /// Both come here together.
    ///
    /// # Errors
    ///
    /// When a rank has failed meanwhile.
    pub(super) fn meet(
        control: &Control,
        ordinal: usize,
        bytes: usize,
    ) -> Result<Option<Self>, String> {
        Way::check_wish();
        let wanted = serde_json::to_vec(&Way::wanted()).map_err(|error| error.to_string())?;
        let all =
            control.share("what moves gradients", wanted).map_err(|error| error.to_string())?;
        let all: Vec<_> =
            all.iter().map(|wanted| serde_json::from_slice(wanted).unwrap_or(Way::Off)).collect();
        let way = Way::of_both(&all);
        if way == Way::Off {
            return Ok(None);
        }
        let mut exchange = match Self::meet_over_links(control, ordinal, bytes)? {
            Ok(exchange) => exchange,
            Err(reason) => {
                tracing::debug!("gradients do not move beside the pass: {reason}");
                return Ok(None);
            }
        };
        exchange.is_open = way == Way::ByLength;
        tracing::debug!("gradients move beside the pass, by copies over the links");
        if way == Way::Host {
            exchange.go_through_the_host(control, |_| Ok(()))?;
        }
        Ok(Some(exchange))
    }

    /// The same, or why there is none, which is the same on both ranks.
    fn meet_over_links(
        control: &Control,
        ordinal: usize,
        bytes: usize,
    ) -> Result<Result<Self, String>, String> {
        let prepared = Prepared::new(control, ordinal, bytes);
        let own = prepared.as_ref().map(|prepared| prepared.name.0.to_vec());
        let theirs = shared(control, "memory for gradients", own)?;
        let (prepared, theirs) = match (prepared, theirs) {
            (Ok(prepared), Ok(theirs)) => (prepared, theirs),
            (Err(reason), _) | (_, Err(reason)) => return Ok(Err(reason)),
        };
        let met = prepared.opened(bytes, &theirs);
        let opened = shared(control, "the other rank's memory", met.as_ref().map(|_| Vec::new()))?;
        let exchange = match (met, opened) {
            (Ok(exchange), Ok(_)) => exchange,
            (Err(reason), _) | (_, Err(reason)) => return Ok(Err(reason)),
        };
        let heard = exchange.greet(&exchange.met).map(|()| Vec::new());
        Ok(shared(control, "first words", heard)?.map(|_| exchange))
    }

    /// Writes to the other rank's memory, and waits until it has done the same.
    fn greet(&self, met: &Met) -> Result<(), String> {
        let driver = &self.reach.driver;
        let [own, theirs] = met.words();
        let since = Instant::now();
        let heard = || {
            // SAFETY: both memories live, and nobody uses them yet.
            unsafe {
                driver.copy_now(own.come(), theirs.come(), 4)?;
                driver.write(self.streams.sums[0], theirs.greeting(), 1)?;
                while driver.number_at(own.greeting())? == 0 && since.elapsed() < FIRST_WORDS {
                    std::thread::sleep(PAUSE);
                }
                driver.number_at(own.greeting())
            }
        };
        match heard().map_err(|error: CallFailed| error.to_string())? {
            0 => Err("the other rank's copies do not come".into()),
            _ => Ok(()),
        }
    }

    /// Goes through memory of the host from now on, if the length of a step has become known and speaks for it. Both ranks
    /// come here together, before each time that they add.
    ///
    /// # Errors
    ///
    /// When a rank has failed meanwhile.
    pub(super) fn choose_way(&mut self, control: &Control) -> Result<(), String> {
        if !self.is_open || (self.rounds as usize) < LAPS {
            return Ok(());
        }
        self.is_open = false;
        let copied = self.plan.stages.iter().filter(|stage| stage.sent.is_none());
        let bytes = copied.flat_map(|stage| &stage.pieces).map(|(piece, _)| piece.bytes).sum();
        self.go_through_the_host(control, |this| {
            let needed = check_length(bytes, this.shortest_lap()?)?;
            check_speed(&this.reach.driver, this.met.landed, this.met.bytes, needed)
        })
    }

    /// The shortest time between the ends of two rounds that followed each other.
    fn shortest_lap(&self) -> Result<Duration, String> {
        let mut shortest = f32::INFINITY;
        for laps in self.streams.laps.windows(2) {
            // SAFETY: the events live, and were recorded in the first rounds.
            let lap = unsafe { self.reach.cuda.elapsed_ms(laps[0], laps[1]) };
            match lap.map_err(|error| error.to_string())? {
                Some(lap) => shortest = shortest.min(lap),
                None => return Err("numbers still move".into()),
            }
        }
        Ok(Duration::from_secs_f32(shortest.max(0.0) / 1e3))
    }

    /// Goes through memory of the host from now on, if it can be had and nothing stands `against` it on either rank.
    fn go_through_the_host(
        &mut self,
        control: &Control,
        against: impl FnOnce(&Self) -> Result<(), String>,
    ) -> Result<(), String> {
        let rank = control.rank();
        let prepared = || {
            // SAFETY: it is this device's.
            unsafe { self.reach.cuda.enter(self.reach.context) }.map_err(|e| e.to_string())?;
            // What moves by the old way has come on both ranks when both have said so.
            if !self.rest().map_err(|error| error.to_string())? {
                return Err("numbers still move".into());
            }
            against(self)?;
            let made = || HostMemory::new(2 * size_for(self.met.bytes));
            let made = (rank == 0).then(made).transpose();
            made.map_err(|error| format!("no memory to share: {error}"))
        };
        let prepared = prepared();
        let name = |memory: &Option<HostMemory>| {
            memory.iter().flat_map(|memory| memory.name.bytes()).collect()
        };
        let theirs = shared(control, "memory of the host", prepared.as_ref().map(name))?;
        let passage = match (prepared, theirs) {
            (Ok(memory), Ok(theirs)) => self.passage(memory, &theirs, rank),
            (Err(reason), _) | (_, Err(reason)) => {
                tracing::debug!("gradients do not go through memory of the host: {reason}");
                return Ok(());
            }
        };
        let met = passage.map(|passage| Met { passage: Some(passage), ..self.met });
        // Nobody writes before both have mapped it.
        let mapped = shared(control, "memory of the host, mapped", met.as_ref().map(|_| vec![]))?;
        let heard = match (&met, mapped) {
            (Ok(met), Ok(_)) => self.greet(met),
            (Err(reason), _) => Err(reason.clone()),
            (_, Err(reason)) => Err(reason),
        };
        match (met, shared(control, "first words by the host", heard.map(|()| Vec::new()))?) {
            (Ok(met), Ok(_)) => {
                tracing::debug!("gradients move beside the pass, through memory of the host");
                self.go_by(met).map_err(|error| error.to_string())
            }
            (_, heard) => {
                let reason = heard.err().unwrap_or_default();
                tracing::debug!("gradients do not go through memory of the host: {reason}");
                Ok(())
            }
        }
    }

    /// The host's memory that rank 0 has made, and the other has heard of.
    fn passage(
        &self,
        made: Option<HostMemory>,
        heard: &[u8],
        rank: usize,
    ) -> Result<Passage, String> {
        let bytes = self.met.bytes;
        let name = String::from_utf8_lossy(heard);
        let memory = made.map_or_else(|| HostMemory::open(&name, 2 * size_for(bytes)), Ok);
        let memory = memory.map_err(|error| format!("{name} is not there: {error}"))?;
        Passage::through(&memory, &self.reach.driver, rank, bytes)
    }

    /// Tells and is told by other words from now on, which say nothing yet.
    fn go_by(&mut self, met: Met) -> Result<(), CallFailed> {
        (self.met, self.rounds) = (met, 0);
        // Blocks have the addresses of the old way.
        self.plan.pieces.clear();
        let [own, _] = met.words();
        *lock(&self.reach.words) = own;
        self.reach.sent.store(0, Ordering::Relaxed);
        match self.reach.is_over.load(Ordering::Relaxed) {
            true => self.reach.end(),
            false => Ok(()),
        }
    }
}

/// An exchange that does not know the other rank yet.
struct Prepared {
    cuda: Cuda,
    driver: CudaCopies,
    context: Context,
    rescue: Stream,
    streams: Streams,
    functions: Functions,
    /// Where what comes will land, and by what the other rank finds it.
    landed: Address,
    name: SharedMemory,
}

impl Prepared {
    fn new(control: &Control, ordinal: usize, bytes: usize) -> Result<Self, String> {
        may_meet(control)?;
        let (cuda, driver) = (Cuda::load()?, CudaCopies::load()?);
        let made = || {
            let context = cuda.context(ordinal)?;
            // SAFETY: it is this device's.
            unsafe { cuda.enter(context) }?;
            let ptx = CString::new(kernels()).unwrap_or_default();
            let names = [c"send", c"add_f32", c"add_f16", c"add_bf16"];
            let [send, add_f32, add_f16, add_bf16] = driver.functions(&ptx, names)?;
            let functions = Functions { send, add_f32, add_f16, add_bf16 };
            let (mut copied, mut laps) =
                ([std::ptr::null_mut(); STAGES], [std::ptr::null_mut(); LAPS]);
            for event in copied.iter_mut().chain(&mut laps) {
                *event = cuda.event()?;
            }
            let streams = Streams {
                copies: [cuda.urgent_stream()?, cuda.urgent_stream()?],
                sums: [cuda.stream()?, cuda.stream()?],
                sent_added: cuda.event()?,
                half_copied: cuda.event()?,
                copied,
                over: cuda.event()?,
                laps,
            };
            let (landed, name) = driver.memory(size_for(bytes))?;
            Ok::<_, CallFailed>((context, functions, streams, cuda.stream()?, landed, name))
        };
        let (context, functions, streams, rescue, landed, name) =
            made().map_err(|error| error.to_string())?;
        Ok(Self { cuda, driver, context, rescue, streams, functions, landed, name })
    }

    fn opened(self, bytes: usize, theirs: &[u8]) -> Result<Exchange, String> {
        let Self { cuda, driver, context, rescue, streams, functions, landed, .. } = self;
        let name = theirs.try_into().map_err(|_| "the other rank's memory has no name")?;
        let theirs = driver.opened(SharedMemory(name)).map_err(|error| error.to_string())?;
        let met = Met { landed, theirs, bytes, passage: None };
        let [own, _] = met.words();
        let reach = Reach {
            cuda,
            driver,
            context,
            words: Mutex::new(own),
            sent: AtomicU32::new(0),
            rescue,
            is_over: AtomicBool::new(false),
        };
        Ok(Exchange {
            reach: Arc::new(reach),
            met,
            streams,
            functions,
            plan: Plan::default(),
            rounds: 0,
            is_open: false,
        })
    }
}

//! The protocol between Burn's fusion and Blackburn's providers.
//!
//! A provider fills in two traits. A [`Search`] follows the operations of a block and says what it claims of
//! them. A [`Replacement`] runs what was claimed on a kernel. The rest is the same for all of them and
//! stands here: when a search is over, what it bids, and that operations run as Burn runs them where a kernel
//! declines.
//!
//! | a new provider takes | and is |
//! |---|---|
//! | one operation | a `Replacement` that is a `SingleOperation`, found by `SingleSearch` |
//! | a fixed sequence of operations | a `Pattern`, and a `Search` with a `Matcher` that follows it, of which it claims `Matcher::positions` |
//! | a sequence with parts that may be missing | a `Search` that takes each part by itself and claims those that came, as `matmul` does |
//!
//! It is registered by a line in `providers`.

use super::{arithmetic::parameter_cast, clock::StreamClock};
use crate::{
    declined::tell_once,
    served::count,
    tensors::{Tensors, kept_casts},
};
use blackburn_kernels::KernelError;
use burn_cubecl::{
    CubeDevice,
    fusion::{self, CubeFuser, OptimizationProvider, RegistryError},
};
use burn_cubecl_fusion::{
    FallbackOperation,
    optim::{CubeOptimization, FusedOperation},
};
use burn_fusion::{FuserProperties, FuserStatus, OperationFuser};
use burn_ir::{OperationIr, TensorId, TensorIr};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::fmt::Debug;

/// Follows the operations of a block from its first one on. A value is a search that has not begun, with the
/// provider's settings; Burn has it cloned for each block.
pub(crate) trait Search: Clone + Send + Sync + 'static {
    /// What runs in the place of the operations.
    type Replacement: Replacement;

    /// Whether a cast of a parameter between the operations may run before them. Operations that write to memory behind the
    /// backs of its holders have it stay in its place, and end there.
    const MAY_CAST_FIRST: bool = true;

    /// Whether the search takes `operation`, the next one of the block. No more are shown after a refusal.
    fn follow(&mut self, operation: &OperationIr, now: Moment) -> Next;

    /// What it claims of the operations that it took.
    fn claim(&self) -> Option<Claim<Self::Replacement>>;

    /// Whether it no longer waits for what may follow. It is asked again when Burn has shown operations to
    /// other blocks, and still takes what follows after all.
    fn gives_up(&self, _elapsed: Elapsed) -> bool {
        false
    }

    /// Whether `operation` counts as time that goes by.
    fn takes_time(_operation: &OperationIr) -> bool {
        true
    }
}

/// What runs in the place of operations.
pub(crate) trait Replacement:
    Clone + Debug + Send + Serialize + DeserializeOwned + 'static
{
    /// The provider's name.
    const NAME: &'static str;

    /// Runs on kernels, now that sizes and numbers are known, and says how much is done.
    ///
    /// # Errors
    ///
    /// [`KernelError`] where no kernel serves it. Nothing may have changed then: Burn's operations take over.
    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError>;
}

/// How much of what it replaces a [`Replacement`] has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Done {
    /// All operations.
    All,
    /// So many operations from the first one on. The others run as Burn runs them.
    First(usize),
}

/// Whether a search takes an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// No, and it is over.
    Refused,
    /// Yes, and it waits for more.
    Taken,
    /// Yes, and it is over.
    Last,
}

impl Next {
    /// [`Taken`](Self::Taken) or [`Refused`](Self::Refused).
    pub(crate) fn taken_if(taken: bool) -> Self {
        if taken { Self::Taken } else { Self::Refused }
    }
}

/// When an operation is shown to a search.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Moment {
    /// The operation's position among those that the search is shown.
    pub(crate) position: usize,
    /// The time that has gone by, the operation's own included.
    pub(crate) elapsed: Elapsed,
}

/// Operations that Burn has shown since, to whichever block.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Elapsed {
    /// Since the first one that the search took.
    pub(crate) since_first: u64,
    /// Since the last one.
    pub(crate) since_last: u64,
}

/// What a search claims: the first operations of its block, in parts that run one after the other.
#[derive(Clone, Debug)]
pub(crate) struct Claim<R> {
    /// What is bid. The highest bid gets the operations. Burn's fusions bid 100 for each tensor that
    /// they save reading or writing, and 10 for each launch.
    pub(crate) score: u64,
    pub(crate) parts: Vec<Part<R>>,
}

/// Operations of a claim, by their positions in the block.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Part<R> {
    /// They run as Burn runs them.
    Unfused(Vec<usize>),
    /// They cast parameters: what they read and make. A step may have made it.
    Casts(Vec<usize>, Vec<[TensorIr; 2]>),
    /// The replacement runs in their place.
    Replaced(Vec<usize>, R),
}

impl<R> Part<R> {
    /// Where the operations are.
    fn positions(&self) -> &Vec<usize> {
        match self {
            Self::Unfused(positions) | Self::Casts(positions, _) | Self::Replaced(positions, _) => {
                positions
            }
        }
    }

    fn positions_mut(&mut self) -> &mut Vec<usize> {
        match self {
            Self::Unfused(positions) | Self::Casts(positions, _) | Self::Replaced(positions, _) => {
                positions
            }
        }
    }

    /// How many operations these are.
    pub(crate) fn len(&self) -> usize {
        self.positions().len()
    }

    /// The same operations with another replacement.
    pub(crate) fn map<T>(self, with: impl FnOnce(R) -> T) -> Part<T> {
        match self {
            Self::Unfused(positions) => Part::Unfused(positions),
            Self::Casts(positions, casts) => Part::Casts(positions, casts),
            Self::Replaced(positions, by) => Part::Replaced(positions, with(by)),
        }
    }
}

impl<R: Replacement> Part<R> {
    /// Runs the operations: the replacement, or Burn's where there is none or it declines.
    pub(crate) fn run(
        &self,
        tensors: &mut Tensors,
        fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>,
    ) {
        let unfused = match self {
            Self::Unfused(positions) => &positions[..],
            Self::Casts(positions, casts) => {
                for (position, [source, out]) in positions.iter().zip(casts) {
                    if !kept_casts::give(tensors, source, out) {
                        fallback(*position).run(tensors);
                    }
                }
                &[]
            }
            Self::Replaced(positions, by) => match by.launch(tensors) {
                Ok(Done::All) => {
                    count(R::NAME, positions.len());
                    &[]
                }
                Ok(Done::First(done)) => {
                    count(R::NAME, done);
                    &positions[done..]
                }
                Err(reason) => {
                    tell_once(R::NAME, &reason);
                    &positions[..]
                }
            },
        };
        for position in unfused {
            fallback(*position).run(tensors);
        }
    }
}

/// Registers a provider with Burn, whose searches begin as `search` is.
///
/// # Errors
///
/// As Burn's registry has them: a second provider of the name, and tensors that were there before.
pub(crate) fn register(search: impl Search) -> Result<(), RegistryError> {
    fusion::register(Provider(search))
}

struct Provider<S>(S);

impl<S: Search> OptimizationProvider for Provider<S> {
    type Operation = Claimed<S::Replacement>;

    fn fuser(&self, _device: &CubeDevice) -> CubeFuser {
        CubeFuser::new(Fuser::new(self.0.clone()))
    }
}

/// A search in a block, as Burn's fusion drives it.
#[derive(Clone)]
pub(crate) struct Fuser<S> {
    fresh: S,
    pub(crate) search: S,
    /// The places of the operations that the search took, which it counts from 0, in the block.
    followed: Vec<usize>,
    /// Casts of parameters in between.
    passengers: Passengers,
    /// When the first one and the last one were.
    first_at: u64,
    last_at: u64,
    closed: bool,
    clock: StreamClock,
}

/// Casts of parameters among the operations of a block. No search sees them: policies of mixed precision put them in front of
/// whatever reads the parameter, and they may run before all that is replaced.
#[derive(Clone, Default)]
struct Passengers {
    /// Their places in the block.
    places: Vec<usize>,
    /// What they read and make.
    casts: Vec<[TensorIr; 2]>,
    /// What the block's other operations make.
    made: Vec<TensorId>,
}

impl Passengers {
    /// What `operation` reads and makes, if it is one.
    fn cast<'a>(&self, operation: &'a OperationIr) -> Option<[&'a TensorIr; 2]> {
        parameter_cast(operation).filter(|[source, _]| !self.made.contains(&source.id))
    }
}

impl<S: Search> Fuser<S> {
    pub(crate) fn new(search: S) -> Self {
        Self::at(search, StreamClock::default())
    }

    fn at(search: S, clock: StreamClock) -> Self {
        let fresh = search.clone();
        let (followed, passengers) = (Vec::new(), Passengers::default());
        Self { fresh, search, followed, passengers, first_at: 0, last_at: 0, closed: false, clock }
    }

    /// Lets the time of an operation go by that the search is not shown.
    pub(crate) fn pass_time(&self, operation: &OperationIr) {
        if S::takes_time(operation) {
            self.clock.tick();
        }
    }

    fn elapsed(&self) -> Elapsed {
        let since = |at: u64| if self.followed.is_empty() { 0 } else { self.clock.now() - at };
        Elapsed { since_first: since(self.first_at), since_last: since(self.last_at) }
    }

    /// Operations of the block that were taken, passengers included.
    fn taken(&self) -> usize {
        self.followed.len() + self.passengers.places.len()
    }

    /// What the search claims, by places in the block. Passengers in front of its last operation run first.
    pub(super) fn claim(&self) -> Option<Claim<S::Replacement>> {
        let mut claim = self.search.claim()?;
        if self.passengers.places.is_empty() {
            return Some(claim);
        }
        for position in claim.parts.iter_mut().flat_map(Part::positions_mut) {
            *position = self.followed[*position];
        }
        let last = claim.parts.iter().flat_map(Part::positions).max()?;
        let Passengers { places, casts, .. } = &self.passengers;
        let in_front = places.partition_point(|place| place < last);
        let passengers = Part::Casts(places[..in_front].to_vec(), casts[..in_front].to_vec());
        claim.parts.insert(0, passengers);
        Some(claim)
    }
}

impl<S: Search> OperationFuser<CubeOptimization> for Fuser<S> {
    fn fuse(&mut self, operation: &OperationIr) {
        self.pass_time(operation);
        if self.closed {
            return;
        }
        if S::MAY_CAST_FIRST
            && let Some(cast) = self.passengers.cast(operation)
        {
            // At the head it runs alone, and the search begins behind it.
            self.closed = self.followed.is_empty();
            if !self.closed {
                self.passengers.places.push(self.taken());
                self.passengers.casts.push(cast.map(TensorIr::clone));
            }
            return;
        }
        let now = Moment { position: self.followed.len(), elapsed: self.elapsed() };
        let next = self.search.follow(operation, now);
        self.closed = next != Next::Taken;
        if next != Next::Refused {
            self.last_at = self.clock.now();
            if self.followed.is_empty() {
                self.first_at = self.last_at;
            }
            self.followed.push(self.taken());
            self.passengers.made.extend(operation.outputs().map(|output| output.id));
        }
    }

    fn finish(&mut self) -> CubeOptimization {
        let claim = self.claim();
        let claim = claim.expect("Burn finishes a fuser only when it says it is ready");
        CubeOptimization::new(Claimed { parts: claim.parts })
    }

    /// Burn resets all fusers behind each segment that it runs, most of which have seen nothing: it knows the segment's plan.
    fn reset(&mut self) {
        if self.taken() > 0 || self.closed {
            *self = Self::at(self.fresh.clone(), self.clock.clone());
        }
    }

    fn status(&self) -> FuserStatus {
        if self.closed || self.search.gives_up(self.elapsed()) {
            FuserStatus::Closed
        } else {
            FuserStatus::Open
        }
    }

    fn properties(&self) -> FuserProperties {
        let score = self.search.claim().map(|claim| claim.score);
        FuserProperties { score: score.unwrap_or_default(), ready: score.is_some() }
    }

    /// What was taken behind the claim is left to others.
    fn len(&self) -> usize {
        let claimed = |claim: Claim<_>| claim.parts.iter().map(Part::len).sum();
        self.claim().map_or(self.taken(), claimed)
    }

    fn clone_dyn(&self) -> Box<dyn OperationFuser<CubeOptimization>> {
        Box::new(self.clone())
    }
}

/// Operations that a provider claimed, when they run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Claimed<R> {
    parts: Vec<Part<R>>,
}

impl<R: Replacement> FusedOperation for Claimed<R> {
    const NAME: &'static str = R::NAME;
    type State = Self;

    fn num_ops_fused(&self) -> usize {
        self.parts.iter().map(Part::len).sum()
    }

    fn run(
        &mut self,
        tensors: &mut Tensors,
        fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>,
    ) {
        self.parts.iter().for_each(|part| part.run(tensors, fallback));
    }

    fn to_state(&self) -> Self::State {
        self.clone()
    }

    fn from_state(_device: &cubecl::Device, state: Self::State) -> Self {
        state
    }
}

/// What the unit tests of searches ask of a fuser.
#[cfg(test)]
impl<S: Search> Fuser<S> {
    /// The fuser behind `operations`.
    pub(crate) fn after(search: S, operations: &[OperationIr]) -> Self {
        let mut fuser = Self::new(search);
        operations.iter().for_each(|operation| fuser.fuse(operation));
        fuser
    }

    /// How many operations it would take, if it is ready.
    pub(crate) fn claims(&self) -> Option<usize> {
        self.properties().ready.then(|| self.len())
    }

    pub(crate) fn is_open(&self) -> bool {
        matches!(self.status(), FuserStatus::Open)
    }
}

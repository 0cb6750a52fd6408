//! The ranks that train together.

mod config;
mod module;

pub use config::{GroupConfig, Wire};
pub use module::GradientSums;
pub(crate) use module::How;

#[cfg(feature = "cuda")]
use crate::engine::{nccl::Nccl, nccl_library::NCCL_VARIABLE};
use crate::{
    control::{Control, Joined, Limits, Membership, join},
    engine::{Engine, Moved, host::OverHost, tcp::Tcp},
    error::DistributedError,
    world::World,
};
use serde::{Serialize, de::DeserializeOwned};
use std::{fmt, path::Path, sync::Arc, time::Duration};

/// The ranks that train together, seen from one of them.
///
/// Functions that move something are called by all ranks, in the same order. Clones are the same member: the
/// rank leaves when the last one goes.
#[derive(Clone, Debug)]
pub struct Group {
    world: World,
    local_rank: usize,
    wire: Wire,
    /// None in a group of one.
    others: Option<Others>,
}

#[derive(Clone, Debug)]
struct Others {
    // Leaves before the engine's connections go.
    membership: Arc<Membership>,
    engine: Arc<dyn Engine>,
}

impl Others {
    fn control(&self) -> &Control {
        &self.membership.0
    }
}

impl Group {
    /// Joins the others, or is a group of one.
    ///
    /// # Errors
    ///
    /// When the environment makes no sense, or the others are not there in time, or run another version.
    pub fn join(config: &GroupConfig) -> Result<Self, DistributedError> {
        let world = match &config.world {
            Some(world) => world.clone(),
            None => World::from_environment()?,
        };
        if world.size == 1 {
            return Ok(Self { world, local_rank: 0, wire: config.wire, others: None });
        }
        let limits = Limits {
            silence: config.timeout()?,
            patience: config.patience,
            ends_process: config.ends_process,
        };
        let joined = join(&world, limits, config.start)?;
        let membership = Arc::new(Membership(joined.control.clone()));
        let engine = engine(&joined, config.start)?;
        let aborted = Arc::downgrade(&engine);
        joined.control.on_failure(move || {
            if let Some(engine) = aborted.upgrade() {
                engine.abort();
            }
        });
        let hosts = joined.control.hosts();
        let here = hosts[..world.rank].iter().filter(|host| **host == hosts[world.rank]).count();
        let local_rank = world.local_rank.unwrap_or(here);
        tracing::debug!("rank {} of {} on {hosts:?}", world.rank, world.size);
        let group = Self {
            world,
            local_rank,
            wire: config.wire,
            others: Some(Others { membership, engine }),
        };
        group.agree("the type in which gradients move", &group.wire)?;
        Ok(group)
    }

    /// A group of one.
    pub fn alone() -> Self {
        Self { world: World::alone(), local_rank: 0, wire: Wire::default(), others: None }
    }

    /// This process's number, from 0.
    pub fn rank(&self) -> usize {
        self.world.rank
    }

    /// How many processes there are.
    pub fn size(&self) -> usize {
        self.world.size
    }

    /// This process's number among those on its machine, from 0: the number of its GPU.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Whether this is rank 0, which prints, validates and saves.
    pub fn is_main(&self) -> bool {
        self.world.rank == 0
    }

    /// The processes, as the launcher has described them.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// How long numbers have moved between this rank and the others until now: on GPUs, those of moves that are
    /// over.
    pub fn time_moving(&self) -> Moved {
        self.others.as_ref().map_or_else(Moved::default, |others| others.engine.moving())
    }

    /// Notes that this rank begins `step`, for the message of a failure.
    ///
    /// # Errors
    ///
    /// When a rank has failed.
    pub fn at_step(&self, step: usize) -> Result<(), DistributedError> {
        let Some(others) = &self.others else { return Ok(()) };
        others.control().at_step(step);
        others.control().check()
    }

    /// Tells all ranks where the newest checkpoint is, for the message of a failure.
    pub fn saved(&self, path: &Path) {
        if let Some(others) = &self.others {
            others.control().saved(&path.display().to_string());
        }
    }

    /// Ends the training of all ranks, which return a failure with this reason: for a rank that cannot go on, before
    /// it ends.
    pub fn fail(&self, reason: &str) {
        if let Some(others) = &self.others {
            others.control().fail(self.rank(), format!("cannot go on: {reason}"));
        }
    }

    /// Waits until all ranks are here.
    ///
    /// # Errors
    ///
    /// When a rank has failed.
    pub fn barrier(&self) -> Result<(), DistributedError> {
        self.gather("a barrier", &()).map(drop)
    }

    /// What each rank gives, in the order of ranks, on all of them. For small things: they go through rank 0.
    /// `what` is the purpose, by which ranks that are not at the same point are noticed.
    ///
    /// # Errors
    ///
    /// When a rank has failed, or is at another point.
    ///
    /// # Panics
    ///
    /// When the type cannot be written as JSON and read again.
    pub fn gather<T: Serialize + DeserializeOwned>(
        &self,
        what: &str,
        value: &T,
    ) -> Result<Vec<T>, DistributedError> {
        let part = serde_json::to_vec(value)
            .unwrap_or_else(|error| panic!("Group::gather: argument `value`: {error}"));
        let parts = match &self.others {
            None => vec![part],
            Some(others) => others.control().share(what, part)?,
        };
        let read = |part: Vec<u8>| {
            serde_json::from_slice(&part)
                .unwrap_or_else(|error| panic!("Group::gather: what came for {what}: {error}"))
        };
        Ok(parts.into_iter().map(read).collect())
    }

    /// What `work` gives on rank 0, on all ranks; the others wait: for a folder that rank 0 prepares and all read,
    /// say. `what` names it.
    ///
    /// # Errors
    ///
    /// On rank 0 when `work` fails, and on the others with what it says then. When a rank has failed.
    ///
    /// # Panics
    ///
    /// When the type cannot be written as JSON and read again.
    pub fn rank_0_first<T, E>(
        &self,
        what: &str,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E>
    where
        T: Serialize + DeserializeOwned,
        E: fmt::Display + From<DistributedError>,
    {
        let done = self.is_main().then(work);
        // With `#`, errors of `anyhow` say what caused them.
        let told = match &done {
            Some(Ok(value)) => Some(Ok(value)),
            Some(Err(error)) => Some(Err(format!("{error:#}"))),
            None => None,
        };
        let told = serde_json::to_string(&told)
            .unwrap_or_else(|error| panic!("Group::rank_0_first: what {what} is: {error}"));
        let all = self.gather(what, &told)?;
        if let Some(done) = done {
            return done;
        }
        let first = all.first().map_or("null", String::as_str);
        let told: Option<Result<T, String>> = serde_json::from_str(first)
            .unwrap_or_else(|error| panic!("Group::rank_0_first: what came for {what}: {error}"));
        match told {
            Some(Ok(value)) => Ok(value),
            Some(Err(reason)) => Err(DistributedError::Rank0 { what: what.into(), reason }.into()),
            None => Err(DistributedError::Rank0 {
                what: what.into(),
                reason: "it has given nothing".into(),
            }
            .into()),
        }
    }

    /// Whether `value` holds on all ranks.
    ///
    /// # Errors
    ///
    /// When a rank has failed.
    pub fn all(&self, value: bool) -> Result<bool, DistributedError> {
        Ok(self.gather("whether something holds on all ranks", &value)?.into_iter().all(|is| is))
    }

    /// Whether `value` holds on any rank: whether somebody still has data, say.
    ///
    /// # Errors
    ///
    /// When a rank has failed.
    pub fn any(&self, value: bool) -> Result<bool, DistributedError> {
        Ok(self.gather("whether something holds on a rank", &value)?.into_iter().any(|is| is))
    }

    /// The sum over all ranks, in their order.
    ///
    /// # Errors
    ///
    /// When a rank has failed.
    pub fn sum(&self, value: f64) -> Result<f64, DistributedError> {
        let all = self.gather("a sum", &value.to_bits())?;
        Ok(all.into_iter().map(f64::from_bits).sum())
    }

    /// Checks that all ranks have the same `value` of `what`: settings, a checkpoint's step, a dataset's
    /// checksum.
    ///
    /// # Errors
    ///
    /// When they have not, with what each has, or a rank has failed.
    pub fn agree<T: Serialize>(&self, what: &str, value: &T) -> Result<(), DistributedError> {
        let text = serde_json::to_string(value).unwrap_or_else(|error| error.to_string());
        let values = self.gather(what, &text)?;
        match values.iter().all(|value| *value == values[0]) {
            true => Ok(()),
            false => Err(DistributedError::Differ { what: what.into(), values }),
        }
    }

    /// As [`agree`](Self::agree), of several values at once, each with its name: options of a program, say.
    ///
    /// # Errors
    ///
    /// When they have not, with the name of the first that differs and what each rank has, or a rank has failed.
    pub fn agree_on(&self, values: &[(&str, String)]) -> Result<(), DistributedError> {
        let own: Vec<(String, String)> =
            values.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
        let all = self.gather("values that all ranks have", &own)?;
        let differs = |at: &usize| all.iter().any(|values| values.get(*at) != own.get(*at));
        let longest = all.iter().map(Vec::len).max().unwrap_or(0);
        let Some(at) = (0..longest).find(differs) else { return Ok(()) };
        let named = all.iter().find_map(|values| values.get(at));
        Err(DistributedError::Differ {
            what: named.map(|(name, _)| name.clone()).unwrap_or_default(),
            values: all
                .iter()
                .map(|values| values.get(at).map_or("none".into(), |(_, value)| value.clone()))
                .collect(),
        })
    }
}

/// What moves numbers.
fn engine(joined: &Joined, start: Duration) -> Result<Arc<dyn Engine>, DistributedError> {
    let host = OverHost::new(Tcp::new(joined, start)?);
    #[cfg(feature = "cuda")]
    if std::env::var(NCCL_VARIABLE).as_deref() != Ok("off") {
        return Ok(Arc::new(Nccl::new(host, joined.control.clone())));
    }
    Ok(Arc::new(host))
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank(), self.size())
    }
}

//! The ranks that train together.

#[cfg(feature = "cuda")]
use crate::engine::{nccl::Nccl, nccl_library::NCCL_VARIABLE};
use crate::{
    control::{Control, Joined, Limits, Membership, join},
    engine::{Engine, EngineError, host::OverHost, tcp::Tcp},
    error::DistributedError,
    fingerprint, flat,
    world::World,
};
use burn::{
    module::{Module, ParamId},
    optim::GradientsParams,
    tensor::{DType, FloatDType, Tensor, TensorData},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{collections::HashMap, fmt, path::Path, sync::Arc, time::Duration};

/// What gradients are while they move between ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Wire {
    /// What they are: those in 16 bits take half the time, and their sums are rounded to 16 bits.
    #[default]
    AsTheyAre,
    /// In f32.
    F32,
    /// In bf16, rounded before and after the sum. The mean is in f32 where the gradients were.
    Bf16,
}

/// How a group is formed. See the [crate](crate).
#[derive(Clone, Debug)]
pub struct GroupConfig {
    world: Option<World>,
    timeout: Option<Duration>,
    start: Duration,
    patience: Duration,
    wire: Wire,
    ends_process: bool,
}

impl Default for GroupConfig {
    /// What the launcher says, 30 s without a sign of life, two minutes to start, half an hour for a rank that
    /// is alive and late.
    fn default() -> Self {
        Self {
            world: None,
            timeout: None,
            start: Duration::from_secs(120),
            patience: Duration::from_secs(30 * 60),
            wire: Wire::default(),
            ends_process: true,
        }
    }
}

/// Seconds without a sign of life, if the program does not say.
const TIMEOUT_VARIABLE: &str = "BLACKBURN_DISTRIBUTED_TIMEOUT";
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

impl GroupConfig {
    /// Joins this world, whatever the environment says.
    #[must_use]
    pub fn with_world(mut self, world: World) -> Self {
        self.world = Some(world);
        self
    }

    /// Takes a rank for dead that has given no sign of life for so long. Without this it is the number of
    /// seconds in `BLACKBURN_DISTRIBUTED_TIMEOUT`, or 30.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Waits so long for all ranks to start.
    #[must_use]
    pub fn with_start_timeout(mut self, start: Duration) -> Self {
        self.start = start;
        self
    }

    /// Waits so long for a rank that is alive, and has not come to where the others are: a validation that one
    /// rank makes alone has to end by then.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// What gradients are while they move.
    #[must_use]
    pub fn with_wire(mut self, wire: Wire) -> Self {
        self.wire = wire;
        self
    }

    /// Lets a process live that does not react to a failure of another rank. It may then hang for good.
    #[must_use]
    pub fn without_ending_the_process(mut self) -> Self {
        self.ends_process = false;
        self
    }

    #[cfg(test)]
    pub(crate) fn ending_the_process(mut self) -> Self {
        self.ends_process = true;
        self
    }

    /// How long a rank may be silent.
    ///
    /// # Errors
    ///
    /// When the variable is no positive number.
    pub fn timeout(&self) -> Result<Duration, DistributedError> {
        if let Some(timeout) = self.timeout {
            return Ok(timeout);
        }
        let Ok(text) = std::env::var(TIMEOUT_VARIABLE) else { return Ok(DEFAULT_TIMEOUT) };
        let seconds = text.parse::<f64>().ok().filter(|seconds| *seconds > 0.0);
        seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()).ok_or_else(|| {
            DistributedError::Environment {
                variable: TIMEOUT_VARIABLE.into(),
                expected: "a positive number of seconds",
                actual: text,
            }
        })
    }
}

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

/// What ranks tell each other of a step.
#[derive(Serialize, Deserialize)]
struct Contribution {
    /// As bits, which JSON keeps.
    weight: u64,
    /// A letter for each parameter.
    gradients: String,
    extras: usize,
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

    /// The module with rank 0's numbers, and with rank 0's identities of parameters, on all ranks.
    ///
    /// # Errors
    ///
    /// When the ranks' modules differ in the paths, shapes or types of parameters, or a rank has failed.
    pub fn broadcast<M: Module>(&self, module: M) -> Result<M, DistributedError> {
        let Some(others) = &self.others else { return Ok(module) };
        let all = self.gather("the parameters of a module", &fingerprint::of(&module))?;
        if let Some(values) = fingerprint::difference(&all) {
            return Err(DistributedError::Differ { what: "the module".into(), values });
        }
        let values = flat::Values::of(&module);
        let rank_0s: Vec<Vec<u64>> = self.gather(
            "the identities of parameters",
            &values.ids.iter().map(ParamId::val).collect::<Vec<u64>>(),
        )?;
        let ids = values.ids.iter().copied().zip(rank_0s[0].iter().map(|id| ParamId::from(*id)));
        let mut replacement =
            flat::Replacement { ids: ids.collect(), ..flat::Replacement::default() };
        let (ids, floats): (Vec<ParamId>, Vec<_>) =
            values.floats.into_iter().map(|(id, value)| (id, (value, 0))).unzip();
        let floats = self.moved(others, others.engine.spread(floats))?;
        replacement.floats = ids.into_iter().zip(floats).collect();
        for (id, data) in values.others {
            let (shape, dtype) = (data.shape().clone(), data.dtype());
            let bytes = data.as_bytes().to_vec();
            let bytes = self.moved(others, others.engine.spread_bytes(bytes, 0))?;
            replacement.others.insert(id, TensorData::from_bytes_vec(bytes, shape, dtype));
        }
        Ok(module.map(&mut replacement))
    }

    /// The mean of all ranks' gradients, each of which is of a mean over `weight` samples or tokens: the gradient
    /// of the mean over all of them. The same bits on all ranks.
    ///
    /// A rank that has no more data gives weight 0; its gradients do not count, and may be none. Gradients that
    /// only some ranks have count as zero on the others.
    ///
    /// # Errors
    ///
    /// When the weight is negative or not finite, all weights are 0, gradients have other types on other ranks,
    /// or a rank has failed.
    pub fn mean<M: Module>(
        &self,
        module: &M,
        gradients: GradientsParams,
        weight: f64,
    ) -> Result<GradientsParams, DistributedError> {
        self.mean_with(module, gradients, Vec::new(), weight).map(|(gradients, _)| gradients)
    }

    /// As [`mean`](Self::mean), with tensors of one dimension in f32 whose means are asked for as well: losses
    /// and metrics. Ranks without data give tensors of the same lengths, with anything in them.
    ///
    /// # Errors
    ///
    /// As `mean`.
    pub fn mean_with<M: Module>(
        &self,
        module: &M,
        gradients: GradientsParams,
        extras: Vec<Tensor<1>>,
        weight: f64,
    ) -> Result<(GradientsParams, Vec<Tensor<1>>), DistributedError> {
        let refused = |argument, expected, actual: String| DistributedError::Argument {
            operation: "Group::mean",
            argument,
            expected,
            actual,
        };
        if !(weight.is_finite() && weight >= 0.0) {
            return Err(refused("weight", "a finite number of at least 0", weight.to_string()));
        }
        let Some(others) = &self.others else { return Ok((gradients, extras)) };
        let parameters = flat::parameters(module);
        let own = flat::take(module, gradients);
        let letters = parameters.iter().map(|(id, ..)| own.get(id).map_or('-', letter)).collect();
        let contribution =
            Contribution { weight: weight.to_bits(), gradients: letters, extras: extras.len() };
        let all = self.gather("the mean of gradients", &contribution)?;
        let shares = Shares::of(&all, self.rank())
            .ok_or_else(|| refused("weight", "a rank with a weight above 0", "0 on all".into()))?;
        let dtypes = common_dtypes(&all)?;
        let kept: Vec<_> = parameters.into_iter().zip(dtypes).collect();

        let mut ids = Vec::new();
        let mut tensors = Vec::new();
        for ((id, elements, device), dtype) in kept {
            let Some(dtype) = dtype else { continue };
            let tensor = own.get(&id).cloned().filter(|_| shares.own > 0.0);
            let tensor =
                tensor.unwrap_or_else(|| Tensor::zeros([elements], (&device, DType::from(dtype))));
            ids.push((id, dtype));
            tensors.push(self.on_wire(weighted(tensor, shares.own)));
        }
        let count = tensors.len();
        tensors.extend(extras.into_iter().map(|extra| match shares.own > 0.0 {
            true => weighted(extra, shares.own),
            false => extra.zeros_like(),
        }));
        let mut sums = self.moved(others, others.engine.sum(tensors))?;
        let extras = sums.split_off(count);
        let means = |sum: Tensor<1>| weighted(sum, shares.of_sum);
        let gradients = ids.into_iter().zip(sums).map(|((id, dtype), sum)| {
            // What was in f32 is so again.
            let wide = matches!(dtype, FloatDType::F32) && sum.dtype() != DType::F32;
            (id, means(if wide { sum.cast(FloatDType::F32) } else { sum }))
        });
        let gradients: HashMap<ParamId, Tensor<1>> = gradients.collect();
        Ok((flat::give(module, gradients), extras.into_iter().map(means).collect()))
    }

    /// Gives all ranks each parameter of `module` as its owner has it.
    pub(crate) fn spread_parameters<M: Module>(
        &self,
        module: M,
        owners: &HashMap<ParamId, usize>,
    ) -> Result<M, DistributedError> {
        let Some(others) = &self.others else { return Ok(module) };
        let owned = flat::Values::of(&module)
            .floats
            .into_iter()
            .filter_map(|(id, value)| Some((id, (value, *owners.get(&id)?))));
        let (ids, values): (Vec<ParamId>, Vec<_>) = owned.unzip();
        let values = self.moved(others, others.engine.spread(values))?;
        let floats = ids.into_iter().zip(values).collect();
        Ok(module.map(&mut flat::Replacement { floats, ..flat::Replacement::default() }))
    }

    /// The bytes of each rank, in their order, on all of them.
    pub(crate) fn gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, DistributedError> {
        let Some(others) = &self.others else { return Ok(vec![bytes]) };
        let from = |root| {
            let own = if root == self.rank() { bytes.clone() } else { Vec::new() };
            self.moved(others, others.engine.spread_bytes(own, root))
        };
        (0..self.size()).map(from).collect()
    }

    fn on_wire(&self, gradient: Tensor<1>) -> Tensor<1> {
        match self.wire {
            Wire::F32 if gradient.dtype() != DType::F32 => gradient.cast(FloatDType::F32),
            Wire::Bf16 if gradient.dtype() != DType::BF16 => gradient.cast(FloatDType::BF16),
            _ => gradient,
        }
    }

    fn moved<T>(
        &self,
        others: &Others,
        moved: Result<T, EngineError>,
    ) -> Result<T, DistributedError> {
        moved.map_err(|EngineError { rank, what }| others.control().explain(rank, &what))
    }
}

/// What moves numbers.
fn engine(joined: &Joined, start: Duration) -> Result<Arc<dyn Engine>, DistributedError> {
    let host = OverHost(Tcp::new(joined, start)?);
    #[cfg(feature = "cuda")]
    if std::env::var(NCCL_VARIABLE).as_deref() != Ok("off") {
        return Ok(Arc::new(Nccl::new(host, joined.control.clone())));
    }
    Ok(Arc::new(host))
}

/// What a rank's gradients and their sum are multiplied by.
struct Shares {
    /// Relative to the first rank that counts: 1 where all weigh the same.
    own: f64,
    of_sum: f64,
}

impl Shares {
    /// `None` when no rank counts.
    fn of(all: &[Contribution], rank: usize) -> Option<Self> {
        let weights: Vec<f64> = all.iter().map(|one| f64::from_bits(one.weight)).collect();
        let unit = weights.iter().copied().find(|weight| *weight > 0.0)?;
        Some(Self { own: weights[rank] / unit, of_sum: unit / weights.iter().sum::<f64>() })
    }
}

/// The type of each gradient that a rank that counts has.
fn common_dtypes(all: &[Contribution]) -> Result<Vec<Option<FloatDType>>, DistributedError> {
    let lengths: Vec<(usize, usize)> =
        all.iter().map(|one| (one.gradients.len(), one.extras)).collect();
    if lengths.windows(2).any(|pair| pair[0] != pair[1]) {
        let shown = lengths.iter().map(|(parameters, extras)| {
            format!("{parameters} parameters and {extras} further tensors")
        });
        let what = "what the mean is asked of".into();
        return Err(DistributedError::Differ { what, values: shown.collect() });
    }
    let counting = || all.iter().filter(|one| f64::from_bits(one.weight) > 0.0);
    (0..lengths.first().map_or(0, |(parameters, _)| *parameters))
        .map(|index| {
            let letter = |one: &Contribution| one.gradients.as_bytes().get(index).copied();
            let mut found = counting().filter_map(letter).filter(|letter| *letter != b'-');
            let first = found.next();
            if found.any(|other| Some(other) != first) {
                let shown = all.iter().filter_map(letter).map(|letter| match dtype(letter) {
                    Some(dtype) => format!("{dtype:?}"),
                    None => "none".into(),
                });
                let what = format!("the type of gradient {index}");
                return Err(DistributedError::Differ { what, values: shown.collect() });
            }
            Ok(first.and_then(dtype))
        })
        .collect()
}

fn letter(gradient: &Tensor<1>) -> char {
    match gradient.dtype() {
        DType::BF16 => 'b',
        DType::F16 => 'h',
        DType::F64 => 'd',
        _ => 'f',
    }
}

fn dtype(letter: u8) -> Option<FloatDType> {
    match letter {
        b'b' => Some(FloatDType::BF16),
        b'h' => Some(FloatDType::F16),
        b'd' => Some(FloatDType::F64),
        b'f' => Some(FloatDType::F32),
        _ => None,
    }
}

/// `tensor` times `factor`, in its type, rounded once.
fn weighted(tensor: Tensor<1>, factor: f64) -> Tensor<1> {
    if factor == 1.0 {
        return tensor;
    }
    match tensor.dtype() {
        dtype @ (DType::BF16 | DType::F16) => {
            let narrow = if dtype == DType::BF16 { FloatDType::BF16 } else { FloatDType::F16 };
            tensor.cast(FloatDType::F32).mul_scalar(factor).cast(narrow)
        }
        _ => tensor.mul_scalar(factor),
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank(), self.size())
    }
}

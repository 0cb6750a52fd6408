//! What ranks do with a model's parameters and gradients.

use super::{Group, Others, Wire};
use crate::{engine::EngineError, error::DistributedError, fingerprint, flat};
use blackburn_backend::graph::Progress;
use burn::{
    module::{Module, ParamId},
    optim::GradientsParams,
    tensor::{DType, Device, FloatDType, Tensor, TensorData},
};
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};

/// Sums of gradients over all ranks.
#[derive(Debug)]
pub struct GradientSums {
    /// The sums, the same bits on all ranks.
    pub gradients: GradientsParams,
    /// The means of what was given besides.
    pub extras: Vec<Tensor<1>>,
    /// What the sums are multiplied by to be means.
    pub factor: f64,
}

impl GradientSums {
    /// The means of the gradients of `module`, which are taken out.
    pub fn means<M: Module>(&mut self, module: &M) -> GradientsParams {
        let sums = std::mem::take(&mut self.gradients);
        if self.factor == 1.0 {
            return sums;
        }
        let means = flat::take(module, sums)
            .into_iter()
            .map(|(id, sum)| (id, weighted(sum, self.factor)))
            .collect();
        flat::give(module, means)
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
    /// How the gradients lie, if they may be added up where they do.
    layout: Option<u32>,
}

impl Contribution {
    /// Whether gradients of both may be added up where they lie: all of them, with the same weight.
    fn lies_like(&self, other: &Self) -> bool {
        self.layout.is_some()
            && self.layout == other.layout
            && self.gradients == other.gradients
            && self.weight == other.weight
            && f64::from_bits(self.weight) > 0.0
    }
}

/// How gradients are added up.
#[derive(Clone, Copy, Default)]
pub(crate) struct How<'a> {
    /// Whether sums may take their place.
    pub(crate) in_place: bool,
    /// The ranks that alone get the sums of parameters, if not all do.
    pub(crate) owners: Option<&'a HashMap<ParamId, usize>>,
    /// Which gradients are there before their pass is over.
    pub(crate) progress: Option<&'a Progress>,
}

impl Group {
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
            flat::Replacement { ids: ids.collect(), in_place: true, ..Default::default() };
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

    /// Checks that all ranks have the same numbers in the parameters of `module` that are trained, as they do after
    /// steps by the same gradients: a rank whose memory or arithmetic fails is found so. The numbers are copied to the
    /// host.
    ///
    /// # Errors
    ///
    /// When they have not, with the first parameter that differs, or a rank has failed.
    pub fn same<M: Module>(&self, module: &M) -> Result<(), DistributedError> {
        if self.size() == 1 {
            return Ok(());
        }
        let all = self.gather("the numbers of a module", &fingerprint::with_numbers(module))?;
        fingerprint::difference(&all).map_or(Ok(()), |values| {
            Err(DistributedError::Differ { what: "the numbers of a parameter".into(), values })
        })
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
        let mut sums = self.sums(module, gradients, extras, weight)?;
        Ok((sums.means(module), sums.extras))
    }

    /// As [`mean_with`](Self::mean_with), of gradients the sums alone: whoever multiplies them anyhow, such as an
    /// optimizer that clips, saves a pass over all of them.
    ///
    /// # Errors
    ///
    /// As `mean`.
    pub fn sums<M: Module>(
        &self,
        module: &M,
        gradients: GradientsParams,
        extras: Vec<Tensor<1>>,
        weight: f64,
    ) -> Result<GradientSums, DistributedError> {
        self.sums_for(module, gradients, extras, weight, How::default())
    }

    /// As [`sums`](Self::sums), of gradients that nobody needs any more, such as those of a recorded pass: sums may
    /// take the place of gradients in their memory, and are then in all their clones. This takes the host less time,
    /// and no memory. Where they [move beside the pass](Self::moves_beside), those that `progress` of its recording tells
    /// of are on their way before the replay is over.
    ///
    /// # Errors
    ///
    /// As `mean`.
    pub fn sums_in_place<M: Module>(
        &self,
        module: &M,
        gradients: GradientsParams,
        extras: Vec<Tensor<1>>,
        weight: f64,
        progress: Option<&Progress>,
    ) -> Result<GradientSums, DistributedError> {
        let how = How { in_place: true, owners: None, progress };
        self.sums_for(module, gradients, extras, weight, how)
    }

    /// Whether gradients on `device` move before their pass is over, given its
    /// [`Progress`] in [`sums_in_place`](Self::sums_in_place): with two ranks on CUDA devices that reach each other's
    /// memory. Whether they do is seen when the first gradients move.
    pub fn moves_beside(&self, device: &Device) -> bool {
        self.others.as_ref().is_some_and(|others| others.engine.moves_beside(device))
    }

    /// As [`sums`](Self::sums).
    pub(crate) fn sums_for<M: Module>(
        &self,
        module: &M,
        gradients: GradientsParams,
        extras: Vec<Tensor<1>>,
        weight: f64,
        how: How<'_>,
    ) -> Result<GradientSums, DistributedError> {
        let refused = |argument, expected, actual: String| DistributedError::Argument {
            operation: "Group::mean",
            argument,
            expected,
            actual,
        };
        if !(weight.is_finite() && weight >= 0.0) {
            return Err(refused("weight", "a finite number of at least 0", weight.to_string()));
        }
        let Some(others) = &self.others else {
            return Ok(GradientSums { gradients, extras, factor: 1.0 });
        };
        let How { in_place, owners, progress } = how;
        let parameters = flat::parameters(module);
        let lying = flat::Lying::of(module, &gradients);
        let layout = match in_place && lying.types.iter().all(|dtype| self.moves_as_it_is(*dtype)) {
            true => self.moved(others, others.engine.layout(&lying.tensors, progress))?,
            false => None,
        };
        let found: HashMap<ParamId, DType> =
            lying.ids.iter().copied().zip(lying.types.iter().copied()).collect();
        let letter = |id| found.get(id).map_or('-', |dtype| letter(*dtype));
        let contribution = Contribution {
            weight: weight.to_bits(),
            gradients: parameters.iter().map(|(id, ..)| letter(id)).collect(),
            extras: extras.len(),
            layout,
        };
        let begun = std::time::Instant::now();
        let all = self.gather("the mean of gradients", &contribution)?;
        tracing::trace!("the host's wait for other ranks' gradients: {:?}", begun.elapsed());
        let shares = Shares::of(&all, self.rank())
            .ok_or_else(|| refused("weight", "a rank with a weight above 0", "0 on all".into()))?;
        let dtypes = common_dtypes(&all)?;
        let is_here =
            |id: &ParamId| owners.is_none_or(|owners| owners.get(id) == Some(&self.rank()));
        if all.iter().all(|one| one.lies_like(&all[0])) {
            let root = |id: &ParamId| owners.map(|owners| owners.get(id).copied().unwrap_or(0));
            let roots = lying.ids.iter().map(root);
            let tensors = lying.tensors.into_iter().zip(roots).collect();
            let extras =
                self.moved(others, others.engine.sum_in_place(tensors, extras, progress))?;
            let means = extras.into_iter().map(|sum| weighted(sum, shares.of_sum)).collect();
            let gradients = flat::keep(module, gradients, is_here);
            return Ok(GradientSums { gradients, extras: means, factor: shares.of_sum });
        }
        // What holds gradients twice keeps their memory longer than it is needed.
        drop(lying);
        let own = flat::take(module, gradients);
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
        drop(own);
        let extras = extras.into_iter().map(|extra| match shares.own > 0.0 {
            true => weighted(extra, shares.own),
            false => extra.zeros_like(),
        });
        let (sums, extras) = match owners {
            None => {
                let count = tensors.len();
                tensors.extend(extras);
                let mut sums = self.moved(others, others.engine.sum(tensors))?;
                let extras = sums.split_off(count);
                (sums, extras)
            }
            Some(owners) => {
                let owner = |(id, _): &(ParamId, FloatDType)| owners.get(id).copied().unwrap_or(0);
                let tensors = tensors.into_iter().zip(ids.iter().map(owner)).collect();
                let sums = self.moved(others, others.engine.sum_at(tensors))?;
                (sums, self.moved(others, others.engine.sum(extras.collect()))?)
            }
        };
        let gradients = ids.into_iter().zip(sums).filter(|((id, _), _)| is_here(id));
        let gradients = gradients.map(|((id, dtype), sum)| {
            // What was in f32 is so again.
            let wide = matches!(dtype, FloatDType::F32) && sum.dtype() != DType::F32;
            (id, if wide { sum.cast(FloatDType::F32) } else { sum })
        });
        let gradients: HashMap<ParamId, Tensor<1>> = gradients.collect();
        let factor = shares.of_sum;
        let means = extras.into_iter().map(|sum| weighted(sum, factor)).collect();
        Ok(GradientSums { gradients: flat::give(module, gradients), extras: means, factor })
    }

    /// Adds up a tensor of one dimension in f32 over all ranks, without waiting for the device.
    ///
    /// # Errors
    ///
    /// When a rank has failed.
    pub fn sum_on_device(&self, tensor: Tensor<1>) -> Result<Tensor<1>, DistributedError> {
        let Some(others) = &self.others else { return Ok(tensor) };
        let sums = self.moved(others, others.engine.sum(vec![tensor.clone()]))?;
        Ok(sums.into_iter().next().unwrap_or(tensor))
    }

    /// Gives all ranks the parameters of `module` that `ids` are, each as its owner has it. The device goes on
    /// meanwhile: the parameters may be read and changed behind [`join_spread`](Self::join_spread).
    pub(crate) fn spread_parameters<M: Module>(
        &self,
        module: M,
        ids: &HashSet<ParamId>,
        owners: &HashMap<ParamId, usize>,
    ) -> Result<M, DistributedError> {
        let Some(others) = &self.others else { return Ok(module) };
        let owned = flat::Values::some_of(&module, ids)
            .floats
            .into_iter()
            .filter_map(|(id, value)| Some((id, (value, *owners.get(&id)?))));
        let (ids, values): (Vec<ParamId>, Vec<_>) = owned.unzip();
        let values = self.moved(others, others.engine.spread_beside(values))?;
        // Its own are what they were.
        let new = |(id, _): &(ParamId, Tensor<1>)| owners.get(id) != Some(&self.rank());
        let floats = ids.into_iter().zip(values).filter(new).collect();
        Ok(module.map(&mut flat::Replacement { floats, ..flat::Replacement::default() }))
    }

    /// Has the device wait for all parameters that come.
    pub(crate) fn join_spread(&self) -> Result<(), DistributedError> {
        let Some(others) = &self.others else { return Ok(()) };
        self.moved(others, others.engine.join())
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

    fn moves_as_it_is(&self, dtype: DType) -> bool {
        match self.wire {
            Wire::AsTheyAre => true,
            Wire::F32 => dtype == DType::F32,
            Wire::Bf16 => dtype == DType::BF16,
        }
    }

    fn on_wire(&self, gradient: Tensor<1>) -> Tensor<1> {
        match self.wire {
            _ if self.moves_as_it_is(gradient.dtype()) => gradient,
            Wire::Bf16 => gradient.cast(FloatDType::BF16),
            _ => gradient.cast(FloatDType::F32),
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

fn letter(dtype: DType) -> char {
    match dtype {
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

//! What ranks do with a model's parameters and gradients.

use super::{Group, Others, Wire};
use crate::{engine::EngineError, error::DistributedError, fingerprint, flat};
use burn::{
    module::{Module, ParamId},
    optim::GradientsParams,
    tensor::{DType, FloatDType, Tensor, TensorData},
};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

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

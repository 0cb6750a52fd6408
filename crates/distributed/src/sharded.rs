//! Optimizer states split over the ranks.

use crate::{
    error::DistributedError,
    flat,
    group::{GradientSums, Group, How},
};
use burn::{
    module::{Module, ParamId},
    optim::{GradientsParams, ModuleOptimizer},
    store::RecordError,
    tensor::{Bytes, Tensor},
};
use burn_pack::{Reader, Writer};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fmt,
};

/// An optimizer each of whose parameters is updated by one rank alone, its owner, which tells the others.
///
/// A rank keeps the states of its own parameters: for AdamW in f32, 8 bytes for a parameter become 8 / N on each
/// of N ranks. Updates by the same gradients are those of the optimizer on one rank, bit for bit, unless it rounds by
/// chance. A norm of all gradients is added up by owners, and so rounded otherwise: what is clipped by it may differ in the
/// last bits.
///
/// Gradients come to their owners alone, which is half the way of a sum for all, and parameters go to all. Owners
/// update them in buckets, and one bucket is on its way while the next one is updated.
///
/// Parameters are not cut: the ranks' shares differ by at most the largest one.
///
/// Source: Rajbhandari et al., "`ZeRO`: Memory Optimizations Toward Training Trillion Parameter Models",
/// arXiv:1910.02054, stage 1.
pub struct Sharded {
    group: Group,
    optimizer: ModuleOptimizer,
    owners: HashMap<ParamId, usize>,
    /// Parameters that move together, in the order in which they do.
    buckets: Vec<HashSet<ParamId>>,
}

/// Elements of each rank that a bucket has at least, but for the last one: few buckets for the host, and enough numbers
/// for the links' bandwidth.
const BUCKET: usize = 24 << 20;

impl fmt::Debug for Sharded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sharded").field("group", &self.group).finish_non_exhaustive()
    }
}

impl Group {
    /// Splits the states of `optimizer`, which is new or has the whole state, over the ranks. `module` is the one
    /// that it will update, [broadcast](Self::broadcast) before.
    ///
    /// A rank's share is loaded where the optimizer loads states: those of Burn on `Device::default()`, which a process
    /// for another GPU should not use. `blackburn::train::optim::OnDevice` has them load elsewhere, and the toolkit's
    /// optimizers do so.
    ///
    /// # Errors
    ///
    /// When the state cannot be written and read.
    pub fn sharded<M: Module>(
        &self,
        optimizer: ModuleOptimizer,
        module: &M,
    ) -> Result<Sharded, DistributedError> {
        self.sharded_in(BUCKET, optimizer, module)
    }

    /// As [`sharded`](Self::sharded), in buckets of so many elements of each rank.
    pub(crate) fn sharded_in<M: Module>(
        &self,
        bucket_size: usize,
        optimizer: ModuleOptimizer,
        module: &M,
    ) -> Result<Sharded, DistributedError> {
        let mut parameters: Vec<(ParamId, usize)> =
            flat::parameters(module).into_iter().map(|(id, elements, _)| (id, elements)).collect();
        // The largest first, each to the rank that has least: a stable sort, so that all ranks agree.
        parameters.sort_by_key(|(_, elements)| std::cmp::Reverse(*elements));
        let mut loads = vec![0; self.size()];
        let mut owners = HashMap::new();
        let mut buckets: Vec<HashSet<ParamId>> = Vec::new();
        for (id, elements) in parameters {
            let least = (0..loads.len()).min_by_key(|rank| loads[*rank]).unwrap_or(0);
            let bucket = loads[least] / bucket_size;
            loads[least] += elements;
            owners.insert(id, least);
            if buckets.len() <= bucket {
                buckets.resize_with(bucket + 1, HashSet::new);
            }
            buckets[bucket].insert(id);
        }
        buckets.retain(|bucket| !bucket.is_empty());
        let sharded = Sharded { group: self.clone(), optimizer, owners, buckets };
        match self.size() {
            1 => Ok(sharded),
            _ => sharded.reduced(),
        }
    }
}

impl Sharded {
    /// Whether this rank updates the parameter.
    pub fn owns(&self, id: ParamId) -> bool {
        self.owners.get(&id) == Some(&self.group.rank())
    }

    #[cfg(test)]
    pub(crate) fn buckets(&self) -> usize {
        self.buckets.len()
    }

    /// As [`Group::sums`], each gradient's on its owner alone.
    ///
    /// # Errors
    ///
    /// As `Group::sums`.
    pub fn sums<M: Module>(
        &self,
        module: &M,
        gradients: GradientsParams,
        extras: Vec<Tensor<1>>,
        weight: f64,
    ) -> Result<GradientSums, DistributedError> {
        let how = How { in_place: false, owners: Some(&self.owners), progress: None };
        self.group.sums_for(module, gradients, extras, weight, how)
    }

    /// As [`Group::sums_in_place`], each gradient's on its owner alone.
    ///
    /// # Errors
    ///
    /// As `Group::sums`.
    pub fn sums_in_place<M: Module>(
        &self,
        module: &M,
        gradients: GradientsParams,
        extras: Vec<Tensor<1>>,
        weight: f64,
    ) -> Result<GradientSums, DistributedError> {
        let how = How { in_place: true, owners: Some(&self.owners), progress: None };
        self.group.sums_for(module, gradients, extras, weight, how)
    }

    /// Updates `module`, on each rank by the gradients of its own parameters. Those of others may be there, and are
    /// ignored: what [`sums`](Self::sums) or [`Group::mean`] gives, clipped or not.
    ///
    /// # Errors
    ///
    /// When a rank has failed. The module is lost then.
    pub fn step<M: Module>(
        &mut self,
        learning_rate: f64,
        mut module: M,
        gradients: GradientsParams,
    ) -> Result<M, DistributedError> {
        if self.group.size() == 1 {
            return Ok(self.optimizer.step(learning_rate, module, gradients));
        }
        let mut own = flat::take(&module, gradients);
        own.retain(|id, _| self.owns(*id));
        for bucket in &self.buckets {
            let gradients: HashMap<ParamId, Tensor<1>> =
                bucket.iter().filter_map(|id| own.remove_entry(id)).collect();
            if !gradients.is_empty() {
                let gradients = flat::give(&module, gradients);
                module = self.optimizer.step(learning_rate, module, gradients);
            }
            module = self.group.spread_parameters(module, bucket, &self.owners)?;
        }
        self.group.join_spread()?;
        Ok(module)
    }

    /// The whole state as one ordinary record of the optimizer's, on all ranks. All ranks call it.
    ///
    /// # Errors
    ///
    /// When the state cannot be written, or a rank has failed.
    pub fn to_bytes(&self) -> Result<Bytes, DistributedError> {
        let own = self.optimizer.into_bytes().map_err(|error| self.wrong(&error))?;
        if self.group.size() == 1 {
            return Ok(own);
        }
        let parts = self.group.gather_bytes(own.to_vec())?;
        joined(parts).map_err(|error| self.wrong(&error))
    }

    /// Takes this rank's share of the whole state.
    ///
    /// # Errors
    ///
    /// When it is not a state of such an optimizer.
    pub fn from_bytes(mut self, bytes: Bytes) -> Result<Self, DistributedError> {
        let own = self.own_part(bytes)?;
        let optimizer = self.optimizer.clone().from_bytes(own);
        self.optimizer = optimizer.map_err(|error| self.wrong(&error))?;
        Ok(self)
    }

    /// Drops the states of parameters that other ranks own.
    fn reduced(self) -> Result<Self, DistributedError> {
        let bytes = self.optimizer.into_bytes().map_err(|error| self.wrong(&error))?;
        self.from_bytes(bytes)
    }

    fn own_part(&self, bytes: Bytes) -> Result<Bytes, DistributedError> {
        let is_own = |id: u64| self.owns(ParamId::from(id));
        selected(bytes, is_own).map_err(|error| self.wrong(&error))
    }

    fn wrong(&self, error: &dyn fmt::Display) -> DistributedError {
        DistributedError::State { size: self.group.size(), reason: error.to_string() }
    }
}

/// The entries of one record whose parameters `keeps`. Names of scalars begin with the parameter's identity and
/// a dot, and keys of paths are identities.
fn selected(bytes: Bytes, keeps: impl Fn(u64) -> bool) -> Result<Bytes, RecordError> {
    let reader = Reader::from_bytes(bytes)?;
    let is_kept = |name: &str| {
        let id = name.split('.').next().and_then(|id| id.parse().ok());
        id.is_none_or(&keeps)
    };
    let scalars: BTreeMap<_, _> =
        reader.scalars().clone().into_iter().filter(|(name, _)| is_kept(name)).collect();
    let paths: BTreeMap<_, _> =
        reader.metadata().clone().into_iter().filter(|(name, _)| is_kept(name)).collect();
    let mut tensors = Vec::new();
    for tensor in reader.into_tensors()? {
        let (name, dtype, shape, id, bytes) = tensor.into_parts()?;
        if id.is_none_or(&keeps) {
            tensors.push(burn_pack::Tensor::new(name, dtype, shape, id, bytes));
        }
    }
    written(tensors, scalars, paths)
}

/// One record of several with different parameters.
fn joined(parts: Vec<Vec<u8>>) -> Result<Bytes, RecordError> {
    let (mut tensors, mut scalars, mut paths) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
    for part in parts {
        let reader = Reader::from_bytes(Bytes::from_bytes_vec(part))?;
        scalars.extend(reader.scalars().clone());
        paths.extend(reader.metadata().clone());
        tensors.extend(reader.into_tensors()?);
    }
    written(tensors, scalars, paths)
}

fn written(
    tensors: Vec<burn_pack::Tensor>,
    scalars: BTreeMap<String, burn_pack::Scalar>,
    paths: BTreeMap<String, String>,
) -> Result<Bytes, RecordError> {
    let mut writer = Writer::new(tensors);
    for (name, scalar) in scalars {
        writer = writer.with_scalar(&name, scalar);
    }
    for (key, path) in paths {
        writer = writer.with_metadata(&key, &path);
    }
    Ok(writer.into_bytes()?)
}

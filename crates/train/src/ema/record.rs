//! An average in Burn's file format, burnpack.

use super::{Ema, Entry, shadow};
use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    store::RecordError,
    tensor::{Bytes, DType, Tensor, TensorData, container::TensorContainer},
};
use burn_pack::{Reader, Scalar, Writer};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

const UPDATES: &str = "updates";

/// A saved [`Ema`]: the averages with their parameters' paths and identities, and the count of
/// updates. The options are not part of it.
#[derive(Clone, Debug)]
pub struct EmaRecord {
    updates: u64,
    averages: Vec<Average>,
}

#[derive(Clone, Debug)]
struct Average {
    path: String,
    id: ParamId,
    data: TensorData,
}

impl EmaRecord {
    /// The number of averages.
    pub fn len(&self) -> usize {
        self.averages.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.averages.is_empty()
    }

    /// # Errors
    ///
    /// When an average is too large for the format.
    pub fn into_bytes(self) -> Result<Bytes, RecordError> {
        Ok(self.into_writer().into_bytes()?)
    }

    /// # Errors
    ///
    /// When the bytes are not a record of an average.
    pub fn from_bytes(bytes: Bytes) -> Result<Self, RecordError> {
        Self::from_reader(Reader::from_bytes(bytes)?)
    }

    /// Writes a file. One that is there is replaced once the new one is whole and, on Unix, on the disk: a
    /// crash or a full disk leaves the old one.
    ///
    /// # Errors
    ///
    /// When an average is too large for the format, or writing fails.
    pub fn save(self, path: impl AsRef<Path>) -> Result<(), RecordError> {
        Ok(self.into_writer().overwrite(true).write_to_file(path)?)
    }

    /// # Errors
    ///
    /// When the file cannot be read or is not a record of an average.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, RecordError> {
        Self::from_reader(Reader::from_file(path)?)
    }

    pub(super) fn read<M: Module>(ema: &Ema, model: &M) -> Self {
        let mut collector = Collector { ema, averages: vec![], seen: BTreeSet::new() };
        model.visit(&mut collector);
        Self { updates: ema.updates, averages: collector.averages }
    }

    /// The count of updates, and the averages by their parameters' identities.
    pub(super) fn into_parts(
        self,
    ) -> (u64, BTreeMap<ParamId, Entry>, BTreeMap<ParamId, TensorData>) {
        let mut entries = BTreeMap::new();
        let mut data = BTreeMap::new();
        for average in self.averages {
            let entry = Entry { path: average.path, shape: average.data.shape().clone() };
            entries.insert(average.id, entry);
            data.insert(average.id, average.data);
        }
        (self.updates, entries, data)
    }

    fn into_writer(self) -> Writer {
        let tensors = self
            .averages
            .into_iter()
            .map(|Average { path, id, data }| {
                let (bytes, shape, dtype) = data.into_parts();
                burn_pack::Tensor::new(path, dtype, shape, Some(id.val()), bytes)
            })
            .collect();
        Writer::new(tensors).with_scalar(UPDATES, Scalar::from(self.updates))
    }

    fn from_reader(reader: Reader) -> Result<Self, RecordError> {
        let invalid = |what: &str, actual: String| {
            RecordError::Validation(format!("EmaRecord: expected {what}, got {actual}"))
        };
        let updates = reader.scalars().get(UPDATES).copied();
        let updates = updates.and_then(|count| u64::try_from(count).ok()).ok_or_else(|| {
            invalid("a count of updates, as the record of an average has it", "none".into())
        })?;
        let mut averages = Vec::new();
        for tensor in reader.into_tensors()? {
            let (path, dtype, shape, id, bytes) = tensor.into_parts()?;
            let Some(id) = id else {
                return Err(invalid("a parameter's identity", format!("none for `{path}`")));
            };
            if !matches!(dtype, DType::F32 | DType::F64) {
                return Err(invalid("averages in f32 or f64", format!("{dtype:?} for `{path}`")));
            }
            let data = TensorData::from_bytes(bytes, shape, dtype);
            averages.push(Average { path, id: ParamId::from(id), data });
        }
        Ok(Self { updates, averages })
    }
}

struct Collector<'a> {
    ema: &'a Ema,
    averages: Vec<Average>,
    /// A parameter in two places of a model is saved once.
    seen: BTreeSet<ParamId>,
}

impl ModuleVisitor for Collector<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(entry) = self.ema.entries.get(&param.id) else { return };
        let Some(average) = self.ema.shadows.get::<Tensor<D>>(&param.id) else { return };
        if self.seen.insert(param.id) {
            let path = entry.path.clone();
            self.averages.push(Average { path, id: param.id, data: average.into_data() });
        }
    }
}

/// Puts the averages onto the devices of their parameters.
pub(super) struct Loader<'a> {
    pub(super) shadows: &'a mut TensorContainer<ParamId>,
    pub(super) data: BTreeMap<ParamId, TensorData>,
}

impl ModuleVisitor for Loader<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(data) = self.data.remove(&param.id) else { return };
        let device = param.lazy_device().without_autodiff();
        // In the type that updates are made in, which a changed parameter may have changed.
        let dtype = shadow(param).dtype();
        self.shadows.register(param.id, Tensor::<D>::from_data(data, (&device, dtype)));
    }
}

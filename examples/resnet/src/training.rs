//! A network that learns: the step, and all that has to be saved of it.

use crate::{
    data::loader::Batch, evaluation::tensors, model::ResNet, settings::RunSettings,
    weights::Weights,
};
use anyhow::{Context, Result};
use blackburn::train::{
    accumulate::GradientSum,
    checkpoint::Checkpoint,
    ema::{Ema, EmaRecord},
    precision::{PrecisionPolicy, full_precision},
    scaler::{GradScaler, ScalerState},
};
use burn::{
    module::Module,
    nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig},
    optim::{GradientsParams, ModuleOptimizer},
    store::ModuleRecord,
    tensor::{Bytes, Device, Tensor},
};

const MODEL: &str = "model.bpk";
const OPTIMIZER: &str = "optimizer.bpk";
const AVERAGE: &str = "average.bpk";

/// A network, and what its training has come to.
pub(crate) struct Training {
    /// There but while the optimizer has it.
    model: Option<ResNet>,
    optimizer: ModuleOptimizer,
    scaler: GradScaler,
    average: Option<Ema>,
    policy: PrecisionPolicy,
    criterion: CrossEntropyLoss,
    /// With automatic differentiation.
    device: Device,
    clip: f64,
}

impl Training {
    /// A network with random parameters, or with those of a file.
    pub(crate) fn new(
        settings: &RunSettings,
        weights: Option<(&Weights, bool)>,
        device: &Device,
    ) -> Result<Self> {
        device.seed(settings.seed);
        let model = ResNet::new(&settings.model, &device.clone().autodiff());
        let model = match weights {
            Some((weights, new_head)) => weights.load(model, &settings.model, new_head)?,
            None => model,
        };
        let model = settings.policy().apply(model)?;
        let average = settings.ema().map(|ema| ema.init(&model)).transpose()?;
        Self::of(settings, model, average, device)
    }

    fn of(
        settings: &RunSettings,
        model: ResNet,
        average: Option<Ema>,
        device: &Device,
    ) -> Result<Self> {
        let device = device.clone().autodiff();
        let scaler = settings.scaler(&device)?;
        let smoothing = settings.label_smoothing;
        let smoothing = (smoothing > 0.0).then_some(smoothing);
        Ok(Self {
            optimizer: settings.groups().init_gated(&model, &device, scaler.gate()),
            model: Some(model),
            scaler,
            average,
            policy: settings.policy(),
            criterion: CrossEntropyLossConfig::new().with_smoothing(smoothing).init(&device),
            device,
            clip: settings.clip.unwrap_or(f64::INFINITY),
        })
    }

    fn model(&self) -> &ResNet {
        match &self.model {
            Some(model) => model,
            None => unreachable!("the step that took the model has panicked"),
        }
    }

    /// One optimizer step: the mean gradient of all batches. Returns the mean loss and the gradients' norm, still
    /// on the device.
    pub(crate) fn step(
        &mut self,
        batches: Vec<Batch>,
        learning_rate: f64,
    ) -> Result<(Tensor<1>, Tensor<1>)> {
        let model = self.model.take().context("an earlier step failed")?;
        let mut gradients = GradientSum::new();
        let mut losses = Vec::new();
        for batch in batches {
            let rows = batch.rows() as f64;
            let (images, classes) = tensors(batch, &self.policy, &self.device);
            let logits = full_precision(model.forward(images));
            let loss = self.criterion.forward(logits, classes);
            losses.push(loss.clone().inner());
            let backward = self.scaler.scale(loss).backward();
            gradients.add(&model, GradientsParams::from_grads(backward, &model), rows);
        }
        let gradients = gradients.mean(&model).context("a step needs at least one image")?;
        let norm = self.scaler.unscale_and_clip_in_step(&gradients, &model, self.clip)?;
        let model = self.optimizer.step(learning_rate, model, gradients);
        self.scaler.update()?;
        if let Some(average) = &mut self.average {
            average.update(&model)?;
        }
        self.model = Some(model);
        // Hand the step over to the device now, and go on preparing the next one.
        self.device.flush().context("the device failed")?;
        Ok((Tensor::cat(losses, 0).mean(), norm))
    }

    /// Whether weights are averaged.
    pub(crate) fn is_averaged(&self) -> bool {
        self.average.is_some()
    }

    /// The network to tell images apart with: of averaged weights where there are some.
    pub(crate) fn to_read(&self) -> Result<ResNet> {
        // The norms' running statistics are up to date only after `valid`.
        let model = self.model().valid();
        let model = match &self.average {
            Some(average) => average.apply(model)?,
            None => model,
        };
        Ok(model.materialize())
    }

    /// Where the scaling of losses has come to, if they are scaled.
    pub(crate) fn scaler(&self) -> Option<ScalerState> {
        self.scaler.is_enabled().then(|| self.scaler.state())
    }

    /// The files of a checkpoint.
    pub(crate) fn to_files(&self) -> Result<Vec<(&'static str, Vec<u8>)>> {
        let model = self.model();
        // Burn's norms hold back the last update of their running statistics, and a record would lack it.
        // Going to inference makes it, for all clones.
        drop(model.valid());
        let record = model.clone().into_record().into_bytes()?;
        let mut files =
            vec![(MODEL, record.to_vec()), (OPTIMIZER, self.optimizer.into_bytes()?.to_vec())];
        if let Some(average) = &self.average {
            files.push((AVERAGE, average.to_record(model)?.into_bytes()?.to_vec()));
        }
        Ok(files)
    }

    /// What a checkpoint holds, to go on with.
    pub(crate) fn load<S>(
        settings: &RunSettings,
        scaler: Option<ScalerState>,
        checkpoint: &Checkpoint<S>,
        device: &Device,
    ) -> Result<Self> {
        let model = load_model(settings, checkpoint, &device.clone().autodiff())?;
        let average = load_average(settings, checkpoint, &model)?;
        let mut training = Self::of(settings, model, average, device)?;
        let optimizer = Bytes::from_bytes_vec(checkpoint.file(OPTIMIZER)?);
        training.optimizer = training
            .optimizer
            .from_bytes(optimizer)
            .with_context(|| format!("{OPTIMIZER} is no record of Burn's"))?;
        if let Some(state) = scaler {
            training.scaler.restore(state).context("the saved loss scaler does not fit")?;
        }
        Ok(training)
    }
}

/// The network of a checkpoint to tell images apart with, of averaged weights unless `raw`. On a device without
/// automatic differentiation.
pub(crate) fn load_to_read<S>(
    settings: &RunSettings,
    checkpoint: &Checkpoint<S>,
    raw: bool,
    device: &Device,
) -> Result<ResNet> {
    let model = load_model(settings, checkpoint, device)?;
    let average = if raw { None } else { load_average(settings, checkpoint, &model)? };
    let model = match average {
        Some(average) => average.apply(model)?,
        None => model,
    };
    Ok(model.valid().materialize())
}

fn load_model<S>(
    settings: &RunSettings,
    checkpoint: &Checkpoint<S>,
    device: &Device,
) -> Result<ResNet> {
    let record = ModuleRecord::from_bytes(Bytes::from_bytes_vec(checkpoint.file(MODEL)?))
        .with_context(|| format!("{MODEL} is no record of Burn's"))?;
    let model = settings.policy().apply(ResNet::new(&settings.model, device))?;
    model.try_load_record(record).with_context(|| {
        format!("{MODEL} is of another network than its settings say: {:?}", settings.model)
    })
}

fn load_average<S>(
    settings: &RunSettings,
    checkpoint: &Checkpoint<S>,
    model: &ResNet,
) -> Result<Option<Ema>> {
    let Some(config) = settings.ema() else { return Ok(None) };
    let record = EmaRecord::from_bytes(Bytes::from_bytes_vec(checkpoint.file(AVERAGE)?))?;
    Ok(Some(config.restore(record, model)?))
}

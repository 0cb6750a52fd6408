//! Losses and their gradient by one pass, against the reference, and in whose memory.

use super::{Case, IGNORED, SIZES};
use blackburn_kernels::{
    buffer::Buffer,
    cross_entropy::{
        CrossEntropyAtOnce, CrossEntropyProblem, Reduction, cross_entropy_at_once,
        cross_entropy_rescale,
    },
};
use blackburn_reference::{storage::Storage, tolerance::compare};
use blackburn_tests::{
    buffers::{download, dtype, upload},
    on_device_with,
};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

pub(super) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let mut add = |what: &str, test: fn(&Client, Storage) -> Result<(), Failed>| {
            let name = format!("cross_entropy::at_once_{what}_in_{storage:?}").to_lowercase();
            trials.push(Trial::ignorable_test(name, move || {
                on_device_with(dtype(storage), |client| test(client, storage))
            }));
        };
        add("both_are_within_bounds", each_size);
        add("memory_that_is_held_stays", held);
        add("the_gradient_takes_a_factor", rescaled);
        add("a_gradient_of_another_factor_is_caught", planted_fault);
    }
    trials
}

impl Case {
    fn at_once(
        &self,
        client: &Client,
        reduction: Reduction,
        logits: Buffer,
    ) -> Result<CrossEntropyAtOnce, Failed> {
        let targets = self.upload_targets(client);
        Ok(cross_entropy_at_once(client, &self.problem, reduction, logits, &targets)?)
    }

    /// What a row's gradient is multiplied by.
    fn factor(&self, reduction: Reduction) -> f64 {
        let ignored = self.problem.ignore_index;
        let counted = self.targets.iter().filter(|target| ignored != Some(**target)).count();
        if reduction == Reduction::Mean { 1.0 / counted.max(1) as f64 } else { 1.0 }
    }

    fn check_factor(&self, client: &Client, dlogits: Buffer, factor: f64) -> Result<(), Failed> {
        let dlogits = download(client, dlogits, self.storage)?;
        let grads = vec![factor; self.problem.rows];
        Ok(self.check_gradient(&dlogits, &grads, self.steps(client))?)
    }
}

fn each_size(client: &Client, storage: Storage) -> Result<(), Failed> {
    let apart = [(3, 9, 16), (7, 50, 53), (5, 4097, 4104)];
    let dense = SIZES.map(|(rows, classes)| (rows, classes, classes));
    for (rows, classes, row_stride) in dense.into_iter().chain(apart) {
        for smoothing in [0.0, 0.1] {
            let case = Case::new(rows, classes, smoothing, storage);
            let problem = CrossEntropyProblem { row_stride, ..case.problem };
            let case = Case { problem, ..case };
            for reduction in [Reduction::Mean, Reduction::Sum] {
                let both = case.at_once(client, reduction, case.upload(client))?;
                let factor = case.factor(reduction);
                case.check_factor(client, both.dlogits, factor).map_err(|error| {
                    let error = error.message().unwrap_or_default();
                    format!("{rows} by {classes}, {smoothing}, {reduction:?}: {error}")
                })?;
                if case.targets.iter().all(|target| *target == IGNORED) {
                    continue;
                }
                let (mut sum, mut bound) = (0.0, 0.0);
                for (asked, logits) in (0..rows).map(|row| case.row(row)) {
                    sum += asked.loss(logits);
                    bound += asked.loss_bound(logits, case.steps(client));
                }
                bound += (rows as f64 + 5.0) * Storage::F32.unit_roundoff() * (sum + bound);
                let loss = download(client, both.loss, Storage::F32)?;
                compare(&loss, &[sum * factor], &[bound * factor])?;
            }
        }
    }
    Ok(())
}

/// In place where nobody else holds the logits, and nowhere else.
fn held(client: &Client, storage: Storage) -> Result<(), Failed> {
    let case = Case::new(7, 1001, 0.0, storage);
    let logits = case.upload(client);
    let id = |buffer: &Buffer| buffer.handle.memory.descriptor().id.value;
    let both = case.at_once(client, Reduction::Sum, logits.clone())?;
    if id(&both.dlogits) == id(&logits) {
        return Err("the gradient is where logits are that somebody holds".into());
    }
    case.check_factor(client, both.dlogits, 1.0)?;
    if download(client, logits.clone(), storage)? != case.logits {
        return Err("logits that were held have changed".into());
    }
    let before = id(&logits);
    if id(&case.at_once(client, Reduction::Sum, logits)?.dlogits) != before {
        return Err("memory that nobody holds was not used again".into());
    }
    Ok(())
}

/// By 1, which leaves every bit, and by powers of two, which round nothing anew.
fn rescaled(client: &Client, storage: Storage) -> Result<(), Failed> {
    for (rows, classes) in [(5, 64), (3, 1001)] {
        let case = Case::new(rows, classes, 0.1, storage);
        let made =
            || Ok::<_, Failed>(case.at_once(client, Reduction::Sum, case.upload(client))?.dlogits);
        let first = download(client, made()?, storage)?;
        let by = |factor: f64| -> Result<_, Failed> {
            let grad = upload(client, &[factor], Storage::F32);
            Ok(cross_entropy_rescale(client, &case.problem, made()?, &grad)?)
        };
        if download(client, by(1.0)?, storage)? != first {
            return Err("a gradient times 1 has changed".into());
        }
        case.check_factor(client, by(-0.5)?, -0.5)?;
    }
    Ok(())
}

/// The negative control.
fn planted_fault(client: &Client, storage: Storage) -> Result<(), Failed> {
    let case = Case::new(6, 100, 0.0, storage);
    let both = case.at_once(client, Reduction::Mean, case.upload(client))?;
    match case.check_factor(client, both.dlogits, 1.0) {
        Err(_) => Ok(()),
        Ok(()) => Err("the gradient of the sum was taken for that of the mean".into()),
    }
}

//! The fastest correct plans of matrix products, by measurement.

use crate::{buffers::dtype, check::Stop, groups::dtype_name, target::Target};
use blackburn_kernels::{
    DeviceProfile, Family,
    buffer::Buffer,
    matmul::{
        Epilogue, F32Precision, MatmulBlueprint, MatmulProblem, matmul_with, variants::product,
    },
};
use blackburn_reference::storage::Storage;
use cubecl::future::block_on;
use serde::{Deserialize, Serialize};
use std::{
    fmt,
    num::NonZero,
    str::FromStr,
    time::{Duration, Instant},
};

/// A linear layer: rows of its input, which are batch times tokens, and its features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Rows of its input.
    pub rows: usize,
    /// Features of its input.
    pub inputs: usize,
    /// Features of its output.
    pub outputs: usize,
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}x{}", self.rows, self.inputs, self.outputs)
    }
}

impl FromStr for Layer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let sizes: Result<Vec<NonZero<u32>>, _> = text.split('x').map(str::parse).collect();
        match sizes.as_deref() {
            Ok([rows, inputs, outputs]) => {
                let [rows, inputs, outputs] =
                    [rows, inputs, outputs].map(|size| size.get() as usize);
                Ok(Self { rows, inputs, outputs })
            }
            _ => Err(format!(
                "`{text}` is no layer: expected ROWSxINPUTSxOUTPUTS, such as 8192x768x3072"
            )),
        }
    }
}

/// The layers of GPT-2, BERT-large and a Llama of 1.1 B, at the batches that their benches have.
pub const LAYERS: [Layer; 8] = {
    const fn layer(rows: usize, inputs: usize, outputs: usize) -> Layer {
        Layer { rows, inputs, outputs }
    }
    [
        layer(8192, 768, 768),
        layer(8192, 768, 3072),
        layer(8192, 3072, 768),
        layer(8192, 1024, 1024),
        layer(8192, 1024, 4096),
        layer(8192, 4096, 1024),
        layer(16_384, 2048, 2048),
        layer(16_384, 2048, 5632),
    ]
};

/// A layer in a type, as processes are asked for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// The layer.
    pub layer: Layer,
    /// The type of its tensors.
    pub storage: Storage,
}

impl Tuning {
    /// What it is called, as in `tune/bf16/8192x768x3072`.
    pub fn name(&self) -> String {
        format!("tune/{}/{}", dtype_name(self.storage), self.layer)
    }

    /// The one of that name.
    pub fn named(name: &str) -> Option<Self> {
        let (dtype, layer) = name.strip_prefix("tune/")?.split_once('/')?;
        let storage = Storage::ALL.into_iter().find(|storage| dtype_name(*storage) == dtype)?;
        Some(Self { layer: layer.parse().ok()?, storage })
    }
}

/// What layers are called, in each type.
pub fn names(layers: &[Layer]) -> Vec<String> {
    let of = |layer: &Layer| Storage::ALL.map(|storage| Tuning { layer: *layer, storage }.name());
    layers.iter().flat_map(of).collect()
}

/// A product whose plans were measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tuned {
    /// What its plan is kept under.
    pub kept_under: String,
    /// The fastest plan.
    pub plan: String,
    /// What it takes, in microseconds.
    pub us: f64,
    /// What the plan takes that the model would have chosen.
    pub model_us: f64,
}

/// Measures the plans of a layer's products: forward, with an epilogue that needs registers,
/// and both gradients. `begin` is told of each before it
/// begins.
///
/// # Errors
///
/// A plan that gives other numbers than ordinary arithmetic, or that fails; a type that no tensor core multiplies.
pub fn tune(on: &Target, tuning: Tuning, mut begin: impl FnMut(usize)) -> Result<Vec<Tuned>, Stop> {
    let Tuning { layer: Layer { rows, inputs, outputs }, storage } = tuning;
    // Epilogues that need registers, such as GELU, have fewer plans. This one is exact.
    let kept = Epilogue { keep_preactivation: true, ..Epilogue::default() };
    let plain = Epilogue::default;
    let products = [
        ([rows, outputs, inputs], [true, false], plain()),
        ([rows, outputs, inputs], [true, false], kept),
        ([rows, inputs, outputs], [true, true], plain()),
        ([inputs, outputs, rows], [false, false], plain()),
    ];
    let mut all = Vec::new();
    for (index, (sizes, k_major, epilogue)) in products.into_iter().enumerate() {
        begin(index);
        let element = dtype(storage);
        let problem = product(sizes, [element; 2], k_major, F32Precision::Tf32)?;
        all.push(fastest(on, &problem, &epilogue, storage)?);
    }
    Ok(all)
}

fn fastest(
    on: &Target,
    problem: &MatmulProblem,
    epilogue: &Epilogue,
    storage: Storage,
) -> Result<Tuned, Stop> {
    let device = DeviceProfile::of(&on.client);
    let plans = MatmulBlueprint::shortlist(problem, epilogue, device);
    let lhs = operand(on, problem.lhs_span(), storage, 1);
    let rhs = operand(on, problem.rhs_span(), storage, 2);
    let run = |plan: &MatmulBlueprint| -> Result<Buffer, Stop> {
        Ok(matmul_with(&on.client, problem, plan, &lhs, &rhs, epilogue)?.out)
    };
    let ordinary = MatmulBlueprint::candidates(problem, &on.client)
        .into_iter()
        .rfind(|plan| plan.family == Family::Portable)
        .ok_or("ordinary arithmetic has no plan")?;
    let expected = samples(on, &run(&ordinary)?)?;
    let mut best: Option<(f64, MatmulBlueprint)> = None;
    let mut model_us = f64::INFINITY;
    for (rank, plan) in plans.iter().enumerate() {
        if samples(on, &run(plan)?)? != expected {
            return Err(format!(
                "{plan} gives other numbers than ordinary arithmetic: {problem:?}"
            )
            .into());
        }
        let us = time(on, || run(plan).map(drop))?;
        if rank == 0 {
            model_us = us;
        }
        if best.is_none_or(|(least, _)| us < least) {
            best = Some((us, *plan));
        }
    }
    let (us, plan) = best.ok_or("no plan serves the product")?;
    let kept_under = MatmulBlueprint::kept_under(problem, epilogue, device);
    Ok(Tuned { kept_under, plan: plan.to_string(), us, model_us })
}

/// Numbers from -1 to 1, whole ones: sums of any number of their products are exact.
fn operand(on: &Target, elements: usize, storage: Storage, seed: u64) -> Buffer {
    /// A prime: rows of no matrix repeat each other.
    const PERIOD: usize = 100_003;
    let mut state = seed;
    let mut draw = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % 3) as f64 - 1.0
    };
    let values: Vec<f64> = (0..PERIOD.min(elements)).map(|_| draw()).collect();
    let period = storage.encode(&values);
    let bytes: Vec<u8> = period.iter().copied().cycle().take(elements * storage.bytes()).collect();
    Buffer { handle: on.client.create_from_slice(&bytes), elements, dtype: dtype(storage) }
}

/// Bytes from the beginning, the middle and the end of a result.
fn samples(on: &Target, result: &Buffer) -> Result<Vec<u8>, Stop> {
    const MOST: usize = 1 << 18;
    let bytes = result.elements * result.dtype.size();
    let length = MOST.min(bytes);
    let mut all = Vec::with_capacity(3 * length);
    for start in [0, (bytes - length) / 2, bytes - length] {
        // Elements stay whole.
        let start = start - start % result.dtype.size();
        let handle = result.handle.clone().offset_start(start as u64);
        let handle = handle.offset_end((bytes - length - start) as u64);
        let read = on.client.read_one(handle).map_err(|error| Stop::Wrong(error.to_string()))?;
        all.extend_from_slice(&read);
    }
    Ok(all)
}

/// The median of a few rounds, in microseconds.
fn time(on: &Target, launch: impl Fn() -> Result<(), Stop>) -> Result<f64, Stop> {
    const ROUNDS: usize = 5;
    /// So long a round is, at least: the wait at its end is a small part of it.
    const ROUND: Duration = Duration::from_millis(4);
    const MOST: u32 = 500;
    let round = |launches: u32| -> Result<Duration, Stop> {
        let wait = || block_on(on.client.sync()).map_err(|error| Stop::Wrong(error.to_string()));
        wait()?;
        let began = Instant::now();
        (0..launches).try_for_each(|_| launch())?;
        wait()?;
        Ok(began.elapsed())
    };
    round(2)?;
    let one = round(3)? / 3;
    let launches = (ROUND.as_nanos() / one.as_nanos().max(1)).clamp(3, MOST.into()) as u32;
    let mut times: Vec<Duration> =
        (0..ROUNDS).map(|_| round(launches)).collect::<Result<_, _>>()?;
    times.sort();
    Ok(times[ROUNDS / 2].as_secs_f64() * 1e6 / f64::from(launches))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tuning_is_found_by_its_name() {
        for storage in Storage::ALL {
            for layer in LAYERS {
                let tuning = Tuning { layer, storage };
                assert_eq!(Tuning::named(&tuning.name()), Some(tuning));
            }
        }
        assert_eq!(Tuning::named("matmul/mma/bf16"), None);
    }

    #[test]
    fn what_is_no_layer_is_told() {
        for text in ["", "8192", "8192x768", "8192x768x0", "8192x768x3072x1", "axbxc"] {
            assert!(text.parse::<Layer>().unwrap_err().contains("ROWSxINPUTSxOUTPUTS"), "{text}");
        }
    }
}

//! The fastest of a few plans, by measurement.
//!
//! The model behind [`MatmulBlueprint::plan`] knows waves and tiles but neither caches nor clocks.
//! Measured are its first few plans alone: each further one costs about a second of NVRTC when a
//! program first starts.
//!
//! CubeCL's tuner takes the measurements. It keeps them in memory and, where the program was built
//! with CubeCL's `persistence`, on disk; none of it needs Burn's feature `autotune`. The tuner is
//! asked directly and not through a `LocalTuner`: that runs the winner too, and panics if it cannot.

use super::{
    Epilogue, MatmulBlueprint, MatmulProblem,
    epilogue::EpilogueBlueprint,
    launch::{check, matmul_with},
    layout::{OperandLayout, OperandWalk},
    memo::Memo,
    problem::OP,
};
use crate::{DeviceProfile, KernelError, buffer::Buffer};
use cubecl::{
    client::Client,
    tune::{AutotuneLogContext, Tunable, TunableSet, TuneCacheResult, Tuner},
};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::LazyLock,
};

/// What the measured time depends on.
type Question = (MatmulProblem, [OperandLayout; 2], EpilogueBlueprint, DeviceProfile);

/// Results of the tuner by what is at hand at a launch: its own keys take an allocation.
static CHOSEN: LazyLock<Memo<Question, MatmulBlueprint>> = LazyLock::new(|| Memo::new(1024));

/// One for all devices: what tells them apart is in its keys, and devices of a kind share results.
static TUNER: LazyLock<Tuner<String>> =
    LazyLock::new(|| Tuner::new(concat!("blackburn-matmul-", env!("CARGO_PKG_VERSION")), "any"));

impl MatmulBlueprint {
    /// The plan that is fastest among the few that are expected to be, measured now or earlier, and
    /// that of [`plan`](Self::plan) where measuring fails or another thread is at it. Operands are
    /// read only, and what is computed of them is thrown away.
    ///
    /// # Errors
    ///
    /// As [`matmul`](super::matmul).
    pub fn tuned(
        problem: &MatmulProblem,
        epilogue: &Epilogue,
        client: &Client,
        lhs: &Buffer,
        rhs: &Buffer,
    ) -> Result<Self, KernelError> {
        check(OP, problem, lhs, rhs, epilogue)?;
        let operands = [lhs, rhs];
        let device = DeviceProfile::of(client);
        let question = (*problem, layouts(problem, operands), epilogue.blueprint(), device);
        if let Some(plan) = CHOSEN.get(&question) {
            return Ok(plan);
        }
        let plans = Self::shortlist(problem, epilogue, device);
        let plan = match fastest(client, problem, &plans, operands, epilogue) {
            Answer::Fastest(plan) => plan,
            // The next launch asks again.
            Answer::Pending => return Self::plan_on(problem, epilogue, device),
            // It would only fail again, at the same cost.
            Answer::Failed => Self::plan_on(problem, epilogue, device)?,
        };
        CHOSEN.insert(question, plan);
        Ok(plan)
    }

    /// As [`tuned`](Self::tuned), among `plans`. Those that fail are passed over; where all do, it
    /// is the first, whose launch then says why. `None` where the tuner itself fails, and while
    /// another thread measures the same.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] as [`matmul`](super::matmul).
    pub fn fastest_of(
        plans: &[Self],
        problem: &MatmulProblem,
        epilogue: &Epilogue,
        client: &Client,
        lhs: &Buffer,
        rhs: &Buffer,
    ) -> Result<Option<Self>, KernelError> {
        check(OP, problem, lhs, rhs, epilogue)?;
        Ok(match fastest(client, problem, plans, [lhs, rhs], epilogue) {
            Answer::Fastest(plan) => Some(plan),
            Answer::Pending | Answer::Failed => None,
        })
    }
}

enum Answer {
    Fastest(MatmulBlueprint),
    /// Another thread is measuring.
    Pending,
    Failed,
}

/// What every plan is run with. It owns what it needs, because plans are run on the device's thread.
#[derive(Clone)]
struct Call {
    client: Client,
    problem: MatmulProblem,
    lhs: Buffer,
    rhs: Buffer,
    epilogue: Epilogue,
}

impl Call {
    fn run(&self, plan: &MatmulBlueprint) -> Result<(), String> {
        let Self { client, problem, lhs, rhs, epilogue } = self;
        matmul_with(client, problem, plan, lhs, rhs, epilogue)
            .map(drop)
            .map_err(|error| error.to_string())
    }
}

fn fastest(
    client: &Client,
    problem: &MatmulProblem,
    plans: &[MatmulBlueprint],
    operands: [&Buffer; 2],
    epilogue: &Epilogue,
) -> Answer {
    match plans {
        [] => return Answer::Failed,
        [only] => return Answer::Fastest(*only),
        _ => {}
    }
    let key = key(client, problem, plans, operands, epilogue);
    let [lhs, rhs] = operands.map(Buffer::clone);
    let call =
        Call { client: client.clone(), problem: *problem, lhs, rhs, epilogue: epilogue.clone() };
    let same_key = key.clone();
    let mut set = TunableSet::new_cloning_inputs(move |_: &Call| same_key.clone());
    for plan in plans {
        let (name, plan) = (plan.to_string(), *plan);
        let run = move |call: Call| call.run(&plan);
        set = set.with(Tunable::<String, Call, ()>::new(&name, run));
    }
    // The tuner panics where no plan could be run, and runtimes where a compiler is broken.
    let result = catch_unwind(AssertUnwindSafe(|| {
        let log = AutotuneLogContext::new(&mut TUNER.logger().lock());
        TUNER.check_tune(&key, &call, &set, || set.compute_checksum(), client, log)
    }));
    match result {
        Ok(TuneCacheResult::Hit { fastest_index }) => {
            plans.get(fastest_index).map_or(Answer::Failed, |plan| Answer::Fastest(*plan))
        }
        Ok(TuneCacheResult::Pending) => Answer::Pending,
        Ok(TuneCacheResult::Miss | TuneCacheResult::Unchecked) | Err(_) => Answer::Failed,
    }
}

/// How tensor cores would take the operands that take as many layouts as any do.
fn layouts(problem: &MatmulProblem, [lhs, rhs]: [&Buffer; 2]) -> [OperandLayout; 2] {
    [OperandWalk::lhs(problem).layout(lhs, true), OperandWalk::rhs(problem).layout(rhs, true)]
}

/// What a result is kept under: the device, the sizes, the operands as tensor cores take them (their
/// strides do not matter beyond that), the epilogue's steps, and the plans that competed, since a
/// result is a position among them.
fn key(
    client: &Client,
    problem: &MatmulProblem,
    plans: &[MatmulBlueprint],
    operands: [&Buffer; 2],
    epilogue: &Epilogue,
) -> String {
    let properties = client.properties();
    let identity = &properties.identity;
    let MatmulProblem { batch: [outer, inner], m, n, k, out, .. } = *problem;
    let operand = |walk: OperandWalk, layout: OperandLayout| {
        let along = if layout.k_major { "along" } else { "across" };
        let copied = if layout.copied { ", copied" } else { "" };
        let [outer, inner] = walk.matrices;
        format!("{outer}x{inner} {} {along} k{copied}", walk.operand.dtype)
    };
    let [lhs, rhs] = layouts(problem, operands);
    let lhs = operand(OperandWalk::lhs(problem), lhs);
    let rhs = operand(OperandWalk::rhs(problem), rhs);
    let plans: Vec<String> = plans.iter().map(ToString::to_string).collect();
    format!(
        "{} ({}, {:?} multiprocessors): {outer}x{inner} m{m} n{n} k{k}, {lhs}, {rhs}, to {out}, \
         {:?}: {}",
        identity.name,
        identity.fingerprint,
        properties.hardware.num_streaming_multiprocessors,
        epilogue.blueprint(),
        plans.join("; "),
    )
}

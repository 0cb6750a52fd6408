//! From the blocks of the observed steps to rows.

use super::{BlockRow, Chains, Clock, KernelRow, Peaks, ServedBy, StepProfile, chain::chains};
use blackburn_backend::profile::{
    BlockRecord, LaunchRecord, OperationKind, OperationRecord, Server, traffic_bytes,
};
use std::collections::BTreeMap;

/// A profile of the kernels and operations of `steps`, whose times are without `floor`, which measuring
/// costs. The step's own time is still missing.
pub(super) fn summarize(
    steps: &[Vec<BlockRecord>],
    floor: Option<f64>,
    peaks: Option<&Peaks>,
) -> StepProfile {
    let per_step = 1.0 / steps.len().max(1) as f64;
    let time_us = |launch: &LaunchRecord| {
        launch.time.map(|time| (time.as_secs_f64() * 1e6 - floor.unwrap_or(0.0)).max(0.0))
    };
    let mut kernels: BTreeMap<(ServedBy, &str), Sums> = BTreeMap::new();
    let mut blocks: BTreeMap<Group<'_>, Sums> = BTreeMap::new();
    for block in steps.iter().flatten() {
        let Some(served_by) = ServedBy::of(block) else { continue };
        let cost = Cost::of(block, peaks);
        let times: Vec<_> = block.launches.iter().map(time_us).collect();
        let group = Group {
            operations: describe(&block.operations),
            operation_count: counted(&block.operations).count(),
            served_by,
            kernels: block.launches.iter().map(|launch| short_name(launch.kernel)).collect(),
            element_bytes: element_bytes(&block.operations),
        };
        let is_timed = times.iter().all(Option::is_some);
        let time = times.iter().copied().flatten().reduce(|a, b| a + b);
        blocks.entry(group).or_default().add(time, is_timed, cost);
        for (launch, time) in block.launches.iter().zip(times) {
            let alone = BlockRecord { operations: Vec::new(), launches: vec![launch.clone()] };
            let of = ServedBy::of(&alone).unwrap_or(ServedBy::Burn);
            // What several kernels do together is not any one's.
            let cost = if block.launches.len() == 1 { cost } else { Cost::default() };
            kernels.entry((of, short_name(launch.kernel))).or_default().add(
                time,
                time.is_some(),
                cost,
            );
        }
    }

    let launches = || steps.iter().flatten().flat_map(|block| &block.launches);
    let timed: Vec<_> = launches().filter(|launch| launch.time.is_some()).collect();
    let device_us = (!timed.is_empty())
        .then(|| timed.iter().filter_map(|launch| time_us(launch)).sum::<f64>() * per_step);
    let share = |time: Option<f64>| Some(time? / device_us.filter(|all| *all > 0.0)?);
    let mut profile = StepProfile::of_wall(String::new(), 0.0);
    profile.kernels = kernels
        .into_iter()
        .map(|((of, name), sums)| {
            let total_us = sums.time_us.map(|time| time * per_step);
            KernelRow {
                name: name.to_owned(),
                of,
                launches: sums.count as f64 * per_step,
                total_us,
                mean_us: sums.time_us.map(|time| time / sums.timed as f64),
                share: share(total_us),
                bytes: sums.bytes.map(|bytes| bytes as f64 * per_step),
                flops: sums.flops.map(|flops| flops as f64 * per_step),
                roofline: sums.roofline_where_known(),
            }
        })
        .collect();
    profile.blocks = blocks
        .into_iter()
        .map(|(group, sums)| {
            let device_us = sums.time_us.map(|time| time * per_step);
            BlockRow {
                operations: group.operations,
                operation_count: group.operation_count,
                served_by: group.served_by,
                kernels: group.kernels.into_iter().map(str::to_owned).collect(),
                count: sums.count as f64 * per_step,
                device_us,
                share: share(device_us),
                bytes: sums.bytes.map(|bytes| bytes as f64 * per_step),
                flops: sums.flops.map(|flops| flops as f64 * per_step),
                element_bytes: group.element_bytes,
                roofline_us: sums.ideal_us.map(|time| time * per_step),
                roofline: sums.roofline(),
            }
        })
        .collect();
    let longest = |a: Option<f64>, b: Option<f64>| b.unwrap_or(0.0).total_cmp(&a.unwrap_or(0.0));
    profile.kernels.sort_by(|a, b| longest(a.total_us, b.total_us));
    profile.blocks.sort_by(|a, b| longest(a.device_us, b.device_us));

    let block_us = |block: &BlockRecord| block.launches.iter().filter_map(time_us).sum();
    let each = steps.iter().map(|step| chains(step, block_us));
    let all = each.fold(Chains::default(), |a, b| Chains {
        count: a.count + b.count * per_step,
        blocks: a.blocks + b.blocks * per_step,
        saved_bytes: a.saved_bytes + b.saved_bytes * per_step,
        device_us: a.device_us + b.device_us * per_step,
    });
    profile.chains = all;
    profile.launches = Some(launches().count() as f64 * per_step);
    profile.untimed_launches = (launches().count() - timed.len()) as f64 * per_step;
    profile.clock = (!timed.is_empty()).then(|| {
        if timed.iter().all(|launch| launch.by_device) { Clock::Device } else { Clock::Host }
    });
    profile.device_us = device_us;
    profile.launch_floor_us = floor;
    profile.peaks = peaks.cloned();
    profile
}

impl ServedBy {
    fn of(block: &BlockRecord) -> Option<Self> {
        match block.server() {
            Server::Blackburn => Some(Self::Blackburn),
            Server::BurnFused => Some(Self::BurnFused),
            Server::Burn => Some(Self::Burn),
            Server::Nobody => None,
        }
    }
}

/// What makes blocks one row.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Group<'a> {
    operations: String,
    operation_count: usize,
    served_by: ServedBy,
    kernels: Vec<&'a str>,
    element_bytes: Option<u8>,
}

/// What a block has to do, where it is known.
#[derive(Clone, Copy, Default)]
struct Cost {
    bytes: Option<u64>,
    flops: Option<u64>,
    ideal_us: Option<f64>,
}

impl Cost {
    fn of(block: &BlockRecord, peaks: Option<&Peaks>) -> Self {
        let bytes = traffic_bytes(&block.operations);
        let products =
            || block.operations.iter().filter(|operation| operation.kind == OperationKind::Product);
        let is_known =
            !block.operations.is_empty() && products().all(|one| one.arithmetic.is_some());
        let arithmetic = || products().filter_map(|operation| operation.arithmetic);
        let flops = is_known.then(|| arithmetic().map(|product| product.flops).sum());
        let ideal_us = || {
            let peaks = peaks?;
            let arithmetic_us = arithmetic()
                .map(|product| Some(product.flops as f64 / peaks.flops(product.element_bytes)?))
                .sum::<Option<f64>>()?;
            Some(1e6 * arithmetic_us.max(bytes? as f64 / peaks.bytes_per_second))
        };
        Self { bytes, flops, ideal_us: if is_known { ideal_us() } else { None } }
    }
}

/// Sums over launches or blocks; what is unknown of one is unknown of all.
#[derive(Default)]
struct Sums {
    count: usize,
    timed: usize,
    time_us: Option<f64>,
    bytes: Option<u64>,
    flops: Option<u64>,
    ideal_us: Option<f64>,
    /// Times at the peaks, and times taken, of what was timed and has the former.
    known_us: (f64, f64),
}

impl Sums {
    /// `is_timed`: whether the time is of all launches.
    fn add(&mut self, time_us: Option<f64>, is_timed: bool, cost: Cost) {
        let is_first = self.count == 0;
        self.count += 1;
        self.timed += usize::from(is_timed);
        if let Some(time) = time_us {
            *self.time_us.get_or_insert(0.0) += time;
            if let Some(ideal) = cost.ideal_us.filter(|_| is_timed) {
                self.known_us.0 += ideal;
                self.known_us.1 += time;
            }
        }
        fn sum<T: std::ops::Add<Output = T>>(
            is_first: bool,
            a: Option<T>,
            b: Option<T>,
        ) -> Option<T> {
            if is_first { b } else { Some(a? + b?) }
        }
        self.bytes = sum(is_first, self.bytes, cost.bytes);
        self.flops = sum(is_first, self.flops, cost.flops);
        self.ideal_us = sum(is_first, self.ideal_us, cost.ideal_us);
    }

    fn roofline_where_known(&self) -> Option<f64> {
        (self.known_us.1 > 0.0).then(|| self.known_us.0 / self.known_us.1)
    }

    /// Only of what was timed to the last launch.
    fn roofline(&self) -> Option<f64> {
        let time = self.time_us.filter(|time| *time > 0.0 && self.timed == self.count)?;
        Some(self.ideal_us? / time)
    }
}

/// Operations that a reader counts as such.
fn counted(operations: &[OperationRecord]) -> impl Iterator<Item = &OperationRecord> {
    operations.iter().filter(|operation| operation.kind != OperationKind::Drop)
}

fn element_bytes(operations: &[OperationRecord]) -> Option<u8> {
    operations.iter().find_map(|operation| Some(operation.arithmetic?.element_bytes))
}

/// `Mul x 3, Add`.
fn describe(operations: &[OperationRecord]) -> String {
    let mut runs: Vec<(&str, usize)> = Vec::new();
    for operation in counted(operations) {
        match runs.last_mut() {
            Some((name, count)) if *name == operation.name => *count += 1,
            _ => runs.push((&operation.name, 1)),
        }
    }
    let words: Vec<_> = runs
        .into_iter()
        .map(|(name, count)| if count == 1 { name.to_owned() } else { format!("{name} x {count}") })
        .collect();
    words.join(", ")
}

/// A type's name without its module and arguments.
fn short_name(kernel: &'static str) -> &'static str {
    let path = kernel.split('<').next().unwrap_or(kernel);
    path.rsplit("::").next().unwrap_or(path)
}

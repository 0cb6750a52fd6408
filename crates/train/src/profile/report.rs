//! What a profile holds.

use super::{
    Peaks, Recommendation,
    advice::{self, Advice},
};
use serde::{Deserialize, Serialize};

/// Below this share of a step's time the device counts as waiting for the host.
const BUSY: f64 = 0.8;

/// Where a training step's time goes. [`Display`](std::fmt::Display) is for people, serialization for programs.
///
/// Times are in microseconds and of one step; counts too, as means over the observed steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepProfile {
    /// The device, as Burn names it.
    pub device: String,
    /// The time of a step: the median of rounds of steps, which nothing observed.
    pub wall_us: f64,
    /// The same without the recorded graph, where steps replay one.
    pub eager_wall_us: Option<f64>,
    /// The kernels' times together. `None` where none was timed: on a CPU, or where a runtime has no timers.
    pub device_us: Option<f64>,
    /// What is left of the step's time, at least 0: the device has nothing to do, since the host has not asked
    /// for anything.
    pub gap_us: Option<f64>,
    /// What the step waits for.
    pub verdict: Verdict,
    /// Whose clock timed the kernels.
    pub clock: Option<Clock>,
    /// What the smallest kernel measures, which was taken off each kernel's time.
    pub launch_floor_us: Option<f64>,
    /// Kernels launched in a step.
    pub launches: Option<f64>,
    /// Launches of a step that could not be timed; their kernels' times lack them.
    pub untimed_launches: f64,
    /// What the device does at best.
    pub peaks: Option<Peaks>,
    /// Kernels, the longest first.
    pub kernels: Vec<KernelRow>,
    /// Blocks of operations, the longest first.
    pub blocks: Vec<BlockRow>,
    /// Neighboring blocks that could be one.
    pub chains: Chains,
    /// Why Blackburn left work to Burn, since the program started.
    pub declined: Vec<String>,
    /// What to change, by what it gains.
    pub recommendations: Vec<Recommendation>,
}

/// What a step waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The device works for less than four fifths of the step.
    HostBound,
    /// The device works for most of the step.
    DeviceBound,
    /// No device time was measured, or not by the device's clock.
    Unknown,
}

/// Whose clock timed kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Clock {
    /// The device's.
    Device,
    /// The host's, in part at least: times hold what it costs to hand a kernel over and to wait for it.
    Host,
}

/// Whose kernels a block ran on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ServedBy {
    /// Blackburn's.
    Blackburn,
    /// Those that Burn's fusion writes.
    BurnFused,
    /// Burn's kernels of single operations.
    Burn,
}

/// A kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelRow {
    /// Its name, without module and type arguments.
    pub name: String,
    /// Whose it is.
    pub of: ServedBy,
    /// Launches in a step.
    pub launches: f64,
    /// Time of all launches. `None` where none was timed.
    pub total_us: Option<f64>,
    /// Time of one launch.
    pub mean_us: Option<f64>,
    /// Part of all kernels' time.
    pub share: Option<f64>,
    /// Bytes that it has to move, where it is the only kernel of all its blocks and they are known.
    pub bytes: Option<f64>,
    /// Its arithmetic, likewise.
    pub flops: Option<f64>,
    /// The time at the device's peaks as a share of its time, over those launches that are the only one of
    /// a block whose bytes and arithmetic are known. Above 1 for what fits the caches.
    pub roofline: Option<f64>,
}

/// Blocks of the same operations on the same kernels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlockRow {
    /// The operations in order, repeated ones counted; empty for kernels that no operation of Burn's launched.
    pub operations: String,
    /// Operations of one block.
    pub operation_count: usize,
    /// Whose kernels it ran on.
    pub served_by: ServedBy,
    /// The kernels of one block, in order.
    pub kernels: Vec<String>,
    /// Blocks in a step.
    pub count: f64,
    /// Time of all of them. `None` where none was timed.
    pub device_us: Option<f64>,
    /// Part of all kernels' time.
    pub share: Option<f64>,
    /// Bytes that they have to move, where they are known of all.
    pub bytes: Option<f64>,
    /// Arithmetic of their products, where it is known of all; 0 without a product.
    pub flops: Option<f64>,
    /// Bytes of an element of their products' operands: 2 for bf16 and f16, 4 for f32.
    pub element_bytes: Option<u8>,
    /// The time that bytes and arithmetic take at the device's peaks.
    pub roofline_us: Option<f64>,
    /// The part of the time that this is: above 1 for what fits the caches.
    pub roofline: Option<f64>,
}

/// Neighboring blocks of element-wise operations, reductions and views.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Chains {
    /// Chains of at least two blocks, in a step.
    pub count: f64,
    /// Blocks in them.
    pub blocks: f64,
    /// Bytes that they write and read again, and would not as one kernel each.
    pub saved_bytes: f64,
    /// Their time.
    pub device_us: f64,
}

impl StepProfile {
    /// Of a device that tells nothing but the time.
    pub(super) fn of_wall(device: String, wall_us: f64) -> Self {
        Self {
            device,
            wall_us,
            eager_wall_us: None,
            device_us: None,
            gap_us: None,
            verdict: Verdict::Unknown,
            clock: None,
            launch_floor_us: None,
            launches: None,
            untimed_launches: 0.0,
            peaks: None,
            kernels: Vec::new(),
            blocks: Vec::new(),
            chains: Chains::default(),
            declined: Vec::new(),
            recommendations: Vec::new(),
        }
    }

    /// Puts the step's time beside the kernels', and says what follows.
    pub(super) fn conclude(&mut self, wall_us: f64, eager_wall_us: Option<f64>) {
        self.wall_us = wall_us;
        self.eager_wall_us = eager_wall_us;
        self.gap_us = self.device_us.map(|device| (wall_us - device).max(0.0));
        self.verdict = match (self.device_us, self.clock) {
            (Some(device), Some(Clock::Device)) if device < BUSY * wall_us => Verdict::HostBound,
            (Some(_), Some(Clock::Device)) => Verdict::DeviceBound,
            _ => Verdict::Unknown,
        };
        self.recommendations = advice::recommend(self);
    }

    /// The recommendation of that kind, if there is one.
    pub fn recommendation(&self, kind: Advice) -> Option<&Recommendation> {
        self.recommendations.iter().find(|recommendation| recommendation.kind == kind)
    }
}

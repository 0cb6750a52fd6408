use super::{CrossEntropyProblem, problem::OP};
use crate::{
    DeviceProfile, Promise,
    buffer::Buffer,
    device::{plane_units, widest_vector},
    plan::tell_plan,
};
use cubecl::{
    client::Client,
    ir::{ElemType, VectorSize},
};
use std::fmt;

/// Units in a cube: every adapter takes as many.
pub(crate) const UNITS: u32 = 256;
/// Units in a cube that reads its rows twice, where the adapter takes as many: few cubes at work have few rows in the
/// cache.
const MOST_UNITS: u32 = 512;

/// How a pass is compiled and spread over the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CrossEntropyBlueprint {
    /// Elements that a unit loads at once.
    pub vector_size: VectorSize,
    /// Units of a cube: a power of two, from 256 to 512.
    pub units: u32,
    /// Units that share a row: a power of two, from 8 to those of a cube.
    pub lanes: u32,
    /// Units that exchange numbers without shared memory: the device's plane size, or 1 where it has no
    /// such exchange or does not say how many.
    pub plane: u32,
    /// Whether exponentials are NVIDIA's instruction for powers of two.
    pub hardware: bool,
}

impl CrossEntropyBlueprint {
    /// At least the elements of a vector, so that what is left at the ends of a row takes few steps.
    const LEAST_LANES: u32 = 8;
    /// Vectors that a unit reads before another one pays.
    const VECTORS_A_LANE: usize = 4;
    /// Partial results of a row, which each unit reads.
    const MOST_PARTIALS: u32 = 32;
    /// Six cubes of 256 units a multiprocessor, each unit with a vector of 16 bytes on the way and one that it
    /// works on.
    const PROMISE: Promise = Promise::registers(40);
    /// What passes over rows promise, those of [`softmax`](crate::softmax) among them.
    pub(crate) const PROMISES: [(&str, Promise); 6] = [
        // Two cubes of 512 units a multiprocessor.
        ("cross_entropy_at_once", Promise::registers(64)),
        ("cross_entropy_rescale", Self::PROMISE),
        ("cross_entropy_forward", Self::PROMISE),
        ("cross_entropy_backward", Self::PROMISE),
        ("cross_entropy_reduce", Self::PROMISE),
        ("softmax_sums", Self::PROMISE),
    ];

    /// The widest vectors that begin where the buffer does, and as many units a row as it keeps busy.
    pub fn plan(problem: &CrossEntropyProblem, logits: &Buffer, client: &Client) -> Self {
        Self::plan_for(problem, logits, problem.dtype, client)
    }

    /// As [`plan`](Self::plan), with vectors that are not too wide for elements of type `out`.
    pub(crate) fn plan_for(
        problem: &CrossEntropyProblem,
        logits: &Buffer,
        out: ElemType,
        client: &Client,
    ) -> Self {
        Self::with_units(problem, logits, out, UNITS, client)
    }

    /// As [`plan`](Self::plan), for a pass that reads each row twice.
    pub(super) fn plan_at_once(
        problem: &CrossEntropyProblem,
        logits: &Buffer,
        client: &Client,
    ) -> Self {
        let taken = client.properties().hardware.max_units_per_cube;
        let units = if taken >= MOST_UNITS { MOST_UNITS } else { UNITS };
        Self::with_units(problem, logits, problem.dtype, units, client)
    }

    fn with_units(
        problem: &CrossEntropyProblem,
        logits: &Buffer,
        out: ElemType,
        units: u32,
        client: &Client,
    ) -> Self {
        let size = problem.dtype.size();
        let offset = logits.offset_bytes() as usize;
        // A vector may belong to two rows, and not to three.
        let fits = |width| width <= problem.classes && offset.is_multiple_of(width * size);
        let vector_size = widest_vector(client, size.max(out.size()), fits).min(8);
        let plane = plane_units(client).min(units);
        let busy = (problem.classes / vector_size / Self::VECTORS_A_LANE).next_power_of_two();
        let most = units.min(Self::MOST_PARTIALS * plane);
        let plan = Self {
            vector_size,
            units,
            lanes: (busy.min(units as usize) as u32).clamp(Self::LEAST_LANES, most),
            plane,
            hardware: DeviceProfile::of(client).compute_capability.is_some(),
        };
        let reason = format_args!("a row keeps {busy} units busy, and may have {most}");
        tell_plan(OP, problem, &plan, reason);
        plan
    }

    /// At most so many additions lie between a logit and its row's sum.
    pub fn additions(&self, classes: usize) -> usize {
        self.vectors(classes) * self.vector_size + self.ends() + self.meetings()
    }

    /// As often, at most, what is subtracted from logits grows on the way.
    pub fn rescales(&self, classes: usize) -> usize {
        self.vectors(classes) + self.ends() + self.meetings()
    }

    /// Vectors of a unit.
    fn vectors(&self, classes: usize) -> usize {
        (classes / self.vector_size).div_ceil(self.lanes as usize)
    }

    /// Elements of a unit before the first and behind the last vector of a row.
    fn ends(&self) -> usize {
        (2 * self.vector_size).div_ceil(self.lanes as usize)
    }

    /// Sums of other units that a unit adds.
    fn meetings(&self) -> usize {
        let width = self.plane.min(self.lanes);
        (width.ilog2() + self.lanes / width) as usize
    }

    /// Numbers in shared memory, by which the units of a row meet.
    pub(crate) fn partials(&self) -> usize {
        3 * self.units as usize
    }

    /// Rows of a cube.
    pub(crate) fn rows_a_cube(&self) -> u32 {
        self.units / self.lanes
    }
}

impl fmt::Display for CrossEntropyBlueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vector_size, units, lanes, plane, .. } = self;
        write!(f, "{lanes} units of {units} a row, planes of {plane}, vectors of {vector_size}")
    }
}

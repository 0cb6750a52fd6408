use super::SoftmaxProblem;
use crate::{
    DeviceProfile, Pass, Promise,
    buffer::Buffer,
    device::{plane_units, widest_vector},
    plan::tell_plan,
};
use cubecl::{client::Client, ir::VectorSize};
use std::fmt;

/// Elements of a unit up to which a row has a plane of its own, which waits for no other.
fn plane_elements(pass: Pass) -> usize {
    match pass {
        Pass::Forward => 32,
        Pass::Backward => 16,
    }
}

fn tiers(pass: Pass) -> &'static [Tier] {
    match pass {
        Pass::Forward => &FORWARD_TIERS,
        Pass::Backward => &BACKWARD_TIERS,
    }
}

/// How a pass over rows is compiled and spread over the device. A cube has `plane * planes` units along x,
/// which share a row, and `rows` along y.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SoftmaxBlueprint {
    /// Elements that a unit loads and stores at once.
    pub vector_size: VectorSize,
    /// Units of a plane; 1 on devices without operations of planes.
    pub plane: u32,
    /// Planes that share a row.
    pub planes: u32,
    /// Rows that a cube has at once.
    pub rows: u32,
    /// Vectors of a row that a unit holds; none where rows are longer than what a cube holds, and are read
    /// twice.
    pub vectors: usize,
    /// Whether every unit has as many vectors.
    pub even: bool,
    /// Whether the last vector of a row reaches beyond its end.
    pub ragged: bool,
    /// Whether exponentials are NVIDIA's instruction for powers of two.
    pub hardware: bool,
}

/// How much of a row a unit may hold.
struct Tier {
    /// Elements of a row, at most.
    elements: usize,
    /// Units of a cube, at most.
    units: u32,
    /// Cubes that a multiprocessor has at once, at least, as far as registers go. `cargo xtask sass` checks
    /// them.
    cubes: u32,
}

/// Few units with several loads on the way each: rows wait for each other less often than with many.
const FORWARD_TIERS: [Tier; 2] =
    [Tier { elements: 32, units: 256, cubes: 3 }, Tier { elements: 48, units: 512, cubes: 1 }];

/// With two tensors to hold.
const BACKWARD_TIERS: [Tier; 2] =
    [Tier { elements: 16, units: 512, cubes: 1 }, Tier { elements: 32, units: 512, cubes: 1 }];

impl SoftmaxBlueprint {
    /// Units of a cube of rows that are read twice, at most.
    const STREAMING_UNITS: u32 = 512;
    /// Partial results of a row that is read twice, which each unit reads on devices without planes.
    const MOST_PARTIALS: u32 = 32;
    /// Units of a cube of short rows, at least.
    const LEAST_UNITS: u32 = 128;

    /// The widest loads that begin where rows begin; a plane for each row if it holds one, and otherwise a
    /// cube, with as many units as it takes to hold it, if they do.
    ///
    /// `strides` are those of the tensors that are read, `buffers` their memory.
    pub(super) fn plan_for(
        problem: &SoftmaxProblem,
        pass: Pass,
        inputs: &[(&Buffer, usize)],
        client: &Client,
    ) -> Self {
        let properties = client.properties();
        let hardware = &properties.hardware;
        let size = problem.dtype.size();
        let vector_size = widest_vector(client, size.max(problem.out.size()), |width| {
            inputs.iter().all(|(buffer, stride)| {
                let offset = buffer.offset_bytes() as usize;
                let end = problem.rows.saturating_sub(1) * stride
                    + problem.classes.next_multiple_of(width);
                offset.is_multiple_of(width * size)
                    && (problem.rows == 1 || stride.is_multiple_of(width))
                    && (end * size) as u64 <= buffer.handle.size_in_used()
            })
        });
        let plane = plane_units(client);
        let by_instruction = DeviceProfile::of(client).compute_capability.is_some();
        let (classes, most) = (problem.classes, hardware.max_units_per_cube);
        let plan = Self::with_planes(classes, pass, vector_size, plane, most, by_instruction);
        let reason = format_args!("{pass}, cubes of up to {most} units, planes of {plane}");
        tell_plan("softmax_rows", problem, &plan, reason);
        plan
    }

    /// The plan of rows of `classes` on a device with planes of that size.
    pub(crate) fn with_planes(
        classes: usize,
        pass: Pass,
        vector_size: VectorSize,
        plane: u32,
        most_units: u32,
        hardware: bool,
    ) -> Self {
        let columns = classes.div_ceil(vector_size);
        let of_plane = columns.div_ceil(plane as usize);
        let share = |tier: &Tier| {
            let units = tier.units.min(most_units) / plane * plane;
            let most = tier.elements / vector_size;
            // As many vectors as a unit may have, and as few units as these take.
            let units_needed = columns.div_ceil(most).next_multiple_of(plane as usize);
            (most > 0 && units_needed <= units as usize)
                .then(|| (units_needed as u32 / plane, columns.div_ceil(units_needed)))
        };
        let (planes, vectors) = if of_plane * vector_size <= plane_elements(pass) {
            (1, of_plane)
        } else {
            let held = tiers(pass).iter().find_map(share);
            let streaming = Self::STREAMING_UNITS.min(most_units) / plane;
            held.unwrap_or((streaming.min(Self::MOST_PARTIALS), 0))
        };
        let units = plane * planes;
        Self {
            vector_size,
            plane,
            planes,
            rows: (Self::LEAST_UNITS.min(most_units) / units).max(1),
            vectors,
            even: columns == units as usize * vectors,
            ragged: !classes.is_multiple_of(vector_size),
            hardware,
        }
    }

    /// As many registers as leave room for the cubes that this counts on: for two on Blackwell, where ptxas
    /// takes more if a pass `keeps` what it computes on the way.
    pub(crate) fn promise(&self, pass: Pass, keeps: bool, device: &DeviceProfile) -> Promise {
        /// Of a multiprocessor, and how many are given to a unit at a time.
        const REGISTERS: [u32; 2] = [65_536, 8];
        /// Cubes of rows that are read twice.
        const STREAMING_CUBES: u32 = 2;
        /// Two registers, each stored and loaded, that ptxas spills on some architectures although more are left.
        const SPILL_BYTES: u32 = 16;
        let [all, step] = REGISTERS;
        let elements = self.vectors * self.vector_size;
        let tier = tiers(pass).iter().find(|tier| elements <= tier.elements);
        let most = match device.compute_capability {
            Some(100..) if keeps => 2,
            _ => u32::MAX,
        };
        let cubes = match tier {
            Some(tier) if self.vectors > 0 => tier.cubes.min(most),
            _ => STREAMING_CUBES,
        };
        let of_unit = all / (cubes * self.units() * self.rows);
        let registers = (of_unit / step * step).min(Promise::MOST_REGISTERS);
        Promise::registers(registers).spilling(SPILL_BYTES)
    }

    /// Units that share a row.
    pub(crate) fn units(&self) -> u32 {
        self.plane * self.planes
    }

    /// At most so many additions lie between an element and its row's sum.
    pub fn additions(&self, classes: usize) -> usize {
        let in_plane = self.plane.ilog2() as usize;
        self.vectors_of(classes) * self.vector_size
            + 2 * in_plane
            + self.planes.div_ceil(self.plane) as usize
    }

    /// As often, at most, what is subtracted from elements grows on the way.
    pub fn rescales(&self, classes: usize) -> usize {
        let in_unit = if self.vectors == 0 { self.vectors_of(classes) + 1 } else { 0 };
        in_unit + usize::from(self.planes > 1)
    }

    /// Vectors that a unit reads of a row.
    fn vectors_of(&self, classes: usize) -> usize {
        classes.div_ceil(self.vector_size).div_ceil(self.units() as usize)
    }
}

impl fmt::Display for SoftmaxBlueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vector_size, plane, planes, rows, vectors, .. } = self;
        write!(f, "{rows} rows by {planes} planes of {plane}, ")?;
        match vectors {
            0 => write!(f, "read twice by vectors of {vector_size}"),
            _ => write!(f, "{vectors} vectors of {vector_size} a unit"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(classes: usize, pass: Pass) -> SoftmaxBlueprint {
        SoftmaxBlueprint::with_planes(classes, pass, 8, 32, 1024, true)
    }

    #[test]
    fn short_rows_have_a_plane_long_ones_a_cube_and_the_longest_are_read_twice() {
        let short = plan(1000, Pass::Forward);
        assert_eq!((short.planes, short.rows, short.vectors, short.even), (1, 4, 4, false));
        let long = plan(4096, Pass::Forward);
        assert_eq!((long.planes, long.rows, long.vectors, long.even), (4, 1, 4, true));
        let back = plan(4096, Pass::Backward);
        assert_eq!((back.planes, back.rows, back.vectors, back.even), (8, 1, 2, true));
        assert_eq!(plan(24_576, Pass::Forward).vectors, 6);
        assert_eq!(plan(24_577, Pass::Forward).vectors, 0);
        assert_eq!(plan(16_384, Pass::Backward).vectors, 4);
        assert_eq!(plan(16_385, Pass::Backward).vectors, 0);
    }

    #[test]
    fn units_cover_a_row_within_their_tier() {
        for pass in [Pass::Forward, Pass::Backward] {
            for classes in (1..=24_576).step_by(61) {
                let plan = plan(classes, pass);
                if plan.vectors == 0 {
                    continue;
                }
                let held = plan.units() as usize * plan.vectors;
                assert!(held * 8 >= classes, "{classes}: {plan:?}");
                assert_eq!(plan.ragged, classes % 8 != 0);
                let elements = plan.vectors * 8;
                assert!(tiers(pass).iter().any(|tier| elements <= tier.elements), "{plan:?}");
                assert!(plan.units() * plan.rows <= 512, "{plan:?}");
            }
        }
    }

    #[test]
    fn devices_without_planes_meet_in_memory() {
        let plan = SoftmaxBlueprint::with_planes(300, Pass::Forward, 4, 1, 256, false);
        assert_eq!((plan.plane, plan.planes, plan.vectors), (1, 10, 8));
        assert!(!plan.even);
    }
}

//! Which of Burn's routines a reduction runs on, and whether it takes two of them.
//!
//! | outputs | one after the other in memory | routine |
//! |---|---|---|
//! | so many that a unit each fills the device, or of a few elements each | any | a unit for each: what Burn does by itself |
//! | few, of many elements | any | parts, of which several cubes take one output; then a cube for each |
//! | fewer than the device has units, of a large tensor | yes | parts, of which each unit takes one vector of outputs; then a plane for each |
//! | fewer than planes fill the device | with vectors of 16 bytes | a cube for each |
//! | others | any | a plane for each |
//!
//! Elements of one output that lie side by side are loaded as vectors, and so are outputs that lie side by side.

/// A routine of cubek: who makes an output, or a vector of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Routine {
    /// One unit.
    Unit,
    /// The units of a plane.
    Plane,
    /// The units of a cube.
    Cube,
}

/// How the elements of an output may be divided into parts that are reduced by themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Parts {
    /// Not at all.
    Never,
    /// Without a rest.
    Equal,
    /// In any way: an element may be in two parts.
    Overlapping,
}

/// Parts of equal length at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Split {
    pub(super) parts: usize,
    /// From the beginning of one part to that of the next one.
    pub(super) step: usize,
    /// Of a part.
    pub(super) length: usize,
}

/// How a reduction runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    Once(Routine),
    Twice {
        split: Split,
        /// Reduces each part.
        first: Routine,
        /// Reduces what the parts left.
        last: Routine,
    },
}

/// A device, as far as plans depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Device {
    pub(super) multiprocessors: usize,
    /// Whether all planes are of one size and know the operations of planes in the reduction's type.
    pub(super) has_planes: bool,
}

/// A reduction along one dimension, as far as its plan depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Problem {
    pub(super) outputs: usize,
    /// Elements of which an output is made.
    pub(super) length: usize,
    /// Elements that a unit loads at once.
    pub(super) vector: usize,
    /// Of an element.
    pub(super) bytes: usize,
    /// Whether the elements of an output lie side by side.
    pub(super) is_of_rows: bool,
    pub(super) parts: Parts,
}

/// Units of a cube, as cubek launches them.
const CUBE: usize = 256;
/// Units of a plane on NVIDIA's GPUs.
const PLANE: usize = 32;
/// Units that keep a multiprocessor's loads under way: a quarter of those that it has room for.
const UNITS_PER_MULTIPROCESSOR: usize = 512;
/// Vectors, or elements that lie apart, which one unit walks through as fast as a launch takes.
const FEW_STEPS: usize = 16;
/// Bytes of a row that a unit reads by itself from lines of the cache that it has loaded.
const SHORT_ROW_BYTES: usize = 256;
/// Bytes that a vector of the widest loads has. Narrower ones leave most of what a cube fetches along a dimension
/// that is not the last to the cubes beside it; the planes of a cube share it.
const WIDE_BYTES: usize = 16;
/// Steps of a part that several cubes share an output by.
const LEAST_PART: usize = 8 * CUBE;
/// The most parts that a second pass reduces by planes.
const MOST_PARTS: usize = 1024;
/// Bytes for each unit of the device from which on coalesced loads make up for a second launch.
const LARGE_BYTES_PER_UNIT: usize = 1024;

/// Whether a unit for each output does as well as planes and cubes would: `outputs` of `length` elements each, of that
/// many bytes, which lie side by side where they are `of_rows`.
pub(in crate::fused) fn suits_units(
    [outputs, length]: [usize; 2],
    bytes: usize,
    is_of_rows: bool,
    multiprocessors: usize,
) -> bool {
    let along = if is_of_rows { length } else { outputs };
    let vector = (1..=WIDE_BYTES / bytes).rev().find(|vector| along.is_multiple_of(*vector));
    let vector = vector.unwrap_or(1);
    let problem = Problem { outputs, length, vector, bytes, is_of_rows, parts: Parts::Never };
    problem.plan(Device { multiprocessors, has_planes: true }) == Plan::Once(Routine::Unit)
}

impl Problem {
    /// The plan for `device`.
    pub(super) fn plan(&self, device: Device) -> Plan {
        let units = device.multiprocessors * UNITS_PER_MULTIPROCESSOR;
        let cubes = units / CUBE;
        let (outputs, steps) = match self.is_of_rows {
            true => (self.outputs, self.length / self.vector),
            false => (self.outputs.div_ceil(self.vector), self.length),
        };
        if self.suits_units(outputs, steps, units) {
            return Plan::Once(Routine::Unit);
        }
        let plane = if device.has_planes { Routine::Plane } else { Routine::Cube };
        if outputs * 4 <= cubes {
            let most = (cubes / outputs).min(steps / LEAST_PART);
            if let Some(split) = self.split(steps, most) {
                return Plan::Twice { split, first: Routine::Cube, last: Routine::Cube };
            }
        } else if !self.is_of_rows
            && self.outputs * self.length * self.bytes >= units * LARGE_BYTES_PER_UNIT
        {
            let most = (units / outputs).min(steps / FEW_STEPS).min(MOST_PARTS);
            if let Some(split) = self.split(steps, most) {
                return Plan::Twice { split, first: Routine::Unit, last: plane };
            }
        }
        let has_idle_planes = outputs * PLANE * 2 < units;
        let fills_cubes = steps > CUBE / 4;
        let is_shared_well = self.is_of_rows || self.vector * self.bytes >= WIDE_BYTES;
        match has_idle_planes && fills_cubes && is_shared_well {
            true => Plan::Once(Routine::Cube),
            false => Plan::Once(plane),
        }
    }

    /// Whether nothing is faster than a unit for each of `outputs`, of `steps` loads.
    fn suits_units(&self, outputs: usize, steps: usize, units: usize) -> bool {
        if !self.is_of_rows {
            return steps <= FEW_STEPS || outputs >= units;
        }
        let is_short = self.length * self.bytes <= SHORT_ROW_BYTES;
        steps <= FEW_STEPS / 4 || (is_short && outputs * 4 >= units)
    }

    /// At most `most` parts of `steps` loads, and at least two.
    fn split(&self, steps: usize, most: usize) -> Option<Split> {
        let parts = match self.parts {
            Parts::Never => None,
            Parts::Equal => (2..=most).rev().find(|parts| steps.is_multiple_of(*parts)),
            Parts::Overlapping if most < 2 => None,
            // The rest makes every part longer.
            Parts::Overlapping => {
                (most.div_ceil(2).max(2)..=most).rev().min_by_key(|parts| steps % parts)
            }
        }?;
        let elements = if self.is_of_rows { self.vector } else { 1 };
        let step = steps / parts;
        let length = steps - (parts - 1) * step;
        Some(Split { parts, step: step * elements, length: length * elements })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H100: Device = Device { multiprocessors: 132, has_planes: true };

    /// Of f32, whose outputs or elements are loaded by fours.
    fn rows(outputs: usize, length: usize) -> Problem {
        Problem { is_of_rows: true, ..columns(outputs, length) }
    }

    fn columns(outputs: usize, length: usize) -> Problem {
        Problem {
            outputs,
            length,
            vector: 4,
            bytes: 4,
            is_of_rows: false,
            parts: Parts::Overlapping,
        }
    }

    #[test]
    fn what_a_unit_each_does_well_is_left_to_units() {
        let all = [rows(1, 16), rows(1 << 20, 64), columns(1 << 20, 1 << 10), columns(100, 16)];
        for problem in all {
            assert_eq!(problem.plan(H100), Plan::Once(Routine::Unit), "{problem:?}");
        }
        assert_ne!(rows(1 << 20, 65).plan(H100), Plan::Once(Routine::Unit));
    }

    #[test]
    fn many_outputs_take_planes_and_fewer_take_cubes() {
        for problem in [rows(4096, 4096), rows(200, 256), columns(8192, 1000), columns(1000, 60)] {
            assert_eq!(problem.plan(H100), Plan::Once(Routine::Plane), "{problem:?}");
        }
        for problem in [rows(256, 50_256), rows(100, 2000), columns(1024, 1024)] {
            assert_eq!(problem.plan(H100), Plan::Once(Routine::Cube), "{problem:?}");
        }
        let narrow = Problem { vector: 1, ..columns(1023, 1024) };
        assert_eq!(narrow.plan(H100), Plan::Once(Routine::Plane));
    }

    #[test]
    fn a_device_without_planes_has_cubes_take_their_place() {
        let device = Device { has_planes: false, ..H100 };
        assert_eq!(rows(4096, 4096).plan(device), Plan::Once(Routine::Cube));
        let Plan::Twice { first, last, .. } = columns(1024, 1 << 20).plan(device) else {
            panic!("one pass over a gigabyte");
        };
        assert_eq!((first, last), (Routine::Unit, Routine::Cube));
    }

    #[test]
    fn few_outputs_are_made_by_many_cubes_each() {
        for problem in [rows(1, 1 << 24), rows(8, 1 << 20), columns(4, 1 << 20)] {
            let Plan::Twice { split, first, last } = problem.plan(H100) else {
                panic!("{problem:?} in one pass");
            };
            assert_eq!((first, last), (Routine::Cube, Routine::Cube));
            let together = if problem.is_of_rows { problem.outputs } else { problem.outputs / 4 };
            assert!((132..=264).contains(&(split.parts * together)), "{split:?}");
        }
        assert_eq!(rows(1, 4096).plan(H100), Plan::Once(Routine::Cube), "not worth a launch");
        let whole = Problem { parts: Parts::Never, ..rows(1, 1 << 24) };
        assert_eq!(whole.plan(H100), Plan::Once(Routine::Cube));
    }

    #[test]
    fn parts_cover_every_element_and_no_more() {
        for length in [1 << 20, 999_999, 1_000_003, 4 * 262_147] {
            let vector = if length % 4 == 0 { 4 } else { 1 };
            for parts in [Parts::Equal, Parts::Overlapping] {
                let problem = Problem { vector, parts, ..rows(1, length) };
                let Plan::Twice { split, .. } = problem.plan(H100) else {
                    assert_eq!(parts, Parts::Equal, "{length} has no divisor");
                    continue;
                };
                assert_eq!((split.parts - 1) * split.step + split.length, length);
                assert!(split.length >= split.step, "a gap of {split:?}");
                assert_eq!((split.step % vector, split.length % vector), (0, 0));
                if parts == Parts::Equal {
                    assert_eq!(split.length, split.step, "counted twice");
                }
            }
        }
    }

    #[test]
    fn parts_of_columns_are_made_by_units_only_where_the_tensor_is_large() {
        let Plan::Twice { split, first, last } = columns(1024, 1 << 17).plan(H100) else {
            panic!("one pass");
        };
        assert_eq!((first, last), (Routine::Unit, Routine::Plane));
        assert!(split.parts <= 264 && split.parts >= 132, "{split:?}");
        assert_eq!(columns(1024, 1 << 13).plan(H100), Plan::Once(Routine::Cube));
    }
}

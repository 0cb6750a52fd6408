use super::{
    LayerNormProblem, Norm,
    problem::{BACKWARD, FORWARD},
};
use crate::{
    DeviceProfile, KernelError, Pass, Promise,
    device::{plane_units, widest_vector},
    dropout::DropoutForm,
    plan::tell_plan,
};
use cubecl::{client::Client, ir::VectorSize};
use std::fmt;

fn op(pass: Pass) -> &'static str {
    match pass {
        Pass::Forward => FORWARD,
        Pass::Backward => BACKWARD,
    }
}

/// Elements of a unit up to which a row has a plane of its own, which waits for no other. Backward, 24
/// would spill registers.
fn plane_elements(pass: Pass) -> usize {
    match pass {
        Pass::Forward => 24,
        Pass::Backward => 16,
    }
}

fn tiers(pass: Pass) -> &'static [Tier] {
    match pass {
        Pass::Forward => &FORWARD_TIERS,
        Pass::Backward => &BACKWARD_TIERS,
    }
}

/// What is compiled in and what is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LayerNormForm {
    /// No mean.
    pub(crate) rms: bool,
    /// With beta.
    pub(crate) bias: bool,
    /// With a residual.
    pub(crate) residual: bool,
    /// Forward, what the steps in between make is written, too; backward, x is the centered rows, and there are
    /// deviations in the place of what is 1 over them.
    pub(crate) parts: bool,
    /// With gamma; backward only, where its gradient is left out otherwise, too.
    pub(crate) scaled: bool,
    /// What is left out of the residual.
    pub(crate) dropout: DropoutForm,
    /// With a bias of the residual.
    pub(crate) residual_bias: bool,
    /// The largest magnitude is written, forward of y, backward of the residual's gradient.
    pub(crate) watched: bool,
}

impl LayerNormForm {
    pub(super) fn of(problem: &LayerNormProblem, dropout: DropoutForm) -> Self {
        let LayerNormProblem {
            norm, bias, residual, parts, scaled, residual_bias, watched, ..
        } = *problem;
        let rms = norm == Norm::Rms;
        Self { rms, bias, residual, parts, scaled, dropout, residual_bias, watched }
    }

    /// Parameters that get a gradient, in this order: gamma, beta, the residual's bias.
    pub(super) fn parameters(self) -> u32 {
        u32::from(self.scaled) + u32::from(self.bias) + u32::from(self.residual_bias)
    }

    /// Whether the gradient that is added is asked for with the row. It takes the registers of gamma, which is read for
    /// each row then; with dropout there are none left.
    pub(super) fn adds_early(self) -> bool {
        self.residual && self.dropout == DropoutForm::None
    }
}

/// How a pass is compiled and spread over the device. A cube has `plane * planes` units along x, which
/// share a row, and `rows` along y.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerNormBlueprint {
    /// Elements that a unit loads and stores at once.
    pub vector_size: VectorSize,
    /// Units of a plane; 1 on devices without operations of planes.
    pub plane: u32,
    /// Planes that share a row.
    pub planes: u32,
    /// Rows that a cube has at once.
    pub rows: u32,
    /// Vectors of a row that a unit holds.
    pub vectors: usize,
    /// Whether every unit has as many vectors.
    pub even: bool,
    /// Cubes of the backward pass for a multiprocessor, where rows are many: all that it holds at once.
    pub cubes: u32,
}

/// Registers of a multiprocessor.
const REGISTERS: usize = 65_536;

/// How much of a row a unit may hold, and what that costs: what the compiler makes of it, since it widens
/// elements once and keeps them so. `cargo xtask sass` checks the registers.
#[derive(Clone, Copy)]
struct Tier {
    /// Elements of a row, at most.
    elements: usize,
    /// Units of a cube, at most.
    units: u32,
    /// Registers of a unit.
    registers: usize,
}

impl Tier {
    /// Registers with what the problem adds: backward, a third sum for each element.
    fn registers(&self, problem: &LayerNormProblem, pass: Pass) -> usize {
        match pass == Pass::Backward && problem.residual_bias {
            true => self.registers + 16,
            false => self.registers,
        }
    }
}

const FORWARD_TIERS: [Tier; 3] = [
    Tier { elements: 16, units: 512, registers: 64 },
    Tier { elements: 24, units: 256, registers: 80 },
    Tier { elements: 48, units: 512, registers: 128 },
];

/// With two sums for each element. Small cubes, of which some read while others wait for their planes to meet, unless a
/// row takes more units.
const BACKWARD_TIERS: [Tier; 4] = [
    Tier { elements: 8, units: 192, registers: 64 },
    Tier { elements: 8, units: 256, registers: 64 },
    Tier { elements: 8, units: 512, registers: 64 },
    Tier { elements: 16, units: 512, registers: 128 },
];

impl LayerNormBlueprint {
    /// The widest loads that divide a row; a plane for each row if it holds one, and otherwise a cube,
    /// of as few vectors a unit as it has units for.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] where no cube holds a row.
    pub fn plan(
        problem: &LayerNormProblem,
        pass: Pass,
        client: &Client,
    ) -> Result<Self, KernelError> {
        let properties = client.properties();
        let hardware = &properties.hardware;
        let vector_size =
            widest_vector(client, problem.dtype.size(), |size| problem.width.is_multiple_of(size));
        let plane = plane_units(client);
        let found = if plane > 1 {
            Self::with_planes(problem, pass, vector_size, plane)
        } else {
            Self::without_planes(problem, vector_size)
        };
        let fits = |plan: &Self| {
            plan.units() * plan.rows <= hardware.max_units_per_cube
                && plan.shared_bytes(pass) <= hardware.max_shared_memory_size
        };
        let Some(plan) = found.filter(fits) else {
            let LayerNormProblem { width, dtype, .. } = problem;
            let reason = format!("rows of {width} {dtype:?} are more than a cube holds");
            return Err(KernelError::unsupported(op(pass), reason));
        };
        let reason = format_args!("the fewest vectors a unit that hold a row");
        tell_plan(op(pass), problem, &plan, reason);
        Ok(plan)
    }

    /// The plan on a device with operations of planes of that size.
    pub(crate) fn with_planes(
        problem: &LayerNormProblem,
        pass: Pass,
        vector_size: VectorSize,
        plane: u32,
    ) -> Option<Self> {
        let columns = problem.width / vector_size;
        let tiers = tiers(pass).iter();
        let of_plane = columns.div_ceil(plane as usize);
        let (tier, planes, vectors) = if of_plane * vector_size <= plane_elements(pass) {
            let tier = tiers.clone().find(|tier| of_plane * vector_size <= tier.elements)?;
            (tier, 1, of_plane)
        } else {
            let vectors = |tier: &Tier| columns.div_ceil(tier.units as usize);
            let tier = tiers.clone().find(|tier| vectors(tier) * vector_size <= tier.elements)?;
            let vectors = vectors(tier);
            // No more units than the tier has.
            (tier, columns.div_ceil(vectors * plane as usize) as u32, vectors)
        };
        let units = plane * planes;
        let rows = (tier.units / units).max(1);
        let at_once = (REGISTERS / tier.registers(problem, pass)) as u32 / (units * rows);
        Some(Self {
            vector_size,
            plane,
            planes,
            rows,
            vectors,
            even: columns == units as usize * vectors,
            cubes: at_once.clamp(1, Self::MOST_CUBES),
        })
    }

    /// Units meet in memory, where each reads what all of them wrote: few share a row.
    fn without_planes(problem: &LayerNormProblem, vector_size: VectorSize) -> Option<Self> {
        /// Vectors that a unit has before it pays to bring in others, and the most that it may have.
        const VECTORS: [usize; 2] = [4, 64];
        /// Units that share a row, at most, and that a cube of several rows has.
        const UNITS: [usize; 2] = [256, 64];
        let columns = problem.width / vector_size;
        let units = columns.div_ceil(VECTORS[0]).next_power_of_two().min(UNITS[0]);
        let vectors = columns.div_ceil(units);
        let plan = Self {
            vector_size,
            plane: 1,
            planes: units as u32,
            rows: (UNITS[1] / units).max(1) as u32,
            vectors,
            even: columns == units * vectors,
            cubes: Self::MOST_CUBES,
        };
        (vectors <= VECTORS[1]).then_some(plan)
    }

    const MOST_CUBES: u32 = 8;

    /// The sums of parameters' gradients: a cube of 1024 units fills a multiprocessor.
    pub(crate) const PARAMETERS_PROMISE: Promise = Promise::registers(64);

    /// As many registers as leave room for the cubes that this counts on.
    pub(crate) fn promise(&self, problem: &LayerNormProblem, pass: Pass) -> Promise {
        let registers = self.tier(pass).map(|tier| tier.registers(problem, pass) as u32);
        // Units on devices without planes may hold more than any tier.
        Promise::registers(registers.unwrap_or(Promise::MOST_REGISTERS))
    }

    /// The tier that holds its cubes.
    fn tier(&self, pass: Pass) -> Option<&'static Tier> {
        let elements = self.vectors * self.vector_size;
        let units = self.units() * self.rows;
        let holds = |tier: &&Tier| elements <= tier.elements && units <= tier.units;
        tiers(pass).iter().find(holds)
    }

    /// Units that share a row.
    pub(crate) fn units(&self) -> u32 {
        self.plane * self.planes
    }

    /// Additions that a term of a row's sum goes through, at most.
    pub fn additions(&self) -> usize {
        let in_plane = self.plane.ilog2();
        let between = in_plane + self.planes.div_ceil(self.plane);
        let between = if self.sums_planes_in_order() { between.max(self.planes) } else { between };
        self.vectors + self.vector_size + (in_plane + between) as usize
    }

    /// Whether each unit adds up what the planes of its row have.
    pub(super) fn sums_planes_in_order(&self) -> bool {
        self.plane > 1 && self.planes <= 8
    }

    /// Cubes of the backward pass, each of which leaves one partial sum of every parameter.
    pub(super) fn backward_cubes(&self, rows: usize, client: &Client) -> usize {
        let at_once = DeviceProfile::of(client).multiprocessors * self.cubes as usize;
        rows.div_ceil(self.rows as usize).min(at_once)
    }

    fn shared_bytes(&self, pass: Pass) -> usize {
        let slots = (self.planes * self.rows) as usize;
        let slab = match pass {
            Pass::Backward if self.rows > 1 => (self.units() * self.rows) as usize,
            _ => 1,
        };
        (2 * slots + slab * self.vector_size) * size_of::<f32>()
    }
}

impl fmt::Display for LayerNormBlueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vector_size, plane, planes, rows, vectors, .. } = self;
        write!(f, "{rows} rows by {planes} planes of {plane}, ")?;
        write!(f, "{vectors} vectors of {vector_size} a unit")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cubecl::ir::{ElemType, FloatKind};

    fn plan(width: usize, kind: FloatKind, pass: Pass) -> Option<LayerNormBlueprint> {
        let dtype = ElemType::Float(kind);
        let problem = LayerNormProblem {
            norm: Norm::Layer,
            rows: 8192,
            width,
            dtype,
            parameter: dtype,
            bias: true,
            residual: true,
            parts: false,
            scaled: true,
            residual_bias: false,
            watched: false,
        };
        LayerNormBlueprint::with_planes(&problem, pass, 16 / dtype.size(), 32)
    }

    #[test]
    fn narrow_rows_have_a_plane_and_wide_ones_a_cube() {
        let narrow = plan(768, FloatKind::BF16, Pass::Forward).unwrap();
        assert_eq!((narrow.planes, narrow.rows, narrow.vectors, narrow.even), (1, 8, 3, true));
        // Backward the same row is shared by three planes.
        let narrow = plan(768, FloatKind::BF16, Pass::Backward).unwrap();
        assert_eq!((narrow.planes, narrow.rows, narrow.vectors, narrow.even), (3, 2, 1, true));
        for pass in [Pass::Forward, Pass::Backward] {
            let wide = plan(4096, FloatKind::BF16, pass).unwrap();
            assert_eq!((wide.planes, wide.rows, wide.vectors, wide.even), (16, 1, 1, true));
        }
    }

    #[test]
    fn units_cover_a_row_within_their_tier() {
        for width in (8..=8192).step_by(8) {
            let plan = plan(width, FloatKind::BF16, Pass::Backward).unwrap();
            let columns = width / plan.vector_size;
            let held = plan.units() as usize * plan.vectors;
            assert!(held >= columns, "{width}: {plan:?}");
            assert_eq!(plan.even, held == columns, "{width}: {plan:?}");
            assert!(plan.tier(Pass::Backward).is_some(), "{width}: {plan:?}");
        }
    }

    #[test]
    fn rows_that_registers_do_not_hold_are_declined() {
        for kind in [FloatKind::F32, FloatKind::BF16] {
            assert!(plan(24_576, kind, Pass::Forward).is_some());
            assert!(plan(24_584, kind, Pass::Forward).is_none());
            assert!(plan(8192, kind, Pass::Backward).is_some());
            assert!(plan(8200, kind, Pass::Backward).is_none());
        }
    }
}

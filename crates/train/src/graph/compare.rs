//! Whether a replay gives what the pass gives.

use super::tensors::{PassTensors, Squares, served};
use crate::precision::{Precision, PrecisionPolicy};
use blackburn_backend::sketch::Sketch;
use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{Device, Tensor},
};
use std::collections::HashSet;

/// What a pass gives.
pub(super) type Results<O> = (O, GradientsParams);

/// What is kept of a pass's results, for others to be compared with it. Gradients take as much memory as the model, so
/// there is a sketch of them.
#[derive(Clone, Debug)]
pub(super) struct Trace<O> {
    outputs: O,
    gradients: Sketch,
}

impl<O: PassTensors> Trace<O> {
    /// Of the results for `model`. They may be let go of as soon as the device's stream has been drained.
    pub(super) fn of<M: Module>(
        model: &M,
        device: &Device,
        (outputs, gradients): &Results<O>,
    ) -> Self {
        let sketch = Some(Sketch::new(device));
        let mut sketcher = Sketcher { gradients, seen: HashSet::new(), sketch };
        model.visit(&mut sketcher);
        let gradients = sketcher.sketch.unwrap_or_else(|| Sketch::new(device));
        Self { outputs: outputs.clone(), gradients }
    }
}

struct Sketcher<'a> {
    gradients: &'a GradientsParams,
    seen: HashSet<ParamId>,
    /// Taken and put back at each parameter.
    sketch: Option<Sketch>,
}

impl ModuleVisitor for Sketcher<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        let sketch = self.sketch.take();
        self.sketch = sketch.map(|sketch| match self.gradients.get::<D>(param.id) {
            // One that is missing counts as zero.
            None => sketch.with_zeros(param.shape().num_elements()),
            Some(gradient) => sketch.with(served(gradient)),
        });
    }
}

/// How many times farther than two passes may be apart, a replay may be from a pass.
const TIMES_NOISE: f32 = 8.0;
/// Passes that show how far they are apart. By one alone, a single number can be close by chance.
const NOISE_PASSES: u32 = 3;

/// How far from a pass a replay may be, as a share of the norm.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Without a closer look: kernels may be chosen anew, and round otherwise.
    free: f32,
    /// Beyond it, a replay is wrong even where passes differ from each other as much: dropout makes it the
    /// size of 1.
    pub(super) most: f32,
}

impl Limits {
    pub(super) fn of(policy: &PrecisionPolicy) -> Self {
        /// Roundings that add up in a sum of many, of which few go the same way.
        const ROUNDINGS: f32 = 4.0;
        // Products of f32 may be of operands with 11 bits.
        let unit = match policy.precision() {
            Precision::Bf16 | Precision::Fp8(_) => (-8f32).exp2(),
            Precision::F32 | Precision::Tf32 | Precision::F16 => (-11f32).exp2(),
        };
        // A sum in another order falls on another number of 8 bits here and there: 0.022 of the norm was seen in a
        // Llama of 12 layers, 0.045 in one of 22.
        let most = match policy.precision() {
            Precision::Fp8(_) => 0.2,
            _ => 0.02,
        };
        Self { free: ROUNDINGS * unit, most }
    }

    /// Without the upper one. Once a recording is proven to leave nothing to chance, passes that differ are
    /// those of a model whose gradients have become as small as their roundings.
    pub(super) fn of_a_proven_pass(self) -> Self {
        Self { most: f32::INFINITY, ..self }
    }
}

/// When replays are compared with the pass.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Schedule {
    /// Replays whose results were given away.
    replays: u64,
    /// How many there were at the last check.
    checked: u64,
}

impl Schedule {
    /// Takes note of a replay.
    pub(super) fn count(&mut self) {
        self.replays += 1;
    }

    /// Whether the last replay is to be compared with a pass that runs: the second, the tenth, the
    /// hundredth and so on. The second, since what changes in each call is found there before it did harm.
    pub(super) fn is_due(&self) -> bool {
        let next = match self.checked {
            0 => 2,
            2 => 10,
            checked => checked * 10,
        };
        self.replays >= next
    }

    /// Whether another replay is not to be compared.
    pub(super) fn goes_on(&self) -> bool {
        let mut next = *self;
        next.count();
        !next.is_due()
    }

    /// Takes note that it was.
    pub(super) fn set_checked(&mut self) {
        // To the next power of ten where a check was put off.
        self.checked = match self.replays {
            ..10 => 2,
            replays => 10u64.pow(replays.ilog10()),
        };
    }

    /// Results given away since the last check, without the last replay's.
    pub(super) fn unchecked(&self) -> u64 {
        // The first one is of the pass that was recorded and compared.
        self.replays - 1 - self.checked.max(1)
    }

    /// Whether it has proven useful.
    pub(super) fn is_settled(&self) -> bool {
        self.checked >= 10
    }
}

/// What a comparison finds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Verdict {
    Same,
    /// Gradients are not finite, so that there is nothing to compare.
    Unknown,
    Apart {
        results: &'static str,
        share: f32,
    },
}

impl From<Gap> for Verdict {
    fn from(gap: Gap) -> Self {
        if gap.gradients >= gap.outputs {
            Self::Apart { results: "gradients", share: gap.gradients }
        } else {
            Self::Apart { results: "outputs", share: gap.outputs }
        }
    }
}

/// How far passes with the same inputs are apart: kernels that add in any order make some 1e-3 of it in bf16, and all
/// of it where a gradient is nothing but its roundings.
#[derive(Clone, Copy, Debug)]
pub(super) struct Noise(Gap);

impl Noise {
    /// Before any two passes were compared.
    pub(super) fn unseen(limits: Limits) -> Self {
        let share = limits.free / TIMES_NOISE;
        Self(Gap { outputs: share, gradients: share })
    }

    /// With what these two passes show; nothing where gradients are not finite.
    pub(super) fn seen<O: PassTensors>(self, [one, other]: [&Trace<O>; 2]) -> Self {
        Gap::between(one, other).map_or(self, |apart| self.with(apart))
    }

    fn with(self, apart: Gap) -> Self {
        Self(self.0.max(apart))
    }

    /// Whether passes are farther apart than `other` says.
    pub(super) fn exceeds(self, other: Self) -> bool {
        !self.0.is_within(other.0.outputs, other.0.gradients)
    }

    fn covers(self, gap: Gap) -> bool {
        gap.is_within(TIMES_NOISE * self.0.outputs, TIMES_NOISE * self.0.gradients)
    }
}

/// Compares a replay with the pass. `again` runs the pass once more, which is asked for where they are farther apart
/// than the noise that is known.
pub(super) fn judge<O: PassTensors, E>(
    (limits, noise): (Limits, Noise),
    [replayed, ran]: [&Trace<O>; 2],
    again: impl Fn() -> Result<Trace<O>, E>,
) -> Result<Verdict, E> {
    let Some(gap) = Gap::between(replayed, ran) else {
        return Ok(Verdict::Unknown);
    };
    gap.judged((limits, noise), || Ok(Gap::between(&again()?, ran)))
}

/// How far results are apart, as shares of their norms.
#[derive(Clone, Copy, Debug)]
struct Gap {
    /// Of the output that is farthest.
    outputs: f32,
    /// Of all gradients together.
    gradients: f32,
}

impl Gap {
    /// `None` where gradients are not finite.
    fn between<O: PassTensors>(one: &Trace<O>, other: &Trace<O>) -> Option<Self> {
        let gradients = one.gradients.squares(&other.gradients);
        let outputs = one.outputs.squares(&other.outputs).into_iter().flat_map(Squares::totals);
        let all = gradients.into_iter().chain(outputs).collect();
        // One read for all of them.
        let totals = Tensor::cat(all, 0).into_data();
        let totals: Vec<f32> = totals.try_to_vec().ok()?;
        let (gradients, outputs) = totals.split_at_checked(3)?;
        if gradients[..2].iter().all(|sum| !sum.is_finite()) {
            return None;
        }
        let shares = outputs.chunks_exact(3).map(|sums| share(sums).unwrap_or(0.0));
        Some(Self { gradients: share(gradients)?, outputs: shares.fold(0.0, f32::max) })
    }

    /// What a replay that is so far from a pass is. `again` tells how far another pass is from the first.
    fn judged<E>(
        self,
        (limits, mut noise): (Limits, Noise),
        again: impl Fn() -> Result<Option<Self>, E>,
    ) -> Result<Verdict, E> {
        if self.is_within(limits.free, limits.free) {
            return Ok(Verdict::Same);
        }
        if !self.is_within(limits.most, limits.most) {
            return Ok(self.into());
        }
        for _ in 0..NOISE_PASSES {
            if noise.covers(self) {
                return Ok(Verdict::Same);
            }
            let Some(apart) = again()? else { return Ok(Verdict::Unknown) };
            noise = noise.with(apart);
        }
        Ok(if noise.covers(self) { Verdict::Same } else { self.into() })
    }

    fn is_within(self, outputs: f32, gradients: f32) -> bool {
        self.outputs <= outputs && self.gradients <= gradients
    }

    fn max(self, other: Self) -> Self {
        Self {
            outputs: self.outputs.max(other.outputs),
            gradients: self.gradients.max(other.gradients),
        }
    }
}

/// `None` where neither is finite: masks may well be infinite.
fn share(sums: &[f32]) -> Option<f32> {
    let &[one, other, differences] = sums else { return None };
    match (one.is_finite(), other.is_finite()) {
        (false, false) => None,
        (true, true) if differences == 0.0 => Some(0.0),
        (true, true) => Some((differences / one.max(other)).sqrt()),
        _ => Some(f32::INFINITY),
    }
}

#[cfg(test)]
mod tests {
    use super::{Gap, Limits, Noise, Verdict, share};
    use crate::precision::PrecisionPolicy;

    #[test]
    fn a_replay_as_far_away_as_passes_are_from_each_other_needs_no_further_pass() {
        let limits = Limits::of(&PrecisionPolicy::default());
        let gap = |gradients| Gap { outputs: 0.0, gradients };
        let judged = |noise, again: fn() -> Result<f32, &'static str>| {
            gap(0.01).judged((limits, noise), || Ok(Some(gap(again()?))))
        };
        let unseen = Noise::unseen(limits);
        let seen = unseen.with(gap(0.005));
        assert_eq!(judged(seen, || Err("asked for")), Ok(Verdict::Same));
        assert_eq!(judged(unseen, || Err("asked for")), Err("asked for"));
        assert_eq!(judged(unseen, || Ok(0.005)), Ok(Verdict::Same));
        let apart = Verdict::Apart { results: "gradients", share: 0.01 };
        assert_eq!(judged(unseen, || Ok(1e-4)), Ok(apart));
        // Beyond the upper limit nothing excuses it.
        let far = gap(0.5).judged((limits, unseen.with(gap(0.5))), || Err("asked for"));
        assert_eq!(far, Ok(Verdict::Apart { results: "gradients", share: 0.5 }));
    }

    #[test]
    fn a_share_is_a_quotient_of_norms() {
        assert_eq!(share(&[4.0, 1.0, 1.0]), Some(0.5));
        assert_eq!(share(&[0.0, 0.0, 0.0]), Some(0.0));
    }

    #[test]
    fn what_is_infinite_on_one_side_alone_is_apart() {
        let (finite, infinite) = (1.0, f32::INFINITY);
        assert_eq!(share(&[finite, infinite, infinite]), Some(f32::INFINITY));
        assert_eq!(share(&[f32::NAN, finite, f32::NAN]), Some(f32::INFINITY));
        assert_eq!(share(&[infinite, infinite, f32::NAN]), None);
    }
}

//! Plans that were measured on a machine: they come before the model's.

use super::{Epilogue, MatmulBlueprint, MatmulProblem};
use crate::DeviceProfile;
use std::{
    collections::BTreeMap,
    sync::{PoisonError, RwLock},
};

/// Names of plans by [`MatmulBlueprint::kept_under`].
static KEPT: RwLock<BTreeMap<String, String>> = RwLock::new(BTreeMap::new());

/// Takes measured plans into use: what [`MatmulBlueprint::kept_under`] says, and how the plan prints itself. A name
/// that no plan of the problem has is passed over. Call it before the first product, since plans are remembered.
pub fn keep_plans(plans: impl IntoIterator<Item = (String, String)>) {
    KEPT.write().unwrap_or_else(PoisonError::into_inner).extend(plans);
}

impl MatmulBlueprint {
    /// What the measured plan of a problem is kept under: the device, sizes and types, how the operands lie, and
    /// whether the epilogue needs registers.
    pub fn kept_under(
        problem: &MatmulProblem,
        epilogue: &Epilogue,
        device: DeviceProfile,
    ) -> String {
        let MatmulProblem { batch: [outer, inner], m, n, k, lhs, rhs, out, .. } = problem;
        let along = |stride| if stride == 1 { "along" } else { "across" };
        let (lhs_k, rhs_k) = (along(lhs.column_stride), along(rhs.row_stride));
        let registers = if epilogue.needs_registers() { ", registers" } else { "" };
        let architecture =
            device.compute_capability.map_or_else(String::new, |number| format!("sm_{number} "));
        format!(
            "{architecture}{}: {outer}x{inner} m{m} n{n} k{k}, {} {lhs_k} k, {} {rhs_k} k, {:?} to {out}{registers}",
            device.multiprocessors, lhs.dtype, rhs.dtype, problem.f32_precision
        )
    }

    /// The name of the plan that was measured to be the fastest.
    pub(super) fn kept(
        problem: &MatmulProblem,
        epilogue: &Epilogue,
        device: DeviceProfile,
    ) -> Option<String> {
        let kept = KEPT.read().unwrap_or_else(PoisonError::into_inner);
        if kept.is_empty() {
            return None;
        }
        kept.get(&Self::kept_under(problem, epilogue, device)).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matmul::{F32Precision, variants::product};
    use cubecl::ir::{ElemType, FloatKind};

    /// A device that no other test plans for.
    const DEVICE: DeviceProfile = DeviceProfile {
        compute_capability: Some(80),
        multiprocessors: 77,
        shared_bytes: 166_912,
        families: crate::Families::ALL,
    };

    fn bf16(sizes: [usize; 3], k_major: [bool; 2]) -> MatmulProblem {
        let dtype = ElemType::Float(FloatKind::BF16);
        product(sizes, [dtype; 2], k_major, F32Precision::Tf32).unwrap()
    }

    #[test]
    fn a_measured_plan_comes_before_the_models_for_its_problem_alone() {
        let (plain, measured) = (Epilogue::default(), bf16([512, 640, 384], [true, false]));
        let models = |problem| MatmulBlueprint::shortlist(&problem, &plain, DEVICE)[0];
        let plans = MatmulBlueprint::candidates_on(&measured, DEVICE);
        let last = plans.into_iter().rfind(|plan| *plan != models(measured)).unwrap();
        let key = MatmulBlueprint::kept_under(&measured, &plain, DEVICE);
        let other = bf16([512, 640, 448], [true, false]);
        keep_plans([
            (key, last.to_string()),
            (
                MatmulBlueprint::kept_under(&other, &plain, DEVICE),
                "a plan of a later version".into(),
            ),
        ]);
        let plan = |problem| MatmulBlueprint::plan_on(&problem, &plain, DEVICE).unwrap();
        assert_eq!(plan(measured), last);
        assert_eq!(plan(other), models(other));
    }

    #[test]
    fn what_a_plan_is_kept_under_tells_problems_apart() {
        let (plain, kept) =
            (Epilogue::default(), Epilogue { keep_preactivation: true, ..Epilogue::default() });
        let problem = bf16([8, 16, 32], [true, false]);
        let key = MatmulBlueprint::kept_under(&problem, &plain, DEVICE);
        assert_eq!(key, "sm_80 77: 1x1 m8 n16 k32, bf16 along k, bf16 across k, Tf32 to bf16");
        let device = DeviceProfile { multiprocessors: 78, ..DEVICE };
        for other in [
            MatmulBlueprint::kept_under(&problem, &kept, DEVICE),
            MatmulBlueprint::kept_under(&problem, &plain, device),
            MatmulBlueprint::kept_under(&bf16([8, 16, 32], [true, true]), &plain, DEVICE),
            MatmulBlueprint::kept_under(&bf16([16, 8, 32], [true, false]), &plain, DEVICE),
        ] {
            assert_ne!(key, other);
        }
    }
}

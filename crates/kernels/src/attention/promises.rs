//! What the kernels of each plan of attention promise of their machine code.

use super::{AttentionBlueprint, AttentionProblem, mma_plan::MOST_OWN_COLUMNS};
use crate::{Family, Promise};

impl AttentionBlueprint {
    /// What the kernels of this plan promise, in both passes.
    pub(super) fn promises(&self, problem: &AttentionProblem) -> Vec<(&'static str, Promise)> {
        const MOST: u32 = Promise::MOST_REGISTERS;
        let AttentionProblem { mask, bias, packed, dropout, .. } = problem;
        // Known spills in bytes, on one architecture or another: tiles leave few registers for options.
        let of_pairs = mask.is_some() || dropout.is_some();
        let wide = problem.head_dim > 64;
        let of_forward = match (mask.is_some(), bias.is_some() || packed.is_some()) {
            (true, _) if dropout.is_some() && wide => 96,
            (false, false) => 0,
            _ => 32,
        };
        let widest = problem.head_dim > MOST_OWN_COLUMNS;
        let of_backward = match (wide, bias.is_some(), of_pairs) {
            // Weights of TF32 take a register each.
            (true, ..) if widest && problem.is_tf32() => 128,
            (true, true, _) => 320,
            (true, false, true) => 128,
            (true, false, false) | (false, false, true) => 16,
            (false, ..) => 0,
        };
        let of_hopper = match (wide, bias.is_some(), mask.is_some()) {
            (true, true, _) => 480,
            (true, false, true) => 128,
            _ => 0,
        };
        // Numbers that do not change from tile to tile, and addresses of a mask that is not mapped.
        let of_once = match wide {
            true if dropout.is_some() && mask.is_some() && !self.maps_mask => 80,
            true if widest || mask.is_some() && !self.maps_mask => 32,
            true => 0,
            false => 16,
        };
        let once = match widest {
            false => "attention_backward_once_wgmma",
            true => "attention_backward_once_wide_wgmma",
        };
        let row_terms = ("attention_row_terms", Promise::registers(MOST));
        let mut promises = match self.family {
            Family::Wgmma if self.atomic => vec![
                // What a launch gives each unit, as forward.
                (
                    once,
                    Promise::tensor_core("HGMMA", if self.tile_kv == 192 { 128 } else { 168 })
                        .spilling(of_once),
                ),
                ("attention_dq", Promise::registers(MOST)),
                row_terms,
            ],
            Family::Wgmma => vec![
                // What a launch gives each unit; those that multiply then take from those that copy.
                (
                    "attention_forward_wgmma",
                    Promise::tensor_core("HGMMA", if self.is_wide() { 128 } else { 168 }),
                ),
                (
                    "attention_backward_wgmma",
                    Promise::tensor_core("HGMMA", MOST).spilling(of_hopper),
                ),
                row_terms,
            ],
            Family::Mma if self.split => vec![
                ("attention_decode_mma", Promise::tensor_core("HMMA", MOST)),
                ("attention_merge", Promise::registers(MOST)),
            ],
            Family::Mma => vec![
                ("attention_forward_mma", Promise::tensor_core("HMMA", MOST).spilling(of_forward)),
                (
                    "attention_backward_mma",
                    Promise::tensor_core("HMMA", MOST).spilling(of_backward),
                ),
                row_terms,
            ],
            // What a launch gives each unit.
            Family::Tcgen05 => vec![
                ("attention_forward_tcgen05", Promise::tensor_core("UTCHMMA", 168)),
                ("attention_backward_tcgen05", Promise::tensor_core("UTCHMMA", 128)),
                ("attention_dq", Promise::registers(MOST)),
                row_terms,
            ],
            Family::Portable if self.split => vec![
                ("attention_decode", Promise::registers(MOST)),
                ("attention_merge", Promise::registers(MOST)),
            ],
            Family::Portable => [
                "attention_forward_portable",
                "attention_delta",
                "attention_backward_kv_portable",
                "attention_backward_q_portable",
            ]
            .map(|kernel| (kernel, Promise::registers(MOST)))
            .into(),
        };
        if bias.is_some() && self.family != Family::Portable && !self.split {
            promises.push(("attention_bias_gradient_mma", Promise::tensor_core("HMMA", MOST)));
        }
        if self.maps_mask {
            promises.push(("attention_mask_map", Promise::registers(MOST)));
        }
        promises
    }
}

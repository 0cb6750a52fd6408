//! Attention of heads above 128, and of numbers of f32 that are multiplied as TF32.

use super::{
    Case,
    attention::{CAUSAL, GROUPED, LONG, PLAIN, WIDE, Wanted, both, both_in},
    exact_attention::gradients,
};
use blackburn_kernels::{Family, recorder::Gpu};
use blackburn_reference::{
    attention::{AttentionCase, AttentionOptions, cases},
    storage::Storage,
};

const WIDEST: AttentionCase = AttentionCase { name: "widest", head_dim: 256, ..WIDE };

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |name, gpu, quick, body| cases.push(Case { name, gpu, quick, body });
    let (ampere, hopper) = (Gpu::SM_80, Gpu::SM_90A);
    add("attention_once_of_shared_keys_is_within_bounds", hopper, true, |recorder| {
        both(recorder, Wanted::Once(64), AttentionCase { seq_kv: 70, ..WIDEST })
    });
    add("attention_once_of_shared_keys_and_more_is_within_bounds", hopper, false, |recorder| {
        let causal = AttentionOptions { causal: true, ..AttentionOptions::PLAIN };
        let options = [causal, AttentionOptions { dropout: cases::DROPOUT, ..causal }];
        for head_dim in [144, 192, 256] {
            for options in options {
                let case = AttentionCase {
                    heads_q: 2,
                    seq_q: 270,
                    // Sums of dq of more than two tiles have other bits under each schedule.
                    seq_kv: 120,
                    head_dim,
                    options,
                    ..WIDEST
                };
                both(recorder, Wanted::Once(64), case)?;
            }
        }
        gradients(recorder, Wanted::Once(64), 256, Storage::F16)
    });
    add("attention_mma_in_tf32_is_within_bounds", ampere, true, |recorder| {
        both_in(recorder, Wanted::Of(Family::Mma), PLAIN, Storage::F32)
    });
    add("attention_mma_in_tf32_with_options_is_within_bounds", hopper, false, |recorder| {
        for case in [GROUPED, WIDE, WIDEST, LONG, AttentionCase { head_dim: 48, ..CAUSAL }] {
            both_in(recorder, Wanted::Of(Family::Mma), case, Storage::F32)?;
        }
        Ok(())
    });
    // The last one has memory for one pair of tiles and rows of two warps.
    for gpu in [hopper, ampere, Gpu::SM_89] {
        add("attention_mma_of_the_widest_heads_is_within_bounds", gpu, false, |recorder| {
            both(recorder, Wanted::Of(Family::Mma), WIDEST)?;
            let case = AttentionCase { head_dim: 192, ..GROUPED };
            both(recorder, Wanted::Of(Family::Mma), case)
        });
    }
    cases
}

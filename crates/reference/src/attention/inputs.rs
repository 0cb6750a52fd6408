//! Seeded inputs.

use super::{Attention, AttentionCase, PairShape};
use crate::{random::normal, storage::Storage};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// What a case is given.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionInputs {
    /// Queries.
    pub q: Vec<f64>,
    /// Keys.
    pub k: Vec<f64>,
    /// Values.
    pub v: Vec<f64>,
    /// True where a pair is left out.
    pub mask: Option<Vec<bool>>,
    /// What is added to the scores.
    pub bias: Option<Vec<f64>>,
    /// The gradient of the output.
    pub dout: Vec<f64>,
}

impl AttentionInputs {
    /// Normal numbers of deviation 1, rounded to `storage`, and a mask that leaves out about a
    /// third of the pairs: for [`PairShape::Keys`] the last keys of a sequence, else random ones, or all but those
    /// of documents.
    pub fn generate(case: &AttentionCase, seed: u64, storage: Storage) -> Self {
        let draw = |stream: u64, count| {
            normal(seed.wrapping_mul(6).wrapping_add(stream), count, 1.0, storage)
        };
        Self {
            q: draw(0, case.q_len()),
            k: draw(1, case.kv_len()),
            v: draw(2, case.kv_len()),
            bias: case.options.bias.map(|shape| draw(3, case.pair_len(shape))),
            dout: draw(4, case.q_len()),
            mask: case.options.mask.map(|shape| mask(case, shape, seed.wrapping_mul(6) ^ 5)),
        }
    }

    /// Attention over them.
    pub fn attention(&self, case: AttentionCase) -> Attention<'_> {
        let Self { q, k, v, mask, bias, .. } = self;
        let (mask, bias) = (mask.as_deref(), bias.as_deref());
        Attention { case, q, k, v, mask, bias, first_batch: 0 }
    }
}

fn mask(case: &AttentionCase, shape: PairShape, seed: u64) -> Vec<bool> {
    let [batch, heads, rows, keys] = case.pair_dims(shape);
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut below = |limit: usize| (rng.next_u64() % limit as u64) as usize;
    let mut mask = Vec::with_capacity(case.pair_len(shape));
    if case.options.documents && shape != PairShape::Keys {
        for _ in 0..batch * heads {
            add_documents([rows, keys], case.options.dead_rows, &mut below, &mut mask);
        }
        return mask;
    }
    for row in 0..batch * heads * rows {
        if shape == PairShape::Keys {
            // From a sixth to a half, so that some key always stays.
            let visible = keys - keys / 6 - below(keys / 3 + 1);
            mask.extend((0..keys).map(|j| j >= visible));
        } else {
            let dead = case.options.dead_rows && row % rows % 5 == 2;
            mask.extend((0..keys).map(|_| below(3) == 0 || dead));
        }
    }
    mask
}

/// Adds the mask of a head: documents, each a run of queries over as large a share of the keys. Queries see all of it, it
/// up to their own place, or two thirds of it. With `has_dead` some see nothing.
fn add_documents(
    [rows, keys]: [usize; 2],
    has_dead: bool,
    below: &mut impl FnMut(usize) -> usize,
    mask: &mut Vec<bool>,
) {
    let mut first = 0;
    while first < rows {
        let length = 1 + below((rows - first).min(rows * 2 / 3 + 1));
        let place = |row: usize| row * keys / rows;
        let (begin, end) = (place(first), place(first + length).max(place(first) + 1));
        let kind = below(if has_dead { 4 } else { 3 });
        for row in first..first + length {
            let last = place(row).max(begin);
            mask.extend((0..keys).map(|key| {
                let is_seen = match kind {
                    0 => true,
                    1 => key <= last,
                    2 => key == begin || below(3) > 0,
                    _ => false,
                };
                !(begin..end).contains(&key) || !is_seen
            }));
        }
        first += length;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::AttentionOptions;

    fn generated(shape: PairShape, dead_rows: bool) -> (AttentionCase, Vec<bool>) {
        let options = AttentionOptions { mask: Some(shape), dead_rows, ..AttentionOptions::PLAIN };
        let (batch, heads_q, heads_kv, head_dim) = (8, 2, 1, 4);
        let (seq_q, seq_kv, name) = (20, 60, "test");
        let case =
            AttentionCase { name, batch, heads_q, heads_kv, seq_q, seq_kv, head_dim, options };
        (case, AttentionInputs::generate(&case, 1, Storage::F32).mask.unwrap())
    }

    #[test]
    fn masks_leave_out_about_a_third_and_no_whole_row() {
        for shape in [PairShape::Keys, PairShape::Shared, PairShape::PerBatch, PairShape::Full] {
            let (case, mask) = generated(shape, false);
            assert_eq!(mask.len(), case.pair_len(shape));
            let share = mask.iter().filter(|masked| **masked).count() as f64 / mask.len() as f64;
            assert!((share - 1.0 / 3.0).abs() < 0.1, "{shape:?} {share}");
            assert!(mask.chunks_exact(60).all(|row| row.contains(&false)), "{shape:?}");
        }
    }

    #[test]
    fn documents_are_runs_of_keys_that_runs_of_queries_see() {
        let options = AttentionOptions {
            mask: Some(PairShape::PerBatch),
            documents: true,
            ..AttentionOptions::PLAIN
        };
        let (case, _) = generated(PairShape::PerBatch, false);
        let case = AttentionCase { options, ..case };
        let mask = AttentionInputs::generate(&case, 1, Storage::F32).mask.unwrap();
        assert_eq!(mask.len(), case.pair_len(PairShape::PerBatch));
        assert!(mask.chunks_exact(60).all(|row| row.contains(&false)));
        let first = |row: &[bool]| row.iter().position(|masked| !masked);
        for sequence in mask.chunks_exact(20 * 60) {
            assert!(sequence.chunks_exact(60).map(first).is_sorted());
        }
    }

    #[test]
    fn dead_rows_are_left_out_whole_in_every_head() {
        let (_, mask) = generated(PairShape::PerHead, true);
        let dead = mask.chunks_exact(60).map(|row| !row.contains(&false));
        assert!(dead.enumerate().all(|(row, dead)| dead == (row % 20 % 5 == 2)));
    }
}

//! The catalogue of attention, which tests and benches share.

use super::{AttentionCase, AttentionOptions, Dropout, PairShape, Window};

const PLAIN: AttentionOptions = AttentionOptions::PLAIN;

const CAUSAL: AttentionOptions = AttentionOptions { causal: true, ..PLAIN };

const SOFTCAP: Option<f64> = Some(2.0);

/// A fifth of the weights left out.
pub const DROPOUT: Option<Dropout> = Some(Dropout { rate: 0.2, seed: 0x0123_4567_89ab_cdef });

/// All at once. The bias and the mask differ in shape, and the window cuts both sides of some rows.
const EVERYTHING: AttentionOptions = AttentionOptions {
    scale: Some(0.2),
    causal: true,
    window: Some(Window { left: Some(20), right: Some(3) }),
    softcap: SOFTCAP,
    dropout: DROPOUT,
    mask: Some(PairShape::PerBatch),
    dead_rows: true,
    documents: false,
    bias: Some(PairShape::PerHead),
};

/// As many short sequences that share a bias as an image has windows: more than a GPU runs tiles at once.
pub const WINDOWS: AttentionCase = AttentionCase {
    name: "windows that share a bias",
    batch: 1100,
    heads_q: 1,
    heads_kv: 1,
    seq_q: 9,
    seq_kv: 11,
    head_dim: 16,
    options: AttentionOptions { bias: Some(PairShape::PerHead), ..PLAIN },
};

/// Cases small enough for software devices: [`edges`], then [`options`].
pub fn small() -> Vec<AttentionCase> {
    [edges(), options()].concat()
}

/// Sequences that end around the edges of tiles of 16 to 128, of equal and of different lengths, in
/// all dimensions of heads, each with and without causality. Where a causal case has more queries
/// than keys, its first rows see nothing.
pub fn edges() -> Vec<AttentionCase> {
    macro_rules! edges {
        ($($seq_q:literal by $seq_kv:literal, heads of $head_dim:literal),+ $(,)?) => {
            [$((
                concat!($seq_q, " by ", $seq_kv, ", heads of ", $head_dim),
                concat!($seq_q, " by ", $seq_kv, ", heads of ", $head_dim, ", causal"),
                [$seq_q, $seq_kv, $head_dim],
            )),+]
        };
    }
    let sizes = edges![
        1 by 1, heads of 32,
        1 by 65, heads of 64,
        64 by 1, heads of 32,
        15 by 17, heads of 128,
        17 by 15, heads of 96,
        16 by 16, heads of 64,
        31 by 33, heads of 256,
        33 by 31, heads of 128,
        63 by 64, heads of 96,
        65 by 63, heads of 64,
        16 by 127, heads of 256,
        127 by 16, heads of 128,
        127 by 129, heads of 32,
        129 by 127, heads of 64,
    ];
    let both = |(full, causal, [seq_q, seq_kv, head_dim]): (_, _, [usize; 3])| {
        [(full, PLAIN), (causal, CAUSAL)].map(|(name, options)| AttentionCase {
            name,
            batch: 1,
            heads_q: 2,
            heads_kv: 2,
            seq_q,
            seq_kv,
            head_dim,
            options,
        })
    };
    sizes.into_iter().flat_map(both).collect()
}

/// Each option alone, some that meet in one kernel together, and all at once.
pub fn options() -> Vec<AttentionCase> {
    let window = |left, right| AttentionOptions { window: Some(Window { left, right }), ..PLAIN };
    let mask = |shape| AttentionOptions { mask: Some(shape), ..PLAIN };
    let bias = |shape| AttentionOptions { bias: Some(shape), ..PLAIN };
    let documents = |shape| AttentionOptions { documents: true, ..mask(shape) };
    let dead_rows = AttentionOptions { dead_rows: true, ..mask(PairShape::Full) };
    // Batch, heads of queries, heads of keys; queries, keys, head dimension.
    let cases = [
        ("another scale", [1, 2, 2], [33, 31, 64], AttentionOptions { scale: Some(0.3), ..PLAIN }),
        ("two heads to each key", [2, 4, 2], [33, 65, 64], PLAIN),
        ("four heads to each key", [1, 4, 1], [65, 33, 32], PLAIN),
        ("four heads to each key, causal", [2, 4, 1], [31, 64, 128], CAUSAL),
        ("window to the left", [1, 2, 2], [65, 127, 64], window(Some(16), Some(0))),
        ("window to both sides", [1, 2, 2], [129, 65, 32], window(Some(17), Some(15))),
        ("window to the right", [1, 2, 2], [64, 64, 64], window(None, Some(8))),
        (
            "window, causal",
            [1, 2, 2],
            [63, 65, 64],
            AttentionOptions { causal: true, ..window(Some(31), None) },
        ),
        // The first query sees all keys of the first tile but the last, of whatever tiles.
        ("causal, a key short of a tile", [1, 2, 2], [65, 191, 64], CAUSAL),
        // The 64th sees all of the second tile but its first.
        ("window, a key short of a tile", [1, 2, 2], [65, 256, 64], window(Some(125), None)),
        ("softcap", [1, 2, 2], [33, 64, 64], AttentionOptions { softcap: SOFTCAP, ..PLAIN }),
        (
            "softcap, causal",
            [1, 2, 2],
            [64, 64, 128],
            AttentionOptions { softcap: SOFTCAP, ..CAUSAL },
        ),
        ("dropout", [2, 2, 2], [33, 65, 64], AttentionOptions { dropout: DROPOUT, ..PLAIN }),
        (
            "dropout, causal",
            [1, 2, 2],
            [65, 65, 32],
            AttentionOptions { dropout: DROPOUT, ..CAUSAL },
        ),
        ("padded keys", [2, 2, 2], [17, 127, 64], mask(PairShape::Keys)),
        (
            "padded keys, causal",
            [2, 2, 2],
            [65, 65, 64],
            AttentionOptions { causal: true, ..mask(PairShape::Keys) },
        ),
        ("mask, shared", [2, 2, 2], [33, 31, 64], mask(PairShape::Shared)),
        ("mask for each sequence", [2, 2, 2], [31, 65, 64], mask(PairShape::PerBatch)),
        ("mask for each head", [2, 2, 1], [64, 63, 32], mask(PairShape::PerHead)),
        ("mask with rows that see nothing", [1, 2, 2], [33, 65, 96], dead_rows),
        ("documents", [2, 4, 2], [150, 150, 64], documents(PairShape::Shared)),
        (
            "documents of each sequence, and rows that see nothing",
            [2, 2, 1],
            [199, 250, 32],
            AttentionOptions { dead_rows: true, ..documents(PairShape::PerBatch) },
        ),
        (
            "documents, causal",
            [1, 2, 2],
            [130, 251, 64],
            AttentionOptions { causal: true, ..documents(PairShape::PerBatch) },
        ),
        ("bias, shared", [2, 2, 2], [33, 31, 64], bias(PairShape::Shared)),
        ("bias for each sequence", [2, 2, 2], [17, 63, 64], bias(PairShape::PerBatch)),
        ("bias for each head", [2, 4, 2], [65, 33, 64], bias(PairShape::PerHead)),
        ("bias for each pair", [2, 2, 2], [31, 33, 128], bias(PairShape::Full)),
        ("bias for each key", [2, 2, 2], [33, 17, 64], bias(PairShape::Keys)),
        ("everything", [2, 4, 2], [63, 65, 64], EVERYTHING),
        ("everything, more queries", [1, 4, 1], [65, 33, 128], EVERYTHING),
        ("everything, heads of 256", [1, 2, 1], [17, 33, 256], EVERYTHING),
    ];
    let case = |(name, heads, sizes, options): (_, [usize; 3], [usize; 3], _)| {
        let ([batch, heads_q, heads_kv], [seq_q, seq_kv, head_dim]) = (heads, sizes);
        AttentionCase { name, batch, heads_q, heads_kv, seq_q, seq_kv, head_dim, options }
    };
    cases.into_iter().map(case).collect()
}

/// Without queries, keys or sequences. Without keys, rows see nothing.
pub fn empty() -> Vec<AttentionCase> {
    let case = |name, batch, seq_q, seq_kv| AttentionCase {
        name,
        batch,
        heads_q: 2,
        heads_kv: 1,
        seq_q,
        seq_kv,
        head_dim: 32,
        options: PLAIN,
    };
    vec![case("no sequence", 0, 3, 2), case("no query", 1, 0, 2), case("no key", 1, 3, 0)]
}

/// What is timed: 4 sequences of 1024 to 16384 tokens, 16 heads of 64, of 128 and of 256.
pub fn benchmark() -> Vec<AttentionCase> {
    macro_rules! lengths {
        ($($seq:literal),+) => {
            [$(
                (concat!($seq, ", heads of 64"), $seq, 64, PLAIN),
                (concat!($seq, ", heads of 64, causal"), $seq, 64, CAUSAL),
                (concat!($seq, ", heads of 128"), $seq, 128, PLAIN),
                (concat!($seq, ", heads of 128, causal"), $seq, 128, CAUSAL),
                (concat!($seq, ", heads of 256"), $seq, 256, PLAIN),
                (concat!($seq, ", heads of 256, causal"), $seq, 256, CAUSAL)
            ),+]
        };
    }
    let case = |(name, seq, head_dim, options)| AttentionCase {
        name,
        batch: 4,
        heads_q: 16,
        heads_kv: 16,
        seq_q: seq,
        seq_kv: seq,
        head_dim,
        options,
    };
    lengths![1024, 2048, 4096, 8192, 16384].into_iter().map(case).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{attention::AttentionInputs, storage::Storage};
    use std::collections::BTreeSet;

    #[test]
    fn every_case_has_a_name_of_its_own_and_makes_sense() {
        let all = [small(), empty(), benchmark()].concat();
        let names: BTreeSet<_> = all.iter().map(|case| case.name).collect();
        assert_eq!(names.len(), all.len());
        all.iter().for_each(AttentionCase::check);
    }

    #[test]
    fn small_cases_reach_every_edge_every_head_and_both_orders_of_length() {
        let cases = small();
        for edge in [1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129] {
            assert!(cases.iter().any(|case| case.seq_q == edge), "seq_q {edge}");
            assert!(cases.iter().any(|case| case.seq_kv == edge), "seq_kv {edge}");
        }
        for head_dim in [32, 64, 96, 128, 256] {
            for causal in [false, true] {
                let found =
                    |c: &&AttentionCase| (c.head_dim, c.options.causal) == (head_dim, causal);
                assert!(cases.iter().any(|c| found(&c)), "{head_dim} {causal}");
            }
        }
        assert!(cases.iter().any(|case| case.options.causal && case.seq_q < case.seq_kv));
        assert!(cases.iter().any(|case| case.options.causal && case.seq_q > case.seq_kv));
        assert!(cases.iter().all(|case| case.seq_q.max(case.seq_kv) <= 256));
        assert!(cases.iter().all(|case| case.batch <= 2 && case.heads_q <= 4));
    }

    #[test]
    fn some_rows_see_nothing_by_mask_and_some_by_causality() {
        let dead = |name| {
            let case = *small().iter().find(|case| case.name == name).unwrap();
            let inputs = AttentionInputs::generate(&case, 1, Storage::F32);
            let lse = inputs.attention(case).forward().lse;
            lse.iter().filter(|lse| **lse == f64::NEG_INFINITY).count()
        };
        assert_eq!(dead("mask with rows that see nothing"), 2 * 7);
        assert_eq!(dead("64 by 1, heads of 32, causal"), 2 * 63);
        assert_eq!(dead("64 by 1, heads of 32"), 0);
    }

    #[test]
    fn benchmarks_cost_half_when_causal() {
        for pair in benchmark().chunks_exact(2) {
            let share = pair[1].forward_flops() / pair[0].forward_flops();
            assert!((0.5..0.501).contains(&share), "{share}");
        }
        let largest = 4.0 * 4.0 * 16.0 * 16384f64.powi(2) * 256.0;
        assert_eq!(benchmark()[28].forward_flops(), largest);
    }
}

//! The cases of attention, and of its cache.

use crate::draw::Told;
use blackburn_kernels::{
    Family,
    attention::variants::{ON_TENSOR_CORES, Options, PORTABLE},
};

/// The options of the list for machine code, on sequences that no tile divides.
pub(super) fn attention(family: Family, of_type: &Told, small: bool) -> Vec<Told> {
    let of_family: Vec<(Options, usize)> = match family {
        Family::Portable => PORTABLE.to_vec(),
        _ => ON_TENSOR_CORES
            .into_iter()
            .flat_map(|(options, heads)| heads.iter().map(move |head| (options, *head)))
            .collect(),
    };
    let mut all = Vec::new();
    for (number, (options, head_dim)) in of_family.into_iter().enumerate() {
        use Options::{Bias, Causal, Dropout, Everything, Mask, Packed, Plain, SharedMask};
        if options == Packed {
            // It has an order in memory of its own, which cases do not draw.
            continue;
        }
        let plain = matches!(options, Plain | Causal);
        let everything = options == Everything;
        let orders = ["HeadsFirst", "PositionsFirst"];
        let [seq_q, seq_kv] = if small { [37, 53] } else { [139, 203] };
        let mut told = of_type
            .clone()
            .with("head_dim", if small { 32 } else { head_dim })
            .named("order", orders[number % 2])
            .named("order-kv", orders[number / 2 % 2])
            .with("mask-bytes", if number % 2 == 0 { 4 } else { 1 })
            .with("forward", number % 3)
            .with("backward", number % 2)
            .with("padding", 0)
            .with("plain", plain)
            .with("causal", matches!(options, Causal | Dropout | Mask))
            .with("batch", 1)
            .with("heads_kv", 1)
            .with("group", 2)
            .with("seq_q", seq_q)
            .with("seq_kv", seq_kv);
        if !plain {
            let masked = everything || matches!(options, Mask | SharedMask);
            told = told
                .with("mask", masked)
                .with("bias", everything || options == Bias)
                .with("windowed", everything)
                .with("capped", everything || options == Bias)
                .with("drops", everything || options == Dropout);
            if masked {
                told = told
                    .named("mask-shape", if options == SharedMask { "Shared" } else { "Full" })
                    .with("documents", options == SharedMask);
            }
        }
        all.push(told);
    }
    all
}

/// Heads of every number of vectors, tiles of every number of rows, and lengths within and beside splits.
pub(super) fn decoding(of_type: &Told) -> Vec<Told> {
    struct Of {
        head_dim: usize,
        tile: usize,
        group: usize,
        seq_q: usize,
        /// Keys of a split.
        split: usize,
        length: usize,
        causal: bool,
        windowed: bool,
    }
    let one = Of {
        head_dim: 64,
        tile: 4,
        group: 4,
        seq_q: 1,
        split: 96,
        length: 251,
        causal: true,
        windowed: false,
    };
    let all = [
        Of { ..one },
        Of { head_dim: 128, tile: 8, group: 3, seq_q: 5, split: 37, length: 150, ..one },
        Of { head_dim: 80, tile: 1, length: 97, ..one },
        Of { head_dim: 256, tile: 2, seq_q: 2, split: 20, length: 90, ..one },
        Of { head_dim: 33, seq_q: 3, split: 11, causal: false, ..one },
        // Whole splits lie before the window.
        Of { head_dim: 32, seq_q: 2, split: 64, windowed: true, ..one },
        // The first queries see nothing.
        Of { head_dim: 96, tile: 8, seq_q: 16, split: 1000, length: 9, ..one },
        Of { head_dim: 40, split: 1, length: 1, ..one },
        // By tensor cores, where they are: several tiles of each warp, and more rows than one has.
        Of { tile: 16, split: 300, length: 290, ..one },
        Of { head_dim: 128, tile: 16, seq_q: 5, split: 140, length: 299, ..one },
    ];
    let mut told = Vec::new();
    for (number, of) in all.into_iter().enumerate() {
        for known in [false, true] {
            let orders = ["HeadsFirst", "PositionsFirst"];
            let plain = number % 2 == 0 && !of.windowed;
            let mut case = of_type
                .clone()
                .with("head_dim", of.head_dim)
                .named("order", orders[number % 2])
                .named("order-kv", orders[number / 2 % 2])
                .with("padding", [0, 8, 3][number % 3])
                .with("tile", of.tile)
                .with("known", known)
                .with("plain", plain)
                .with("causal", of.causal)
                .with("batch", 3)
                .with("heads_kv", 2)
                .with("group", of.group)
                .with("seq_q", of.seq_q)
                .with("capacity", 300)
                .with("split", of.split)
                .with("length", of.length)
                .with("differ", number % 2 == 0);
            if !plain {
                case = case.with("windowed", of.windowed).with("capped", !of.windowed);
            }
            if of.windowed {
                case = case.with("left", 70).with("unbounded", false);
            }
            told.push(case);
        }
    }
    told
}

/// Vectors of every width, and places inside and outside of the cache.
pub(super) fn appends(of_type: &Told) -> Vec<Told> {
    let orders = ["HeadsFirst", "PositionsFirst"];
    let mut all = Vec::new();
    for (number, (head_dim, padding)) in
        [(128, 0), (33, 0), (80, 8), (64, 3)].into_iter().enumerate()
    {
        for inside in [true, false] {
            all.push(
                of_type
                    .clone()
                    .with("head_dim", head_dim)
                    .named("order", orders[number % 2])
                    .named("order-new", orders[1 - number / 2])
                    .with("padding", padding)
                    .with("padding-new", if number == 3 { 0 } else { padding })
                    .with("batch", 3)
                    .with("heads", 2)
                    .with("seq", if inside { 1 } else { 17 })
                    .with("capacity", 75)
                    .with("inside", inside)
                    .with("shared", number % 2 == 1),
            );
        }
    }
    all
}

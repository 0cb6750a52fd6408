//! Attention on every device, and the rules that all families share.

use super::{InFile, device, statement};

/// The quick ones. Long sequences are for GPUs.
const TESTS: &[&str] = &[
    "attention::op::both_passes_are_within_bounds",
    "attention::op",
    "attention::packed_sequences",
    "attention::scores_of_minus_infinity",
    "attention::lengths_around_the_edges_of_tiles_are_within_bounds_in_f32",
];
const RULES: &[&str] = &[
    "attention::op::both_passes_are_within_bounds",
    "attention::op",
    "attention::a_batch_may_be_larger_than_a_launch_in_f32",
];
/// Masks that tell documents apart.
const MAPS: &[&str] = &[
    "attention::tiles_that_a_mask_hides_are_left_out_in_f32",
    "attention::every_option_is_within_bounds_in_f32",
];

pub(super) const FILES: &[InFile] = &[
    InFile {
        file: "crates/kernels/src/attention/forward.rs",
        tests: TESTS,
        rows: &[
            device(
                "dropped scale of dropout",
                "rules.numbers.kept / total[i]",
                "1.0f32 / total[i]",
            ),
            statement("sum of weights not rescaled", "total[i] *= rescale[i];", ""),
            statement(
                "output not rescaled",
                "sums[comptime!(i * blueprint.columns() + j)] *= rescale[i];",
                "",
            ),
            device(
                "lost last key",
                "query < sequence.seq_q && key < sequence.seq_kv",
                "query < sequence.seq_q && key + 1 < sequence.seq_kv",
            ),
            device("wrong sign in the logarithm", "total[i].ln()", "-total[i].ln()"),
            statement("largest score not saved", "lse[at as usize] = most[i];", ""),
            statement("dropout left out", "weight = -weight;", ""),
            device("heads of keys not shared", "CUBE_POS_Y / rules.sizes.group", "CUBE_POS_Y"),
            statement("skipped tile of keys", "first_key += side;", "first_key += 2 * side;"),
        ],
    },
    InFile {
        file: "crates/kernels/src/attention/decode.rs",
        tests: &["attention::decode"],
        rows: &[
            device(
                "a key too many",
                "bounded(diagonal + seq_q, seq_kv)",
                "bounded(diagonal + seq_q + 1, seq_kv)",
            ),
            statement(
                "skipped tile of keys",
                "first_key += tile_keys;",
                "first_key += 2 * tile_keys;",
            ),
            device(
                "one position for all sequences",
                "(batch * splits.position_step) as usize",
                "(splits.position_step) as usize",
            ),
            device(
                "keys of the last splits lost",
                "max(seen.div_ceil(self.count), self.least_keys)",
                "max(seen / self.count, self.least_keys)",
            ),
            device(
                "heads of a key mixed up",
                "head_kv * sizes.group + row / sizes.seq_q",
                "head_kv * sizes.group",
            ),
            statement(
                "weighted values not rescaled",
                "sums[comptime!(part * round + row)] *= Vector::new(weights.rescale[row]);",
                "",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/attention/decode_merge.rs",
        tests: &["attention::decode"],
        rows: &[
            device(
                "merge without the last split",
                "keys.div_ceil(splits.keys_of_each(keys))",
                "keys / splits.keys_of_each(keys)",
            ),
            device(
                "stripes merged without their maxima",
                "(found.most - most).exp()",
                "1.0f32.runtime()",
            ),
        ],
    },
    // Through shared memory: software devices have no planes of one known size.
    InFile {
        file: "crates/kernels/src/attention/decode_weights.rs",
        tests: &["attention::decode"],
        rows: &[
            device(
                "a query sees the key behind it",
                "sequence.keys_of(query, query + 1)",
                "sequence.keys_of(query, query + 2)",
            ),
            device("keys of other splits seen", "min(seen.1, self.end)", "seen.1"),
            device(
                "sum of weights not rescaled",
                "running.total[known] * rescale + added",
                "running.total[known] + added",
            ),
            device(
                "parts of a row's product left out",
                "memory[(key * pitch + other) as usize]",
                "memory[(key * pitch) as usize]",
            ),
            device(
                "scores of the first row",
                "comptime!(row as u32 * tile_keys) + of_tile",
                "of_tile",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/attention/append.rs",
        tests: &["attention::cached"],
        rows: &[
            device(
                "tokens on top of each other",
                "position[(batch * room.position_step) as usize] + i32::cast_from(token)",
                "position[(batch * room.position_step) as usize]",
            ),
            device(
                "values of keys",
                "new_values.memory[from as usize]",
                "new_keys.memory[from as usize]",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/attention/backward.rs",
        tests: TESTS,
        rows: &[
            device(
                "missing delta",
                "kept * gradients[pair] - values.delta[at]",
                "kept * gradients[pair]",
            ),
            device(
                "slope of the cap left out",
                "gradient * rules.score_slope(bounded)",
                "gradient",
            ),
            statement(
                "dropped scale of dk",
                "store_rows::<I>(&dk_sums, &mut dk.memory, &span, rules.numbers.scale, blueprint);",
                "store_rows::<I>(&dk_sums, &mut dk.memory, &span, 1.0f32, blueprint);",
            ),
            statement("dropout left out", "kept = 0.0f32;", ""),
            statement("dropped scale of dropout in dv", "weight = kept * p;", "weight = p;"),
            device(
                "first head of a group taken for all",
                "CUBE_POS_Y * rules.sizes.group + member",
                "CUBE_POS_Y * rules.sizes.group",
            ),
            statement("bias's gradient not zeroed", "keys = (0u32, sequence.seq_kv);", ""),
            device(
                "row without keys not masked",
                "select(log < f32::min_value(), 0.0f32, (below - log).exp())",
                "(below - log).exp()",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/attention/mask_map.rs",
        tests: MAPS,
        rows: &[
            statement(
                "span of seen keys ends a block early",
                "seen_end = end;",
                "seen_end = begin;",
            ),
            device(
                "span of seen keys begins a block late",
                "min(seen_begin, begin)",
                "min(seen_begin, begin + block)",
            ),
            device(
                "blocks that are left out count as seen",
                "select(word == 0, 0u32, 1u32)",
                "select(word == 0, 1u32, 1u32)",
            ),
            device(
                "spans of all sequences at the first one's place",
                "CUBE_POS_Y * strides.span_batch + CUBE_POS_X * strides.span_block",
                "CUBE_POS_X * strides.span_block",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/attention/rules.rs",
        tests: MAPS,
        rows: &[
            device(
                "last block of queries that see a key left out",
                "(block + 1) * size",
                "block * size",
            ),
            device(
                "spans of the first sequence for all",
                "self.batch * strides.span_batch + block * strides.span_block + number",
                "block * strides.span_block + number",
            ),
            device(
                "no key seen by any block",
                "seen_end = max(seen_end, to);",
                "seen_end = min(seen_end, to);",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/attention/rules.rs",
        tests: RULES,
        rows: &[
            device(
                "mask aligned at the top left",
                "i32::cast_from(seq_kv) - i32::cast_from(seq_q)",
                "i32::cast_from(seq_kv) - i32::cast_from(seq_kv)",
            ),
            device(
                "off-by-one left end of the window",
                "visible && distance >= -self.rules.numbers.left",
                "visible && distance > -self.rules.numbers.left",
            ),
            device(
                "off-by-one right end of the window",
                "visible && distance <= self.rules.numbers.right",
                "visible && distance < self.rules.numbers.right",
            ),
            device(
                "missing mask",
                "visible && self.rules.mask[at as usize] == M::from_int(0)",
                "visible",
            ),
            device("launches all at the first batch", "cube + self.sizes.first_batch", "cube"),
            device(
                "keys of the window's right side left out",
                "i32::cast_from(end) + self.diagonal + self.rules.numbers.right",
                "i32::cast_from(end) + self.diagonal",
            ),
            device(
                "queries of the window's left side left out",
                "i32::cast_from(end) - self.diagonal + self.rules.numbers.left",
                "i32::cast_from(end) - self.diagonal",
            ),
            device(
                "length of packed keys by the queries'",
                "self.starts[(kv + batch + 1) as usize] - first_kv",
                "self.starts[(batch + 1) as usize] - first_q",
            ),
            statement("slope of the cap left out", "slope -= share * share;", ""),
            device(
                "dropped scale of the cap",
                "self.numbers.softcap * (score / self.numbers.softcap).tanh()",
                "(score / self.numbers.softcap).tanh()",
            ),
            device(
                "same dropout in every sequence",
                "self.batch * self.rules.sizes.heads_q + self.head",
                "self.head",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/attention/tile.rs",
        tests: TESTS,
        rows: &[
            device(
                "missing mask of the head's columns",
                "span.first + row < span.end && first_column + column < comptime!(blueprint.head_dim)",
                "span.first + row < span.end",
            ),
            statement(
                "lost part of the head",
                "first_column += DEPTH;",
                "first_column += 2 * DEPTH;",
            ),
            device(
                "last row not written",
                "row < span.end && column < comptime!(blueprint.head_dim)",
                "row + 1 < span.end && column < comptime!(blueprint.head_dim)",
            ),
            device(
                "dropped factor",
                "factor * sums[comptime!(i * columns + j)]",
                "sums[comptime!(i * columns + j)]",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/attention/dropout.rs",
        tests: TESTS,
        rows: &[
            statement(
                "digits below its own are a weight's, too",
                "kept = (kept << NEXT_KEY) | (kept >> NEXT_KEY);",
                "",
            ),
            device("queries share a draw", "of_key + query % 16 / APART", "of_key"),
            device(
                "a digit taken twice",
                "majority(third, drawn.3, zeros[comptime!(digit + 3)])",
                "majority(third, drawn.3, zeros[digit])",
            ),
        ],
    },
];

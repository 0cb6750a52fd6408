//! The families that run on tensor cores, what only devices with planes compile, and streams that race:
//! only a GPU can notice these.

use super::{InFile, device, host, statement};

/// Of one type each, since a fault's kernels are compiled anew.
const PRODUCTS: &[&str] = &[
    "matmul::long_sums_are_within_bounds_in_bf16",
    "matmul::all_layouts_are_within_bounds_in_bf16",
    "matmul::batches_are_within_bounds_in_bf16",
    "matmul::ragged_shapes_are_within_bounds_in_bf16",
    "matmul::every_epilogue_is_within_bounds_in_bf16",
];
const EPILOGUES: &[&str] = &[
    "matmul::a_residual_is_added",
    "matmul::every_epilogue_is_within_bounds_in_bf16",
    "matmul::all_layouts_are_within_bounds_in_bf16",
];
const ATTENTION: &[&str] = &[
    "attention::long::packed_sequences_attend_to_themselves_in_bf16",
    "attention::long::everything_is_within_bounds_in_bf16",
    "attention::every_option_is_within_bounds_in_bf16",
    "attention::long::a_key_of_four_heads_causal_is_within_bounds_in_bf16",
    "attention::long::a_sequence_of_4100_is_within_bounds_in_bf16",
    "attention::lengths_around_the_edges_of_tiles_are_within_bounds_in_bf16",
];

pub(super) const FILES: &[InFile] = &[
    InFile {
        file: "crates/kernels/src/softmax/rows_forward.rs",
        tests: &["softmax::rows::forward", "softmax::rows"],
        rows: &[statement(
            "unit's sum not brought to the plane's peak",
            "total *= exponential_by(peak - of_plane, hardware);",
            "",
        )],
    },
    InFile {
        file: "crates/kernels/src/matmul/mma.rs",
        tests: PRODUCTS,
        rows: &[device(
            "whole chunk read at a row's end",
            "min(columns - column_at, chunk_elements) * element_bytes",
            "min(columns, chunk_elements) * element_bytes",
        )],
    },
    InFile {
        file: "crates/kernels/src/matmul/mma_tile.rs",
        tests: PRODUCTS,
        rows: &[device(
            "bias of the first warp for all",
            "bias_at + fragments.column * comptime!(element_bytes(half))",
            "bias_at",
        )],
    },
    InFile {
        file: "crates/kernels/src/matmul/ring.rs",
        tests: PRODUCTS,
        rows: &[
            statement("missing barrier", "sync_cube();", ""),
            device("stale block", "work.first_block + ahead", "work.first_block + block"),
            statement("ring not wrapped", "ahead_stage = 0u32;", ""),
            device(
                "words of the first warp for all",
                "first / 32 * comptime!(chunk_bytes(4))",
                "first * 0u32",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/matmul/wgmma.rs",
        tests: PRODUCTS,
        rows: &[
            device(
                "both groups write the same rows",
                "work.row + group * 64 + lane / 32 * 16 + lane % 32 / 4",
                "work.row + lane / 32 * 16 + lane % 32 / 4",
            ),
            device(
                "first block again and again",
                "block * comptime!(self.block_k)",
                "work.first_block * comptime!(self.block_k)",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/matmul/wgmma.rs",
        tests: &["fp8::linear", "fp8"],
        rows: &[
            statement("promoted sums lost", "promoted += sums;", ""),
            statement("promoted sums forgotten at the end", "sums += promoted;", ""),
        ],
    },
    InFile {
        file: "crates/kernels/src/matmul/store.rs",
        tests: EPILOGUES,
        rows: &[
            device(
                "splits over each other",
                "work.split * extent.batches + work.batch",
                "work.batch",
            ),
            device("dropped scale", "finish.scale * sum + offset", "sum + offset"),
            device(
                "dropped factor of the residual",
                "fma(residual, finish.beta, value)",
                "value + residual",
            ),
            device("column not passed on", "select(place.quad == 3, carried, high)", "high"),
            statement(
                "swapped words of an octet",
                "received[1] = select(upper, from1, x1);",
                "received[1] = select(upper, x1, from1);",
            ),
            device("missing bound of an octet", "has_row && octet_column < place.n", "has_row"),
            device(
                "residual of the column before",
                "residual_at::<O>(residual, row, column + 1, has_row, place)",
                "residual_at::<O>(residual, row, column, has_row, place)",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/matmul/bias_tile.rs",
        tests: EPILOGUES,
        rows: &[device("last bias lost", "column < columns", "column + 1 < columns")],
    },
    InFile {
        file: "crates/kernels/src/matmul/work.rs",
        tests: PRODUCTS,
        rows: &[
            device(
                "last group of rows taken for a full one",
                "min(extent.group, tiles_m - first_row)",
                "extent.group",
            ),
            device(
                "splits overlap",
                "min(first_block + extent.split_blocks, extent.k_blocks)",
                "extent.k_blocks",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/matmul/split.rs",
        tests: EPILOGUES,
        rows: &[
            statement(
                "other splits lost",
                "sum += partial[(split * vectors + index) as usize];",
                "",
            ),
            device(
                "dropped factor of the residual",
                "fma(residual, Vector::new(epilogue.beta), finished)",
                "residual + finished",
            ),
            device("bias by row", "index % row_vectors", "index / row_vectors"),
        ],
    },
    InFile {
        file: "crates/kernels/src/attention/mask_map.rs",
        tests: ATTENTION,
        rows: &[device(
            "queries that see a key in the opposite order",
            "(found[(from + 4 * i) as usize] >> (column % 16) & 1) << i",
            "(found[(from + 4 * i) as usize] >> (column % 16) & 1) << (31 - i)",
        )],
    },
    InFile {
        file: "crates/kernels/src/attention/seen_words.rs",
        tests: ATTENTION,
        rows: &[device(
            "bits of another unit of the quad",
            "sequence.seen_word(own, column, rows) >> (2 * quad)",
            "sequence.seen_word(own, column, rows) >> quad",
        )],
    },
    InFile {
        file: "crates/kernels/src/attention/softmax.rs",
        tests: ATTENTION,
        rows: &[
            device("peak of half a quad", "max(pair, plane_shuffle_xor(pair, 2u32))", "pair"),
            device("sum of half a quad", "pair + plane_shuffle_xor(pair, 2u32)", "pair"),
            statement(
                "lower row rescaled as the upper",
                "state.rescale_lower = exp2_fast(power(state.peak_lower, lower, lower_from, exponent, has_bias));",
                "state.rescale_lower = state.rescale_upper;",
            ),
            statement("missing mask", "score = select(visible, score, UNSEEN);", ""),
            statement(
                "dropout left out",
                "weight = select(is_kept(kept, i, Side::Queries), weight, 0.0f32);",
                "",
            ),
            device(
                "same dropout in all of a tile",
                "first_key + comptime!(2 * i as u32) + 2 * queries.quad",
                "first_key + 2 * queries.quad",
            ),
            device(
                "logarithm by the upper row's peak",
                "state.peak_lower * to_scores",
                "state.peak_upper * to_scores",
            ),
            device("dropped scale of dropout", "kept / lower", "1.0f32 / lower"),
        ],
    },
    InFile {
        file: "crates/kernels/src/attention/mma_forward.rs",
        tests: ATTENTION,
        rows: &[
            device("first tile's memory again", "(tile - first) & 1", "(tile - tile) & 1"),
            device(
                "missing check at a tile's end",
                "first_key < all_from || first_key + tile_kv > all_to",
                "first_key < all_from",
            ),
            device("heads of keys not shared", "head / rules.sizes.group", "head"),
        ],
    },
    InFile {
        file: "crates/kernels/src/attention/decode_mma.rs",
        tests: &["attention::decode"],
        rows: &[
            device(
                "keys of the wrong row",
                "keys_of_row(&sequence, row + 8, end)",
                "keys_of_row(&sequence, row, end)",
            ),
            device("heads of a key mixed up", "first_head + row / sizes.seq_q", "first_head"),
            device(
                "first tile's memory again",
                "select(stage == comptime!(stages - 1), 0u32, stage + 1)",
                "stage",
            ),
            device(
                "warps merged without their maxima",
                "(statistics[of_warp as usize] - most).exp()",
                "1.0f32.runtime()",
            ),
            statement(
                "a tile skipped",
                "tile += comptime!(warps * keys);",
                "tile += comptime!(2 * warps * keys);",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/attention/mma_backward.rs",
        tests: ATTENTION,
        rows: &[
            device(
                "first head of a group taken for all",
                "first_head + round / of_member",
                "first_head",
            ),
            device(
                "first tile ignored",
                "(tiles.0 + round % of_member) * comptime!(MOVING as u32)",
                "(round % of_member) * comptime!(MOVING as u32)",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/attention/mma_bias.rs",
        tests: ATTENTION,
        rows: &[
            device(
                "gradient of the last sequence taken for the sum",
                "sums.extract(i) + made.extract(comptime!(32 + i))",
                "made.extract(comptime!(32 + i))",
            ),
            device(
                "a part of more sequences than there are",
                "min(sequences_of_part, rules.sizes.batch - first_sequence)",
                "sequences_of_part",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/attention/mma_tiles.rs",
        tests: ATTENTION,
        rows: &[device("wrong swizzle", "(chunk & 7) ^ (row & 7)", "(chunk & 7) ^ (row & 3)")],
    },
    InFile {
        file: "crates/kernels/src/attention/pairs.rs",
        tests: ATTENTION,
        rows: &[
            device(
                "slope of the cap left out",
                "weight * (gradient - terms[at]) * slope",
                "weight * (gradient - terms[at])",
            ),
            statement("missing mask", "weight = select(visible, weight, 0.0f32);", ""),
            device(
                "missing check at the last keys",
                "query + queries > sequence.seq_q || key + keys > sequence.seq_kv",
                "query + queries > sequence.seq_q",
            ),
            device(
                "missing check at the window's right end",
                "distance + i32::cast_from(keys) - 1 > numbers.right",
                "distance > numbers.right",
            ),
            device("lost tail tile", "range.1.div_ceil(moving)", "range.1 / moving"),
        ],
    },
    InFile {
        file: "crates/kernels/src/attention/row_terms.rs",
        tests: ATTENTION,
        rows: &[
            statement("half of a row's lanes lost", "sum += plane_shuffle_xor(sum, 4u32);", ""),
            statement("skipped columns", "column += LANES;", "column += 2 * LANES;"),
            device("delta not shared by kept weights", "sum * share_kept", "sum"),
        ],
    },
    InFile {
        file: "crates/kernels/src/attention/rules.rs",
        tests: ATTENTION,
        rows: &[
            device(
                "one key beyond the window taken as seen by all",
                "i32::cast_from(first) + sequence.diagonal + rules.numbers.right + 1",
                "i32::cast_from(first) + sequence.diagonal + rules.numbers.right + 2",
            ),
            device(
                "one key before the window taken as seen by all",
                "i32::cast_from(last) + sequence.diagonal - rules.numbers.left",
                "i32::cast_from(last) + sequence.diagonal - rules.numbers.left - 1",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/attention/wgmma_forward.rs",
        tests: ATTENTION,
        rows: &[
            device("both groups at the same rows", "work.first_row + group * 64", "work.first_row"),
            device(
                "missing check at a tile's end",
                "first_key < all_from || first_key + tile_kv > all_to",
                "first_key < all_from",
            ),
            device(
                "values of the next tile",
                "sequence.first_kv + (tile - 1) * tile_kv",
                "sequence.first_kv + tile * tile_kv",
            ),
            statement("packed batch stepped over", "tensor_batch = 0u32;", ""),
        ],
    },
    InFile {
        file: "crates/kernels/src/attention/wgmma_backward.rs",
        tests: ATTENTION,
        rows: &[
            device(
                "first head of a group taken for all",
                "moving.head + index / moving.of_member",
                "moving.head",
            ),
            device(
                "both groups take the same rows",
                "(2 + warpgroup) * tile_bytes",
                "(2 + warpgroup - warpgroup) * tile_bytes",
            ),
            device("both groups write the same rows", "first_row + warpgroup * 64", "first_row"),
        ],
    },
    InFile {
        file: "crates/kernels/src/attention/once_fetch.rs",
        tests: ATTENTION,
        rows: &[device(
            "first head of a group taken for all",
            "rules.sequence(batch, CUBE_POS_Y * group + member)",
            "rules.sequence(batch, CUBE_POS_Y * group)",
        )],
    },
    InFile {
        file: "crates/kernels/src/attention/once_wide.rs",
        tests: ATTENTION,
        rows: &[
            device(
                "dk of the other warpgroup's columns",
                "tile_descriptor(stage.q + columns, false)",
                "tile_descriptor(stage.q, false)",
            ),
            device(
                "dq of the other warpgroup's columns",
                "places.k + comptime!(role.bytes())",
                "places.k",
            ),
            device(
                "columns written to the first ones' place",
                "comptime!(role.first_column() as u32)",
                "0u32",
            ),
            statement("dq added to another tile", "before = of_sums;", "before = of_sums ^ 1;"),
        ],
    },
    InFile {
        file: "crates/kernels/src/attention/once_backward.rs",
        tests: ATTENTION,
        rows: &[
            device(
                "all groups take the same keys",
                "places.v + own_group * tile_bytes",
                "places.v + (own_group - own_group) * tile_bytes",
            ),
            device("all groups write the same rows", "first_row + own_group * side", "first_row"),
            statement("dq added to another tile", "before = of_sums;", "before = of_sums ^ 1;"),
            device(
                "dq without the last tile",
                "index > 0 && turn == own_group",
                "index > 1000 && turn == own_group",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/attention/kept_bits.rs",
        tests: ATTENTION,
        rows: &[device(
            "dropped weights stay",
            "packed.extract(pair) & mask",
            "packed.extract(pair)",
        )],
    },
    InFile {
        file: "crates/kernels/src/attention/once_pairs.rs",
        tests: ATTENTION,
        rows: &[
            statement("slope of the cap left out", "gradient *= slopes[i];", ""),
            statement("missing mask", "weight = select(visible, weight, 0.0f32);", ""),
            statement(
                "dropped weights keep their gradients",
                "product = select(is_kept(tile.kept, i, tile.side), product, 0.0f32);",
                "",
            ),
            statement(
                "dropped weights stay",
                "word &= kept_pair_mask(tile.kept, pair, tile.side);",
                "",
            ),
            device("delta taken for the shift", "at + comptime!(TERM_BYTES as u32)", "at"),
        ],
    },
    InFile {
        file: "crates/kernels/src/attention/query_sums.rs",
        tests: ATTENTION,
        rows: &[
            device("scale left out", "four.extract(3usize) * scale", "four.extract(3usize)"),
            statement(
                "wrong half of rows",
                "dq[(at + strides.row) as usize] = lower;",
                "dq[(at + strides.row) as usize] = upper;",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/attention/pipeline.rs",
        tests: ATTENTION,
        rows: &[
            statement("ring's phase not turned", "slot.phase ^= 1;", ""),
            device(
                "ring's phase turned too soon",
                "index / comptime!(held as u32) % 2",
                "index / comptime!(held as u32 - 1) % 2",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/column_sum/clusters.rs",
        tests: &["column_sum"],
        rows: &[
            device("rows summed by each cube", "rank * ROW_LANES + UNIT_POS_Y", "UNIT_POS_Y"),
            device(
                "sums of cubes in one place",
                "(rank * VECTOR_LANES + UNIT_POS_X) * bytes",
                "UNIT_POS_X * bytes",
            ),
            device(
                "one row for all parts",
                "part * comptime!(ROW_LANES / PARTS) + UNIT_POS_Y",
                "UNIT_POS_Y",
            ),
            device(
                "lost last columns",
                "rank == 0 && UNIT_POS_Y == 0 && column < columns",
                "rank == 0 && UNIT_POS_Y == 0 && column + 1 < columns",
            ),
            device("one cube for all", "cube * VECTOR_LANES + UNIT_POS_X", "UNIT_POS_X"),
        ],
    },
    // Streams of a GPU run side by side; a software device has one queue. It survives on an H200: what the two
    // threads ask for came in order in every run, which CubeCL does not promise.
    InFile {
        file: "crates/train/src/graph/mod.rs",
        tests: &["gradient_graph::threads_that_take_turns"],
        rows: &[host("thread before not waited for", "last.wait(device)", "Ok(())")],
    },
];

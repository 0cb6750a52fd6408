//! Steps of optimizers, loss scaling, and casts to 8 bits.

use super::{InFile, device, host, statement};

pub(super) const FILES: &[InFile] = &[
    InFile {
        file: "crates/kernels/src/adamw/rule.rs",
        tests: &["adamw"],
        rows: &[
            statement(
                "second moment of the gradient itself",
                "new.push(second + Vector::new(factors.one_minus_beta_2) * (g * g - second));",
                "new.push(second + Vector::new(factors.one_minus_beta_2) * (g - second));",
            ),
            statement("dropped decay", "change += Vector::new(factors.decay) * p;", ""),
            device("dropped epsilon", "deviation + Vector::new(factors.epsilon)", "deviation"),
            device(
                "skipped steps counted",
                "max(factors.time - skipped, 1.0f32)",
                "max(factors.time, 1.0f32)",
            ),
            statement(
                "first moment not corrected",
                "rate /= complement_of_power(factors.log_beta_1, steps);",
                "",
            ),
            device(
                "cancellation in a small power",
                "select(exponent > SMALL, -exponent * sum, 1.0f32 - exponent.exp())",
                "1.0f32 - exponent.exp()",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/adamw/problem.rs",
        tests: &["adamw_plain"],
        rows: &[
            host("known correction left out", "self.rate / self.correction_1", "self.rate"),
            host("known deviation not corrected", "1.0 / self.correction_2", "1.0"),
        ],
    },
    InFile {
        file: "crates/kernels/src/sgd/rule.rs",
        tests: &["sgd"],
        rows: &[
            statement("dropped decay", "decayed += Vector::new(factors.decay) * p;", ""),
            device("dropped dampening", "Vector::new(factors.of_gradient) * g", "g"),
            device(
                "Nesterov's form without the momentum",
                "g + Vector::new(factors.momentum) * velocities[0]",
                "g + velocities[0]",
            ),
            statement("skipped steps counted", "time -= skipped;", ""),
            device(
                "second step taken for the first",
                "factors.time > 1.0f32",
                "factors.time > 2.0f32",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/step/kernel.rs",
        tests: &["adamw", "sgd"],
        rows: &[
            statement("gradient not unscaled", "g *= Vector::new(multiplier);", ""),
            statement("gate ignored", "readings.is_taken = taken[0] != 0.0f32;", ""),
            statement(
                "stale state written",
                "store::<f32, N>(&mut states_out[state], at, new[state]);",
                "store::<f32, N>(&mut states_out[state], at, old[state]);",
            ),
            device(
                "lost cube of a tensor",
                "cube >= start && cube < part.end",
                "cube >= start && cube + 1 < part.end",
            ),
            device("other cubes' elements done again", "(part.end - start) * CUBE_DIM", "CUBE_DIM"),
            statement(
                "parameter not kept when a step is taken back",
                "parameter_out[place(row, column, part.parameter.new, walk)] = same;",
                "",
            ),
            device(
                "copy of what was not rounded",
                "Vector::cast_from(rounded)",
                "Vector::cast_from(updated)",
            ),
            statement(
                "stale copy behind a closed gate",
                "copy[index as usize] = Vector::cast_from(parameter[index as usize]);",
                "",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/step/launch.rs",
        tests: &["adamw", "sgd"],
        rows: &[statement("copy by rows not made", "overwrite_many(client, &copies)", "Ok(())")],
    },
    InFile {
        file: "crates/kernels/src/step/loads.rs",
        tests: &["adamw", "sgd"],
        rows: &[device(
            "off-by-one bound of a gathered gradient",
            "select(beside < columns, 0u32, gap)",
            "select(beside <= columns, 0u32, gap)",
        )],
    },
    InFile {
        file: "crates/kernels/src/step/rounding.rs",
        tests: &["adamw", "sgd"],
        rows: &[
            device("rounded down, not by chance", "bits + (word & lacking)", "bits"),
            device(
                "words swapped",
                "select(place & 1 != 0, odd, even)",
                "select(place & 1 != 0, even, odd)",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/milestone/forward.rs",
        tests: &["gradient_graph::a_replay_counts"],
        rows: &[device("counts by two", "counter[0] += 1u32", "counter[0] += 2u32")],
    },
    InFile {
        file: "crates/kernels/src/loss_scale/forward.rs",
        tests: &["loss_scale", "loss_scaling"],
        rows: &[
            device(
                "small norms made larger",
                "min(largest / (norm + EPSILON), 1.0f32)",
                "largest / (norm + EPSILON)",
            ),
            statement("scale ignored", "factor = 1.0f32 / scale[0];", ""),
            device(
                "off-by-one interval",
                "is_clean && count >= rules.interval",
                "is_clean && count > rules.interval",
            ),
            device(
                "scale without bounds",
                "clamp(scale[0] * change, rules.least, rules.largest)",
                "scale[0] * change",
            ),
            device(
                "count in a row not begun anew",
                "select(is_clean, 0.0f32, in_a_row[0] + 1.0f32)",
                "in_a_row[0] + select(is_clean, 0.0f32, 1.0f32)",
            ),
            device(
                "clean steps counted on after growth",
                "select(is_clean && !grows, count, 0.0f32)",
                "select(is_clean, count, 0.0f32)",
            ),
            statement(
                "half of the sums left out",
                "all[UNIT_POS as usize] += other;",
                "all[UNIT_POS as usize] = other;",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/quantize/amax.rs",
        tests: &["fp8"],
        rows: &[device("lost last vector", "index < vectors", "index + 1 < vectors")],
    },
    InFile {
        file: "crates/kernels/src/quantize/codes.rs",
        tests: &["fp8"],
        rows: &[device("infinity saturates", "magnitude >= INFINITY", "magnitude > INFINITY")],
    },
    InFile {
        file: "crates/kernels/src/quantize/cast.rs",
        tests: &["fp8"],
        rows: &[
            statement("scale not inverted", "scale[0] = 1.0f32 / factor;", "scale[0] = factor;"),
            device(
                "tile not transposed",
                "(UNIT_POS_X * UNIT_COLUMNS + c) * PITCH + UNIT_POS_Y * COLUMN_WORDS",
                "(UNIT_POS_X * UNIT_COLUMNS + c) * PITCH + UNIT_POS_X * COLUMN_WORDS",
            ),
            device(
                "dropped scale",
                "Vector::<f32, N>::cast_from(loaded[comptime!(first + v)]) * Vector::new(factor)",
                "Vector::<f32, N>::cast_from(loaded[comptime!(first + v)])",
            ),
            statement("skipped tile", "tile += CUBE_COUNT_X;", "tile += 2 * CUBE_COUNT_X;"),
        ],
    },
    InFile {
        file: "crates/kernels/src/quantize/blocks.rs",
        tests: &["fp8"],
        rows: &[
            device(
                "scale rounded down",
                "(amax + ABOVE_LARGEST) >> MANTISSA_BITS",
                "amax >> MANTISSA_BITS",
            ),
            device("infinity has a scale", "select(bits < INFINITY, bits, 0u32)", "bits"),
            device("padding of rows unwritten", "half < chunks", "half + 1 < chunks"),
            statement(
                "scale of another stripe",
                "turned_scales |= scale << comptime!(8 * part);",
                "turned_scales |= scale << comptime!(8 * (3 - part));",
            ),
            device(
                "scales of a column's tiles along the row",
                "scale_word(first_column + UNIT_POS, tile_row, tiles_down)",
                "scale_word(first_column + UNIT_POS, tile_row, tiles_across)",
            ),
        ],
    },
];

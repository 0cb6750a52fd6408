//! Element-wise kernels and sums: GELU, dropout, embedding, column sums, sums of squares.

use super::{InFile, device, statement};

pub(super) const FILES: &[InFile] = &[
    InFile {
        file: "crates/kernels/src/gelu/normal.rs",
        tests: &["gelu"],
        rows: &[
            device(
                "wrong factor in the distribution",
                "half + half * (x * Vector::new(FRAC_1_SQRT_2)).erf()",
                "half + half * (x * half).erf()",
            ),
            device(
                "dropped scale of the density",
                "Vector::new(scale) * (x * x * Vector::new(-0.5f32)).exp()",
                "(x * x * Vector::new(-0.5f32)).exp()",
            ),
            device(
                "the other tail of 16 bits",
                "select(x < 0.0f32, tail, 1.0f32 - tail)",
                "select(x < 0.0f32, 1.0f32 - tail, tail)",
            ),
            device("dropped scale of the density of 16 bits", "scale * bell", "bell"),
            statement(
                "wrong coefficient of the tail",
                "sum = fma(sum, t, 0.710_706_9f32);",
                "sum = fma(sum, t, 0.701_706_9f32);",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/gelu/forward.rs",
        tests: &["gelu"],
        rows: &[
            device("dropped factor", "values[v] * normal.cdf", "normal.cdf"),
            device("skipped tail", "ABSOLUTE_POS >= step", "ABSOLUTE_POS + 1 >= step"),
            statement(
                "one vector for two",
                "values[v] = inputs.biased(ABSOLUTE_POS + v * step, bias, form);",
                "values[v] = inputs.biased(ABSOLUTE_POS, bias, form);",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/gelu/backward.rs",
        tests: &["gelu"],
        rows: &[
            device("missing term of the derivative", "normal.cdf + x * normal.pdf", "normal.cdf"),
            statement(
                "dropped gradient",
                "dx[ABSOLUTE_POS] = Vector::cast_from(grad * derivative::<N>(value, comptime!(form.functions)));",
                "dx[ABSOLUTE_POS] = Vector::cast_from(derivative::<N>(value, comptime!(form.functions)));",
            ),
            device(
                "lost column",
                "column < columns && row < rows",
                "column + 1 < columns && row < rows",
            ),
            statement("rows left out of the sum", "sum += product;", ""),
            statement("skipped rows", "row += step;", "row += step + 1;"),
        ],
    },
    InFile {
        file: "crates/kernels/src/functions.rs",
        tests: &["swiglu", "lstm"],
        rows: &[
            device("wrong sign of the power", "-x.extract(lane)", "x.extract(lane)"),
            device(
                "the other half of a sigmoid of 16 bits",
                "reciprocal_by(1.0f32 + power, hardware)",
                "power * reciprocal_by(1.0f32 + power, hardware)",
            ),
            device(
                "tangent of half the angle",
                "sigmoid::<N>(two * x, functions)",
                "sigmoid::<N>(x, functions)",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/lstm/cell.rs",
        tests: &["lstm"],
        rows: &[
            device(
                "gates that change places",
                "sum::<F, N>(projected, base + width, product, first + width)",
                "sum::<F, N>(projected, base + width, product, first)",
            ),
            device(
                "the cell of another step",
                "cells[before as usize] + taken",
                "cells[unit as usize] + taken",
            ),
            device(
                "a gradient that does not reach the former step",
                "dh += dproduct[unit as usize];",
                "",
            ),
            device("a lost slope", "of_c * before * kept * (one - kept)", "of_c * before * kept"),
            device(
                "the last cell's gradient overlooked",
                "dout[(extent.steps * state + unit) as usize]",
                "dout[unit as usize]",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/swiglu/element.rs",
        tests: &["swiglu"],
        rows: &[
            device("missing term of the slope", "s + silu * (Vector::new(1.0f32) - s)", "s"),
            device("the gradients' factor of the gate lost", "grad * u * slope", "grad * slope"),
            device("skipped tail", "at >= dgate.len()", "at + 1 >= dgate.len()"),
            device(
                "magnitudes of one vector of two",
                "larger::<N>(larger::<N>(of_gate, by_gate), next_by_gate)",
                "larger::<N>(of_gate, next_by_gate)",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/magnitude.rs",
        tests: &["swiglu", "layer_norm", "fp8"],
        rows: &[
            device(
                "sign in the magnitude",
                "u32::reinterpret(values.extract(lane)) & MAGNITUDE",
                "u32::reinterpret(values.extract(lane))",
            ),
            device(
                "magnitude of what was not rounded",
                "u32::reinterpret(f32::cast_from(stored)) & MAGNITUDE",
                "select(f32::cast_from(stored) < 0.0f32, 0u32, largest)",
            ),
            device(
                "last units of a cube left out",
                "UNIT_POS + distance < units",
                "UNIT_POS + distance + 1 < units",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/rotary/turn.rs",
        tests: &["rotary"],
        rows: &[
            device(
                "turned the wrong way",
                "(-both.extract(1usize), both.extract(3usize))",
                "(both.extract(1usize), -both.extract(3usize))",
            ),
            device(
                "gradient by the sines of the other column",
                "(both.extract(3usize), -both.extract(1usize))",
                "(both.extract(1usize), -both.extract(3usize))",
            ),
            device("every row from the first position", "walk.start + position", "position"),
            device(
                "the table by the odd columns of even ones",
                "(2 * pair + 1) * step",
                "2 * pair * step",
            ),
            device(
                "result where x lies",
                "batch * to.batch + head * to.head + position * to.row",
                "batch * from.batch + head * from.head + position * from.row",
            ),
            device("lost units", "unit < walk.units", "unit + 1 < walk.units"),
        ],
    },
    InFile {
        file: "crates/kernels/src/column_sum/forward.rs",
        tests: &["column_sum", "reduce::fused_a_variance"],
        rows: &[
            device("lost last row", "row < rows", "row + 1 < rows"),
            device("outer dimension ignored", "CUBE_POS_Z * outer_stride + column", "column"),
            device(
                "one row for all that are asked for at once",
                "row + comptime!(i as u32) * step",
                "row",
            ),
            device("rows beyond the last added", "this < rows", "this < rows + 1"),
            device("distances not squared", "distance * distance", "distance"),
            device("means of the first outer", "CUBE_POS_Z * columns + column", "column"),
            statement(
                "rows beyond the last far from the mean",
                "found[i] = nothing;",
                "found[i] = Vector::new(I::new(0.0));",
            ),
            device(
                "outer dimension ignored in the result",
                "(CUBE_POS_Z * CUBE_COUNT_Y + CUBE_POS_Y) * columns + column",
                "CUBE_POS_Y * columns + column",
            ),
            statement(
                "only the last lane is kept",
                "total += partial[(lane * VECTOR_LANES + UNIT_POS_X) as usize];",
                "total = partial[(lane * VECTOR_LANES + UNIT_POS_X) as usize];",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/row_sum/forward.rs",
        tests: &["row_sum", "reduce::fused_a_variance"],
        rows: &[
            device("gap between rows ignored", "row * pitch + column", "row * columns + column"),
            device(
                "every split sums the same columns",
                "CUBE_POS_Y * lanes + UNIT_POS_X",
                "UNIT_POS_X",
            ),
            device("a halving left out", "lanes >> (halving + 1)", "lanes >> (halving + 2)"),
            device("squares not squared", "value * value", "value"),
            device(
                "factor left out",
                "partial[place as usize] * factor",
                "partial[place as usize]",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/square_sum/forward.rs",
        tests: &["square_sum"],
        rows: &[
            device(
                "gap between rows ignored",
                "index / x.columns * x.pitch + index % x.columns",
                "index",
            ),
            device(
                "what lies beyond a row is counted",
                "select(at + 1 == all, x.last, u32::MAX)",
                "select(at == all, x.last, u32::MAX)",
            ),
            device("no square", "values * values", "values"),
            device(
                "lost cube",
                "cube >= start && cube < part.end",
                "cube >= start && cube + 1 < part.end",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/sketch/mod.rs",
        tests: &["sketch"],
        rows: &[
            device(
                "signs by the place in the tensor",
                "is_negative(first + element)",
                "is_negative(element)",
            ),
            device("no signs", "hash & 1u32 == 1u32", "hash & 1u32 == 2u32"),
            device(
                "gap between rows ignored",
                "element / columns * pitch + element % columns",
                "element",
            ),
            statement("once around", "element += comptime!(PLACES as u32);", "element = elements;"),
            device(
                "tensors on each other",
                "(first + element) & comptime!(PLACES as u32 - 1)",
                "element & comptime!(PLACES as u32 - 1)",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/embedding/sort.rs",
        tests: &["embedding"],
        rows: &[
            device(
                "itself counted as before",
                "other == digit && k < UNIT_POS",
                "other == digit && k <= UNIT_POS",
            ),
            statement("stretches before not counted", "in_cubes_before += count;", ""),
            statement("a stretch's tiles on each other", "begins[UNIT_POS as usize] += count;", ""),
            statement("order of the last pass forgotten", "place = order[at as usize];", ""),
            device("cubes before left out", "smaller + in_cubes_before", "smaller"),
            device(
                "indices of no row among the others",
                "(min(index, rows) >> shift) & comptime!(DIGITS - 1)",
                "(index >> shift) & comptime!(DIGITS - 1)",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/embedding/backward.rs",
        tests: &["embedding"],
        rows: &[
            statement("skipped rows", "k += SHARES;", "k += SHARES + 1;"),
            statement(
                "shares of other units lost",
                "sum += parts[(share * CUBE_DIM_X + UNIT_POS_X) as usize];",
                "",
            ),
            device(
                "last row lost",
                "key < rows && (begins_chunk || !follows)",
                "key + 1 < rows && (begins_chunk || !follows)",
            ),
            device(
                "a chunk's first sum in the second's place",
                "u32::cast_from(!follows)",
                "u32::cast_from(follows)",
            ),
            statement("the other gradient overwritten", "all += Vector::cast_from(dw[at]);", ""),
            device(
                "the part of the first chunk lost",
                "partials[((2 * chunk + 1) * columns + column) as usize]",
                "partials[(2 * chunk * columns + column) as usize]",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/dropout/forward.rs",
        tests: &["dropout"],
        rows: &[statement(
            "residual lost",
            "kept += Vector::<f32, N>::cast_from(residual[ABSOLUTE_POS]);",
            "",
        )],
    },
    InFile {
        file: "crates/kernels/src/dropout/mask.rs",
        tests: &["dropout"],
        rows: &[
            device("dropped scale", "left * self.scale", "left"),
            device("kept and dropped swapped", "draw < self.threshold", "draw > self.threshold"),
            device(
                "words swapped",
                "select(first & comptime!(of_word as u32) != 0, words.1, words.0)",
                "select(first & comptime!(of_word as u32) != 0, words.0, words.1)",
            ),
            device(
                "the same half of a word for both",
                "byte_draw(word >> ((first & 2) * 8), lane, form)",
                "byte_draw(word, lane, form)",
            ),
            device("a neighbor that is another one", "3 - (byte ^ 1)", "3 - (byte ^ 2)"),
            device(
                "a neighbor's digits in their order",
                "word.reverse_bits() >> comptime!(8 * reversed_neighbor(byte) as u32)",
                "word >> comptime!(8 * reversed_neighbor(byte) as u32)",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/philox.rs",
        tests: &["dropout", "attention::op", "adamw"],
        rows: &[statement("key left out", "x0 = high1 ^ x1 ^ key0;", "x0 = high1 ^ x1;")],
    },
];

//! Kernels that work on rows: layer, RMS and batch normalization, softmax.

use super::{InFile, device, statement};

pub(super) const FILES: &[InFile] = &[
    InFile {
        file: "crates/kernels/src/layer_norm/forward.rs",
        tests: &["layer_norm"],
        rows: &[
            device("missing mask", "there && column < columns", "there"),
            device(
                "dropped scale of the mean",
                "row_sum_of::<N>(total, blueprint) * of_width",
                "row_sum_of::<N>(total, blueprint)",
            ),
            device(
                "dropped epsilon",
                "(variance + epsilon).inverse_sqrt()",
                "variance.inverse_sqrt()",
            ),
            statement("sum not written", "outputs.sum[(start + column) as usize] = value;", ""),
            statement(
                "dropped bias of the residual",
                "addend += Vector::cast_from(inputs.residual_bias[column as usize]);",
                "",
            ),
            statement(
                "dropped bias",
                "result += Vector::<f32, N>::cast_from(inputs.beta[column as usize]);",
                "",
            ),
            statement(
                "wrong statistic saved",
                "outputs.rstd[row as usize] = scale;",
                "outputs.rstd[row as usize] = scale * scale;",
            ),
            statement("skipped rows", "first_row += step;", "first_row += 2 * step;"),
            device(
                "last row's statistics lost",
                "UNIT_POS_X == 0 && row < rows",
                "UNIT_POS_X == 0 && row + 1 < rows",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/layer_norm/row_sums.rs",
        tests: &["layer_norm"],
        rows: &[
            statement(
                "another row's partial sum",
                "b += partial[(start + apart + at) as usize];",
                "b += partial[(apart + at) as usize];",
            ),
            device("a first sum that nobody asked for", "comptime!(!both)", "comptime!(false)"),
        ],
    },
    InFile {
        file: "crates/kernels/src/layer_norm/backward.rs",
        tests: &["layer_norm"],
        rows: &[
            statement(
                "gamma's gradient of the row itself",
                "dgamma[v] += grad * normal;",
                "dgamma[v] += grad;",
            ),
            device("missing mean of the gradient", "plain * of_width", "0.0f32 * plain"),
            statement("dropped scale", "result *= Vector::new(scale);", ""),
            statement(
                "gradient of the sum lost",
                "result += Vector::<f32, N>::cast_from(added[v]);",
                "",
            ),
            device(
                "partial sums over each other",
                "parameter * CUBE_COUNT_X + CUBE_POS_X",
                "CUBE_POS_X",
            ),
            statement("rows left out of the gradient of a bias", "dbias[v] += result;", ""),
            statement("skipped partial sums", "place += lanes;", "place += lanes + 1;"),
            device("lost cube", "place < cubes", "place + 1 < cubes"),
            statement(
                "only the last row of a cube",
                "total += shared[(row * units + UNIT_POS_X) as usize];",
                "total = shared[(row * units + UNIT_POS_X) as usize];",
            ),
            device(
                "not centered",
                "(Vector::<f32, N>::cast_from(value) - Vector::new(center)) * Vector::new(scale)",
                "Vector::<f32, N>::cast_from(value) * Vector::new(scale)",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/group_norm/samples.rs",
        tests: &["group_norm"],
        rows: &[
            device("samples over each other", "sample * extent.rows + of_split", "of_split"),
            device(
                "rows of the last split",
                "min(extent.rows - of_split, extent.split_rows)",
                "extent.split_rows",
            ),
            device(
                "partial results over each other",
                "2 * (share.sample * CUBE_COUNT_Y + CUBE_POS_Y) * columns",
                "2 * share.sample * CUBE_COUNT_Y * columns",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/group_norm/forward.rs",
        tests: &["group_norm"],
        rows: &[
            device("first value of all left out", "(shift - pivot) + mean", "mean"),
            device(
                "another unit's rows counted",
                "(end - begin).div_ceil(tile.row_lanes)",
                "(end - begin) / tile.row_lanes + 1",
            ),
            statement("not centered", "part.second -= part.first * mean;", ""),
            device("lost column", "member < members", "member + 1 < members"),
            statement(
                "distances from different values merged",
                "of_column.first += Vector::new(apart);",
                "",
            ),
            device("lost split", "at < partials.splits", "at + 1 < partials.splits"),
            device(
                "dropped epsilon",
                "gated::<f32, One>(squares, squares).extract(0usize) + epsilon",
                "gated::<f32, One>(squares, squares).extract(0usize)",
            ),
            device(
                "parameters of the sample's first channels",
                "(group * grouping.of_group + at / copies) % grouping.channels",
                "at / copies",
            ),
            device("dropped bias", "distance * scale + of.beta", "distance * scale"),
            device("pixels of the first sample", "first - share.sample * extent.rows", "first"),
            statement(
                "scaled rows kept for centered ones",
                "centered[place] = Vector::cast_from(distance);",
                "centered[place] = Vector::cast_from(normalized);",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/group_norm/backward.rs",
        tests: &["group_norm"],
        rows: &[
            device(
                "mean of the first channel's group",
                "mean[(channel / of_group) as usize]",
                "mean[(place * comptime!(size as u32) / of_group) as usize]",
            ),
            device(
                "swapped stride",
                "dy.memory[(row * dy.stride + column) as usize]",
                "dy.memory[(row * x.stride + column) as usize]",
            ),
            device(
                "not centered",
                "Vector::<f32, N>::cast_from(values[i as usize]) - center",
                "Vector::<f32, N>::cast_from(values[i as usize])",
            ),
            device(
                "lost term",
                "term < partials.splits * copies",
                "term + 1 < partials.splits * copies",
            ),
            statement(
                "gamma left out of the group's sum",
                "plain += factor * of_plain;",
                "plain += of_plain;",
            ),
            device(
                "mean of the gradient left out",
                "Vector::<f32, N>::cast_from(grad) * scale - distance * slope - offset",
                "Vector::<f32, N>::cast_from(grad) * scale - distance * slope",
            ),
            device(
                "inverse deviation left out",
                "rstd * (all_weighted * of_count) * of_distance",
                "rstd * (all_weighted * of_count)",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/batch_norm/channels.rs",
        tests: &["batch_norm"],
        rows: &[
            device(
                "squares between two means left out",
                "other.second + apart * apart * Vector::new(part.count * share)",
                "other.second",
            ),
            device(
                "share of the other part alone",
                "other.count / max(count, 1.0f32)",
                "other.count / max(part.count, 1.0f32)",
            ),
            statement("count not merged", "part.count = count;", ""),
            statement(
                "half of the units not merged",
                "add::<N>(part, &other, merge);",
                "if UNIT_POS_Y % 2 == 0 { add::<N>(part, &other, merge); }",
            ),
            device(
                "partial results over each other",
                "2 * CUBE_POS_Y * columns",
                "CUBE_POS_Y * columns",
            ),
            device(
                "rows of the last split",
                "min(rows - at * split_rows, split_rows)",
                "split_rows",
            ),
            device("lost split", "at < partials.splits", "at + 1 < partials.splits"),
            device(
                "NaN stopped",
                "select_many(stops, Vector::new(0.0f32), value)",
                "select_many(by.greater_than(&Vector::new(I::new(0.0))), value, Vector::new(0.0f32))",
            ),
            device(
                "dropped epsilon",
                "Vector::<f32, N>::cast_from(variance) + Vector::new(epsilon)",
                "Vector::<f32, N>::cast_from(variance)",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/batch_norm/statistics.rs",
        tests: &["batch_norm"],
        rows: &[
            device(
                "no value taken off",
                "Vector::<f32, N>::cast_from(values[i as usize]) - shift",
                "Vector::<f32, N>::cast_from(values[i as usize])",
            ),
            statement("not centered", "part.second -= part.first * mean;", ""),
            device(
                "another unit's rows counted",
                "(end - begin).div_ceil(tile.row_lanes)",
                "(end - begin) / tile.row_lanes + 1",
            ),
            device("first value of all left out", "(shift - pivot) + mean", "mean"),
            device(
                "skipped rows",
                "row + comptime!((count - 1) * tile.row_lanes) < end",
                "row + comptime!(count * tile.row_lanes) < end",
            ),
            device(
                "sum instead of variance",
                "part.second / Vector::new(part.count)",
                "part.second",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/batch_norm/apply.rs",
        tests: &["batch_norm"],
        rows: &[
            device("gap between rows ignored", "row * x.stride + column", "row * columns + column"),
            statement("ReLU left out", "result = gated::<f32, N>(result, result);", ""),
            device("dropped bias", "distance * of.scale + of.beta", "distance * of.scale"),
        ],
    },
    InFile {
        file: "crates/kernels/src/batch_norm/backward.rs",
        tests: &["batch_norm"],
        rows: &[
            statement("ReLU left out", "result = gated::<I, N>(result, loaded.y[i as usize]);", ""),
            device("swapped stride", "row * dy.stride + column", "row * x.stride + column"),
            device(
                "not centered",
                "Vector::<f32, N>::cast_from(loaded.x[i as usize]) - center",
                "Vector::<f32, N>::cast_from(loaded.x[i as usize])",
            ),
            device(
                "dropped scale",
                "(part.second * scale).extract(0usize)",
                "part.second.extract(0usize)",
            ),
            device(
                "missing mean of the gradient",
                "grad - of.plain - distance * of.weighted",
                "grad - distance * of.weighted",
            ),
            device(
                "sums swapped",
                "sums[(columns + column) as usize] * of_rows * rstd",
                "sums[at] * of_rows * rstd",
            ),
            statement(
                "gradient of the residual lost",
                "dresidual[place] = Vector::cast_from(grad);",
                "",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/softmax/rows_forward.rs",
        tests: &["softmax"],
        rows: &[
            device(
                "off-by-one bound of a ragged row",
                "first + comptime!(i as u32) < classes",
                "first + comptime!(i as u32) <= classes",
            ),
            statement(
                "planes' sums not brought to one peak",
                "sum += sums[place] * exponential_by(peaks[place] - peak, hardware);",
                "sum += sums[place];",
            ),
            statement(
                "last plane's peak taken",
                "peak = max(peak, peaks[(first + at) as usize]);",
                "peak = peaks[(first + at) as usize];",
            ),
            device(
                "running sum not rescaled",
                "total * exponential_by(before - peak, hardware)",
                "total",
            ),
            device("dropped logarithm", "less - Vector::new(numbers.log)", "less"),
            device(
                "result relative to the plane's peak",
                "less_exponential::<N>(held, met.peak, hardware)",
                "less_exponential::<N>(held, peak, hardware)",
            ),
            device(
                "last row's statistics lost",
                "UNIT_POS_X == 0 && row < rows",
                "UNIT_POS_X == 0 && row + 1 < rows",
            ),
            device("gap between rows ignored", "row * extent.pitch", "row * columns"),
        ],
    },
    InFile {
        file: "crates/kernels/src/softmax/row_mask.rs",
        tests: &["softmax::masks"],
        rows: &[
            device(
                "mask of the first row for all",
                "start / comptime!(size as u32) + column",
                "column",
            ),
            device(
                "mask of other elements",
                "mask.extract(i) == M::from_int(0)",
                "mask.extract(0usize) == M::from_int(0)",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/softmax/rows_backward.rs",
        tests: &["softmax"],
        rows: &[
            device(
                "dropped scale of the mean",
                "row_sum(sum_of::<N>(products), blueprint) * scale",
                "row_sum(sum_of::<N>(products), blueprint)",
            ),
            device(
                "dropped scale of a long row's mean",
                "row_sum(total, blueprint) * scale",
                "row_sum(total, blueprint)",
            ),
            device(
                "missing mean",
                "probability * (Vector::<f32, N>::cast_from(dy) - Vector::new(mean))",
                "probability * Vector::<f32, N>::cast_from(dy)",
            ),
            device("swapped pitch", "row * dy_pitch", "row * extent.pitch"),
            statement(
                "missing mask",
                "products += within_row::<N>(product, column, classes, 0.0f32, blueprint);",
                "products += product;",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/softmax/forward.rs",
        tests: &["softmax"],
        rows: &[
            device(
                "peak left out of the picked one",
                "f32::cast_from(x.elements[at as usize]) - seen.peak - log",
                "f32::cast_from(x.elements[at as usize]) - log",
            ),
            statement(
                "skipped rows",
                "first_row += CUBE_COUNT_X * rows_a_cube;",
                "first_row += 2 * CUBE_COUNT_X * rows_a_cube;",
            ),
        ],
    },
];

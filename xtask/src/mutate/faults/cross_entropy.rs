//! Cross-entropy, its gradient, and both at once.

use super::{InFile, device, host, statement};

pub(super) const FILES: &[InFile] = &[
    InFile {
        file: "crates/kernels/src/cross_entropy/forward.rs",
        tests: &["cross_entropy"],
        rows: &[
            device(
                "lanes' sums not brought to one peak",
                "other.total * exponential_by(other.peak - peak, hardware)",
                "other.total",
            ),
            statement("lanes' plain sums lost", "seen.sum += other.sum;", ""),
            device(
                "head of an unaligned row by the wrong distance",
                "min((width - start % width) % width, classes)",
                "min(start % width, classes)",
            ),
            device("skipped tail", "classes - vectors * width", "head"),
            device(
                "dropped scale of smoothing",
                "log - sum / f32::cast_from(classes)",
                "log - sum",
            ),
            device(
                "share of the target not reduced",
                "(1.0f32 - rules.smoothing) * loss + rules.smoothing * of_all",
                "loss + rules.smoothing * of_all",
            ),
            device(
                "ignored rows counted",
                "select(target == rules.ignore_index, 0.0f32, loss)",
                "loss",
            ),
            device(
                "off-by-one bound of the target",
                "target >= 0 && u32::cast_from(target) < classes",
                "target >= 0 && u32::cast_from(target) <= classes",
            ),
            statement(
                "wrong logarithm saved",
                "lse[row as usize] = log;",
                "lse[row as usize] = log - seen.peak;",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/cross_entropy/backward.rs",
        tests: &["cross_entropy"],
        rows: &[
            statement("smoothing left out", "excess -= of.everywhere;", ""),
            device("target left out", "select(is_target, excess - of.at_target, excess)", "excess"),
            device("dropped scale", "excess * terms.scale", "excess"),
            device("vector across two rows lost", "(end - 1) / width + 1", "end / width"),
            device(
                "next row's target by this row's start",
                "at - next_start == next.target",
                "at - start == next.target",
            ),
            device(
                "dropped scale of the mean",
                "tensors.grad[0] * tensors.factor[0]",
                "tensors.grad[0]",
            ),
            statement(
                "ignored next row not masked",
                "one = select(next.is_ignored, 0.0f32, there);",
                "one = there;",
            ),
            statement("ignored rows counted", "is_ignored = target == of.ignore_index;", ""),
        ],
    },
    InFile {
        file: "crates/kernels/src/cross_entropy/at_once.rs",
        tests: &["cross_entropy::at_once"],
        rows: &[
            statement(
                "skipped rows",
                "first_row += CUBE_COUNT_X * rows_a_cube;",
                "first_row += 2 * CUBE_COUNT_X * rows_a_cube;",
            ),
            device(
                "dropped factor",
                "select(is_class, factor[0], of.invalid)",
                "select(is_class, 1.0f32, of.invalid)",
            ),
            device("every row counted", "target == of.ignore_index", "target != target"),
            device(
                "the largest logit left out of the logarithm",
                "seen.peak + seen.total.ln()",
                "seen.total.ln()",
            ),
            device("skipped tail", "classes - vectors * width", "head"),
            device(
                "target of a whole row by its first vector",
                "terms.target - (head + here * width)",
                "terms.target - here * width",
            ),
            device(
                "target of an end by its place among ends",
                "column == terms.target",
                "end == terms.target",
            ),
            statement(
                "losses of a cube's first row alone",
                "loss[row as usize] = loss_of(picked, log, target, seen.sum, classes, rules);",
                "loss[first_row as usize] = loss_of(picked, log, target, seen.sum, classes, rules);",
            ),
            device("multiplied only by more than 1", "scale != 1.0f32", "scale > 1.0f32"),
            statement(
                "not all vectors multiplied",
                "at += CUBE_COUNT_X * CUBE_DIM_X;",
                "at += 2 * CUBE_COUNT_X * CUBE_DIM_X;",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/cross_entropy/at_once_launch.rs",
        tests: &["cross_entropy::at_once"],
        rows: &[host(
            "written over logits that are held",
            "(!is_ours).then(|| Buffer::empty(client, span, problem.dtype))",
            "None::<Buffer>",
        )],
    },
    InFile {
        file: "crates/kernels/src/cross_entropy/reduce.rs",
        tests: &["cross_entropy"],
        rows: &[
            statement(
                "ignored rows in the mean",
                "count += select(targets[row as usize] == ignore_index, 0u32, 1u32);",
                "count += 1;",
            ),
            statement("units' counts lost", "counts[UNIT_POS as usize] += counts[other];", ""),
            statement("skipped rows", "row += UNITS;", "row += UNITS + 1;"),
            device(
                "mean of no row is a number",
                "select(counts[0] == 0, invalid, total / number)",
                "total / number",
            ),
        ],
    },
];

//! Resized images: where outputs lie, which of them touch a pixel, and what they give it.

use super::{InFile, device, host, statement};

const TESTS: &[&str] = &["interpolate::"];

pub(super) const FILES: &[InFile] = &[
    InFile {
        file: "crates/kernels/src/interpolate/position.rs",
        tests: TESTS,
        rows: &[
            host(
                "corners never aligned",
                "(from - 1, 0, (to - 1).max(1))",
                "(2 * from, from - to, 2 * to)",
            ),
            host("half a pixel off", "(2 * from, from - to, 2 * to)", "(2 * from, from, 2 * to)"),
            host("exact as nearest", "(2 * from, from, 2 * to)", "(2 * from, 0, 2 * to)"),
        ],
    },
    InFile {
        file: "crates/kernels/src/interpolate/blueprint.rs",
        tests: TESTS,
        rows: &[host(
            "resized dimensions not filtered",
            "pixels > 1 && pixels != outputs",
            "pixels == outputs",
        )],
    },
    InFile {
        file: "crates/kernels/src/interpolate/backward.rs",
        tests: TESTS,
        rows: &[
            device("outputs rounded down", "ahead + axis.scale.divisor - 1", "ahead"),
            device("an output beyond the last", "min(first, axis.outputs)", "first"),
            statement(
                "outputs before the pixel lost",
                "first += 1i32 - comptime!(filter.radius()) * axis.divisor;",
                "",
            ),
            device("another cubic", "comptime!(A + 2.0) * far", "comptime!(A + 3.0) * far"),
            device("taps before the image lost", "pixel == 0", "pixel == axis.pixels"),
            device(
                "taps behind the image lost",
                "pixel + 1 == axis.pixels",
                "pixel == axis.pixels",
            ),
            device(
                "offset dropped",
                "i32::cast_from(output * axis.scale.divisor) + axis.offset",
                "i32::cast_from(output * axis.scale.divisor)",
            ),
            device(
                "NaN times zero",
                "distance != axis.divisor && distance != -axis.divisor",
                "true.runtime()",
            ),
            device(
                "pixels without their gaps",
                "(line + column) * spread.pitch",
                "(line + column) * spread.vectors.divisor",
            ),
            device(
                "weight of the row dropped",
                "along * Vector::new(weight(above, place.row, &rows, filters[0]))",
                "along",
            ),
        ],
    },
];

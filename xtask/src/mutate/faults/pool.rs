//! Pools: which taps a window has, which windows reach a pixel, and what counts.

use super::{InFile, device, host, statement};

const TESTS: &[&str] = &["pool::"];

pub(super) const FILES: &[InFile] = &[
    InFile {
        file: "crates/kernels/src/pool/blueprint.rs",
        tests: TESTS,
        rows: &[
            host(
                "last window ignored",
                "(window.reach(dim) / window.stride[dim] + 1) as u32",
                "(window.reach(dim) / window.stride[dim]).max(1) as u32",
            ),
            host(
                "cells that do not reach the image's end",
                "(problem.input[dim] + window.padding[dim]).div_ceil(window.stride[dim])",
                "problem.input[dim].div_ceil(window.stride[dim])",
            ),
            host("dilation ignored", "window.dilation[dim] as u32", "1"),
        ],
    },
    InFile {
        file: "crates/kernels/src/pool/walk.rs",
        tests: TESTS,
        rows: &[
            device(
                "count beyond the padding",
                "min(line.taps, end + line.padding - first)",
                "line.taps",
            ),
            device("padding counted", "max(first, line.padding)", "first"),
        ],
    },
    InFile {
        file: "crates/kernels/src/pool/forward.rs",
        tests: TESTS,
        rows: &[
            device(
                "padding inside of the image",
                "row < rows.size && column < columns.size",
                "row < rows.size",
            ),
            device("NaN passed over", "value.is_nan()", "lanes::<N>(false)"),
            statement("first tap always", "seen.none = seen.none && !inside;", ""),
            device(
                "pixels without their gaps",
                "pixel * spread.pitch + place.vector",
                "pixel * spread.vectors.divisor + place.vector",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/pool/backward.rs",
        tests: TESTS,
        rows: &[
            device("windows before the first", "named.vec_and(lanes::<N>(there))", "named"),
            device(
                "share of a tap too many",
                "tap_column + j < columns.taps",
                "tap_column + j <= columns.taps",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/pool/adaptive.rs",
        tests: TESTS,
        rows: &[
            device(
                "windows rounded inwards",
                "(at + 1) * from.divisor + to.divisor - 1",
                "(at + 1) * from.divisor",
            ),
            statement("sum for a mean", "sum *= Vector::new(1.0f32 / f32::cast_from(pixels));", ""),
        ],
    },
];

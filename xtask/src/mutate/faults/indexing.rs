//! Scans along a dimension, additions to the places that indices name, and the largest elements of rows.

use super::{InFile, device, host, statement};

const SCAN: &[&str] = &["scan::"];
const SCATTER: &[&str] = &["scatter::"];

pub(super) const FILES: &[InFile] = &[
    InFile {
        file: "crates/kernels/src/region/mod.rs",
        tests: &["slice_gradient", "copies"],
        rows: &[
            device("written and not added", "comptime!(adds)", "comptime!(false)"),
            device("start ignored", "let mut to = start;", "let mut to = start - start;"),
            host(
                "dimensions merged that do not follow each other",
                "outer.target == dim.size * dim.target",
                "outer.source == dim.size * dim.source",
            ),
            host("vectors across steps", "&& last.target == 1", ""),
            device(
                "start of the source ignored",
                "let mut from = source_start;",
                "let mut from = 0u32;",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/region/turned.rs",
        tests: &["copies"],
        rows: &[
            device(
                "squares not turned",
                "square[place as usize] = value",
                "square[row as usize] = value",
            ),
            device("rows beyond the end", "first_read + row < read.size", "true"),
            host(
                "pairs that begin within words",
                "even.all(|size| size.is_multiple_of(2))",
                "true",
            ),
        ],
    },
    InFile {
        file: "crates/backend/src/tensors/copies.rs",
        tests: &["copies", "slice_gradient"],
        rows: &[host("start of a part ignored", "source_start: start,", "source_start: 0,")],
    },
    InFile {
        file: "crates/kernels/src/scan/operation.rs",
        tests: SCAN,
        rows: &[
            device("powers of two lost", "early.exponent + late.exponent", "late.exponent"),
            device("NaN forgotten", "select(is_nan::<A>(early), early, behind)", "behind"),
            device(
                "the smaller as maximum",
                "late.value > early.value",
                "late.value < early.value",
            ),
            device("half of a power of two", "exponent - half", "half"),
        ],
    },
    InFile {
        file: "crates/kernels/src/scan/rows.rs",
        tests: SCAN,
        rows: &[
            device(
                "a unit of each step left out",
                "place >= comptime!(1u32 << step)",
                "place > comptime!(1u32 << step)",
            ),
            device("planes before lost", "other == group", "other == 0"),
            device(
                "tiles before lost",
                "combine::<A>(&carry, &before, how)",
                "combine::<A>(&neutral::<A>(extreme, how), &before, how)",
            ),
            device("the last chunk before lost", "at < CUBE_POS_Y", "at + 1 < CUBE_POS_Y"),
            device(
                "a chunk's last vector lost",
                "(CUBE_POS_Y + 1) * extent.chunk",
                "(CUBE_POS_Y + 1) * extent.chunk - 1",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/scan/columns.rs",
        tests: SCAN,
        rows: &[
            device(
                "the last chunk before lost",
                "chunk + comptime!(i as u32) < CUBE_POS_Y",
                "chunk + comptime!(i as u32) + 1 < CUBE_POS_Y",
            ),
            device(
                "a chunk's last row lost",
                "row + comptime!(i as u32) < end",
                "row + comptime!(i as u32) + 1 < end",
            ),
            device("rows beyond the end read", "this < end", "this + 1 < end"),
        ],
    },
    InFile {
        file: "crates/kernels/src/scan/launch.rs",
        tests: SCAN,
        rows: &[host("minima from minus infinity", "f32::INFINITY", "f32::NEG_INFINITY")],
    },
    InFile {
        file: "crates/kernels/src/scatter/rows.rs",
        tests: SCATTER,
        rows: &[
            device("runs merged in one direction", "low & run == 0", "low & distance == 0"),
            statement(
                "terms mistaken for each other",
                "key = (place << PLACE_BITS) | term;",
                "key = (place << PLACE_BITS) | (term / 2);",
            ),
            statement(
                "values lost",
                "sum += f32::cast_from(values[(first_term + term) as usize]);",
                "",
            ),
            device(
                "x lost",
                "f32::cast_from(x[(first_place + place) as usize])",
                "0.0f32.runtime()",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/scatter/select.rs",
        tests: SCATTER,
        rows: &[
            device("the order of terms lost", "order[at as usize]", "at"),
            device(
                "the first term of a place passed over",
                "keys[(at + half) as usize] < place",
                "keys[(at + half) as usize] <= place",
            ),
            statement("values lost", "sum += Vector::cast_from(values[from as usize]);", ""),
        ],
    },
    InFile {
        file: "crates/kernels/src/top_k/forward.rs",
        tests: &["top_k::"],
        rows: &[
            device(
                "the last of equal elements first",
                "low_key == high_key && low_place > high_place",
                "low_key == high_key && low_place < high_place",
            ),
            device(
                "negative numbers in ascending order",
                "select(is_negative, bits, !(bits | SIGN))",
                "select(is_negative, !bits | SIGN, !(bits | SIGN))",
            ),
            device(
                "runs merged in one direction",
                "(own * run + first) & part == 0",
                "(own * run + first) & distance == 0",
            ),
            device(
                "what comes last of two runs remains",
                "all.follows(low, high)",
                "!all.follows(low, high)",
            ),
            statement(
                "ranks for places",
                "indices[(CUBE_POS_X * k + rank) as usize] = i32::cast_from(place);",
                "indices[(CUBE_POS_X * k + rank) as usize] = i32::cast_from(rank);",
            ),
        ],
    },
];

//! Convolutions: how pixels and taps walk, on every device and on tensor cores.

use super::{InFile, device, host, statement};

const TESTS: &[&str] = &["conv::"];

/// What the kernels for single channels compute, and their biases.
const DEPTHWISE: &[&str] = &["conv::depthwise", "conv::a_bias_is_added"];

pub(super) const FILES: &[InFile] = &[
    InFile {
        file: "crates/kernels/src/conv/parts.rs",
        tests: TESTS,
        rows: &[
            host(
                "taps of another residue",
                "offset(*tap).rem_euclid(stride as isize) == 0",
                "offset(*tap).rem_euclid(stride as isize) == stride as isize - 1",
            ),
            host(
                "padding after the image for that before it",
                "residue + problem.options.padding[dim][0]",
                "residue + problem.options.padding[dim][1]",
            ),
            host("dilation ignored", "-((dilation / divisor) as isize)", "-1"),
            host("taps skipped that meet a pixel", "stride / divisor", "stride"),
            host(
                "output of a residue written densely",
                "(self.pixel_step[0] * row) as u32",
                "row as u32",
            ),
            host(
                "group of weights by the channels of x",
                "problem.group_channels()[1] * k",
                "problem.group_channels()[0] * k",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/conv/gather.rs",
        tests: TESTS,
        rows: &[
            device(
                "missing bound of the columns",
                "pixel.row + shift.row < gather.height && pixel.column + shift.column < gather.width",
                "pixel.row + shift.row < gather.height",
            ),
            device(
                "dilation of rows for columns",
                "tap.column * gather.step_column",
                "tap.column * gather.step_row",
            ),
            device(
                "stride of rows for columns",
                "j * gather.scale_column + gather.shift_column",
                "j * gather.scale_row + gather.shift_column",
            ),
            device(
                "taps of columns by the distance of rows",
                "tap.column * weights.tap_column",
                "tap.column * weights.tap_row",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/divisor.rs",
        tests: TESTS,
        rows: &[device(
            "half of the inverse",
            "(u32::mul_hi(dividend, by.multiplier) + dividend) >> by.shift",
            "u32::mul_hi(dividend, by.multiplier) >> by.shift",
        )],
    },
    InFile {
        file: "crates/kernels/src/conv/portable.rs",
        tests: TESTS,
        rows: &[
            device(
                "channels of the first group gathered",
                "group * gather.channels + tap.channel",
                "tap.channel",
            ),
            device(
                "gradient of the first group",
                "(group * limit_mn + mn_at) * images.channel",
                "mn_at * images.channel",
            ),
            device(
                "weights of the first group",
                "group * weights.group + weight_at(mn_at, &tap_at(k_at, gather), weights)",
                "weight_at(mn_at, &tap_at(k_at, gather), weights)",
            ),
            device(
                "splits over each other",
                "(CUBE_POS_Z * extent.m + row) * extent.n",
                "(group * extent.m + row) * extent.n",
            ),
            device("bias of the first group", "group * extent.n + column", "column"),
            device(
                "lost last column",
                "row < extent.m && column < extent.n",
                "row < extent.m && column + 1 < extent.n",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/conv/grouped.rs",
        tests: &["conv::groups"],
        rows: &[
            device(
                "one group's weights for all",
                "of_lane * weight_strides.group",
                "of_lane * weight_strides.group * 0u32",
            ),
            device("the last pixel lost", "pixel < gather.pixels", "pixel + 1 < gather.pixels"),
            device(
                "lost last pixel of a split",
                "min(first + split_pixels, gather.pixels)",
                "min(first + split_pixels - 1, gather.pixels)",
            ),
            device(
                "another group's gradient",
                "element_at(at, &gather, &images) + of_filters",
                "element_at(at, &gather, &images)",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/conv/direct.rs",
        tests: TESTS,
        rows: &[
            device(
                "one group's weight for a whole vector",
                "comptime!(lane as u32) * weight_strides.group",
                "comptime!(lane as u32) * weight_strides.group * 0u32",
            ),
            device(
                "lost last pixel of a split",
                "min(first + split_pixels, gather.pixels)",
                "min(first + split_pixels - 1, gather.pixels)",
            ),
            device(
                "gradient of a group for that of a channel",
                "filter * images.channel",
                "group * images.channel",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/conv/depthwise/line.rs",
        tests: DEPTHWISE,
        rows: &[
            host("dilation ignored", "(tap * self.dilation) as isize", "tap as isize"),
            host(
                "taps of another residue",
                "walked.rem_euclid(stride) == 0",
                "walked.rem_euclid(stride) == stride - 1",
            ),
            host(
                "tiles of x as far apart as those of dy",
                "self.pixels / self.stride",
                "self.pixels",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/conv/depthwise/blueprint.rs",
        tests: DEPTHWISE,
        rows: &[host(
            "tiles that begin at another residue",
            "options.padding[dim][0] % options.stride[dim]",
            "0",
        )],
    },
    InFile {
        file: "crates/kernels/src/conv/depthwise/pixels.rs",
        tests: DEPTHWISE,
        rows: &[
            device(
                "missing bound of the columns",
                "is_row && first.column + comptime!(j as u32) < canvas.width",
                "is_row",
            ),
            device(
                "lost last tile of a cube",
                "min(first_tile + walk.cube_tiles, walk.tiles)",
                "min(first_tile + walk.cube_tiles - 1, walk.tiles)",
            ),
            device(
                "weights of the first lane",
                "(at + next * strides.channel)",
                "(at + next * strides.channel * 0u32)",
            ),
            device("bias of the first lane", "(channel + next)", "channel"),
            device("columns of taps for rows", "tap_row * strides.row", "tap_row * strides.column"),
        ],
    },
    InFile {
        file: "crates/kernels/src/conv/depthwise/weights.rs",
        tests: DEPTHWISE,
        rows: &[
            device(
                "pixels beyond the gradient counted",
                "at.column + comptime!(pixel as u32) < of_dy.width",
                "at.column + comptime!(pixel as u32) < of_dy.width + 1",
            ),
            device("units that are left out", "1..walk.lanes.divisor", "2..walk.lanes.divisor"),
            device(
                "splits over each other",
                "(CUBE_POS_X * taps + row) * walk.vectors",
                "row * walk.vectors",
            ),
            statement("every other split", "split += SUM_LANES;", "split += SUM_LANES * 2u32;"),
            device("sums in the order of the workspace", "channel * taps + tap", "element"),
        ],
    },
    InFile {
        file: "crates/kernels/src/conv/product.rs",
        tests: TESTS,
        rows: &[
            host("padding ignored", "options.padding == [[0; 2]; 2]", "true"),
            host(
                "pixels that do not follow each other",
                "stride == first * count",
                "stride >= first",
            ),
        ],
    },
];

const ON_TENSOR_CORES: &[&str] = &[
    "conv::groups_are_within_bounds_in_bf16",
    "conv::dilation_and_uneven_padding_are_within_bounds_in_bf16",
    "conv::a_bias_is_added_in_bf16",
    "conv::long_sums_over_pixels_are_within_bounds_in_bf16",
    "conv::channels_around_tiles_are_within_bounds_in_bf16",
];

/// What Hopper's copies take.
const BOXES: &[&str] = &["conv::channels_of_whole_boxes_are_within_bounds_in_bf16"];

pub(super) const TENSOR_CORE_FILES: &[InFile] = &[
    InFile {
        file: "crates/kernels/src/conv/mma.rs",
        tests: ON_TENSOR_CORES,
        rows: &[
            device("channels of the first group", "group * gather.channels", "group * 0u32"),
            device("weights of the first group", "group * weights.group", "group * 0u32"),
            device(
                "lower rows over the upper ones",
                "element_at(row + 8, &blocks.gather, &images) + first",
                "element_at(row, &blocks.gather, &images) + first",
            ),
            device("bias of the first group", "group * extent.n + work.column", "work.column"),
            device(
                "splits over each other",
                "(work.split * extent.batches + group) * extent.m",
                "group * extent.m",
            ),
            device(
                "tap of the first column for all",
                "work.column + chunk * comptime!(16 / element_bytes)",
                "work.column",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/conv/wgmma.rs",
        tests: BOXES,
        rows: &[
            device("taps of dgrad counted from the first one", "(taps - 1) * step", "taps * 0u32"),
            statement(
                "first pixels for all blocks",
                "load_pixels(at, self.images, first_term, &tap, gather, barrier, pass);",
                "load_pixels(at, self.images, 0u32, &tap, gather, barrier, pass);",
            ),
            device(
                "image not padded",
                "i * gather.scale_row + gather.shift_row + back_row",
                "i * gather.scale_row + back_row",
            ),
            device(
                "tap of the first column for all",
                "min(column, self.columns - comptime!(BOX_CHANNELS as u32))",
                "min(work.column, self.columns - comptime!(BOX_CHANNELS as u32))",
            ),
            device(
                "row of a tap for its column",
                "tap.column * gather.step_column - back_column",
                "tap.row * gather.step_column - back_column",
            ),
            device(
                "lower rows over the upper ones",
                "element_at(row + 8, &self.gather, &self.out)",
                "element_at(row, &self.gather, &self.out)",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/conv/bulk.rs",
        tests: BOXES,
        rows: &[host(
            "taps from the first one for all pixels",
            "memory.behind(first)",
            "memory.behind(0)",
        )],
    },
    InFile {
        file: "crates/kernels/src/conv/im2col.rs",
        tests: BOXES,
        rows: &[host(
            "box a pixel too short",
            "(part.grid[dim] * part.scale[dim]) as isize",
            "((part.grid[dim] - 1) * part.scale[dim]) as isize",
        )],
    },
    InFile {
        file: "crates/kernels/src/conv/tensor_core.rs",
        tests: ON_TENSOR_CORES,
        rows: &[host(
            "rows of taps as far apart as columns",
            "[problem.kernel[1] * padded_channels, padded_channels]",
            "[padded_channels, padded_channels]",
        )],
    },
];

//! The cases of convolutions, pools and resized images.

use crate::draw::Told;
use blackburn_kernels::conv::{ConvPass, variants::PASSES};
use blackburn_reference::interpolate::Mode;

/// Kernels, strides, groups and layouts, in all passes.
pub(super) fn convolutions(of_type: &Told, small: bool) -> Vec<Told> {
    struct Of {
        kernel: [usize; 2],
        stride: usize,
        dilation: usize,
        groups: &'static str,
        lies: &'static str,
        channels: [usize; 2],
        by: usize,
    }
    let plain = |kernel: [usize; 2]| Of {
        kernel,
        stride: 1,
        dilation: 1,
        groups: "One",
        lies: "ChannelsLast",
        channels: if small { [8, 16] } else { [72, 136] },
        by: 8,
    };
    let all = [
        plain([3, 3]),
        plain([1, 1]),
        Of { stride: 2, ..plain([3, 3]) },
        Of { lies: "WithGaps", ..plain([1, 1]) },
        Of { dilation: 2, lies: "InOrder", channels: [40, 24], ..plain([3, 3]) },
        Of { channels: [7, 9], by: 1, ..plain([2, 5]) },
        Of { groups: "Few", channels: [16, 24], ..plain([3, 3]) },
        Of { groups: "Depthwise", channels: [24, 24], ..plain([3, 3]) },
        Of { stride: 2, lies: "InOrder", channels: [3, 64], by: 1, ..plain([7, 7]) },
        // Channels that Hopper's copies take.
        Of { channels: if small { [8, 8] } else { [64, 128] }, ..plain([3, 3]) },
        Of {
            stride: 2,
            lies: "WithGaps",
            channels: if small { [8, 8] } else { [128, 64] },
            by: 8,
            ..plain([5, 3])
        },
    ];
    // The plans of a pass, at most.
    let plans = if small { 1 } else { 4 };
    let mut told = Vec::new();
    for plan in 0..plans {
        for (number, of) in all.iter().enumerate() {
            for pass in PASSES {
                let bias = (number + plan) % 2 == 1;
                let case = of_type
                    .clone()
                    .with("pass", pass)
                    .with("rows", of.kernel[0])
                    .with("columns", of.kernel[1])
                    .with("stride-rows", of.stride)
                    .with("stride-columns", of.stride)
                    .with("dilation-rows", of.dilation)
                    .with("dilation-columns", of.dilation)
                    .named("groups", of.groups)
                    .named("first-lies", of.lies)
                    .named("second-lies", if number % 2 == 0 { "InOrder" } else { of.lies })
                    .with("channels-by", of.by)
                    .with("blueprint", plan)
                    .with("bias", bias)
                    .with("batch", 2)
                    .with("height", 11)
                    .with("width", 13)
                    .with("in", of.channels[0])
                    .with("out", of.channels[1]);
                // Fractions and whole numbers in turns.
                let whole = (number + plan) % 2 == 0;
                told.push(if whole { case.with_whole_numbers() } else { case });
            }
        }
    }
    told
}

/// Each size of windows and vectors that the kernels are compiled for apart, in all passes.
pub(super) fn depthwise(of_type: &Told, small: bool) -> Vec<Told> {
    struct Of {
        kernel: [usize; 2],
        stride: usize,
        dilation: usize,
        lies: &'static str,
        channels: usize,
        by: usize,
    }
    let plain = |kernel: [usize; 2]| Of {
        kernel,
        stride: 1,
        dilation: 1,
        lies: "ChannelsLast",
        channels: 40,
        by: 8,
    };
    let all = [
        plain([3, 3]),
        Of { stride: 2, lies: "WithGaps", ..plain([3, 3]) },
        // More channels than a cube has.
        Of { channels: 264, ..plain([1, 3]) },
        Of { dilation: 2, channels: 7, by: 1, ..plain([3, 3]) },
        Of { stride: 3, channels: 13, by: 1, ..plain([2, 4]) },
        Of { lies: "WithGaps", channels: 24, ..plain([5, 5]) },
        // Units share the sums of the taps.
        Of { channels: 16, ..plain([7, 7]) },
    ];
    let plans = if small { 1 } else { 4 };
    let mut told = Vec::new();
    for plan in 0..plans {
        for (number, of) in all.iter().enumerate() {
            for pass in PASSES {
                let sums_pixels = pass == ConvPass::Wgrad;
                let mut case = of_type
                    .clone()
                    .with("pass", pass)
                    .with("rows", of.kernel[0])
                    .with("columns", of.kernel[1])
                    .with("stride-rows", of.stride)
                    .with("stride-columns", of.stride)
                    .with("dilation-rows", of.dilation)
                    .with("dilation-columns", of.dilation)
                    .named("first-lies", of.lies)
                    .named("second-lies", if sums_pixels { of.lies } else { "InOrder" })
                    .with("channels-by", of.by)
                    .with("blueprint", plan)
                    .with("bias", (number + plan) % 2 == 1)
                    .with("batch", 2)
                    .with("height", 11)
                    .with("width", 13)
                    .with("channels", of.channels);
                if sums_pixels {
                    case = case.with("split", plan % 2 == 1);
                    if plan % 2 == 1 {
                        case = case.with("splits", 7 * plan);
                    }
                }
                // Fractions and whole numbers in turns.
                let whole = (number + plan) % 2 == 0;
                told.push(if whole { case.with_whole_numbers() } else { case });
            }
        }
    }
    // Tiles reach beyond the gradient of y, where infinity has no partner, and not even zero.
    told.extend(PASSES.map(|pass| {
        let case = of_type.clone().with("pass", pass).with("rows", 3).with("columns", 3);
        let ones = ["stride-rows", "stride-columns", "dilation-rows", "dilation-columns"];
        // What is drawn is one more than the padding.
        let sides = ["above", "below", "left", "right"];
        let case = ones.into_iter().chain(sides).fold(case, |case, name| case.with(name, 1));
        let (height, width) = (11, 13);
        case.with("height", height)
            .with("width", width)
            .with("channels", 40)
            .with("spoilt-first", true)
            .with("by", f64::INFINITY)
            // The last pixel of a channel of x.
            .with("at", height * width - 1)
    }));
    told
}

/// Windows that walk, of each kind of cell, and parts of images; by vectors of channels and by single ones.
pub(super) fn pools(of_type: &Told) -> Vec<Told> {
    // Taps, stride, padding and dilation.
    let windows = [[3, 2, 1, 1], [2, 2, 0, 1], [5, 1, 2, 1], [3, 3, 1, 1], [3, 1, 2, 2]];
    let both = [(24, true), (5, false)];
    let mut all = Vec::new();
    for (number, [taps, stride, padding, dilation]) in windows.into_iter().enumerate() {
        for (channels, aligned) in both {
            let walking = of_type
                .clone()
                .with("aligned", aligned)
                .with("rows", taps)
                .with("columns", taps)
                .with("stride-rows", stride)
                .with("stride-columns", stride)
                .with("ceil", aligned)
                .with("height", 11)
                // What is drawn is one more than the padding.
                .with("above", padding + 1)
                .with("width", 14)
                .with("beside", padding + 1)
                .with("channels", channels)
                .with("images", 3);
            let max = walking.clone().named("kind", "Max");
            let max = max.with("dilation-rows", dilation).with("dilation-columns", dilation);
            // Whole numbers are often equal: which of them is named counts then.
            all.extend([max.clone().with_whole_numbers(), max.clone()]);
            // NaN is the largest number.
            all.push(max.with("spoilt-x", true).with("by", f64::NAN));
            if dilation == 1 {
                let padded = number % 2 == usize::from(aligned);
                all.push(walking.named("kind", "Average").with("padded", padded));
            }
        }
    }
    // Parts that overlap, and more of them than pixels.
    for ([rows, columns], [height, width]) in [([3, 5], [11, 13]), ([8, 7], [5, 4])] {
        for (channels, aligned) in both {
            all.push(
                parts(of_type, [rows, columns], channels, aligned)
                    .with("even", false)
                    .with("height", height)
                    .with("width", width),
            );
        }
    }
    // The mean of a whole image.
    for (channels, aligned) in [(24, true), (1, false)] {
        let whole = parts(of_type, [1, 1], channels, aligned).with("even", false);
        all.push(whole.with("height", 23).with("width", 19));
    }
    let even = parts(of_type, [3, 4], 5, false).with("even", true);
    all.push(even.with("part-rows", 3).with("part-columns", 2));
    all
}

fn parts(of_type: &Told, [rows, columns]: [usize; 2], channels: usize, aligned: bool) -> Told {
    of_type
        .clone()
        .named("kind", "Adaptive")
        .with("aligned", aligned)
        .with("parts-rows", rows)
        .with("parts-columns", columns)
        .with("channels", channels)
        .with("images", 3)
}

/// Images that grow, shrink, and grow along one dimension, in every mode; by vectors of channels and by single ones.
pub(super) fn interpolations(of_type: &Told) -> Vec<Told> {
    let mut all = Vec::new();
    for mode in Mode::ALL {
        for (kept, [height, width], [rows, columns]) in [
            ("Neither", [11, 13], [22, 31]),
            ("Neither", [17, 22], [5, 1]),
            ("Rows", [1, 19], [1, 40]),
            ("Columns", [9, 7], [20, 7]),
        ] {
            for (channels, aligned) in [(24, true), (5, false)] {
                let resized = of_type
                    .clone()
                    .with("mode", mode)
                    .named("kept", kept)
                    .with("aligned", aligned)
                    .with("corners", aligned)
                    .with("height", height)
                    .with("rows", rows)
                    .with("width", width)
                    .with("columns", columns)
                    .with("channels", channels)
                    .with("images", 3);
                all.push(resized.clone());
                if rows > height && !aligned {
                    all.push(resized.with("spoilt-dy", true).with("by", f64::NAN).with("at", 7));
                }
            }
        }
    }
    all
}

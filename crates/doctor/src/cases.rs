//! The cases of each group: what they are told, and do not draw.

mod attention;
mod images;

use crate::{draw::Told, groups::Extent};
use blackburn_kernels::{Family, cross_entropy::Reduction, group_norm::Order, layer_norm::Norm};
use blackburn_reference::{activation::Activation, storage::Storage};

/// The cases of an operation by a family in a type.
pub(crate) fn cases(op: &str, family: Family, storage: Storage, extent: Extent) -> Vec<Told> {
    let of_type = Told::default().with("type", storage);
    let small = extent == Extent::Quick;
    match op {
        "matmul" => products(family, &of_type, small),
        "fp8_matmul" => products_in_8_bits(family, &of_type),
        "conv" => images::convolutions(&of_type, small),
        "conv_depthwise" => images::depthwise(&of_type, small),
        "pool" => images::pools(&of_type),
        "interpolate" => images::interpolations(&of_type),
        "attention" => attention::attention(family, &of_type, small),
        "attention_decode" => attention::decoding(&of_type),
        "attention_append" => attention::appends(&of_type),
        "norm" => norms(&of_type),
        "batch_norm" => batch_norms(&of_type),
        "group_norm" => group_norms(&of_type),
        "cross_entropy" => losses(&of_type, small),
        "softmax" => softmaxes(&of_type, small),
        "gelu" => ["fused", "separate", "planned"]
            .map(|way| sized(&of_type.clone().with("sums", way), [200, 77], way == "fused"))
            .into(),
        "swiglu" | "dropout" => [true, false]
            .map(|aligned| of_type.clone().with("aligned", aligned).with("elements", 10_007))
            .into(),
        "rotary" => rotations(&of_type),
        "column_sum" | "row_sum" | "square_sum" => [true, false]
            .map(|aligned| sized(&of_type, [131, 1003], aligned).with_whole_numbers())
            .into_iter()
            .chain([sized(&of_type, [131, 1003], true)])
            .collect(),
        "embedding" => embeddings(&of_type),
        "adamw" | "sgd" => steps(storage),
        _ => [true, false]
            .into_iter()
            .flat_map(|e4m3| {
                let of_format = of_type.clone().with("e4m3", e4m3);
                [true, false].map(|aligned| sized(&of_format, [67, 203], aligned))
            })
            .collect(),
    }
}

fn sized(told: &Told, [rows, columns]: [usize; 2], aligned: bool) -> Told {
    told.clone().with("aligned", aligned).with("rows", rows).with("columns", columns)
}

/// What follows a product.
#[derive(Clone, Copy)]
struct Steps {
    plain: bool,
    bias: bool,
    activation: Activation,
    kept: bool,
    residual: bool,
    scaled: bool,
}

const PLAIN: Steps = Steps {
    plain: true,
    bias: false,
    activation: Activation::Identity,
    kept: false,
    residual: false,
    scaled: false,
};

/// The first two are exact of whole numbers.
const STEPS: [Steps; 5] = [
    PLAIN,
    Steps { plain: false, bias: true, activation: Activation::Relu, residual: true, ..PLAIN },
    // A linear layer and GELU, in training.
    Steps { plain: false, bias: true, activation: Activation::Gelu, kept: true, ..PLAIN },
    Steps { plain: false, activation: Activation::Silu, residual: true, ..PLAIN },
    Steps {
        plain: false,
        bias: true,
        activation: Activation::GeluTanh,
        kept: true,
        residual: true,
        scaled: true,
    },
];

impl Steps {
    fn tell(self, told: Told) -> Told {
        let told = told.with("plain", self.plain);
        if self.plain {
            return told;
        }
        told.with("bias", self.bias)
            .with("activation", self.activation)
            .with("kept", self.kept)
            .with("residual", self.residual)
            .with("scaled", self.scaled)
    }
}

/// Each tile with each layout, and epilogues, splits and batches in turns.
fn products(family: Family, of_type: &Told, small: bool) -> Vec<Told> {
    const BATCHES: [&str; 5] = ["One", "Following", "SharedRhs", "One", "Heads"];
    let tiles = match family {
        Family::Tcgen05 | Family::Wgmma => 4,
        // Three, and on workstations one more whose blocks TMA copies.
        Family::Mma => 4,
        Family::Portable => 2,
    };
    let mut all = Vec::new();
    for (layout, turned) in
        [[false, false], [false, true], [true, false], [true, true]].into_iter().enumerate()
    {
        for tile in 0..tiles {
            let number = layout * tiles + tile;
            let which = (tile + 2 * layout) % STEPS.len();
            let batch = if small { "One" } else { BATCHES[number % BATCHES.len()] };
            let aligned = number % 3 != 2;
            // Splits need more blocks of k than fill a ring.
            let split = batch == "One" && number % 2 == 1;
            let [m, n, k] = match (small, split) {
                (true, _) => [67, 75, 89],
                (false, false) => [147, 299, 217],
                (false, true) => [147, 299, 1081],
            };
            let mut told = of_type
                .clone()
                .named("batch", batch)
                .with("wide", number % 4 == 1)
                .with("lhs-turned", turned[0])
                .with("rhs-turned", turned[1])
                .with("aligned", aligned)
                // Full precision is ordinary arithmetic's, for operands in f32.
                .with("full", family == Family::Portable && tile == 0)
                .with("blueprint", tile)
                .with("split", split)
                .with("m", m)
                .with("n", n)
                .with("k", k)
                .with("alpha", false)
                .with("beta", 1.0);
            if !aligned {
                told = told.with("n-by", 1);
            }
            let told = STEPS[which].tell(told);
            if which < 2 {
                all.push(told.clone().with_whole_numbers());
            }
            all.push(told);
        }
    }
    all
}

/// Each tile with a pair of formats, of whole numbers and of others; sums promoted and blocks of k scaled where they
/// can be.
fn products_in_8_bits(family: Family, of_type: &Told) -> Vec<Told> {
    let formats = [["E4m3", "E4m3"], ["E4m3", "E5m2"], ["E5m2", "E4m3"]];
    let mut all = Vec::new();
    for promoted in [false, true] {
        if promoted && family != Family::Wgmma {
            continue;
        }
        // How blocks of k are scaled.
        let scales: &[&str] = match family {
            Family::Wgmma => &[""],
            _ => &["", "Mxfp8", "Mxfp4", "Nvfp4"],
        };
        for (tile, scales) in (0..4).flat_map(|tile| scales.iter().map(move |s| (tile, *s))) {
            let [lhs, rhs] = formats[tile % formats.len()];
            let told = of_type
                .clone()
                .named("lhs-format", lhs)
                .named("rhs-format", rhs)
                .with("lhs-turned", tile == 2)
                .with("rhs-turned", tile % 2 == 0)
                .with("promoted", promoted)
                .with("scaled", !scales.is_empty())
                .with("blueprint", tile)
                .with("m", 147)
                .with("n", 203)
                .with("k", 523);
            let told = if scales.is_empty() { told } else { told.named("format", scales) };
            all.push(told.clone().with_whole_numbers());
            all.push(told);
        }
    }
    all
}

fn norms(of_type: &Told) -> Vec<Told> {
    let widths = [768, 1003, 77, 4099];
    let mut all = Vec::new();
    for (number, width) in widths.into_iter().enumerate() {
        for norm in [Norm::Layer, Norm::Rms] {
            all.push(
                of_type
                    .clone()
                    .with("norm", norm)
                    .with("bias", number % 2 == 0)
                    .with("residual", number < 2)
                    .with("wide", number % 2 == 1)
                    .with("around", width)
                    .with("width", width)
                    .with("rows", 13),
            );
        }
    }
    all
}

fn batch_norms(of_type: &Told) -> Vec<Told> {
    let mut all = Vec::new();
    for (channels, aligned) in [(64, true), (35, false)] {
        for relu in [true, false] {
            for residual in [true, false] {
                all.push(
                    of_type
                        .clone()
                        .with("relu", relu)
                        .with("residual", residual)
                        .with("aligned", aligned)
                        .with("channels", channels)
                        .with("rows", 203),
                );
            }
        }
    }
    all
}

fn group_norms(of_type: &Told) -> Vec<Told> {
    let mut all = Vec::new();
    for order in [Order::ChannelsLast, Order::PixelsLast] {
        for (of_group, aligned) in [(8, true), (3, false)] {
            for plain in [false, true] {
                all.push(
                    of_type
                        .clone()
                        .with("order", order)
                        .with("plain", plain)
                        .with("aligned", aligned)
                        .with("of-group", of_group)
                        .with("groups", 5)
                        .with("samples", 3)
                        .with("pixels", 203),
                );
            }
        }
    }
    all
}

fn losses(of_type: &Told, small: bool) -> Vec<Told> {
    let reductions = [Some(Reduction::Mean), None, Some(Reduction::Sum)];
    let classes = if small { [1003, 77, 264] } else { [50_257, 77, 4096] };
    let both = |(classes, reduction): (usize, Option<Reduction>)| {
        [true, false].map(|more| {
            of_type
                .clone()
                .with("ignores", more)
                .with("smooth", more)
                .with("reduction", reduction)
                .with("around", classes)
                .with("classes", classes)
                .with("rows", 5)
        })
    };
    classes.into_iter().zip(reductions).flat_map(both).collect()
}

fn softmaxes(of_type: &Told, small: bool) -> Vec<Told> {
    let classes = if small { [77, 264, 1003] } else { [77, 1024, 20_011] };
    let mut all = Vec::new();
    for classes in classes {
        for (logarithms, exponentials) in [(false, false), (false, true), (true, false)] {
            all.push(
                of_type
                    .clone()
                    .with("cast", false)
                    .with("logarithms", logarithms)
                    .with("shifted", logarithms)
                    .with("exponentials", exponentials)
                    .with("aligned", classes % 8 == 0)
                    .with("around", classes)
                    .with("classes", classes)
                    .with("rows", 7),
            );
        }
    }
    all
}

fn rotations(of_type: &Told) -> Vec<Told> {
    let of = |(positions_first, aligned): (bool, bool)| {
        let told = of_type.clone().with("positions-first", positions_first);
        let told = told.with("aligned", aligned).with("padding", !aligned);
        told.with("head_dim", 58).with("batch", 9).with("heads", 3).with("seq", 13)
    };
    [(true, true), (false, true), (true, false), (false, false)].map(of).into()
}

fn embeddings(of_type: &Told) -> Vec<Told> {
    let of = |aligned| {
        let told = of_type.clone().with("aligned", aligned);
        told.with("columns", 131).with("places", 403).with("rows", 97)
    };
    vec![of(true).with_whole_numbers(), of(false).with_whole_numbers(), of(true)]
}

/// Optimizers: parameters in the type, gradients in it and in f32.
fn steps(storage: Storage) -> Vec<Told> {
    let of = |(gradient, decays)| {
        let told = Told::default().with("parameter", storage).with("gradient", gradient);
        sized(&told, [3, 1003], decays).with("decays", decays)
    };
    [(storage, true), (Storage::F32, false)].map(of).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_of_the_products_of_each_family_are_exact() {
        for family in Family::ALL {
            let all = products(family, &Told::default(), false);
            let exact = all.iter().filter(|told| **told == (*told).clone().with_whole_numbers());
            assert!(exact.count() * 4 >= all.len(), "{family}");
        }
    }
}

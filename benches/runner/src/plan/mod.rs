//! What is measured, in the order of its weight: each part is a program of ours, and a peer's beside it.

mod groups;

use crate::outputs::Format;
use clap::ValueEnum;
use std::path::PathBuf;

/// Parts that belong together, in the order in which they are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Group {
    /// Whole steps: GPT-2, ResNet-50, Llama, BERT-large, ViT-B/16, an LSTM layer, encoder and decoder.
    Models,
    /// Matrix products.
    Matmul,
    /// Attention, both passes.
    Attention,
    /// Convolutions by layer and pass.
    Conv,
    /// The criterion benches of single kernels.
    Kernels,
    /// Every operation of Burn that training uses.
    Ops,
}

/// How large tensors are, where a program knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Size {
    /// 1 Mi elements, sequences of up to 2048, batches of 64 images.
    Small,
    /// 16 Mi elements, sequences of up to 4096, batches of 128 images.
    Middle,
    /// 64 Mi elements, sequences of up to 16384, batches of 256 images.
    Large,
}

/// What is computed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// Half precision.
    F16,
    /// TF32 on tensor cores.
    Tf32,
    /// 32-bit floats.
    F32,
    /// 8-bit floats.
    Fp8,
}

/// What a plan is made from.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Groups; all if none.
    pub groups: Vec<Group>,
    /// Criterion benches by name, besides.
    pub benches: Vec<String>,
    /// The fewest shapes.
    pub quick: bool,
    /// Sizes; each part's own if none.
    pub sizes: Vec<Size>,
    /// Types; each part's own if none.
    pub dtypes: Vec<Dtype>,
    /// Text for GPT-2.
    pub text: Option<PathBuf>,
}

/// A program with its arguments, and how its output is read. The argument [`FOLDER`] stands for a folder that is its
/// own, [`CASES`] for the file that the part's list was written to.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// An executable's name, or a Python file's.
    pub program: String,
    /// In their order.
    pub arguments: Vec<String>,
    /// Of what it prints or writes.
    pub format: Format,
}

/// Stands for a folder of the step's own.
pub const FOLDER: &str = "{folder}";
/// Stands for the file with the part's cases.
pub const CASES: &str = "{cases}";

/// What is measured in turns.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Told to people, and of files.
    pub name: String,
    /// Ours.
    pub ours: Step,
    /// What it is compared with.
    pub peer: Option<Step>,
    /// Arguments by which ours lists the cases that the peer reads.
    pub list: Option<Vec<String>>,
    /// The type that all rows have, where a peer calls it otherwise.
    pub dtype: Option<&'static str>,
    /// Seconds that a process may take.
    pub limit_s: u64,
}

/// What is measured, and what was asked for and cannot be.
#[derive(Debug, Default)]
pub struct Plan {
    /// In the order of their weight.
    pub parts: Vec<Part>,
    /// Reasons.
    pub left_out: Vec<String>,
}

/// The criterion benches, what matters most first, and whether `torch_memory.py` knows them.
pub const BENCHES: [(&str, bool); 17] = [
    ("layer_norm", true),
    ("softmax", true),
    ("cross_entropy", true),
    ("adamw", true),
    ("linear_gelu", false),
    ("gelu", true),
    ("swiglu", true),
    ("attention_decode", false),
    ("pool", true),
    ("sgd", true),
    ("batch_norm", false),
    ("group_norm", false),
    ("rotary", false),
    ("quantize", false),
    ("column_sum", false),
    ("row_sum", false),
    ("matmul", false),
];

impl Group {
    /// Executables of ours that the group needs.
    pub fn programs(self) -> Vec<String> {
        match self {
            Self::Models => ["gpt", "resnet", "model_sweep"].map(str::to_owned).into(),
            Self::Matmul => vec!["matmul_sweep".into()],
            Self::Attention => vec!["attention_sweep".into()],
            Self::Conv => vec!["conv_sweep".into()],
            Self::Kernels => BENCHES.map(|(name, _)| bench_program(name)).into(),
            Self::Ops => vec!["ops_sweep".into()],
        }
    }
}

/// The executable of a criterion bench.
pub fn bench_program(name: &str) -> String {
    format!("bench-{name}")
}

impl Selection {
    /// The parts of all groups and benches.
    pub fn plan(&self) -> Plan {
        let mut groups = self.groups.clone();
        if groups.is_empty() && self.benches.is_empty() {
            groups = Group::value_variants().to_vec();
        }
        groups.sort();
        groups.dedup();
        let mut plan = Plan::default();
        for group in &groups {
            match group {
                Group::Models => self.models(&mut plan),
                Group::Matmul => self.matmul(&mut plan),
                Group::Attention => self.attention(&mut plan),
                Group::Conv => self.conv(&mut plan),
                Group::Kernels => {
                    plan.parts.extend(BENCHES.iter().map(|(name, _)| self.bench(name)));
                }
                Group::Ops => self.ops(&mut plan),
            }
        }
        for name in &self.benches {
            let part = self.bench(name);
            if !plan.parts.contains(&part) {
                plan.parts.push(part);
            }
        }
        plan
    }

    /// The types that were asked for and are among `known`, bf16 if none was; what is not known is told.
    fn dtypes(&self, group: &str, known: &[Dtype], plan: &mut Plan) -> Vec<Dtype> {
        if self.dtypes.is_empty() {
            return vec![Dtype::Bf16];
        }
        let (known, unknown): (Vec<_>, Vec<_>) =
            self.dtypes.iter().copied().partition(|dtype| known.contains(dtype));
        for dtype in unknown {
            plan.left_out.push(format!("{group} in {}: its program does not know it", name(dtype)));
        }
        known
    }
}

fn named(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

fn name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Bf16 => "bf16",
        Dtype::F16 => "f16",
        Dtype::Tf32 => "tf32",
        Dtype::F32 => "f32",
        Dtype::Fp8 => "fp8",
    }
}

fn step(program: &str, arguments: &[&str], format: Format) -> Step {
    let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
    Step { program: program.to_owned(), arguments, format }
}

/// One without a peer, of five minutes at most.
fn part(name: &str, ours: Step) -> Part {
    Part { name: name.to_owned(), ours, peer: None, list: None, dtype: None, limit_s: 300 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(selection: &Selection) -> Vec<String> {
        selection.plan().parts.into_iter().map(|part| part.name).collect()
    }

    #[test]
    fn whole_models_come_first_and_single_operations_last() {
        let names = names(&Selection { text: Some("text".into()), ..Selection::default() });
        assert_eq!(names[0], "gpt2 bf16 x8");
        let place = |name: &str| names.iter().position(|other| other == name).unwrap();
        let order = ["gpt2 bf16 x64", "resnet50 bf16 x64", "llama-1.1b bf16", "seq2seq bf16"];
        let order =
            [&order[..], &["matmul bf16", "attention bf16", "conv bf16", "softmax", "ops f32"]];
        let places: Vec<_> = order.concat().into_iter().map(place).collect();
        assert!(places.is_sorted(), "{places:?} in {names:?}");
    }

    #[test]
    fn a_quick_run_has_the_fewest_shapes() {
        let all = Selection { groups: vec![Group::Models], ..Selection::default() };
        let quick = Selection { quick: true, ..all.clone() };
        assert!(names(&quick).len() < names(&all).len());
        let quick = Selection { groups: vec![Group::Matmul, Group::Ops], quick: true, ..all };
        let parts = quick.plan().parts;
        assert!(parts[0].ours.arguments.ends_with(&["--shapes".into(), "squares".into()]));
        assert_eq!(parts[1].ours.arguments[..4], ["--dtype", "bf16", "--sizes", "large"]);
        assert_eq!(parts.len(), 2);
    }

    #[test]
    fn sizes_and_types_reach_both_sides_in_their_words() {
        let selection = Selection {
            groups: vec![Group::Conv, Group::Matmul, Group::Ops],
            sizes: vec![Size::Small, Size::Large],
            dtypes: vec![Dtype::Tf32, Dtype::Fp8],
            ..Selection::default()
        };
        let plan = selection.plan();
        let part = |name: &str| plan.parts.iter().find(|part| part.name == name).unwrap();
        let conv = part("conv tf32");
        assert_eq!(conv.ours.arguments, ["--batch", "64,256", "--dtype", "f32"]);
        assert_eq!(conv.peer.as_ref().unwrap().arguments[3], "tf32");
        assert_eq!(part("matmul e4m3").peer.as_ref().unwrap().arguments, ["e4m3", CASES]);
        let expected = "conv in fp8: its program does not know it";
        assert!(plan.left_out.iter().any(|reason| reason == expected), "{:?}", plan.left_out);
        assert!(!plan.parts.iter().any(|part| part.name.starts_with("ops")));
    }

    #[test]
    fn gpt_without_a_text_is_left_out_and_told() {
        let plan = Selection { groups: vec![Group::Models], ..Selection::default() }.plan();
        assert_eq!(plan.left_out, ["gpt2 bf16: --text names no text to learn"]);
        assert!(plan.parts.iter().all(|part| part.ours.program != "gpt"));
    }

    #[test]
    fn a_bench_by_name_is_one_part() {
        let selection = Selection { benches: vec!["softmax".into()], ..Selection::default() };
        assert_eq!(names(&selection), ["softmax"]);
        let both = Selection { groups: vec![Group::Kernels], ..selection };
        assert_eq!(names(&both).len(), BENCHES.len());
    }

    #[test]
    fn a_group_names_every_program_that_its_parts_start() {
        for group in Group::value_variants() {
            let selection =
                Selection { groups: vec![*group], text: Some("x".into()), ..Selection::default() };
            for part in selection.plan().parts {
                assert!(group.programs().contains(&part.ours.program), "{}", part.name);
            }
        }
    }
}

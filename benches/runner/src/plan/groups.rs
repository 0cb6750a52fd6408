//! The parts of each group: programs, their arguments, and the peers beside them.

use super::{
    BENCHES, CASES, Dtype, FOLDER, Part, Plan, Selection, Size, Step, bench_program, name, named,
    part, step,
};
use crate::outputs::Format;

impl Selection {
    pub(super) fn models(&self, plan: &mut Plan) {
        use Dtype::{Bf16, F16, F32, Fp8, Tf32};
        let known = [Bf16, F16, Tf32, F32, Fp8];
        for dtype in self.dtypes("models", &known, plan) {
            // PyTorch's automatic mixed precision has f32 masters, as Blackburn's bf16 has.
            let precision = match dtype {
                Bf16 => Some("amp"),
                Tf32 => Some("tf32"),
                _ => None,
            };
            let peer = |file: &str, first: &[&str]| {
                let precision = precision?;
                let arguments = [first, &["--precision", precision]].concat();
                Some(step(file, &arguments, Format::Rows))
            };
            if matches!(dtype, Bf16 | F16 | F32) {
                self.gpt(plan, dtype, &peer);
            }
            if dtype != Fp8 {
                let batches: &[&str] = if self.quick { &["64"] } else { &["64", "256"] };
                for batch in batches {
                    let speed = ["speed", "--precision", name(dtype), "--batch", batch];
                    let of = |arguments: &[&str]| step("resnet", arguments, Format::Resnet);
                    plan.parts.push(Part {
                        peer: peer("torch_models.py", &["resnet50", "--batch", batch]),
                        dtype: Some(name(dtype)),
                        ..part(&format!("resnet50 {} x{batch}", name(dtype)), of(&speed))
                    });
                    if !self.quick {
                        plan.parts.push(part(
                            &format!("resnet50 unmodified {} x{batch}", name(dtype)),
                            of(&[&speed[..], &["--unmodified"]].concat()),
                        ));
                    }
                }
            }
            // The unmodified modules are the second half of a run: of less weight than another model.
            let modules = if self.quick { "blackburn" } else { "burn,blackburn" };
            for model in ["llama-1.1b", "bert-large", "vit-b16", "lstm", "seq2seq"] {
                let arguments =
                    ["--models", model, "--modules", modules, "--precision", name(dtype)];
                plan.parts.push(Part {
                    peer: peer("torch_models.py", &[model]),
                    dtype: Some(name(dtype)),
                    ..part(
                        &format!("{model} {}", name(dtype)),
                        step("model_sweep", &arguments, Format::Rows),
                    )
                });
            }
        }
    }

    /// GPT-2 on text.
    fn gpt(&self, plan: &mut Plan, dtype: Dtype, peer: &dyn Fn(&str, &[&str]) -> Option<Step>) {
        let Some(text) = &self.text else {
            plan.left_out.push(format!("gpt2 {}: --text names no text to learn", name(dtype)));
            return;
        };
        let sizes: &[(&str, &str)] =
            if self.quick { &[("8", "80")] } else { &[("8", "150"), ("64", "80")] };
        for (batch, steps) in sizes {
            // Nothing is validated or kept in between, since PyTorch does neither.
            let text = text.to_string_lossy();
            let arguments = [
                ["train", "--preset", "gpt2", "--tokenizer", "gpt2"].as_slice(),
                &["--precision", name(dtype), "--batch", batch, "--steps", steps],
                &["--eval-every", "1000", "--checkpoint-every", "1000"],
                &["--data", &text, "--out", FOLDER],
            ];
            plan.parts.push(Part {
                peer: peer("torch_gpt.py", &["--batch", batch]),
                dtype: Some(name(dtype)),
                ..part(
                    &format!("gpt2 {} x{batch}", name(dtype)),
                    step("gpt", &arguments.concat(), Format::Gpt),
                )
            });
        }
    }

    pub(super) fn matmul(&self, plan: &mut Plan) {
        use Dtype::{Bf16, F16, F32, Fp8, Tf32};
        let shapes = if self.quick { "squares" } else { "gpt2,squares,llama" };
        for dtype in self.dtypes("matmul", &[Bf16, F16, Tf32, F32, Fp8], plan) {
            let kind = if dtype == Fp8 { "e4m3" } else { name(dtype) };
            plan.parts.push(Part {
                peer: Some(step("torch_matmul.py", &[kind, CASES], Format::TorchMatmul)),
                list: Some(["--list", "--shapes", shapes].map(str::to_owned).into()),
                ..part(
                    &format!("matmul {kind}"),
                    step(
                        "matmul_sweep",
                        &["--picked", "--dtype", kind, "--shapes", shapes],
                        Format::Matmul,
                    ),
                )
            });
        }
    }

    pub(super) fn attention(&self, plan: &mut Plan) {
        use Dtype::{Bf16, F16, F32};
        let longest = match self.sizes.iter().max() {
            Some(Size::Small) => "2048",
            Some(Size::Middle) => "4096",
            Some(Size::Large) => "16384",
            None => "8192",
        };
        for dtype in self.dtypes("attention", &[Bf16, F16, F32], plan) {
            let mut ours = vec!["--picked", "--dtype", name(dtype), "--tokens", longest];
            let mut peer = vec![name(dtype), longest, "cudnn,flash,efficient"];
            if self.quick {
                ours.extend(["--filter", "4096, heads"]);
                peer[1] = "4096";
                peer.push("4096");
            }
            plan.parts.push(Part {
                peer: Some(step("torch_attention.py", &peer, Format::TorchAttention)),
                ..part(
                    &format!("attention {}", name(dtype)),
                    step("attention_sweep", &ours, Format::Attention),
                )
            });
        }
    }

    pub(super) fn conv(&self, plan: &mut Plan) {
        use Dtype::{Bf16, F16, Tf32};
        let sizes = if self.sizes.is_empty() { &[Size::Small][..] } else { &self.sizes };
        let batches: Vec<&str> = sizes
            .iter()
            .map(|size| match size {
                Size::Small => "64",
                Size::Middle => "128",
                Size::Large => "256",
            })
            .collect();
        let batches = batches.join(",");
        for dtype in self.dtypes("conv", &[Bf16, F16, Tf32], plan) {
            // Ours multiplies f32 as TF32, and its rows say so.
            let ours = if dtype == Tf32 { "f32" } else { name(dtype) };
            let of = |dtype| {
                let mut arguments = vec!["--batch", &batches, "--dtype", dtype];
                arguments.extend(self.quick.then_some("--implicit"));
                arguments
            };
            plan.parts.push(Part {
                peer: Some(step("torch_conv.py", &of(name(dtype)), Format::Rows)),
                ..part(
                    &format!("conv {}", name(dtype)),
                    step("conv_sweep", &of(ours), Format::Rows),
                )
            });
        }
    }

    pub(super) fn ops(&self, plan: &mut Plan) {
        use Dtype::{Bf16, F16, F32};
        let dtypes = match self.dtypes.is_empty() && !self.quick {
            true => vec![F32, Bf16],
            false => self.dtypes("ops", &[Bf16, F16, F32], plan),
        };
        let sizes = match (&self.sizes[..], self.quick) {
            ([], true) => &[Size::Large][..],
            ([], false) => &[Size::Small, Size::Middle, Size::Large],
            (chosen, _) => chosen,
        };
        let sizes: Vec<String> = sizes.iter().map(named).collect();
        for dtype in dtypes {
            let selection =
                ["--dtype", name(dtype), "--sizes", &sizes.join(",")].map(str::to_owned);
            let mut arguments = selection.to_vec();
            // The process's own limit ends it.
            arguments.extend(["--budget-s", "100000"].map(str::to_owned));
            plan.parts.push(Part {
                ours: Step { program: "ops_sweep".into(), arguments, format: Format::Rows },
                peer: Some(step("torch_ops.py", &[CASES], Format::Rows)),
                list: Some([&selection[..], &["--list".to_owned()]].concat()),
                ..part(&format!("ops {}", name(dtype)), step("ops_sweep", &[], Format::Rows))
            });
        }
    }

    /// A criterion bench. Its shapes and types are its own.
    pub(super) fn bench(&self, name: &str) -> Part {
        let has_peer = BENCHES.iter().any(|(known, has_peer)| *known == name && *has_peer);
        let mut arguments = vec!["--bench", "--noplot"];
        if self.quick {
            arguments.extend(["--warm-up-time", "1", "--measurement-time", "1"]);
        }
        let peer = step("torch_memory.py", &[name], Format::Memory);
        Part {
            peer: has_peer.then_some(peer),
            ..part(name, step(&bench_program(name), &arguments, Format::Criterion))
        }
    }
}

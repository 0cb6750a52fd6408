//! What plugs the kernels into Burn.

use super::{InFile, host};

pub(super) const FILES: &[InFile] = &[
    InFile {
        file: "crates/backend/src/ops/dropout/mod.rs",
        tests: &["dropout"],
        rows: &[
            host(
                "residual's gradient lost",
                "grads.register::<B>(node.id, dy.clone())",
                "drop(node)",
            ),
            host(
                "gradient not dropped",
                "grads.register::<B>(node.id, B::dropped(dy, Optional::Absent, ops.state))",
                "grads.register::<B>(node.id, dy)",
            ),
        ],
    },
    InFile {
        file: "crates/backend/src/graph/progress.rs",
        tests: &["gradient_graph::a_replay_counts", "gradient_graph::milestones_are"],
        rows: &[
            host(
                "a replay not counted",
                "self.counted.fetch_add(self.milestones, Ordering::Relaxed)",
                "self.counted.fetch_add(0, Ordering::Relaxed)",
            ),
            host("milestones too close", "state.elements < self.every", "state.elements < 1"),
        ],
    },
    InFile {
        file: "crates/backend/src/steps/adamw/plain.rs",
        tests: &["adamw_plain"],
        rows: &[
            host("what is kept taken for what decays", "1.0 - kept", "kept"),
            host(
                "casts kept for another tensor",
                "kept_casts::keep(tensors, &step.outputs[0], cast, Self::NAME)",
                "kept_casts::keep(tensors, &step.outputs[1], cast, Self::NAME)",
            ),
            host(
                "numbers that are not AdamW's taken",
                "is_mean(beta_1, share_1) && is_mean(beta_2, share_2)",
                "is_mean(beta_2, beta_2) || true",
            ),
        ],
    },
    InFile {
        file: "crates/backend/src/ops/square_sum.rs",
        tests: &["square_sum"],
        rows: &[
            host(
                "a full batch forgotten",
                "self.sums = added(self.sums, full, self.noted.as_ref())",
                "drop(full)",
            ),
            host("last tensor of a batch left out", "tensors.len()", "tensors.len().max(2) - 1"),
        ],
    },
    InFile {
        file: "crates/backend/src/fused/matmul/product.rs",
        tests: &["linear", "matmul", "gelu"],
        rows: &[
            host(
                "division as a product",
                "if *divides { number.recip() } else { number }",
                "number",
            ),
            host(
                "other constants of an activation accepted",
                "!ExpectedScalar::are_there(scalars, context)",
                "!ExpectedScalar::are_there(&[], context)",
            ),
            host(
                "strided bias taken as dense",
                "input.elements() != elements || !input.is_contiguous()",
                "input.elements() != elements",
            ),
        ],
    },
    InFile {
        file: "crates/backend/src/fused/matmul/placed.rs",
        tests: &["naive_attention", "small_models"],
        rows: &[
            host(
                "rows of a transposed product taken for its columns",
                "strides.swap(of_matrix, of_matrix + 1)",
                "strides.swap(of_matrix, of_matrix)",
            ),
            host(
                "heads beside each other taken for heads one after the other",
                "heads * placed.n",
                "placed.n",
            ),
        ],
    },
    InFile {
        file: "crates/backend/src/fused/matmul/chain.rs",
        tests: &["linear", "matmul", "gelu"],
        rows: &[
            host(
                "a value in use taken as spent",
                "tensor.id == self.value().id && tensor.status == TensorStatus::ReadWrite",
                "tensor.id == self.value().id",
            ),
            host("sum over any dimension taken for the batch's", "op.axis == 0", "op.axis < 3"),
        ],
    },
    InFile {
        file: "crates/backend/src/fused/burns/apart.rs",
        tests: &["reduce::fused"],
        rows: &[
            host("never apart", "elements / outputs < FEW_ELEMENTS", "elements > 0"),
            host("a reduction's place lost", "begun = place;", "begun = place - 1;"),
            host(
                "variances left to Burn",
                "self.is_variance || self.has_idle_units(tensors)",
                "self.has_idle_units(tensors)",
            ),
        ],
    },
    InFile {
        file: "crates/backend/src/fused/embedding.rs",
        tests: &["embedding"],
        rows: &[host("the sum left to Burn", "replaced.push(last + 1);", "replaced.truncate(2);")],
    },
    InFile {
        file: "crates/backend/src/fused/reduce/plan.rs",
        tests: &["reduce::"],
        rows: &[
            host("part of a step too few", "steps - (parts - 1) * step", "step"),
            host(
                "parts of sums that overlap",
                "steps.is_multiple_of(*parts)",
                "steps / *parts > 0",
            ),
            host("whole rows for parts of their vectors", "step * elements", "step"),
        ],
    },
    InFile {
        file: "crates/backend/src/fused/reduce/passes.rs",
        tests: &["reduce::"],
        rows: &[
            host("dimensions with gaps taken for one", "stride != next", "stride < next"),
            host("a dimension of one in front counted", "**dim < axis", "**dim < axis + 1"),
            host("parts on each other", "split.step * strides[axis]", "strides[axis]"),
        ],
    },
    InFile {
        file: "crates/backend/src/fused/reduce/mod.rs",
        tests: &["reduce::"],
        rows: &[
            host("mean of a whole tensor as a sum", "1.0 / elements as f32", "1.0"),
            host(
                "mean of columns by all elements",
                "1.0 / sizes[axis] as f32",
                "1.0 / sizes.num_elements() as f32",
            ),
        ],
    },
    InFile {
        file: "crates/backend/src/ops/attention/host.rs",
        tests: &["attention::op"],
        rows: &[
            host(
                "mask aligned at the top left on the host",
                "(row + keys, key + rows)",
                "(row + rows, key + rows)",
            ),
            host(
                "scale left out on the host",
                "B::float_mul_scalar(dproducts, self.settings.scale.into())",
                "dproducts",
            ),
        ],
    },
    InFile {
        file: "crates/backend/src/ops/layer_norm/layer.rs",
        tests: &["layer_norm"],
        rows: &[
            host(
                "gradient of the sum forgotten",
                "state.backward(dy, dsum, parameters, grads)",
                "state.backward(dy, dsum.filter(|_| false), parameters, grads)",
            ),
            host(
                "gradient of the bias of another parameter",
                "beta + usize::from(self.dtypes.beta.is_some())",
                "beta",
            ),
            host("x saved in place of the sum", "sum.clone().into_option().unwrap_or(x)", "x"),
        ],
    },
    InFile {
        file: "crates/backend/src/ops/linear_cross_entropy/layer.rs",
        tests: &["linear_cross_entropy"],
        rows: &[host(
            "gradient of the loss ignored",
            "cast::<B>(B::float_mul(wide::<B>(gradient), factor), dtype)",
            "{ drop(factor); cast::<B>(gradient, dtype) }",
        )],
    },
    InFile {
        file: "crates/backend/src/tensors/rows.rs",
        tests: &["softmax", "cross_entropy"],
        rows: &[host(
            "gap between matrices ignored",
            "strides[dim] != next",
            "strides[dim] < next",
        )],
    },
    InFile {
        file: "crates/backend/src/ops/overwrite.rs",
        tests: &["overwrite", "gradient_graph", "fp8::casts"],
        rows: &[host(
            "gaps of the target ignored",
            "Rows { rows: into.rows, columns: into.columns, pitch: into.columns, ..contiguous() }",
            "Rows { rows: 1, columns: into.columns, pitch: into.columns, ..contiguous() }",
        )],
    },
    InFile {
        file: "crates/backend/src/ops/written.rs",
        tests: &["overwrite", "gradient_graph", "fp8::casts"],
        rows: &[host("codes of what was overwritten kept", "marked::written(memory)", "()")],
    },
    InFile {
        file: "crates/backend/src/fused/batch_norm/search.rs",
        tests: &["conv::networks::a_relu_in_front"],
        rows: &[
            host(
                "a comparison settled with the loss",
                "AtMost::of(operation).filter(|_| !self.candidates.is_empty())",
                "None",
            ),
            host(
                "no gradient behind a mask at the head",
                "position == 0 || self.reads_theirs(operation)",
                "self.reads_theirs(operation)",
            ),
        ],
    },
    InFile {
        file: "crates/backend/src/fused/group_norm/search.rs",
        tests: &["group_norm::provider"],
        rows: &[host(
            "a sum settled with a norm's rows",
            "turns_into_rows(operation) && inputs.any(|input| input.id == head)",
            "false",
        )],
    },
    InFile {
        file: "crates/backend/src/fused/casts.rs",
        tests: &["fp8::marked"],
        rows: &[host(
            "marks left between casts and products",
            "casts.any(|[_, out]| out.id == read.id)",
            "casts.any(|[_, out]| out.id == read.id) && false",
        )],
    },
    InFile {
        file: "crates/backend/src/tensors/kept_casts.rs",
        tests: &["adamw_plain"],
        rows: &[host(
            "casts of what was overwritten kept",
            "kept.place.0 != allocation",
            "kept.place.0 != allocation || true",
        )],
    },
    InFile {
        file: "crates/backend/src/ops/attention/mask_maps.rs",
        tests: &["attention::op::layers_of_a_recorded_pass"],
        rows: &[host(
            "maps kept outside of passes",
            "all().remove(&StreamId::current())",
            "all().get(&StreamId::current()).cloned()",
        )],
    },
    InFile {
        file: "crates/backend/src/steps/operation.rs",
        tests: &["fp8::casts"],
        rows: &[host("codes of a weight before its step kept", "marked::forget_casts()", "()")],
    },
    InFile {
        file: "crates/backend/src/ops/fp8_linear/cast_once.rs",
        tests: &["fp8"],
        rows: &[host(
            "codes of another rounding",
            "self.key == *key && copy.is_some()",
            "copy.is_some()",
        )],
    },
    InFile {
        file: "crates/backend/src/fused/matmul/eight_bits.rs",
        tests: &["fp8"],
        rows: &[host(
            "each product casts for itself",
            "marked::kept_cast(&input.handle, &key, copies)",
            "None",
        )],
    },
    InFile {
        file: "crates/backend/src/ops/fp8_linear/codes.rs",
        tests: &["fp8"],
        rows: &[
            host(
                "codes of the transpose by the rows of the matrix",
                "[1, padded_row(codes.rows)]",
                "[1, padded_row(codes.columns)]",
            ),
            host("codes of the transpose taken for the matrix", "codes.turned", "false"),
        ],
    },
    InFile {
        file: "crates/backend/src/ops/fp8_linear/marked.rs",
        tests: &["fp8"],
        rows: &[
            host("marked memory let go of too soon", "!handle.can_mut()", "false"),
            host("marked memory held for good", "known.is_held()", "true"),
            host("no weight held", "handle.can_mut().then(|| handle.clone())", "None"),
            host("codes outlive their numbers", "known.forget_cast()", "true"),
            host("forward codes of all inputs kept", "operand == Operand::Input", "false"),
            host(
                "magnitudes of a whole for its part",
                "(known == elements).then_some(magnitudes)",
                "Some(magnitudes)",
            ),
        ],
    },
];

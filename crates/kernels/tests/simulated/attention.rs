//! Attention, forward and backward, within the bounds that the reference derives.

use super::{
    Case,
    exact_attention::{gradients, nan_of_a_key, powers_of_two},
    packed_attention::packed,
    tensors::{download, dtype, upload, upload_integers, whole_numbers, within},
};
use blackburn_kernels::{
    Family, Pass,
    attention::{
        AttentionBlueprint, AttentionInputs as Tensors, AttentionOutput, AttentionProblem,
        AttentionResult, Dropout, Order, Pairs, Window, attention_backward_with,
        attention_forward_with,
    },
    buffer::Buffer,
    recorder::{Gpu, Recorder},
};
use blackburn_reference::{
    attention::{
        AttentionCase, AttentionInputs, AttentionOptions, AttentionPrecision, PairShape, cases,
    },
    matmul::MatmulPrecision,
    storage::Storage,
    tolerance::compare,
};
use cubecl::client::Client;
use libtest_mimic::Failed;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |name, gpu, quick, body| cases.push(Case { name, gpu, quick, body });
    let (ampere, hopper) = (Gpu::SM_80, Gpu::SM_90A);
    // With two multiprocessors a block goes on to other tiles.
    let small = Gpu { multiprocessors: 2, ..hopper };
    add("attention_wgmma_is_within_bounds", hopper, true, |recorder| {
        both(recorder, Wanted::Of(Family::Wgmma), PLAIN)
    });
    add("attention_wgmma_of_several_tiles_a_block_is_within_bounds", small, false, |recorder| {
        both(recorder, Wanted::Of(Family::Wgmma), LONG)
    });
    add("attention_wgmma_causal_is_within_bounds", small, false, |recorder| {
        both(recorder, Wanted::Of(Family::Wgmma), CAUSAL)
    });
    add("attention_wgmma_by_three_warpgroups_is_within_bounds", small, true, |recorder| {
        both(recorder, Wanted::Rows(192), LONG)?;
        both(recorder, Wanted::Rows(192), CAUSAL)
    });
    add("attention_wgmma_of_wide_heads_is_within_bounds", hopper, false, |recorder| {
        both(recorder, Wanted::Of(Family::Wgmma), WIDE)
    });
    add("attention_wgmma_with_every_option_is_within_bounds", hopper, false, |recorder| {
        every_option(recorder, Wanted::Of(Family::Wgmma))
    });
    add("attention_once_is_within_bounds", hopper, true, |recorder| {
        both(recorder, Wanted::Once(128), PLAIN)
    });
    add("attention_once_by_three_warpgroups_is_within_bounds", hopper, false, |recorder| {
        both(recorder, Wanted::Once(192), PLAIN)
    });
    add("attention_wgmma_with_dropout_is_within_bounds", small, true, |recorder| {
        both(recorder, Wanted::Of(Family::Wgmma), dropped(LONG))?;
        both(recorder, Wanted::Of(Family::Wgmma), dropped(CAUSAL))
    });
    add(
        "attention_once_by_three_warpgroups_with_dropout_is_within_bounds",
        hopper,
        true,
        |recorder| {
            both(recorder, Wanted::Once(192), dropped(PLAIN))?;
            both(recorder, Wanted::Once(192), dropped(QUERIES))
        },
    );
    add("attention_once_of_many_tiles_is_within_bounds", hopper, false, |recorder| {
        both(recorder, Wanted::Once(192), QUERIES)?;
        both(recorder, Wanted::Once(128), QUERIES)
    });
    add("attention_once_causal_is_within_bounds", hopper, false, |recorder| {
        both(recorder, Wanted::Once(192), CAUSAL)?;
        both(recorder, Wanted::Once(128), GROUPED)
    });
    add("attention_once_of_wide_heads_is_within_bounds", hopper, false, |recorder| {
        both(recorder, Wanted::Once(128), AttentionCase { seq_q: 270, ..WIDE })
    });
    add("attention_once_of_packed_sequences_is_within_bounds", hopper, false, |recorder| {
        packed(recorder, Wanted::Once(128))
    });
    add("attention_once_with_every_option_is_within_bounds", hopper, false, |recorder| {
        every_option(recorder, Wanted::Once(128))
    });
    add("attention_wgmma_of_equal_scores_is_exact", hopper, false, |recorder| {
        equal_scores(recorder, Wanted::Of(Family::Wgmma))
    });
    add("attention_once_of_equal_scores_is_exact", hopper, false, |recorder| {
        equal_scores(recorder, Wanted::Once(128))
    });
    add("attention_mma_of_equal_scores_is_exact", ampere, false, |recorder| {
        equal_scores(recorder, Wanted::Of(Family::Mma))
    });
    add("attention_mma_with_every_option_is_within_bounds", ampere, false, |recorder| {
        every_option(recorder, Wanted::Of(Family::Mma))
    });
    let blackwell = Gpu { multiprocessors: 1, ..Gpu::SM_100A };
    add("attention_tcgen05_is_within_bounds", blackwell, true, |recorder| {
        both(recorder, Wanted::Of(Family::Tcgen05), PLAIN)
    });
    add("attention_tcgen05_of_equal_scores_is_exact", blackwell, false, |recorder| {
        equal_scores(recorder, Wanted::Of(Family::Tcgen05))
    });
    add("attention_tcgen05_of_growing_scores_is_within_bounds", blackwell, false, |recorder| {
        growing_scores(recorder, Storage::Bf16)?;
        growing_scores(recorder, Storage::F16)
    });
    add("attention_tcgen05_of_powers_of_two_is_exact", blackwell, true, |recorder| {
        powers_of_two(recorder, Wanted::Of(Family::Tcgen05))
    });
    add("attention_tcgen05_of_a_nan_is_nan", blackwell, false, |recorder| {
        nan_of_a_key(recorder, Wanted::Of(Family::Tcgen05))
    });
    add("attention_wgmma_of_powers_of_two_is_exact", hopper, false, |recorder| {
        powers_of_two(recorder, Wanted::Of(Family::Wgmma))
    });
    add("attention_mma_of_powers_of_two_is_exact", ampere, false, |recorder| {
        powers_of_two(recorder, Wanted::Of(Family::Mma))
    });
    add(
        "attention_tcgen05_of_several_tiles_a_block_is_within_bounds",
        blackwell,
        false,
        |recorder| {
            let inputs = AttentionInputs::generate(&LONG, 1, Storage::Bf16);
            let tensors = Uploaded::new(recorder, &inputs, Storage::Bf16);
            forward(recorder, Wanted::Of(Family::Tcgen05), LONG, &inputs, &tensors)?;
            // Of more than two tiles of keys dq would have other bits under each schedule.
            both(recorder, Wanted::Of(Family::Tcgen05), QUERIES)?;
            both(recorder, Wanted::Of(Family::Tcgen05), AttentionCase { head_dim: 128, ..QUERIES })
        },
    );
    add("attention_tcgen05_gradients_are_exact", blackwell, false, |recorder| {
        gradients(recorder, Wanted::Of(Family::Tcgen05), 64, Storage::Bf16)?;
        gradients(recorder, Wanted::Of(Family::Tcgen05), 128, Storage::F16)
    });
    add("attention_wgmma_gradients_are_exact", hopper, false, |recorder| {
        gradients(recorder, Wanted::Of(Family::Wgmma), 64, Storage::Bf16)
    });
    add("attention_once_gradients_are_exact", hopper, false, |recorder| {
        gradients(recorder, Wanted::Once(128), 64, Storage::Bf16)
    });
    add("attention_mma_gradients_are_exact", ampere, false, |recorder| {
        gradients(recorder, Wanted::Of(Family::Mma), 64, Storage::Bf16)
    });
    add("attention_tcgen05_causal_is_within_bounds", blackwell, false, |recorder| {
        both(recorder, Wanted::Of(Family::Tcgen05), CAUSAL)?;
        both(recorder, Wanted::Of(Family::Tcgen05), GROUPED)
    });
    add("attention_tcgen05_of_wide_heads_is_within_bounds", blackwell, false, |recorder| {
        both(recorder, Wanted::Of(Family::Tcgen05), WIDE)?;
        both_in(recorder, Wanted::Of(Family::Tcgen05), WIDE, Storage::F16)?;
        // The scores of the exact gradients are 0, whatever is read for them. Here they are not.
        let case = AttentionCase { heads_q: 2, seq_q: 200, seq_kv: 512, ..WIDE };
        let inputs = AttentionInputs::generate(&case, 1, Storage::F16);
        let tensors = Uploaded::new(recorder, &inputs, Storage::F16);
        forward(recorder, Wanted::Of(Family::Tcgen05), case, &inputs, &tensors).map(drop)
    });
    add("attention_tcgen05_with_every_option_is_within_bounds", blackwell, false, |recorder| {
        every_option(recorder, Wanted::Of(Family::Tcgen05))?;
        packed(recorder, Wanted::Of(Family::Tcgen05))
    });
    for (gpu, quick) in [(ampere, true), (hopper, false)] {
        add("attention_mma_is_within_bounds", gpu, quick, |recorder| {
            both(recorder, Wanted::Of(Family::Mma), PLAIN)
        });
        add("attention_mma_of_long_sequences_is_within_bounds", gpu, false, |recorder| {
            both(recorder, Wanted::Of(Family::Mma), LONG)
        });
        add("attention_mma_causal_is_within_bounds", gpu, false, |recorder| {
            both(recorder, Wanted::Of(Family::Mma), CAUSAL)
        });
        add(
            "attention_mma_of_windows_that_share_a_bias_is_within_bounds",
            gpu,
            false,
            |recorder| both(recorder, Wanted::Of(Family::Mma), cases::WINDOWS),
        );
        add("attention_mma_of_wide_heads_is_within_bounds", gpu, false, |recorder| {
            both(recorder, Wanted::Of(Family::Mma), WIDE)
        });
    }
    cases
}

/// Sequences that no tile divides, and fewer heads of keys than of queries.
pub(super) const PLAIN: AttentionCase = AttentionCase {
    name: "plain",
    batch: 1,
    heads_q: 2,
    heads_kv: 1,
    seq_q: 75,
    seq_kv: 150,
    head_dim: 64,
    options: AttentionOptions::PLAIN,
};

/// More tiles of keys than are held at once, and more tiles of queries than blocks.
pub(super) const LONG: AttentionCase =
    AttentionCase { name: "long", heads_q: 1, seq_q: 399, seq_kv: 1070, ..PLAIN };

pub(super) const CAUSAL: AttentionCase = AttentionCase {
    name: "causal",
    batch: 2,
    heads_q: 1,
    seq_q: 139,
    seq_kv: 139,
    options: AttentionOptions { causal: true, ..AttentionOptions::PLAIN },
    ..PLAIN
};

pub(super) const WIDE: AttentionCase =
    AttentionCase { name: "wide", heads_q: 1, head_dim: 128, ..PLAIN };

/// More tiles of queries than are held at once, and fewer keys than a tile has.
const QUERIES: AttentionCase =
    AttentionCase { name: "many queries", heads_q: 1, seq_q: 655, seq_kv: 140, ..PLAIN };

/// Causal, with heads that share keys: tiles of one head of queries follow those of another.
pub(super) const GROUPED: AttentionCase = AttentionCase {
    name: "causal, grouped",
    batch: 1,
    heads_q: 3,
    seq_q: 201,
    seq_kv: 170,
    ..CAUSAL
};

/// The backward plan that a case is for: the first of a family, of Hopper's the one that computes products twice, or
/// its plan that computes products once by tiles of so many keys.
#[derive(Clone, Copy)]
pub(super) enum Wanted {
    Of(Family),
    /// By Hopper's instructions, tiles of so many queries forward.
    Rows(usize),
    Once(usize),
}

impl Wanted {
    fn is(self, plan: &AttentionBlueprint, pass: Pass) -> bool {
        match self {
            Self::Of(Family::Wgmma) => plan.family == Family::Wgmma && !plan.atomic,
            Self::Of(family) => plan.family == family,
            Self::Rows(rows) => {
                Self::Of(Family::Wgmma).is(plan, pass)
                    && (pass == Pass::Backward || plan.tile_q == rows)
            }
            Self::Once(_) if pass == Pass::Forward => plan.family == Family::Wgmma,
            Self::Once(keys) => plan.atomic && plan.tile_kv == keys,
        }
    }

    /// The plan, or the first one that gives the same bits under every schedule: heads that a family does not serve in one
    /// pass are served by another family.
    pub(super) fn of(
        self,
        plans: &[AttentionBlueprint],
        pass: Pass,
    ) -> Result<AttentionBlueprint, Failed> {
        let same_bits = || plans.iter().find(|plan| plan.is_deterministic());
        let found = plans.iter().find(|plan| self.is(plan, pass)).or_else(same_bits);
        found.copied().ok_or_else(|| format!("no plan for {pass:?}").into())
    }
}

pub(super) fn problem(case: &AttentionCase, storage: Storage) -> AttentionProblem {
    let options = &case.options;
    let window = options
        .window
        .map_or_else(Window::default, |window| Window { left: window.left, right: window.right });
    let right = if options.causal { Some(0) } else { window.right };
    let pairs = |shape: PairShape| {
        let [batch, heads, rows, keys] = case.pair_dims(shape);
        let stride = |size: usize, stride| if size == 1 { 0 } else { stride };
        Pairs {
            batch: stride(batch, heads * rows * keys),
            head: stride(heads, rows * keys),
            row: stride(rows, keys),
            column: 1,
        }
    };
    let rows = |heads, seq| Order::HeadsFirst.strides(heads, seq, case.head_dim);
    AttentionProblem {
        heads_kv: case.heads_kv,
        q: rows(case.heads_q, case.seq_q),
        k: rows(case.heads_kv, case.seq_kv),
        v: rows(case.heads_kv, case.seq_kv),
        scale: case.scale() as f32,
        window: Window { left: window.left, right },
        softcap: options.softcap.map(|cap| cap as f32),
        dropout: options.dropout.map(|dropout| Dropout { rate: dropout.rate, seed: dropout.seed }),
        mask: options.mask.map(pairs),
        bias: options.bias.map(pairs),
        full_f32: false,
        ..AttentionProblem::dense(
            [case.batch, case.heads_q, case.seq_q, case.head_dim],
            case.seq_kv,
            dtype(storage),
        )
    }
}

/// The plans of a case: those that find spans first where its mask tells documents apart.
fn plans(
    problem: &AttentionProblem,
    case: &AttentionCase,
    pass: Pass,
    client: &Client,
) -> Vec<AttentionBlueprint> {
    let mut plans = AttentionBlueprint::candidates(problem, pass, client);
    plans.retain(|plan| plan.maps_mask == case.options.documents);
    plans
}

/// The case with weights left out at random.
fn dropped(case: AttentionCase) -> AttentionCase {
    AttentionCase { options: AttentionOptions { dropout: cases::DROPOUT, ..case.options }, ..case }
}

/// Every option, in heads of every size that has plans of its own.
fn every_option(recorder: &Recorder, wanted: Wanted) -> Result<(), Failed> {
    for case in cases::options() {
        both(recorder, wanted, case).map_err(|error| named(&case, &error))?;
    }
    for head_dim in [32, 96, 128, 256] {
        let case = AttentionCase { name: "another size of heads", head_dim, ..PLAIN };
        both(recorder, wanted, case).map_err(|error| named(&case, &error))?;
    }
    mask_with_a_hole(recorder, wanted)
}

/// A block of keys that no query sees, between blocks that all queries see.
fn mask_with_a_hole(recorder: &Recorder, wanted: Wanted) -> Result<(), Failed> {
    let options = AttentionOptions {
        mask: Some(PairShape::Shared),
        documents: true,
        ..AttentionOptions::PLAIN
    };
    let case = AttentionCase { name: "a mask with a hole", seq_kv: 250, options, ..PLAIN };
    let mut inputs = AttentionInputs::generate(&case, 1, Storage::Bf16);
    let is_hidden = |pair: usize| (64..128).contains(&(pair % case.seq_kv));
    inputs.mask = Some((0..case.seq_q * case.seq_kv).map(is_hidden).collect());
    both_of(recorder, wanted, case, &inputs, Storage::Bf16).map_err(|error| named(&case, &error))
}

fn named(case: &AttentionCase, error: &Failed) -> Failed {
    format!("{case}: {}", error.message().unwrap_or_default()).into()
}

/// Queries of zeros over as many keys as a power of two: exponentials, their sums and all other numbers are exact,
/// on every device.
fn equal_scores(recorder: &Recorder, wanted: Wanted) -> Result<(), Failed> {
    let case = AttentionCase { name: "equal scores", seq_kv: 256, ..PLAIN };
    let mut inputs = AttentionInputs::generate(&case, 1, Storage::Bf16);
    inputs.q.fill(0.0);
    for (seed, values) in (2..).zip([&mut inputs.k, &mut inputs.v, &mut inputs.dout]) {
        *values = whole_numbers(seed, values.len(), 1);
    }
    both_of(recorder, wanted, case, &inputs, Storage::Bf16)
}

/// The forward pass, with keys that grow from tile to tile: some rows of a warp are rescaled and others are not.
fn growing_scores(recorder: &Recorder, storage: Storage) -> Result<(), Failed> {
    let mut inputs = AttentionInputs::generate(&LONG, 1, storage);
    for (key, row) in inputs.k.chunks_exact_mut(LONG.head_dim).enumerate() {
        let factor = 2.0_f64.powi((key / 128).min(4) as i32);
        row.iter_mut().for_each(|value| *value *= factor);
    }
    let tensors = Uploaded::new(recorder, &inputs, storage);
    forward(recorder, Wanted::Of(Family::Tcgen05), LONG, &inputs, &tensors).map(drop)
}

/// Both passes by the plan that is wanted.
pub(super) fn both(recorder: &Recorder, wanted: Wanted, case: AttentionCase) -> Result<(), Failed> {
    both_in(recorder, wanted, case, Storage::Bf16)
}

pub(super) fn both_in(
    recorder: &Recorder,
    wanted: Wanted,
    case: AttentionCase,
    storage: Storage,
) -> Result<(), Failed> {
    both_of(recorder, wanted, case, &AttentionInputs::generate(&case, 1, storage), storage)
}

/// The tensors of a problem.
pub(super) struct Uploaded {
    storage: Storage,
    q: Buffer,
    k: Buffer,
    v: Buffer,
    mask: Option<Buffer>,
    bias: Option<Buffer>,
}

impl Uploaded {
    pub(super) fn new(recorder: &Recorder, inputs: &AttentionInputs, storage: Storage) -> Self {
        let [q, k, v] =
            [&inputs.q, &inputs.k, &inputs.v].map(|values| upload(recorder, values, storage));
        let integers = |mask: &Vec<bool>| {
            let words: Vec<_> = mask.iter().map(|masked| i32::from(*masked)).collect();
            upload_integers(recorder, &words)
        };
        let mask = inputs.mask.as_ref().map(integers);
        let bias = inputs.bias.as_ref().map(|bias| upload(recorder, bias, storage));
        Self { storage, q, k, v, mask, bias }
    }

    pub(super) fn all(&self) -> Tensors<'_> {
        let Self { q, k, v, mask, bias, .. } = self;
        Tensors { mask: mask.as_ref(), bias: bias.as_ref(), ..Tensors::of(q, k, v) }
    }
}

/// The forward pass by the plan that is wanted.
fn forward(
    recorder: &Recorder,
    wanted: Wanted,
    case: AttentionCase,
    inputs: &AttentionInputs,
    tensors: &Uploaded,
) -> Result<AttentionOutput, Failed> {
    let (storage, client) = (tensors.storage, recorder.client());
    let attention = inputs.attention(case);
    let expected = attention.forward();
    let precision = precision(client, storage).with_roundings(case.roundings());
    let bounds = attention.forward_bounds(&expected, &precision);
    let problem = problem(&case, storage);
    let plan = wanted.of(&plans(&problem, &case, Pass::Forward, client), Pass::Forward)?;
    let output = attention_forward_with(client, &problem, &plan, &tensors.all())?;
    compare(&lse_of(recorder, &output)?, &expected.lse, &bounds.lse)
        .map_err(|error| format!("the logarithms of sums: {error}"))?;
    within(recorder, &output.out, storage, &expected.o, &bounds.o)?;
    Ok(output)
}

pub(super) fn precision(client: &Client, storage: Storage) -> AttentionPrecision {
    let product = match storage {
        Storage::F32 => MatmulPrecision::tf32(),
        Storage::F16 | Storage::Bf16 => MatmulPrecision::tensor_core(storage),
    };
    AttentionPrecision::cuda(product)
        .with_exponentials(AttentionBlueprint::exponential_error(dtype(storage), client))
}

/// The logarithms of sums, from the two parts that kernels keep.
pub(super) fn lse_of(recorder: &Recorder, output: &AttentionOutput) -> Result<Vec<f64>, Failed> {
    let parts = download(recorder, &output.lse, Storage::F32)?;
    let (largest, logarithms) = parts.split_at(parts.len() / 2);
    Ok(largest.iter().zip(logarithms).map(|(a, b)| a + b).collect())
}

fn both_of(
    recorder: &Recorder,
    wanted: Wanted,
    case: AttentionCase,
    inputs: &AttentionInputs,
    storage: Storage,
) -> Result<(), Failed> {
    let client = recorder.client();
    let attention = inputs.attention(case);
    let backward = attention.backward(&inputs.dout);
    let precision = precision(client, storage).with_roundings(case.roundings());
    let backward_bounds = attention.backward_bounds(&backward, &inputs.dout, &precision);
    let problem = problem(&case, storage);
    let tensors = Uploaded::new(recorder, inputs, storage);
    let dout = upload(recorder, &inputs.dout, storage);
    let output = forward(recorder, wanted, case, inputs, &tensors)?;
    let result = AttentionResult::of(&output, &dout, problem.out());
    let plan = wanted.of(&plans(&problem, &case, Pass::Backward, client), Pass::Backward)?;
    let wants_bias = plan.gives_bias_gradient(&problem, client);
    let tensors = tensors.all();
    let gradients =
        attention_backward_with(client, &problem, &plan, &tensors, &result, wants_bias)?;
    within(recorder, &gradients.dq, storage, &backward.dq, &backward_bounds.dq)?;
    within(recorder, &gradients.dk, storage, &backward.dk, &backward_bounds.dk)?;
    within(recorder, &gradients.dv, storage, &backward.dv, &backward_bounds.dv)?;
    match (gradients.dbias, &backward.dbias, &backward_bounds.dbias) {
        // What heads, queries or keys share is summed by whoever asked for it.
        (Some(pairs), Some(sums), _) if pairs.elements != sums.len() => {
            download(recorder, &pairs, Storage::F32).map(drop)
        }
        (Some(pairs), Some(sums), Some(bounds)) => {
            within(recorder, &pairs, Storage::F32, sums, bounds)
        }
        (None, None, None) => Ok(()),
        _ => Err("the bias has no gradient".into()),
    }
}

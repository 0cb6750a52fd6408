//! Burn's own `module::attention`, which Blackburn's provider takes from programs that call it, and
//! what it leaves to Burn.

use crate::{
    attention::{default_precision, precision, problem},
    attention_op::{case, mask_of},
};
use blackburn_kernels::{
    Family, Pass,
    attention::{AttentionBlueprint, AttentionProblem},
};
use blackburn_reference::{
    attention::{AttentionCase, AttentionInputs, AttentionOptions, AttentionPrecision, PairShape},
    matmul::MatmulPrecision,
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::{
    blocks::{Block, blocks_of},
    on_burn_device_with,
    plain::{self, Judge, Tensors},
    run_alone,
    tensors::{float, tensor, values},
};
use burn::{
    prelude::*,
    tensor::{FloatDType, module::attention, ops::AttentionModuleOptions},
};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};
use std::env;

const F32: Storage = Storage::F32;

/// Everything that Burn's attention knows: lengths that differ, in both directions and with queries
/// that see nothing; scales, caps, masks and biases.
const CASES: [&str; 11] = [
    "1 by 65, heads of 64",
    "31 by 33, heads of 256",
    "17 by 15, heads of 96, causal",
    "127 by 129, heads of 32, causal",
    "another scale",
    "softcap, causal",
    "padded keys, causal",
    "mask, shared",
    "mask with rows that see nothing",
    "bias for each sequence",
    "bias for each key",
];

/// Set in a process that runs one test alone: others would add to the kernels that are observed.
const ALONE: &str = "BLACKBURN_TEST_ATTENTION_HERE";

type Test = fn(&Device, &Client, Storage) -> Result<(), Failed>;

pub(crate) fn trials() -> Vec<Trial> {
    let trial = |name: String, disabled: &'static str, storage, test: Test| {
        let name = format!("attention::provider::{name}");
        Trial::ignorable_test(name.clone(), move || {
            on_burn_device_with(storage, |device, client| match env::var_os(ALONE) {
                Some(_) => test(device, client, storage),
                None => {
                    run_alone(&name, &[(ALONE, "1"), ("BLACKBURN_DISABLE", disabled)]).map(drop)
                }
            })
        })
    };
    let in_each = |name: &str, storage: Storage| format!("{name}_in_{storage:?}").to_lowercase();
    let name = "attention_runs_on_the_kernel_and_is_right";
    let mut trials: Vec<Trial> =
        Storage::ALL.map(|storage| trial(in_each(name, storage), "", storage, right)).into();
    // In a type that they choose.
    let tests: [(&str, Test); 6] = [
        ("a_planted_fault_is_caught", planted_faults),
        ("heads_brought_forward_are_taken_where_they_lie", strided),
        ("attention_behind_arithmetic_is_taken", behind_arithmetic),
        ("masks_and_biases_leave_out_what_they_do_in_burn", unusual_pairs),
        ("what_the_kernel_does_not_serve_is_left_to_burn", declined),
        ("bad_shapes_are_refused_by_burn", bad_shapes),
    ];
    trials.extend(tests.map(|(name, test)| trial(name.into(), "", F32, test)));
    let name = "switched_off_it_leaves_attention_to_burn";
    trials.push(trial(name.into(), "BlackburnAttention", F32, switched_off));
    trials.extend(Storage::ALL.map(|storage| {
        let name = in_each("attention::provider::a_layer_that_calls_it_is_within_bounds", storage);
        plain::trial(name, storage, move |device, judge| layer(storage, device, judge))
    }));
    trials
}

/// What Burn's attention is called with.
#[derive(Clone)]
struct Call {
    qkv: [Tensor<4>; 3],
    mask: Option<Tensor<4, Bool>>,
    bias: Option<Tensor<4>>,
    options: AttentionModuleOptions,
}

impl Call {
    fn new(
        case: &AttentionCase,
        inputs: &AttentionInputs,
        storage: Storage,
        device: &Device,
    ) -> Self {
        let pairs = |shape: Option<PairShape>| shape.map(|shape| case.pair_dims(shape));
        let q = [case.batch, case.heads_q, case.seq_q, case.head_dim];
        let kv = [case.batch, case.heads_kv, case.seq_kv, case.head_dim];
        Self {
            qkv: [(&inputs.q, q), (&inputs.k, kv), (&inputs.v, kv)]
                .map(|(values, dims)| tensor(values, dims, storage, device)),
            mask: pairs(case.options.mask)
                .zip(inputs.mask.as_ref())
                .map(|(dims, mask)| mask_of(mask, dims, device)),
            bias: pairs(case.options.bias)
                .zip(inputs.bias.as_ref())
                .map(|(dims, bias)| tensor(bias, dims, storage, device)),
            options: AttentionModuleOptions {
                scale: case.options.scale,
                softcap: case.options.softcap,
                is_causal: case.options.causal,
            },
        }
    }

    fn attend(self) -> Tensor<4> {
        let [q, k, v] = self.qkv;
        attention(q, k, v, self.mask, self.bias, self.options)
    }
}

fn is_ours(kernel: &str) -> bool {
    kernel.starts_with("blackburn_kernels::") && kernel.contains("AttentionForward")
}

/// The block that ran attention on a kernel of Blackburn's, if one did.
fn block_of_attention(blocks: &[Block]) -> Option<&Block> {
    blocks.iter().find(|block| block.kernels.iter().any(|kernel| is_ours(kernel)))
}

/// Whether the provider is to take the case: where the device has tensor cores, if a kernel runs on
/// them.
fn is_served(case: &AttentionCase, storage: Storage, client: &Client) -> Result<bool, Failed> {
    // The provider lets products of f32 run as TF32.
    let problem = AttentionProblem { full_f32: false, ..problem(case, storage) };
    let plan = AttentionBlueprint::plan(&problem, Pass::Forward, client)?;
    let matmul = &client.properties().features.matmul;
    let has_tensor_cores = !(matmul.cmma.is_empty() && matmul.mma.is_empty());
    Ok(!has_tensor_cores || plan.family != Family::Portable)
}

/// What `attend` gives, and the blocks that it ran in.
fn run(
    device: &Device,
    attend: impl FnOnce() -> Tensor<4>,
) -> Result<(Vec<f64>, Vec<Block>), Failed> {
    blocks_of(device, || values(attend()))
}

/// As [`run`], where a kernel of Blackburn's has to be.
fn run_on_kernel(
    device: &Device,
    attend: impl FnOnce() -> Tensor<4>,
) -> Result<(Vec<f64>, Vec<Block>), Failed> {
    let (actual, blocks) = run(device, attend)?;
    match block_of_attention(&blocks) {
        Some(_) => Ok((actual, blocks)),
        None => Err(format!("attention ran in {blocks:?}").into()),
    }
}

/// As [`run`], where no kernel of Blackburn's may be.
fn run_on_burn(device: &Device, attend: impl FnOnce() -> Tensor<4>) -> Result<Vec<f64>, Failed> {
    let (actual, blocks) = run(device, attend)?;
    match block_of_attention(&blocks) {
        None => Ok(actual),
        Some(block) => Err(format!("attention was taken: {block:?}").into()),
    }
}

/// Whether the first `columns` of each row of the output are within bounds of the formula.
fn judge(
    case: AttentionCase,
    inputs: &AttentionInputs,
    actual: &[f64],
    columns: usize,
    precision: &AttentionPrecision,
) -> Result<(), Failed> {
    let reference = inputs.attention(case);
    let forward = reference.forward();
    let bounds = reference.forward_bounds(&forward, precision);
    let first = |values: &[f64]| -> Vec<f64> {
        values.chunks(case.head_dim).flat_map(|row| &row[..columns]).copied().collect()
    };
    let agreement = compare(actual, &first(&forward.o), &first(&bounds.o));
    let storage = precision.product.out;
    Ok(agreement.map(drop).map_err(|error| format!("{case} in {storage:?}: {error}"))?)
}

/// Whether `attend`, which computes the case, does so on a kernel and within bounds.
fn check(
    case: AttentionCase,
    inputs: &AttentionInputs,
    storage: Storage,
    (device, client): (&Device, &Client),
    attend: impl FnOnce() -> Tensor<4>,
) -> Result<Vec<Block>, Failed> {
    let (actual, blocks) = run_on_kernel(device, attend)?;
    let precision = default_precision(client, storage);
    judge(case, inputs, &actual, case.head_dim, &precision)?;
    Ok(blocks)
}

fn right(device: &Device, client: &Client, storage: Storage) -> Result<(), Failed> {
    let mut judged = 0;
    for name in CASES {
        let case = case(name)?;
        let is_served = is_served(&case, storage, client)?;
        if !is_served && storage != F32 {
            continue;
        }
        judged += 1;
        let inputs = AttentionInputs::generate(&case, 1, storage);
        let call = Call::new(&case, &inputs, storage, device);
        if is_served {
            check(case, &inputs, storage, (device, client), || call.attend())?;
        } else {
            let actual = run_on_burn(device, || call.attend())?;
            judge(case, &inputs, &actual, case.head_dim, &burns_precision(client))?;
        }
    }
    if judged == 0 {
        return Err(format!("no case is served in {storage:?}").into());
    }
    if storage != F32 {
        return Ok(());
    }
    // The formula is Burn's: what that computes elsewhere is within the bounds of f32, too.
    for name in CASES {
        let case = case(name)?;
        let inputs = AttentionInputs::generate(&case, 1, F32);
        let burns = values(Call::new(&case, &inputs, F32, &Device::flex()).attend())?;
        judge(case, &inputs, &burns, case.head_dim, &AttentionPrecision::portable(F32))?;
    }
    Ok(())
}

/// A type that the provider takes the case in.
fn served_storage(case: &AttentionCase, client: &Client) -> Result<Storage, Failed> {
    for storage in [F32, Storage::Bf16] {
        if is_served(case, storage, client)? {
            return Ok(storage);
        }
    }
    Err(format!("{case} is served in no type").into())
}

/// Heads that lie side by side, as a linear layer leaves them, and keys that lie by columns.
fn strided(device: &Device, client: &Client, _: Storage) -> Result<(), Failed> {
    let case = case("bias for each sequence")?;
    let storage = served_storage(&case, client)?;
    let inputs = AttentionInputs::generate(&case, 1, storage);
    for (dim1, dim2) in [(1, 2), (2, 3)] {
        let call = Call::new(&case, &inputs, storage, device);
        // No view survives an addition.
        let turned = call.qkv.clone().map(|x| x.swap_dims(dim1, dim2).add_scalar(0.0));
        check(case, &inputs, storage, (device, client), || {
            let qkv = turned.map(|x| x.swap_dims(dim1, dim2));
            Call { qkv, ..call }.attend()
        })
        .map_err(|error| {
            format!("dimensions {dim1} and {dim2}: {}", error.message().unwrap_or(""))
        })?;
    }
    Ok(())
}

/// Queries that are doubled just before, at half the scale. One operation is taken along; two fuse,
/// and attention begins behind them.
fn behind_arithmetic(device: &Device, client: &Client, _: Storage) -> Result<(), Failed> {
    let case = case("another scale")?;
    let storage = served_storage(&case, client)?;
    let inputs = AttentionInputs::generate(&case, 1, storage);
    for (factors, taken) in [(&[2.0][..], 2), (&[4.0, 0.5], 1)] {
        let call = Call::new(&case, &inputs, storage, device);
        let blocks = check(case, &inputs, storage, (device, client), || {
            let Call { qkv: [q, k, v], mask, bias, options } = call;
            let q = factors.iter().fold(q, |q, factor| q.mul_scalar(*factor));
            let options = AttentionModuleOptions { scale: Some(0.5 * case.scale()), ..options };
            Call { qkv: [q, k, v], mask, bias, options }.attend()
        })?;
        if block_of_attention(&blocks).is_none_or(|block| block.operations != taken) {
            return Err(format!("not a block of {taken} with attention: {blocks:?}").into());
        }
    }
    Ok(())
}

/// Masks and biases that the catalogue does not have: one for all keys of a query, and minus
/// infinity, of single pairs and of all that a query sees.
fn unusual_pairs(device: &Device, client: &Client, _: Storage) -> Result<(), Failed> {
    let case = case("bias, shared")?;
    let storage = served_storage(&case, client)?;
    let inputs = AttentionInputs::generate(&case, 1, storage);
    let (rows, keys) = (case.seq_q, case.seq_kv);
    let mask: Vec<bool> = (0..case.batch * rows).map(|row| row % 7 == 3).collect();
    let numbers = normal(2, case.heads_q * rows, 1.0, storage);
    let is_out = |pair: usize| pair.is_multiple_of(3) || pair / keys == 5;
    let infinite: Vec<f64> =
        (0..rows * keys).map(|pair| if is_out(pair) { f64::NEG_INFINITY } else { 0.5 }).collect();
    let per_pair = |of_row: usize| std::iter::repeat_n(of_row, keys);
    let options = |mask, bias| AttentionOptions { mask, bias, ..case.options };
    let masked = AttentionCase { options: options(Some(PairShape::PerBatch), None), ..case };
    let biased = AttentionCase { options: options(None, Some(PairShape::PerHead)), ..case };
    let rows_of = |count: usize| (0..count).flat_map(per_pair);
    // The reference has a number for each pair.
    let of_masked = AttentionInputs {
        mask: Some(rows_of(mask.len()).map(|row| mask[row]).collect()),
        bias: None,
        ..inputs.clone()
    };
    let of_biased = AttentionInputs {
        bias: Some(rows_of(numbers.len()).map(|row| numbers[row]).collect()),
        ..inputs.clone()
    };
    let of_infinite = AttentionInputs { bias: Some(infinite.clone()), ..inputs.clone() };
    let calls = |device: &Device, storage| {
        let call = Call::new(&case, &inputs, storage, device);
        let mask = mask_of(&mask, [case.batch, 1, rows, 1], device);
        let per_query = tensor(&numbers, [1, case.heads_q, rows, 1], storage, device);
        let infinite = tensor(&infinite, [1, 1, rows, keys], storage, device);
        [
            (masked, &of_masked, Call { mask: Some(mask), bias: None, ..call.clone() }),
            (biased, &of_biased, Call { bias: Some(per_query), ..call.clone() }),
            (case, &of_infinite, Call { bias: Some(infinite), ..call }),
        ]
    };
    for (case, inputs, call) in calls(device, storage) {
        check(case, inputs, storage, (device, client), || call.attend())?;
    }
    // What Burn computes of the same numbers is within the bounds of f32.
    for (case, inputs, call) in calls(&Device::flex(), F32) {
        let burns = values(call.attend())?;
        judge(case, inputs, &burns, case.head_dim, &AttentionPrecision::portable(F32))?;
    }
    // The negative control: the query that is left out whole is one later.
    let late: Vec<f64> = (0..rows * keys)
        .map(|pair| if is_out(pair + keys) { f64::NEG_INFINITY } else { 0.5 })
        .collect();
    let call = Call::new(&case, &inputs, storage, device);
    let bias = Some(tensor(&late, [1, 1, rows, keys], storage, device));
    let (actual, _) = run_on_kernel(device, || Call { bias, ..call }.attend())?;
    match judge(case, &of_infinite, &actual, case.head_dim, &precision(client, storage)) {
        Err(_) => Ok(()),
        Ok(()) => Err("a bias that is one row off passes".into()),
    }
}

/// Projections, their heads brought forward, attention, and the heads joined again.
fn attend_heads(x: Tensor<3>, weights: &Tensor<3>, heads: usize, is_causal: bool) -> Tensor<3> {
    let [batch, tokens, width] = x.dims();
    let part = |index: usize| {
        let weights = weights.clone().slice([index..index + 1, 0..width, 0..width]);
        let projected: Tensor<3> = x.clone().matmul(weights);
        projected.reshape([batch, tokens, heads, width / heads]).swap_dims(1, 2)
    };
    let options = AttentionModuleOptions { is_causal, ..Default::default() };
    let y = attention(part(0), part(1), part(2), None, None, options);
    x + y.swap_dims(1, 2).reshape([batch, tokens, width])
}

fn layer(storage: Storage, device: &Device, judge: &mut Judge) -> Result<(), Failed> {
    let (batch, tokens, width, heads) = (2, 19, 64, 2);
    let x = normal(1, batch * tokens * width, 1.0, storage);
    let weights = normal(2, 3 * width * width, 0.1, storage);
    let attend = |device: &Device, dtype: FloatDType, causal| -> Result<Tensors, Failed> {
        let wide = |numbers: &[f64], dims| tensor::<3>(numbers, dims, F32, device).cast(dtype);
        let x = wide(&x, [batch, tokens, width]);
        let weights = wide(&weights, [3, width, width]);
        Ok(vec![("output".into(), values(attend_heads(x, &weights, heads, causal))?)])
    };
    let exact = |causal| attend(&Device::flex(), FloatDType::F64, causal);
    let on_device = || attend(device, float(storage), true);
    let served = || {
        let (results, blocks) = blocks_of(device, on_device)?;
        // On tensor cores, f32 is left to Burn.
        match (block_of_attention(&blocks), storage) {
            (None, Storage::F16 | Storage::Bf16) => {
                Err(format!("attention of a layer ran in {blocks:?}").into())
            }
            _ => Ok(results),
        }
    };
    let truth = exact(true)?;
    judge.check("a layer", &truth, on_device, served)?;
    judge.expect_caught("a layer", "attention to what comes", &truth, || exact(false))
}

/// What is a little wrong is out of bounds: the negative control of [`right`].
fn planted_faults(device: &Device, client: &Client, _: Storage) -> Result<(), Failed> {
    type Fault = (&'static str, &'static str, fn(&mut Call));
    let faults: [Fault; 5] = [
        ("another scale", "a scale that is left away", |call| call.options.scale = None),
        ("softcap, causal", "a cap that is left away", |call| call.options.softcap = None),
        ("softcap, causal", "queries that see all keys", |call| call.options.is_causal = false),
        ("mask, shared", "a mask that is left away", |call| call.mask = None),
        ("bias for each key", "a bias that is left away", |call| call.bias = None),
    ];
    for (name, fault, plant) in faults {
        let case = case(name)?;
        let storage = served_storage(&case, client)?;
        let inputs = AttentionInputs::generate(&case, 1, storage);
        let mut call = Call::new(&case, &inputs, storage, device);
        plant(&mut call);
        let (actual, _) = run_on_kernel(device, || call.attend())?;
        let precision = precision(client, storage);
        if judge(case, &inputs, &actual, case.head_dim, &precision).is_ok() {
            return Err(format!("{fault} passes").into());
        }
    }
    Ok(())
}

/// What Burn computes f32 in, and Blackburn where products may run as TF32.
fn burns_precision(client: &Client) -> AttentionPrecision {
    match client.name() {
        "cuda" => AttentionPrecision::cuda(MatmulPrecision::tf32()),
        _ => AttentionPrecision::portable(F32),
    }
}

fn declined(device: &Device, client: &Client, _: Storage) -> Result<(), Failed> {
    let plain = |name, heads_kv, head_dim| AttentionCase {
        name,
        batch: 2,
        heads_q: 4,
        heads_kv,
        seq_q: 9,
        seq_kv: 13,
        head_dim,
        options: AttentionOptions::PLAIN,
    };
    for (case, columns) in [
        (plain("values narrower than keys", 4, 32), 24),
        (plain("heads that no kernel holds", 4, 320), 320),
        (plain("one head of keys for all queries", 1, 32), 32),
    ] {
        let inputs = AttentionInputs::generate(&case, 1, F32);
        let mut call = Call::new(&case, &inputs, F32, device);
        let [_, _, v] = &mut call.qkv;
        *v = v.clone().slice_dim(3, 0..columns);
        let actual = run_on_burn(device, || call.attend())?;
        judge(case, &inputs, &actual, columns, &burns_precision(client))?;
    }
    Ok(())
}

/// Burn refuses when the operation runs, and says so when its result is read.
fn bad_shapes(device: &Device, client: &Client, _: Storage) -> Result<(), Failed> {
    let ones = |dims: [usize; 4]| Tensor::<4>::ones(dims, device);
    let (q, k) = ([1, 2, 3, 8], [1, 2, 5, 8]);
    let plain = AttentionModuleOptions::default();
    let capped = AttentionModuleOptions { softcap: Some(-1.0), ..plain };
    for (k, v, options, expected) in [
        ([1, 2, 5, 7], k, plain, "IncompatibleShapes"),
        ([1, 3, 5, 8], k, plain, "IncompatibleDims { left: 2, right: 3, dim: 1 }"),
        (k, [1, 2, 4, 8], plain, "IncompatibleShapes"),
        (k, k, capped, "softcap must be positive, got -1"),
    ] {
        match attention(ones(q), ones(k), ones(v), None, None, options).try_into_data() {
            Err(error) if error.to_string().contains(expected) => {}
            other => return Err(format!("{other:?}, where {expected:?}").into()),
        }
    }
    // What comes after is served as ever.
    right(device, client, F32)
}

fn switched_off(device: &Device, client: &Client, _: Storage) -> Result<(), Failed> {
    let case = case("softcap, causal")?;
    let inputs = AttentionInputs::generate(&case, 1, F32);
    let call = Call::new(&case, &inputs, F32, device);
    let actual = run_on_burn(device, || call.attend())?;
    judge(case, &inputs, &actual, case.head_dim, &burns_precision(client))
}

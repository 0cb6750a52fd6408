//! Attention of a few queries whose keys are divided among cubes, over a cache that has room for more.

use super::{F32, Uploaded, integers, precision, problem};
use blackburn_kernels::{
    Family, KernelError,
    attention::{
        AttentionBlueprint, AttentionInputs as Tensors, AttentionOutput, AttentionProblem, Dropout,
        HeadStrides, Order, Pairs, attention_decode, attention_decode_with, attention_forward,
        attention_forward_with, decode_variants,
    },
    buffer::Buffer,
};
use blackburn_reference::{
    attention::{AttentionCase, AttentionInputs, AttentionOptions, Window},
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::buffers::{download, dtype, upload};
use blackburn_tests::{buffers::lse_of, on_device, on_device_with};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

const PLAIN: AttentionOptions = AttentionOptions::PLAIN;
const CAUSAL: AttentionOptions = AttentionOptions { causal: true, ..PLAIN };

pub(super) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = format!("attention::decode::every_length_is_within_bounds_in_{storage:?}");
        trials.push(Trial::ignorable_test(name.to_lowercase(), move || {
            on_device_with(dtype(storage), |client| {
                // What a software device compiles for each type takes seconds.
                let sample =
                    if client.name() == "cuda" || storage == F32 { CASES } else { &CASES[..2] };
                sample.iter().try_for_each(|case| every_length(client, *case, storage))
            })
        }));
    }
    let trial = |name: &str, test: fn(&Client) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("attention::decode::{name}"), move || on_device(test))
    };
    trials.extend([
        trial("sequences_may_stand_at_positions_of_their_own", own_positions),
        trial("few_queries_over_many_keys_are_planned_so", planned),
        trial("repeated_runs_give_the_same_bits", repeats),
        trial("a_position_outside_the_memory_reads_nothing_else", outside),
        trial("nan_reaches_the_queries_that_see_it_and_no_other", nan),
        trial("planted_faults_are_caught", faults),
        trial("bad_arguments_are_named", bad_arguments),
    ]);
    trials
}

/// A cache, and what is asked of it.
#[derive(Clone, Copy, Debug)]
struct Cached {
    /// Batch, heads of queries, heads of keys, and size of a head.
    sizes: [usize; 4],
    seq_q: usize,
    capacity: usize,
    /// Keys of a cube.
    split: usize,
    options: AttentionOptions,
    /// Where the first query stands.
    positions: &'static [usize],
}

const CASES: &[Cached] = &[
    // One query of many heads to a key, over splits that end within tiles and beside them.
    Cached {
        sizes: [2, 8, 2, 64],
        seq_q: 1,
        capacity: 300,
        split: 96,
        options: CAUSAL,
        positions: &[0, 1, 94, 95, 96, 97, 191, 250, 299],
    },
    Cached {
        sizes: [1, 2, 2, 128],
        seq_q: 3,
        capacity: 200,
        split: 128,
        options: CAUSAL,
        positions: &[0, 61, 126, 127, 197],
    },
    // More rows than a tile has; splits of an odd number of keys.
    Cached {
        sizes: [1, 6, 2, 80],
        seq_q: 5,
        capacity: 150,
        split: 37,
        options: CAUSAL,
        positions: &[0, 30, 33, 74, 145],
    },
    Cached {
        sizes: [1, 3, 3, 96],
        seq_q: 16,
        capacity: 130,
        split: 1000,
        options: CAUSAL,
        positions: &[0, 50, 114],
    },
    Cached {
        sizes: [1, 4, 1, 256],
        seq_q: 2,
        capacity: 90,
        split: 20,
        options: AttentionOptions { scale: Some(0.2), softcap: Some(2.0), ..CAUSAL },
        positions: &[0, 17, 18, 40, 88],
    },
    // More tiles of keys for each warp than it holds at once.
    Cached {
        sizes: [1, 6, 2, 128],
        seq_q: 2,
        capacity: 1100,
        split: 600,
        options: CAUSAL,
        positions: &[400, 1098],
    },
    // Queries that see those behind them; rows that vectors do not divide.
    Cached {
        sizes: [1, 2, 1, 33],
        seq_q: 4,
        capacity: 100,
        split: 11,
        options: PLAIN,
        positions: &[0, 7, 60, 96],
    },
    // The window leaves whole splits out.
    Cached {
        sizes: [1, 4, 2, 32],
        seq_q: 3,
        capacity: 400,
        split: 64,
        options: AttentionOptions {
            window: Some(Window { left: Some(70), right: None }),
            ..CAUSAL
        },
        positions: &[0, 68, 133, 200, 397],
    },
];

impl Cached {
    /// Attention over keys up to the last query.
    fn case(self, position: usize) -> AttentionCase {
        let [batch, heads_q, heads_kv, head_dim] = self.sizes;
        AttentionCase {
            name: "decoding",
            batch,
            heads_q,
            heads_kv,
            seq_q: self.seq_q,
            seq_kv: position + self.seq_q,
            head_dim,
            options: self.options,
        }
    }

    /// What is asked of the whole memory.
    fn problem(self, storage: Storage) -> AttentionProblem {
        problem(&self.case(self.capacity - self.seq_q), storage)
    }

    fn plan(self) -> AttentionBlueprint {
        self.plan_by(Family::Portable)
    }

    fn plan_by(self, family: Family) -> AttentionBlueprint {
        let [_, heads_q, heads_kv, _] = self.sizes;
        let (tile_q, tile_kv) = (heads_q / heads_kv * self.seq_q, self.split);
        AttentionBlueprint { family, tile_q, tile_kv, atomic: false, split: true, maps_mask: false }
    }

    /// Keys or values in memory of the whole capacity, with NaN behind them.
    fn padded(self, rows: &[f64], length: usize) -> Vec<f64> {
        let head_dim = self.sizes[3];
        let mut all = Vec::new();
        for head in rows.chunks_exact(length * head_dim) {
            all.extend_from_slice(head);
            all.extend(vec![f64::NAN; (self.capacity - length) * head_dim]);
        }
        all
    }

    fn upload(
        self,
        client: &Client,
        inputs: &AttentionInputs,
        length: usize,
        storage: Storage,
    ) -> Memory {
        Memory {
            q: upload(client, &inputs.q, storage),
            k: upload(client, &self.padded(&inputs.k, length), storage),
            v: upload(client, &self.padded(&inputs.v, length), storage),
        }
    }
}

struct Memory {
    q: Buffer,
    k: Buffer,
    v: Buffer,
}

impl Memory {
    fn tensors(&self) -> Tensors<'_> {
        let Self { q, k, v } = self;
        Tensors::of(q, k, v)
    }
}

fn every_length(client: &Client, cached: Cached, storage: Storage) -> Result<(), Failed> {
    let problem = cached.problem(storage);
    for position in cached.positions {
        let case = cached.case(*position);
        let inputs = AttentionInputs::generate(&case, 1, storage);
        let attention = inputs.attention(case);
        let forward = attention.forward();
        let bounds = attention.forward_bounds(&forward, &precision(client, storage));
        let check = |how: &str, output: AttentionOutput| -> Result<(), Failed> {
            let fail = |what: &str, error: String| {
                Failed::from(format!("{cached:?} at {position}, {what}, {how}: {error}"))
            };
            let lse = lse_of(&download(client, output.lse, F32)?);
            compare(&lse, &forward.lse, &bounds.lse).map_err(|e| fail("lse", e.to_string()))?;
            let out = download(client, output.out, storage)?;
            compare(&out, &forward.o, &bounds.o).map_err(|e| fail("out", e.to_string()))?;
            Ok(())
        };
        let memory = cached.upload(client, &inputs, case.seq_kv, storage);
        let tensors = memory.tensors();
        let at = integers(client, &[*position as u32]);
        check("placed", attention_decode(client, &problem, &tensors, &at)?)?;
        // The host knows the length, too: keys behind the last are beyond the tensor's end.
        let known = AttentionProblem { seq_kv: case.seq_kv, ..problem };
        for AttentionBlueprint { family, .. } in decode_variants::plans(client, &problem) {
            let plan = cached.plan_by(family);
            let output = attention_decode_with(client, &problem, &plan, &tensors, &at)?;
            check(&format!("placed, by {plan}"), output)?;
            let output = attention_forward_with(client, &known, &plan, &tensors)?;
            check(&format!("of a known length, by {plan}"), output)?;
        }
    }
    Ok(())
}

const SMALL: Cached = CASES[0];

/// Each sequence of a batch, against the reference of it alone.
fn own_positions(client: &Client) -> Result<(), Failed> {
    const POSITIONS: [usize; 2] = [7, 203];
    let alone = Cached { sizes: [1, 8, 2, 64], ..SMALL };
    let cases = POSITIONS.map(|position| alone.case(position));
    let inputs = cases.map(|case| AttentionInputs::generate(&case, 3, F32));
    let both = |one: fn(&AttentionInputs) -> &[f64]| {
        let padded = |i: usize| alone.padded(one(&inputs[i]), cases[i].seq_kv);
        upload(client, &[padded(0), padded(1)].concat(), F32)
    };
    let memory = Memory {
        q: upload(client, &[&inputs[0].q[..], &inputs[1].q].concat(), F32),
        k: both(|inputs| &inputs.k),
        v: both(|inputs| &inputs.v),
    };
    let at = integers(client, &POSITIONS.map(|position| position as u32));
    let output =
        attention_decode_with(client, &SMALL.problem(F32), &SMALL.plan(), &memory.tensors(), &at)?;
    let out = download(client, output.out, F32)?;
    for ((inputs, case), out) in inputs.iter().zip(cases).zip(out.chunks_exact(out.len() / 2)) {
        let attention = inputs.attention(case);
        let forward = attention.forward();
        let bounds = attention.forward_bounds(&forward, &precision(client, F32));
        compare(out, &forward.o, &bounds.o)?;
    }
    Ok(())
}

/// What the host's plans are for a short and for a long query, with heads side by side as a linear layer has them.
fn planned(client: &Client) -> Result<(), Failed> {
    use blackburn_kernels::Pass::{Backward, Forward};
    let plan = |problem: &AttentionProblem, pass| AttentionBlueprint::plan(problem, pass, client);
    let few = SMALL.problem(F32);
    assert!(plan(&few, Forward)?.split && !plan(&few, Backward)?.split);
    let long = AttentionProblem::dense([1, 2, 64, 64], 300, dtype(F32));
    assert!(!plan(&long, Forward)?.split);
    let mask = AttentionProblem { mask: Some(Pairs::default()), ..few };
    let dropout = AttentionProblem { dropout: Some(Dropout { rate: 0.5, seed: 1 }), ..few };
    assert!(!plan(&mask, Forward)?.split && !plan(&dropout, Forward)?.split);

    let case = SMALL.case(200);
    let inputs = AttentionInputs::generate(&case, 4, F32);
    let uploaded = Uploaded::new(client, &inputs, F32);
    let forward = inputs.attention(case).forward();
    let bounds = inputs.attention(case).forward_bounds(&forward, &precision(client, F32));
    let output = attention_forward(client, &problem(&case, F32), &uploaded.tensors())?;
    compare(&download(client, output.out, F32)?, &forward.o, &bounds.o)?;
    Ok(())
}

fn repeats(client: &Client) -> Result<(), Failed> {
    let case = SMALL.case(250);
    let inputs = AttentionInputs::generate(&case, 5, F32);
    let memory = SMALL.upload(client, &inputs, case.seq_kv, F32);
    let at = integers(client, &[250]);
    let all = || -> Result<_, Failed> {
        let problem = SMALL.problem(F32);
        let output =
            attention_decode_with(client, &problem, &SMALL.plan(), &memory.tensors(), &at)?;
        Ok([download(client, output.out, F32)?, download(client, output.lse, F32)?])
    };
    let first = all()?;
    for _ in 0..3 {
        if all()? != first {
            return Err("the same input gave other bits".into());
        }
    }
    Ok(())
}

/// Before the first key there is nothing to see. Behind the last there is no memory, and queries see all there is.
fn outside(client: &Client) -> Result<(), Failed> {
    let case = SMALL.case(SMALL.capacity - 1);
    let inputs = AttentionInputs::generate(&case, 6, F32);
    let forward = inputs.attention(case).forward();
    let bounds = inputs.attention(case).forward_bounds(&forward, &precision(client, F32));
    let memory = SMALL.upload(client, &inputs, case.seq_kv, F32);
    let out = |position: u32| -> Result<Vec<f64>, Failed> {
        let (problem, at) = (SMALL.problem(F32), integers(client, &[position]));
        let output =
            attention_decode_with(client, &problem, &SMALL.plan(), &memory.tensors(), &at)?;
        Ok(download(client, output.out, F32)?)
    };
    for behind in [SMALL.capacity as u32, 1 << 20, i32::MAX as u32] {
        compare(&out(behind)?, &forward.o, &bounds.o)?;
    }
    for before in [-1i32, -2, i32::MIN] {
        if out(before as u32)?.iter().any(|value| *value != 0.0) {
            return Err(format!("something was seen from {before}").into());
        }
    }
    Ok(())
}

/// A NaN in the last key reaches the last query alone.
fn nan(client: &Client) -> Result<(), Failed> {
    let cached = CASES[1];
    let case = cached.case(126);
    let mut inputs = AttentionInputs::generate(&case, 7, F32);
    inputs.k[(case.seq_kv - 1) * case.head_dim] = f64::NAN;
    let memory = cached.upload(client, &inputs, case.seq_kv, F32);
    let at = integers(client, &[126]);
    let problem = cached.problem(F32);
    let output = attention_decode_with(client, &problem, &cached.plan(), &memory.tensors(), &at)?;
    let out = download(client, output.out, F32)?;
    for (at, row) in out.chunks_exact(case.head_dim).enumerate() {
        let sees = at == case.seq_q - 1;
        if row.iter().any(|value| value.is_nan() != sees) {
            return Err(format!("query {at} of all: {row:?}").into());
        }
    }
    Ok(())
}

/// The negative control: what is computed of another problem must not pass for this one.
fn faults(client: &Client) -> Result<(), Failed> {
    let case = SMALL.case(250);
    let inputs = AttentionInputs::generate(&case, 8, F32);
    let forward = inputs.attention(case).forward();
    let bounds = inputs.attention(case).forward_bounds(&forward, &precision(client, F32));
    // Another key behind the last, which a fault may see.
    let (longer, right) = (SMALL.case(251), SMALL.problem(F32));
    let mut more = AttentionInputs::generate(&longer, 9, F32);
    more.q.clone_from(&inputs.q);
    for (more, given) in [(&mut more.k, &inputs.k), (&mut more.v, &inputs.v)] {
        let heads = given.chunks_exact(case.seq_kv * case.head_dim);
        for (more, given) in more.chunks_exact_mut(longer.seq_kv * case.head_dim).zip(heads) {
            more[..given.len()].copy_from_slice(given);
        }
    }
    let memory = SMALL.upload(client, &more, longer.seq_kv, F32);
    for (fault, position, problem) in [
        ("", 250, right),
        ("a key too many", 251, right),
        ("a last key that is skipped", 249, right),
        (
            "a scale off by a thousandth",
            250,
            AttentionProblem { scale: right.scale * 1.001, ..right },
        ),
    ] {
        let at = integers(client, &[position]);
        let output =
            attention_decode_with(client, &problem, &SMALL.plan(), &memory.tensors(), &at)?;
        let passes = compare(&download(client, output.out, F32)?, &forward.o, &bounds.o).is_ok();
        if passes != fault.is_empty() {
            return Err(format!("{fault}: told right: {passes}").into());
        }
    }
    Ok(())
}

fn bad_arguments(client: &Client) -> Result<(), Failed> {
    let inputs = AttentionInputs::generate(&SMALL.case(299), 10, F32);
    let memory = SMALL.upload(client, &inputs, 300, F32);
    let (right, tensors) = (SMALL.problem(F32), memory.tensors());
    let (one, three) = (integers(client, &[0]), integers(client, &[0; 3]));
    let float = upload(client, &[0.0], F32);
    let apart = HeadStrides { row: 65, ..Order::HeadsFirst.strides(2, 300, 64) };
    for (argument, problem, tensors, position) in [
        ("position", right, tensors, &three),
        ("position", right, tensors, &float),
        ("seq_kv", AttentionProblem { seq_kv: 0, ..right }, tensors, &one),
        ("seq_q", AttentionProblem { seq_q: 0, ..right }, tensors, &one),
        ("k", AttentionProblem { k: apart, ..right }, tensors, &one),
        ("v", right, Tensors { v: &float, ..tensors }, &one),
    ] {
        match attention_decode(client, &problem, &tensors, position) {
            Err(KernelError::InvalidProblem { argument: named, .. }) if named == argument => {}
            other => return Err(format!("{argument}: {other:?}").into()),
        }
    }
    let masked = AttentionProblem { mask: Some(Pairs::default()), ..right };
    match attention_decode(client, &masked, &tensors, &one) {
        Err(KernelError::Unsupported { .. }) => Ok(()),
        other => Err(format!("a mask: {other:?}").into()),
    }
}

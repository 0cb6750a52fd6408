//! `bench run`.

use crate::sandbox::{Sandbox, row};

const RUN: &str = "run --python ./python";

/// Both sides of `conv` and of `ops`, sound.
fn packed() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.program("conv_sweep", &row("conv2d", "blackburn", "1.0"));
    sandbox.program("peers/torch_conv.py", &row("conv2d", "torch", "2.0"));
    // Lists its cases where it is asked to.
    let ops = format!(
        "case \"$*\" in *--list*) echo cases of ours;; *) echo ops_sweep >> order; printf '%b' '{}';; esac",
        row("sum", "blackburn", "3.0")
    );
    sandbox.script("ops_sweep", &ops);
    let peer = format!(
        "cat $1 > given; echo torch_ops.py >> order; printf '%b' '{}'",
        row("sum", "torch", "4.0")
    );
    sandbox.script("peers/torch_ops.py", &peer);
    sandbox
}

#[test]
fn both_sides_run_in_turns_and_leave_rows_with_their_origin() {
    let sandbox = packed();
    let outcome = sandbox.bench(&format!("{RUN} ops conv --rounds 2 --dtypes bf16"));
    assert_eq!(outcome.code, 0, "{}", outcome.told);
    let order = sandbox.read("order");
    let conv = "conv_sweep\npeers/torch_conv.py\n".repeat(2);
    assert_eq!(order, conv + &"ops_sweep\ntorch_ops.py\n".repeat(2));
    assert_eq!(sandbox.read("given"), "cases of ours\n");
    let rows = sandbox.rows();
    assert_eq!(rows.len(), 4, "{rows:?}");
    let (date, rest) = rows[0].split_once('|').unwrap();
    assert!(date.len() == 10 && date.starts_with("20"), "{date}");
    assert_eq!(
        rest,
        "abc1234|conv2d|forward|bf16|8x8|blackburn|1.0|1.0|1.0|10|GB/s|stub; median of 2 rounds in turns; driver 580.1, \
         NVIDIA H100 80GB HBM3"
    );
    let subjects: Vec<_> = rows.iter().map(|row| row.split('|').nth(6).unwrap()).collect();
    assert_eq!(subjects, ["blackburn", "torch", "blackburn", "torch"]);
    assert!(outcome.told.contains("4 rows with times in bench-run/rows.tsv"), "{}", outcome.told);
}

#[test]
fn the_median_of_the_rounds_counts() {
    let sandbox = packed();
    let lines =
        ["3.0", "1.0", "2.0"].map(|time| row("conv2d", "blackburn", time).replace("\\n", ""));
    sandbox.write("times", &(lines.join("\n").replace("\\t", "\t") + "\n"));
    sandbox.script("conv_sweep", "head -1 times; sed -i 1d times");
    let outcome = sandbox.bench(&format!("{RUN} conv"));
    assert_eq!(outcome.code, 0, "{}", outcome.told);
    let rows = sandbox.rows();
    assert!(rows[0].contains("|blackburn|2.0|1.0|3.0|10|"), "{rows:?}");
    assert!(rows[0].contains("median of 3 rounds"), "{rows:?}");
}

#[test]
fn a_crash_keeps_the_rows_before_it_and_the_others_go_on() {
    let sandbox = packed();
    let crash = format!(
        "printf '%b' '{}'; echo out of memory >&2; kill -SEGV $$",
        row("conv2d", "blackburn", "1.0")
    );
    sandbox.script("conv_sweep", &crash);
    let outcome = sandbox.bench(&format!("{RUN} conv ops --rounds 2 --dtypes bf16"));
    assert_eq!(outcome.code, 1, "{}", outcome.told);
    let rows = sandbox.rows();
    assert_eq!(rows[0], "# conv bf16, blackburn, round 1 of 2: failed: signal 11: out of memory");
    assert!(rows[1].contains("|conv2d|forward|bf16|8x8|blackburn|1.0|"), "{rows:?}");
    assert!(rows.iter().any(|row| row.contains("|sum|") && row.contains("|torch|")), "{rows:?}");
    let told = "failed: conv bf16, blackburn, round 1 of 2: signal 11: out of memory";
    assert!(outcome.told.contains(told), "{}", outcome.told);
    // It is not begun again, and its peer ran once beside it.
    let order = sandbox.read("order");
    assert!(order.starts_with("peers/torch_conv.py\nops_sweep\n"), "{order}");
}

#[test]
fn a_program_that_hangs_is_ended_and_keeps_its_rows() {
    let sandbox = packed();
    let hang = format!("printf '%b' '{}'; sleep 300", row("conv2d", "torch", "2.0"));
    sandbox.script("peers/torch_conv.py", &hang);
    let outcome = sandbox.bench(&format!("{RUN} conv ops --dtypes bf16 --rounds 1 --limit-s 15"));
    assert_eq!(outcome.code, 1, "{}", outcome.told);
    let rows = sandbox.rows();
    assert_eq!(rows[0], "# conv bf16, peer, round 1 of 1: failed: it had not ended after 15 s");
    let subjects = rows[1..].iter().map(|row| row.split('|').nth(6).unwrap());
    assert_eq!(subjects.collect::<Vec<_>>(), ["blackburn", "torch", "blackburn", "torch"]);
}

#[test]
fn a_program_that_cannot_start_leaves_the_others_and_untimed_rows_are_counted() {
    let sandbox = packed();
    std::fs::remove_file(sandbox.path().join("conv_sweep")).unwrap();
    sandbox.write("conv_sweep", "not executable");
    let rows = row("sum", "blackburn", "3.0") + &row("mean", "blackburn", "-");
    sandbox.program("ops_sweep", &rows);
    let outcome = sandbox.bench(&format!("{RUN} conv ops --rounds 1 --dtypes bf16"));
    assert_eq!(outcome.code, 1, "{}", outcome.told);
    assert!(outcome.told.contains("conv_sweep` does not start: Permission denied"));
    assert!(outcome.told.contains("2 rows with times in"), "{}", outcome.told);
    assert!(outcome.told.contains("1 rows without: their notes say why"), "{}", outcome.told);
}

#[test]
fn a_program_that_measures_nothing_has_failed() {
    let sandbox = packed();
    sandbox.script("conv_sweep", "echo 'skipped: no CUDA device' >&2");
    let outcome = sandbox.bench(&format!("{RUN} conv"));
    assert_eq!(outcome.code, 1, "{}", outcome.told);
    assert!(
        outcome.told.contains("it measured nothing: skipped: no CUDA device"),
        "{}",
        outcome.told
    );
    assert!(
        outcome.told.contains("left out: conv bf16, the peer: ours has no times"),
        "{}",
        outcome.told
    );
    assert!(!sandbox.read("order").contains("torch_conv"), "{}", sandbox.read("order"));
}

#[test]
fn what_is_missing_is_told_in_a_line_each_and_the_rest_is_measured() {
    let sandbox = packed();
    std::fs::remove_file(sandbox.path().join("peers/torch_conv.py")).unwrap();
    let outcome = sandbox.bench(&format!("{RUN} matmul conv ops --rounds 1 --dtypes bf16"));
    assert_eq!(outcome.code, 3, "{}", outcome.told);
    for line in
        ["left out: matmul bf16: there is no ", "left out: conv bf16, the peer: there is no "]
    {
        let count = outcome.told.lines().filter(|told| told.starts_with(line)).count();
        // As it happens, and at the end.
        assert_eq!(count, 2, "{line} in {}", outcome.told);
        let comment = format!("# {line}");
        assert!(sandbox.rows().iter().any(|row| row.starts_with(&comment)), "{:?}", sandbox.rows());
    }
    assert!(sandbox.rows().iter().any(|row| row.contains("|conv2d|")), "{:?}", sandbox.rows());
}

#[test]
fn a_python_without_pytorch_is_told_once_and_ours_is_measured() {
    let sandbox = packed();
    sandbox.script("python", "echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1");
    let outcome = sandbox.bench(&format!("{RUN} conv ops --rounds 1 --dtypes bf16"));
    assert_eq!(outcome.code, 3, "{}", outcome.told);
    let line = "left out: all peers: `./python` has no PyTorch (ModuleNotFoundError: No module named 'torch'); --python";
    assert!(outcome.told.contains(line), "{}", outcome.told);
    assert_eq!(sandbox.read("order"), "conv_sweep\nops_sweep\n");
}

// Long enough that a busy machine starts both sides once.
#[test]
fn a_budget_measures_what_matters_most_and_both_sides_as_often() {
    let sandbox = packed();
    let slow = format!(
        "echo conv_sweep >> order; sleep 4; printf '%b' '{}'",
        row("conv2d", "blackburn", "1.0")
    );
    sandbox.script("conv_sweep", &slow);
    let outcome = sandbox.bench(&format!("{RUN} ops conv --dtypes bf16 --rounds 9 --budget-s 15"));
    assert_eq!(outcome.code, 3, "{}", outcome.told);
    let order = sandbox.read("order");
    assert!(order.starts_with("conv_sweep\npeers/torch_conv.py\n"), "{order}");
    let counted = |name| order.matches(name).count();
    assert!((1..=3).contains(&counted("conv_sweep")), "{order}");
    assert_eq!(counted("conv_sweep"), counted("torch_conv"), "{order}");
    let rows = sandbox.rows();
    assert!(rows.iter().any(|row| row.contains("|blackburn|1.0|")), "{rows:?}");
    let left_out = rows.iter().filter(|row| row.starts_with("# left out: conv bf16, rounds "));
    assert_eq!(left_out.count(), 1, "{rows:?}");
}

#[test]
fn a_program_that_the_budget_ends_was_left_out_and_did_not_fail() {
    let sandbox = packed();
    sandbox.script(
        "conv_sweep",
        &format!("printf '%b' '{}'; sleep 300", row("conv2d", "blackburn", "1.0")),
    );
    let outcome = sandbox.bench(&format!("{RUN} conv ops --dtypes bf16 --budget-s 15"));
    assert_eq!(outcome.code, 3, "{}", outcome.told);
    let rows = sandbox.rows();
    let ended = "# conv bf16, blackburn, round 1 of 3: failed: the budget ended it after ";
    assert!(rows[0].starts_with(ended), "{rows:?}");
    assert!(rows.iter().any(|row| row.contains("|conv2d|")), "{rows:?}");
    assert!(rows.contains(&"# left out: ops bf16: the budget is spent".into()), "{rows:?}");
}

#[test]
fn folders_of_criterion_and_of_gpt_are_read_and_removed() {
    let sandbox = Sandbox::new();
    let criterion = r#"mkdir -p $CRITERION_HOME/rotary_F32_8x8/forward/new; cd $CRITERION_HOME/rotary_F32_8x8/forward/new
        echo '{"group_id":"rotary/F32/8x8","function_id":"forward","value_str":null,"throughput":{"Bytes":2000}}' > benchmark.json
        echo '{"median":{"point_estimate":1000.0,"confidence_interval":{"lower_bound":900.0,"upper_bound":1100.0}}}' > estimates.json"#;
    sandbox.script("bench-rotary", criterion);
    let outcome = sandbox.bench(&format!("{RUN} rotary --rounds 1"));
    assert_eq!(outcome.code, 0, "{}", outcome.told);
    assert!(
        sandbox.rows()[0]
            .contains("|rotary|forward|f32|8x8|blackburn|0.0010|0.0009|0.0011|2|GB/s|by criterion")
    );
    let left: Vec<_> = std::fs::read_dir(sandbox.path().join("bench-run/logs")).unwrap().collect();
    assert_eq!(left.len(), 2, "only what was printed: {left:?}");

    let sandbox = Sandbox::new();
    sandbox.write("text", "words");
    let gpt = r#"for last; do :; done; cat > $last/metrics.jsonl <<E
{"kind":"run","settings":{"preset":"gpt2","precision":"bf16","masters":"f32","batch":8,"accumulate":1,"model":{"context":1024}},"parameters":1e6,"attention":"flash"}
{"kind":"train","step":30,"tokens_per_second":8192.0,"seconds":1.0}
E"#;
    sandbox.script("gpt", gpt);
    let outcome = sandbox.bench(&format!("{RUN} models --quick"));
    assert!(
        sandbox
            .rows()
            .iter()
            .any(|row| row.contains("|gpt2|step|bf16|B8T1024|blackburn|1000.000|"))
    );
    assert!(sandbox.path().join("bench-run/logs/gpt2-bf16-x8-blackburn-1.metrics.jsonl").is_file());
    assert!(outcome.told.contains("left out: resnet50 bf16 x64: there is no "), "{}", outcome.told);
}

#[test]
fn without_a_gpu_it_says_skipped_and_without_a_commit_what_to_do() {
    let sandbox = packed();
    let outcome = sandbox.bench_in("run conv", "/nowhere");
    assert_eq!(outcome.code, 3, "{}", outcome.told);
    assert!(outcome.told.starts_with("skipped: `nvidia-smi` does not start"), "{}", outcome.told);
    sandbox.script("path/nvidia-smi", "echo 'No devices were found'; exit 6");
    let outcome = sandbox.bench("run conv");
    assert!(outcome.told.contains("finds no GPU: No devices were found"), "{}", outcome.told);
    sandbox.script("path/nvidia-smi", "echo 'NVIDIA H100 80GB HBM3, 580.1'");
    std::fs::remove_file(sandbox.path().join("commit")).unwrap();
    let outcome = sandbox.bench("run conv");
    assert_eq!(outcome.code, 2, "{}", outcome.told);
    assert!(
        outcome.told.contains("commit should say of which commit the programs are"),
        "{}",
        outcome.told
    );
}

#[test]
fn rows_of_another_run_are_not_mixed_with() {
    let sandbox = packed();
    assert_eq!(sandbox.bench(&format!("{RUN} conv --rounds 1")).code, 0);
    let outcome = sandbox.bench(&format!("{RUN} conv --rounds 1"));
    assert_eq!(outcome.code, 2, "{}", outcome.told);
    assert!(outcome.told.contains("holds the rows of another run"), "{}", outcome.told);
}

#[test]
fn the_plan_is_listed_and_unknown_words_are_refused() {
    let sandbox = Sandbox::new();
    let outcome = sandbox.bench("run --list ops attention --quick");
    assert_eq!(outcome.code, 0, "{}", outcome.told);
    let names: Vec<_> = outcome.told.lines().map(|line| line.split('\t').next().unwrap()).collect();
    assert_eq!(names, ["attention bf16", "ops bf16"]);
    let outcome = sandbox.bench("run gelu2");
    assert_eq!(outcome.code, 2, "{}", outcome.told);
    assert!(outcome.told.contains("expected a group (models, matmul, "), "{}", outcome.told);
}

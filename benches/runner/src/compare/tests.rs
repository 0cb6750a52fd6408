use super::*;
use crate::row::tests::row;

const THRESHOLDS: Thresholds = Thresholds { warn: 10.0, fail: 25.0 };

fn sum(subject: &str, median: &str, note: &str) -> Row {
    row(["sum", "forward", "bf16", "8x8", subject, median, "-", "GB/s", note])
}

/// The only comparison of some rows.
fn only(run: &[Row], stored: &[Row]) -> Comparison {
    let mut compared = compare(run, stored, THRESHOLDS).unwrap();
    assert_eq!(compared.len(), 1, "{compared:?}");
    compared.remove(0)
}

fn verdict(run: &[Row], stored: &[Row]) -> Verdict {
    only(run, stored).verdict
}

#[test]
fn ten_percent_warn_and_twenty_five_fail() {
    let stored = [sum("blackburn", "1.0", "")];
    for (now, expected) in [
        ("0.9", Verdict::Faster),
        ("0.91", Verdict::Same),
        ("1.099", Verdict::Same),
        ("1.101", Verdict::Warning),
        ("1.249", Verdict::Warning),
        ("1.25", Verdict::Failure),
        ("9.0", Verdict::Failure),
    ] {
        assert_eq!(verdict(&[sum("blackburn", now, "")], &stored), expected, "{now}");
    }
}

#[test]
fn a_peer_that_slowed_likewise_is_told_and_no_failure() {
    let stored = [sum("blackburn", "1.0", ""), sum("torch", "2.0", "2.11.0+cu130")];
    let run = |ours, peer| [sum("blackburn", ours, ""), sum("torch", peer, "2.11.0+cu130 eager")];
    let slow = only(&run("1.5", "2.9"), &stored);
    assert_eq!(slow.verdict, Verdict::Host);
    assert_eq!(slow.remark, "torch slowed by 45 % too: host or clocks");
    // Slower than the peer has become by that.
    assert_eq!(verdict(&run("1.5", "2.6"), &stored), Verdict::Warning);
    assert_eq!(verdict(&run("1.5", "2.0"), &stored), Verdict::Failure);
    // A peer that slowed makes nothing faster.
    assert_eq!(verdict(&run("1.0", "4.0"), &stored), Verdict::Same);
    assert_eq!(verdict(&run("0.7", "2.0"), &stored), Verdict::Faster);
    // As it was, where the peer is faster: a warning at most.
    let fast = only(&run("1.0", "1.0"), &stored);
    assert_eq!(fast.verdict, Verdict::Warning);
    assert_eq!(fast.remark, "torch is faster by 50 %, and this is not");
}

#[test]
fn a_peer_of_another_version_says_nothing_about_the_machine() {
    let run =
        [sum("blackburn", "1.5", ""), sum("torch", "3.0", "1.5 times a copy; 2.12.0+cu130 eager")];
    let stored = |note| [sum("blackburn", "1.0", ""), sum("torch", "2.0", note)];
    assert_eq!(verdict(&run, &stored("2.11; same call")), Verdict::Failure);
    assert_eq!(verdict(&run, &stored("2.1; same call")), Verdict::Failure);
    assert_eq!(verdict(&run, &stored("2.12; same call")), Verdict::Host);
    assert_eq!(verdict(&run, &stored("same call")), Verdict::Host);
}

#[test]
fn versions_are_told_from_measurements() {
    for (note, expected) in [
        ("2.11.0+cu130; AMP, f32 masters", Some("2.11")),
        (
            "1.23 times a copy of its bytes, which makes 2905 GB/s; 2.11.0+cu130 eager; driver 580",
            Some("2.11"),
        ),
        ("2.11, cuDNN; driver 580.159.04", Some("2.11")),
        ("square; NT; driver 580.159.04, torch 2.11.0+cu130", Some("2.11")),
        ("peak 3.05 GiB; driver 580.159.04, NVIDIA H100", None),
        ("", None),
    ] {
        assert_eq!(version(note).as_deref(), expected, "{note}");
    }
}

#[test]
fn what_is_not_measured_any_more_fails_and_what_never_was_is_silent() {
    let failed = sum("blackburn", "-", "failed: no plan");
    let lost = only(std::slice::from_ref(&failed), &[sum("blackburn", "1.0", "")]);
    assert_eq!(lost.verdict, Verdict::Failure);
    assert_eq!(lost.remark, "it was measured before: failed: no plan");
    let other = sum("blackburn", "1.0", "");
    let other = Row { op: "mean".into(), ..other };
    assert_eq!(verdict(&[failed.clone(), other.clone()], &[failed]), Verdict::New);
    assert_eq!(verdict(&[other], &[]), Verdict::New);
    assert!(compare(&[sum("torch", "1.0", "")], &[], THRESHOLDS).is_err());
}

#[test]
fn the_time_of_the_host_is_a_warning_at_most() {
    let run = [sum("blackburn", "2.0", "ops_sweep; the host's time; driver 1")];
    assert_eq!(verdict(&run, &[sum("blackburn", "1.0", "")]), Verdict::Warning);
}

#[test]
fn a_pass_alone_and_a_padded_model_have_their_peers() {
    let attention = |pass, subject, median| {
        row(["attention", pass, "bf16", "Q1", subject, median, "-", "-", ""])
    };
    let both = |ours, peer| {
        [attention("backward", "blackburn", ours), attention("forward_backward", "torch", peer)]
    };
    assert_eq!(verdict(&both("1.4", "2.7"), &both("1.0", "2.0")), Verdict::Host);
    let model = |shape, subject, median| {
        row(["gpt2", "step", "bf16", shape, subject, median, "-", "-", ""])
    };
    let both = |ours, peer| {
        [
            model("B8T1024", "blackburn", ours),
            model("B8T1024 padded vocabulary", "torch-compile", peer),
        ]
    };
    assert_eq!(verdict(&both("1.4", "2.7"), &both("1.0", "2.0")), Verdict::Host);
    // Another batch is another model.
    let other =
        |ours, peer| [model("B8T1024", "blackburn", ours), model("B64T1024", "torch", peer)];
    assert_eq!(verdict(&other("1.4", "2.7"), &other("1.0", "2.0")), Verdict::Failure);
}

#[test]
fn rates_are_compared_where_a_time_is_missing() {
    let rate = |median, rate, unit| {
        row(["llama", "step", "fp8", "B8", "blackburn", median, rate, unit, ""])
    };
    let run = [rate("200.0", "70000", "tokens/s")];
    let compared = only(&run, &[rate("-", "100000", "tokens/s")]);
    assert_eq!(compared.verdict, Verdict::Failure);
    assert!((compared.slower.unwrap() - 42.857).abs() < 0.001, "{compared:?}");
    assert_eq!(verdict(&run, &[rate("-", "100000", "images/s")]), Verdict::New);
}

#[test]
fn products_are_compared_with_their_own_layout() {
    let product = |layout: &str, median| {
        row(["matmul", "forward", "bf16", "8x8x8", "blackburn", median, "-", "-", layout])
    };
    let stored = [product("a; NN", "1.0"), product("a; NT", "2.0")];
    assert_eq!(verdict(&[product("b; NT", "2.0")], &stored), Verdict::Same);
}

#[test]
fn the_table_has_the_worst_first_and_counts_what_is_as_before() {
    let of = |op: &str, median| Row { op: op.into(), ..sum("blackburn", median, "") };
    let stored = [of("a", "1.0"), of("b", "1.0"), of("c", "1.0"), of("d", "1.0")];
    let run = [of("a", "1.0"), of("b", "1.2"), of("c", "1.5"), of("d", "2.0")];
    let text = table(&compare(&run, &stored, THRESHOLDS).unwrap(), THRESHOLDS);
    let lines: Vec<_> = text.lines().collect();
    assert!(lines[1].starts_with("FAILURE") && lines[1].contains("d forward bf16 8x8"), "{text}");
    assert!(lines[2].starts_with("FAILURE") && lines[3].starts_with("warning"), "{text}");
    assert!(lines[3].contains("+20.0") && lines[3].contains("stored at abc1234"), "{text}");
    assert!(!text.contains("a forward"), "{text}");
    let expected = "4 rows: 2 slower by 25 % or more, 1 by 10 %, 0 with their peer, 1 as before";
    assert!(lines[5].starts_with(expected), "{text}");
}

//! `bench compare` and `bench draw`, and both behind `bench run`.

use crate::sandbox::{Sandbox, row};

const HEADER: &str = "date\tcommit\top\tpass\tdtype\tshape\tsubject\tmedian_ms\tmin_ms\tmax_ms\tmetric\tunit\tnote\n";

/// A stored or measured product on an H100.
fn product(subject: &str, median: f64) -> String {
    let rate = 2.0 * 4096f64.powi(3) / median / 1e9;
    format!(
        "2026-01-01\tabc\tmatmul\tforward\tbf16\t4096x4096x4096\t{subject}\t{median}\t{median}\t{median}\t{rate:.1}\t\
         TFLOP/s\tsquare; NN; driver 1, NVIDIA H100 80GB HBM3\n"
    )
}

fn compared(now: f64, peer: f64) -> Sandbox {
    let sandbox = Sandbox::new();
    let stored = product("blackburn", 0.2) + &product("torch", 0.3);
    sandbox.write("results/nvidia-h100.tsv", &(HEADER.to_owned() + &stored));
    sandbox.write("results/nvidia-h200.tsv", HEADER);
    let run = product("blackburn", now) + &product("torch", peer);
    sandbox.write("rows.tsv", &run);
    sandbox
}

#[test]
fn a_slower_row_fails_by_the_table_of_its_device() {
    let outcome = compared(0.3, 0.3).bench("compare rows.tsv");
    assert_eq!(outcome.code, 1, "{}", outcome.told);
    assert!(outcome.told.contains("FAILURE"), "{}", outcome.told);
    assert!(outcome.told.contains("results/nvidia-h100.tsv"), "{}", outcome.told);
    assert_eq!(compared(0.23, 0.3).bench("compare rows.tsv").code, 0);
    assert!(compared(0.23, 0.3).bench("compare rows.tsv").told.contains("warning"));
    assert_eq!(compared(0.23, 0.3).bench("compare rows.tsv --fail 15").code, 1);
    let slow = compared(0.3, 0.45).bench("compare rows.tsv");
    assert_eq!(slow.code, 0, "{}", slow.told);
    assert!(slow.told.contains("torch slowed by 50 % too: host or clocks"), "{}", slow.told);
}

#[test]
fn json_has_every_row_and_nothing_compared_is_no_agreement() {
    let sandbox = compared(0.3, 0.3);
    let outcome = sandbox.bench("compare rows.tsv --json");
    assert_eq!(outcome.code, 1, "{}", outcome.told);
    let json: serde_json::Value = serde_json::from_str(&outcome.told).unwrap();
    assert_eq!(json[0]["verdict"], "failure");
    assert!((json[0]["judged"].as_f64().unwrap() - 50.0).abs() < 1e-9, "{json}");
    let outcome = sandbox.bench("compare rows.tsv --against results/nvidia-h200.tsv");
    assert_eq!(outcome.code, 3, "{}", outcome.told);
    let outcome = sandbox.bench("compare rows.tsv --warn 30 --fail 20");
    assert_eq!(outcome.code, 2, "{}", outcome.told);
    let outcome = sandbox.bench("compare nowhere.tsv");
    assert!(outcome.code == 2 && outcome.told.contains("read nowhere.tsv"), "{}", outcome.told);
    let named = sandbox.bench("compare rows.tsv --device L40S").told;
    assert!(named.contains("has no table of `L40S`, only nvidia-h100, nvidia-h200"), "{named}");
}

#[test]
fn rows_are_drawn_as_vectors_and_as_pixels() {
    let sandbox = compared(0.3, 0.3);
    for picture in ["bars", "roofline"] {
        let outcome =
            sandbox.bench(&format!("draw {picture} rows.tsv --to {picture} --title Products"));
        assert_eq!(outcome.code, 0, "{}", outcome.told);
        let svg = sandbox.read(&format!("{picture}.svg"));
        assert!(svg.contains("Products"), "{svg}");
        let png = std::fs::read(sandbox.path().join(format!("{picture}.png"))).unwrap();
        assert!(png.starts_with(b"\x89PNG") && png.len() > 1000, "{} bytes", png.len());
    }
    assert!(sandbox.read("bars.svg").contains("PyTorch"));
    assert!(sandbox.read("roofline.svg").contains("bf16: 989.5 TFLOP/s"));
    let outcome = sandbox.bench("draw bars rows.tsv --to x --rows conv2d");
    assert!(outcome.code == 2 && outcome.told.contains("no row of rows.tsv is `conv2d`"));
}

#[test]
fn a_run_compares_and_draws_what_it_measured() {
    let sandbox = Sandbox::new();
    sandbox.program("conv_sweep", &row("conv2d", "blackburn", "1.0"));
    sandbox.program("peers/torch_conv.py", &row("conv2d", "torch", "2.0"));
    let stored = row("conv2d", "blackburn", "0.5").replace("\\t", "\t").replace("\\n", "\n");
    sandbox.write("results/nvidia-h100.tsv", &(HEADER.to_owned() + &stored));
    let outcome = sandbox.bench("run conv --python ./python --rounds 1 --compare --draw");
    assert_eq!(outcome.code, 1, "{}", outcome.told);
    assert!(
        outcome.told.contains("FAILURE") && outcome.told.contains("+100.0"),
        "{}",
        outcome.told
    );
    assert!(sandbox.read("bench-run/bars.svg").contains("conv2d forward bf16 8x8"));
    assert!(outcome.told.contains("no roofline: none of 2 rows"), "{}", outcome.told);
}

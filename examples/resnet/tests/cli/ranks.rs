//! Runs of several processes.

use crate::sandbox::{Sandbox, fail_on_ranks};

#[test]
fn options_that_ranks_do_not_share_are_named() {
    let place = Sandbox::new();
    for (option, of_rank_0, of_rank_1) in [
        ("--seed", "42", "7"),
        ("--batch", "4", "8"),
        ("--label-smoothing", "0.1", "0"),
        ("--checkpoint-every", "2", "3"),
    ] {
        let ranks = [of_rank_0, of_rank_1].map(|value| place.train("run", &[option, value]));
        let expected = format!(
            "the ranks differ in {option}: rank 0 has {of_rank_0}, rank 1 has {of_rank_1}. Start all \
             ranks with the same options"
        );
        fail_on_ranks(ranks, &expected);
    }
    place.image("images/red/0.png", [255, 0, 0], 3);
    place.image("images/red/1.png", [255, 0, 0], 5);
    place.image("images/blue/0.png", [0, 0, 255], 3);
    place.image("images/blue/1.png", [0, 0, 255], 5);
    let ranks = ["0.2", "0.4"].map(|jitter| {
        place.train("run", &["--data", "images", "--validation-share", "0.5", "--jitter", jitter])
    });
    fail_on_ranks(ranks, "the ranks differ in --jitter: rank 0 has 0.2, rank 1 has 0.4");
    let ranks = [place.train("run", &[]), place.resume("run", &[])];
    fail_on_ranks(ranks, "the ranks differ in --resume: rank 0 has false, rank 1 has true");
}

//! The project's chores. `cargo xtask --help` lists them; each runs ordinary commands, prints them
//! before it runs them, and stops at the first that fails.

mod bench;
mod bench_pack;
mod book;
mod chart;
mod check;
mod command;
mod deny;
mod figures;
mod fuzz;
mod gpu;
mod host;
mod house_rules;
mod links;
mod mutate;
mod sass;
mod simulate;
mod stream;
mod test;
mod tools;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Blackburn's chores: check, test, fuzz, mutate, bench, figures, chart, book, gpu, sass, simulate, host, stream, deny.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    Check(check::Arguments),
    Test(test::Arguments),
    Fuzz(fuzz::Arguments),
    Bench(bench::Arguments),
    Book(book::Arguments),
    Chart(chart::Arguments),
    Figures(figures::Arguments),
    Gpu(gpu::Arguments),
    Sass(sass::Arguments),
    Simulate(simulate::Arguments),
    Host(host::Arguments),
    Stream(stream::Arguments),
    Mutate(mutate::Arguments),
    Deny(deny::Arguments),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().chore {
        Chore::Check(arguments) => check::run(&arguments),
        Chore::Test(arguments) => test::run(&arguments),
        Chore::Fuzz(arguments) => fuzz::run(&arguments),
        Chore::Bench(arguments) => bench::run(&arguments),
        Chore::Book(arguments) => book::run(&arguments),
        Chore::Chart(arguments) => chart::run(&arguments),
        Chore::Figures(arguments) => figures::run(&arguments),
        Chore::Gpu(arguments) => gpu::run(&arguments),
        Chore::Sass(arguments) => sass::run(&arguments),
        Chore::Simulate(arguments) => simulate::run(&arguments),
        Chore::Host(arguments) => host::run(&arguments),
        Chore::Stream(arguments) => stream::run(&arguments),
        Chore::Mutate(arguments) => mutate::run(&arguments),
        Chore::Deny(arguments) => deny::run(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

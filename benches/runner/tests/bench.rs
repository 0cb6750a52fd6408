//! The program with shell scripts in the place of programs and peers.

#[path = "bench/sandbox.rs"]
mod sandbox;

#[path = "bench/comparing.rs"]
mod comparing;
#[path = "bench/measuring.rs"]
mod measuring;

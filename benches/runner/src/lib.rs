//! Benchmarks that notice: runs the programs of `benches` beside their peers, writes rows of `benches/results`, compares
//! them with stored ones and draws them. The program `bench` needs neither Cargo nor git; `cargo xtask` shares the
//! reader of the tables and the pictures.

pub mod compare;
pub mod device;
pub mod drawing;
mod newest;
pub mod number;
pub mod outputs;
pub mod plan;
pub mod results;
pub mod row;
pub mod run;
pub mod work;

/// Peaks by data sheets. The file is of `blackburn-train`, which depends on Burn, and a light program must not.
#[path = "../../../crates/train/src/throughput/peak.rs"]
pub mod peak;

//! Tables of `benches/results`, and pictures of their rows.

pub mod drawing;
pub mod number;
pub mod results;
pub mod row;
pub mod work;

/// Peaks by data sheets. The file is of `blackburn-train`, which depends on Burn, and a light program must not.
#[path = "../../../crates/train/src/throughput/peak.rs"]
pub mod peak;

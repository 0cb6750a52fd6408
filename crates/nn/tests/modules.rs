//! The modules against those of `burn::nn`, on the CPU.

#[path = "modules/attention.rs"]
mod attention;
#[path = "modules/cache.rs"]
mod cache;
#[path = "modules/compare.rs"]
mod compare;
#[path = "modules/drop_ins.rs"]
mod drop_ins;
#[path = "modules/loss.rs"]
mod loss;
#[path = "modules/norm.rs"]
mod norm;
#[path = "modules/options.rs"]
mod options;
#[path = "modules/positions.rs"]
mod positions;
#[path = "modules/recurrent.rs"]
mod recurrent;
#[path = "modules/transformer.rs"]
mod transformer;

//! Points on three arms of a spiral, generated.

use std::f32::consts::TAU;
use std::sync::Arc;

use burn::{
    data::{
        dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher},
        dataset::InMemDataset,
    },
    tensor::{Device, Int, Tensor, TensorData},
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Arms of the spiral: the classes.
pub(crate) const ARMS: usize = 3;
/// Samples of a micro-batch.
const BATCH: usize = 64;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Point {
    place: [f32; 2],
    arm: i64,
}

/// A micro-batch: places `[n, 2]` and arms `[n]`.
#[derive(Clone, Debug)]
pub(crate) struct Points {
    pub(crate) places: Tensor<2>,
    pub(crate) arms: Tensor<1, Int>,
}

struct PointBatcher;

impl Batcher<Point, Points> for PointBatcher {
    fn batch(&self, points: Vec<Point>, device: &Device) -> Points {
        let places: Vec<f32> = points.iter().flat_map(|point| point.place).collect();
        let arms: Vec<i64> = points.iter().map(|point| point.arm).collect();
        Points {
            places: Tensor::from_data(TensorData::new(places, [points.len(), 2]), device),
            arms: Tensor::from_data(TensorData::new(arms, [points.len()]), device),
        }
    }
}

/// `count` points by `seed`; shuffled anew in each epoch, if so asked.
pub(crate) fn points(
    count: usize,
    seed: u64,
    shuffled: bool,
    device: &Device,
) -> Arc<dyn DataLoader<Points>> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let point = |i: usize| {
        let arm = i % ARMS;
        let radius: f32 = random.random_range(0.1..1.0);
        let noise: f32 = random.random_range(-0.25..0.25);
        // Each arm makes three quarters of a turn.
        let angle = TAU * (arm as f32 / ARMS as f32 + 0.75 * radius) + noise;
        Point { place: [radius * angle.cos(), radius * angle.sin()], arm: arm as i64 }
    };
    let points: Vec<Point> = (0..count).map(point).collect();
    let loader = DataLoaderBuilder::new(PointBatcher).batch_size(BATCH).set_device(device.clone());
    let loader = if shuffled { loader.shuffle(seed) } else { loader };
    loader.build(InMemDataset::new(points))
}

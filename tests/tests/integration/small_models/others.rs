//! Models of neither images nor sequences.

use super::{Batch, Small, trial};
use blackburn::train::precision::full_precision;
use burn::{
    module::{Module, Param},
    nn::{
        Embedding, EmbeddingConfig, Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig,
        PRelu, PReluConfig, loss::CrossEntropyLossConfig,
    },
    tensor::{
        Device, Int, Tensor,
        activation::{log_softmax, mish, relu, sigmoid, silu, softmax, softplus, tanh},
        s,
    },
};
use libtest_mimic::Trial;

pub(super) fn trials() -> Vec<Trial> {
    vec![
        trial::<Graph>(),
        trial::<Experts>(),
        trial::<Recommender>(),
        trial::<ActorCritic>(),
        trial::<Contrastive>(),
        trial::<Diffusion>(),
        trial::<Mixture>(),
        trial::<Quantiles>(),
        trial::<Factorization>(),
    ]
}

const ROWS: usize = 10;
const WIDTH: usize = 24;

fn linear(from: usize, to: usize, device: &Device) -> Linear {
    LinearConfig::new(from, to).init(device)
}

fn mean_square(made: Tensor<2>, wanted: Tensor<2>) -> Tensor<1> {
    (full_precision(made) - full_precision(wanted)).powi_scalar(2).mean()
}

/// Messages along edges, added up at their ends.
#[derive(Module, Debug)]
struct Graph {
    message: Linear,
    own: Linear,
    norm: LayerNorm,
    head: Linear,
}

const EDGES: usize = 30;

impl Small for Graph {
    const NAME: &'static str = "graph_network";
    const NUMBERS: usize = ROWS * WIDTH;
    const WHOLE: usize = 2 * EDGES;
    const BELOW: i64 = ROWS as i64;

    fn new(device: &Device) -> Self {
        Self {
            message: linear(2 * WIDTH, WIDTH, device),
            own: linear(WIDTH, WIDTH, device),
            norm: LayerNormConfig::new(WIDTH).init(device),
            head: linear(WIDTH, WIDTH, device),
        }
    }

    fn loss(&self, (numbers, whole): Batch) -> Tensor<1> {
        let nodes = numbers.reshape([ROWS, WIDTH]);
        let ends = whole.reshape([2, EDGES]);
        let end = |at: isize| ends.clone().slice(s![at..at + 1, ..]).squeeze_dim::<1>(0);
        let mut x = nodes.clone();
        for _ in 0..2 {
            let (from, to) = (x.clone().select(0, end(0)), x.clone().select(0, end(1)));
            let messages = relu(self.message.forward(Tensor::cat(vec![from, to], 1)));
            let sums = Tensor::zeros_like(&x).select_assign(
                0,
                end(1),
                messages,
                burn::tensor::IndexingUpdateOp::Add,
            );
            x = self.norm.forward(self.own.forward(x) + sums);
        }
        mean_square(self.head.forward(x), nodes)
    }
}

/// Two of four experts for each row, by the gate's best.
#[derive(Module, Debug)]
struct Experts {
    gate: Linear,
    experts: Vec<Linear>,
}

impl Small for Experts {
    const NAME: &'static str = "mixture_of_experts";
    const NUMBERS: usize = ROWS * WIDTH;
    const WHOLE: usize = 0;

    fn new(device: &Device) -> Self {
        Self {
            gate: linear(WIDTH, 4, device),
            experts: (0..4).map(|_| linear(WIDTH, WIDTH, device)).collect(),
        }
    }

    fn loss(&self, (numbers, _): Batch) -> Tensor<1> {
        let x = numbers.reshape([ROWS, WIDTH]);
        let scores = self.gate.forward(x.clone());
        let which = scores.clone().argtopk(2, 1);
        let weights = softmax(scores.gather(1, which.clone()), 1);
        let all = self.experts.iter().map(|expert| mish(expert.forward(x.clone())));
        let all: Tensor<3> = Tensor::stack(all.collect(), 1);
        let which = which.unsqueeze_dim::<3>(2).repeat_dim(2, WIDTH);
        let chosen = all.gather(1, which) * weights.unsqueeze_dim(2);
        mean_square(chosen.sum_dim(1).squeeze_dim(1), x)
    }
}

/// Products of embeddings with each other, beside plain features.
#[derive(Module, Debug)]
struct Recommender {
    tables: Vec<Embedding>,
    features: Linear,
    top: Linear,
}

impl Small for Recommender {
    const NAME: &'static str = "recommender";
    const NUMBERS: usize = ROWS * 6;
    const WHOLE: usize = ROWS * 3;
    const BELOW: i64 = 11;

    fn new(device: &Device) -> Self {
        Self {
            tables: (0..3).map(|_| EmbeddingConfig::new(11, 8).init(device)).collect(),
            features: linear(6, 8, device),
            top: linear(16 + 8, 1, device),
        }
    }

    fn loss(&self, (numbers, whole): Batch) -> Tensor<1> {
        let features = relu(self.features.forward(numbers.reshape([ROWS, 6])));
        let ids = whole.reshape([ROWS, 3]);
        let looked_up = |(at, table): (usize, &Embedding)| {
            let at = at as isize;
            table.forward(ids.clone().slice(s![.., at..at + 1]))
        };
        let mut vectors: Vec<Tensor<3>> = self.tables.iter().enumerate().map(looked_up).collect();
        vectors.push(features.clone().unsqueeze_dim(1));
        let vectors = Tensor::cat(vectors, 1);
        let products: Tensor<2> = vectors.clone().matmul(vectors.transpose()).flatten(1, 2);
        let logits = self.top.forward(Tensor::cat(vec![products, features], 1));
        let logits = full_precision(logits.squeeze_dim::<1>(1));
        let clicked =
            full_precision(ids.slice(s![.., 0..1]).squeeze_dim::<1>(1).remainder_scalar(2).float());
        // As a binary cross-entropy of logits is written.
        (relu(logits.clone()) - logits.clone() * clicked + (logits.abs().neg().exp() + 1.0).log())
            .mean()
    }
}

/// What is done, how good that was, and how sure it is.
#[derive(Module, Debug)]
struct ActorCritic {
    body: Linear,
    actor: Linear,
    critic: Linear,
}

impl Small for ActorCritic {
    const NAME: &'static str = "actor_critic";
    const NUMBERS: usize = ROWS * 7;
    const WHOLE: usize = ROWS;
    const BELOW: i64 = 4;

    fn new(device: &Device) -> Self {
        Self {
            body: linear(6, WIDTH, device),
            actor: linear(WIDTH, 4, device),
            critic: linear(WIDTH, 1, device),
        }
    }

    fn loss(&self, (numbers, actions): Batch) -> Tensor<1> {
        let numbers = numbers.reshape([ROWS, 7]);
        let body = tanh(self.body.forward(numbers.clone().slice(s![.., ..6])));
        let returns = full_precision(numbers.slice(s![.., 6..7]));
        let values = full_precision(self.critic.forward(body.clone()));
        let advantage = (returns.clone() - values.clone()).detach();
        let log_odds = log_softmax(full_precision(self.actor.forward(body)), 1);
        let of_action = log_odds.clone().gather(1, actions.reshape([ROWS, 1]));
        let ratio = (of_action.clone() - of_action.detach()).exp();
        let clipped = ratio.clone().clamp(0.8, 1.2) * advantage.clone();
        let gain = (ratio * advantage).min_pair(clipped).mean();
        let entropy = (log_odds.clone().exp() * log_odds).sum_dim(1).mean().neg();
        (returns - values).powi_scalar(2).mean() * 0.5 - gain - entropy * 0.01
    }
}

/// Pairs of views, each of which is to be nearest to its own.
#[derive(Module, Debug)]
struct Contrastive {
    first: Linear,
    second: Linear,
    temperature: Param<Tensor<1>>,
}

impl Small for Contrastive {
    const NAME: &'static str = "contrastive_pairs";
    const NUMBERS: usize = 2 * ROWS * WIDTH;
    const WHOLE: usize = 0;

    fn new(device: &Device) -> Self {
        Self {
            first: linear(WIDTH, 16, device),
            second: linear(WIDTH, 16, device),
            temperature: Initializer::Ones.init([1], device),
        }
    }

    fn loss(&self, (numbers, _): Batch) -> Tensor<1> {
        let views = numbers.reshape([2, ROWS, WIDTH]);
        let view = |at: isize| views.clone().slice(s![at..at + 1]).squeeze_dim::<2>(0);
        let normed = |x: Tensor<2>| {
            let length = x.clone().powi_scalar(2).sum_dim(1).sqrt();
            x / (length + 1e-3)
        };
        let (a, b) = (normed(self.first.forward(view(0))), normed(self.second.forward(view(1))));
        let scale = self.temperature.val().exp().unsqueeze::<2>();
        let alike = full_precision(a.matmul(b.transpose()) * scale);
        let own: Tensor<1, Int> = Tensor::arange(0..ROWS as i64, &alike.device());
        let loss = CrossEntropyLossConfig::new().init(&alike.device());
        (loss.forward(alike.clone(), own.clone()) + loss.forward(alike.transpose(), own)) * 0.5
    }
}

/// Noise told from data at a time that is told by waves.
#[derive(Module, Debug)]
struct Diffusion {
    time: Linear,
    layers: Vec<Linear>,
    norm: LayerNorm,
}

impl Small for Diffusion {
    const NAME: &'static str = "diffusion";
    const NUMBERS: usize = 2 * ROWS * WIDTH;
    const WHOLE: usize = ROWS;
    const BELOW: i64 = 100;

    fn new(device: &Device) -> Self {
        Self {
            time: linear(16, WIDTH, device),
            layers: (0..3).map(|_| linear(WIDTH, WIDTH, device)).collect(),
            norm: LayerNormConfig::new(WIDTH).init(device),
        }
    }

    fn loss(&self, (numbers, times): Batch) -> Tensor<1> {
        let both = numbers.reshape([2, ROWS, WIDTH]);
        let part = |at: isize| both.clone().slice(s![at..at + 1]).squeeze_dim::<2>(0);
        let (data, noise) = (part(0), part(1));
        let times = times.float().reshape([ROWS, 1]).cast(data.dtype());
        let waves: Vec<Tensor<2>> = (0..8)
            .flat_map(|octave| {
                let angle = times.clone() * 0.05 * 0.5f64.powi(octave);
                [angle.clone().sin(), angle.cos()]
            })
            .collect();
        let time = silu(self.time.forward(Tensor::cat(waves, 1)));
        let share = times / 100.0;
        let noisy = data * (share.clone().neg() + 1.0).sqrt() + noise.clone() * share.sqrt();
        let mut x = noisy;
        for layer in &self.layers {
            x = silu(layer.forward(self.norm.forward(x.clone() + time.clone()))) + x;
        }
        mean_square(x, noise)
    }
}

/// Densities that are added up in logarithms.
#[derive(Module, Debug)]
struct Mixture {
    body: Linear,
    prelu: PRelu,
    heads: Linear,
}

impl Small for Mixture {
    const NAME: &'static str = "mixture_of_densities";
    const NUMBERS: usize = ROWS * 7;
    const WHOLE: usize = 0;

    fn new(device: &Device) -> Self {
        Self {
            body: linear(6, WIDTH, device),
            prelu: PReluConfig::new().init(device),
            heads: linear(WIDTH, 9, device),
        }
    }

    fn loss(&self, (numbers, _): Batch) -> Tensor<1> {
        let numbers = numbers.reshape([ROWS, 7]);
        let body = self.prelu.forward(self.body.forward(numbers.clone().slice(s![.., ..6])));
        let heads = full_precision(self.heads.forward(body));
        let [weights, means, widths]: [Tensor<2>; 3] = heads.chunk(3, 1).try_into().unwrap();
        let target = full_precision(numbers.slice(s![.., 6..7]));
        let widths = softplus(widths, 1.0) + 0.1;
        let distance = (target - means) / widths.clone();
        let parts = log_softmax(weights, 1) - distance.powi_scalar(2) * 0.5 - widths.log();
        let most = parts.clone().max_dim(1).detach();
        let sum = (parts - most.clone()).exp().sum_dim(1).log() + most;
        sum.mean().neg()
    }
}

/// Several quantiles at once, by what lies above and below.
#[derive(Module, Debug)]
struct Quantiles {
    body: Linear,
    head: Linear,
}

impl Small for Quantiles {
    const NAME: &'static str = "quantiles";
    const NUMBERS: usize = ROWS * 7;
    const WHOLE: usize = 0;
    const IS_RECORDED: bool = false;

    fn new(device: &Device) -> Self {
        Self { body: linear(6, WIDTH, device), head: linear(WIDTH, 3, device) }
    }

    fn loss(&self, (numbers, _): Batch) -> Tensor<1> {
        let numbers = numbers.reshape([ROWS, 7]);
        let body = sigmoid(self.body.forward(numbers.clone().slice(s![.., ..6])));
        let made = full_precision(self.head.forward(body)).sort(1);
        let error = full_precision(numbers.slice(s![.., 6..7])) - made;
        let levels = Tensor::<1>::from_floats([0.1, 0.5, 0.9], &error.device()).unsqueeze();
        let above = error.clone() * levels.clone();
        let below = error * (levels - 1.0);
        above.max_pair(below).sum_dim(1).mean()
    }
}

/// A matrix of few ranks, of which a part is known.
#[derive(Module, Debug)]
struct Factorization {
    rows: Param<Tensor<2>>,
    columns: Param<Tensor<2>>,
}

impl Small for Factorization {
    const NAME: &'static str = "factorization";
    const NUMBERS: usize = ROWS * WIDTH;
    const WHOLE: usize = ROWS * WIDTH;

    fn new(device: &Device) -> Self {
        Self {
            rows: Initializer::Ones.init([ROWS, 4], device),
            columns: Initializer::Ones.init([4, WIDTH], device),
        }
    }

    fn loss(&self, (numbers, whole): Batch) -> Tensor<1> {
        let known = whole.reshape([ROWS, WIDTH]).equal_elem(1);
        let made = self.rows.val().matmul(self.columns.val());
        let error = full_precision(made) - full_precision(numbers.reshape([ROWS, WIDTH]));
        let error = error.powi_scalar(2).mask_fill(known.clone().bool_not(), 0.0);
        error.sum() / known.int().sum().float()
    }
}

// Language models whose layers Burn lacks, included behind the files of other models.

/// Attention behind a norm, among tokens or of what an encoder made. Its scores are not scaled.
#[derive(Module, Debug)]
struct T5Attention {
    norm: RmsNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
}

impl T5Attention {
    /// Numbers of a head.
    const HEAD: usize = 64;

    fn new(width: usize, device: &Device) -> Self {
        let linear = || LinearConfig::new(width, width).with_bias(false).init(device);
        Self {
            norm: t5_norm(width, device),
            query: linear(),
            key: linear(),
            value: linear(),
            output: linear(),
        }
    }

    fn forward(
        &self,
        x: Tensor<3>,
        memory: Option<Tensor<3>>,
        bias: Option<Tensor<4>>,
        is_causal: bool,
    ) -> Tensor<3> {
        let normalized = self.norm.forward(x.clone());
        let memory = memory.unwrap_or_else(|| normalized.clone());
        let heads = |linear: &Linear, x: Tensor<3>| {
            let [batch, length, width] = x.dims();
            let y = linear.forward(x);
            y.reshape([batch, length, width / Self::HEAD, Self::HEAD]).swap_dims(1, 2)
        };
        let q = heads(&self.query, normalized);
        let (k, v) = (heads(&self.key, memory.clone()), heads(&self.value, memory));
        let scores = Scores { bias, mask: None, is_scaled: false, is_causal };
        let attended = biased_attention(q, k, v, scores).swap_dims(1, 2);
        x.clone() + self.output.forward(attended.reshape(x.dims()))
    }
}

fn t5_norm(width: usize, device: &Device) -> RmsNorm {
    RmsNormConfig::new(width).with_epsilon(1e-6).init(device)
}

#[derive(Module, Debug)]
struct T5Layer {
    attention: T5Attention,
    /// Of a decoder.
    crossed: Option<T5Attention>,
    norm: RmsNorm,
    inner: Linear,
    outer: Linear,
}

/// An encoder, or a decoder. All layers share what the distance of tokens adds to their scores.
#[derive(Module, Debug)]
struct T5Stack {
    biases: Embedding,
    layers: Vec<T5Layer>,
    norm: RmsNorm,
}

impl T5Stack {
    /// Biases of each head.
    const BUCKETS: usize = 32;

    fn new(shape: &Shape, is_decoder: bool, device: &Device) -> Self {
        let Shape { width, layers, .. } = *shape;
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(device);
        let layer = |_| T5Layer {
            attention: T5Attention::new(width, device),
            crossed: is_decoder.then(|| T5Attention::new(width, device)),
            norm: t5_norm(width, device),
            inner: linear(width, 4 * width),
            outer: linear(4 * width, width),
        };
        Self {
            biases: EmbeddingConfig::new(Self::BUCKETS, width / T5Attention::HEAD).init(device),
            layers: (0..layers).map(layer).collect(),
            norm: t5_norm(width, device),
        }
    }

    fn forward(
        &self,
        mut x: Tensor<3>,
        memory: Option<&Tensor<3>>,
        buckets: Tensor<2, Int>,
    ) -> Tensor<3> {
        let bias = self.biases.forward(buckets).permute([2, 0, 1]).unsqueeze::<4>();
        for layer in &self.layers {
            x = layer.attention.forward(x, None, Some(bias.clone()), memory.is_some());
            if let Some(crossed) = &layer.crossed {
                x = crossed.forward(x, memory.cloned(), None, false);
            }
            let y = activation::relu(layer.inner.forward(layer.norm.forward(x.clone())));
            x = x + layer.outer.forward(y);
        }
        self.norm.forward(x)
    }
}

/// A source, a target, where pairs of tokens of either find their bias, and the words that follow.
type T5Batch = (Tensor<2, Int>, Tensor<2, Int>, (Tensor<2, Int>, Tensor<2, Int>), Tensor<1, Int>);

/// `T5` (Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2020),
/// without its dropout. The words' table is the head.
#[derive(Module, Debug)]
pub(crate) struct T5 {
    words: Embedding,
    encoder: T5Stack,
    decoder: T5Stack,
}

impl T5 {
    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        Self {
            words: EmbeddingConfig::new(shape.classes, shape.width).init(device),
            encoder: T5Stack::new(shape, false, device),
            decoder: T5Stack::new(shape, true, device),
        }
    }

    pub(crate) fn loss(
        &self,
        (source, ids, (of_source, of_target), targets): T5Batch,
    ) -> Tensor<1> {
        let memory = self.encoder.forward(self.words.forward(source), None, of_source);
        let x = self.decoder.forward(self.words.forward(ids), Some(&memory), of_target);
        let scale = (x.dims()[2] as f64).powf(-0.5);
        let table = self.words.weight.val().transpose().unsqueeze::<3>();
        cross_entropy((x * scale).matmul(table), targets)
    }
}

/// Two layers over each token, by the two experts that a router finds best (Fedus et al., "Switch Transformers", 2021;
/// Lepikhin et al., "`GShard`", 2020). An expert has a fixed number of slots: what comes too late is left out.
#[derive(Module, Debug)]
struct Experts {
    router: Linear,
    inner: Param<Tensor<3>>,
    outer: Param<Tensor<3>>,
}

impl Experts {
    const COUNT: usize = 8;
    /// Experts of a token.
    const CHOICES: usize = 2;
    /// Slots for one that balanced choices would take.
    const CAPACITY: f64 = 1.25;

    fn new(width: usize, device: &Device) -> Self {
        let initializer =
            Initializer::KaimingUniform { gain: 3f64.powf(-0.5), fan_out_only: false };
        let layer =
            |from, to| initializer.init_with([Self::COUNT, from, to], Some(from), Some(to), device);
        Self {
            router: LinearConfig::new(width, Self::COUNT).with_bias(false).init(device),
            inner: layer(width, 4 * width),
            outer: layer(4 * width, width),
        }
    }

    /// Of tokens `[tokens, width]`; besides, a loss that is least where all experts have the same load.
    fn forward(&self, x: Tensor<2>) -> (Tensor<2>, Tensor<1>) {
        let [tokens, width] = x.dims();
        let choices = tokens * Self::CHOICES;
        let capacity = (choices as f64 * Self::CAPACITY).ceil() as usize / Self::COUNT;
        let slots = Self::COUNT * capacity;
        let device = x.device();

        let shares = activation::softmax(full_precision(self.router.forward(x.clone())), 1);
        // `topk_with_indices` would sort on the host: Burn's autodiff does not pass it on.
        let chosen = shares.clone().argtopk(Self::CHOICES, 1);
        let weights = shares.clone().gather(1, chosen.clone());
        let weights = weights.clone() / weights.sum_dim(1);
        let chosen = chosen.reshape([choices, 1]);
        let experts = Tensor::<1, Int>::arange(0..Self::COUNT as i64, &device);
        let is_chosen = chosen.clone().equal(experts.unsqueeze::<2>()).int();

        // A choice stands behind those in front of it that are of the same expert.
        let place = is_chosen.clone().cumsum(0).gather(1, chosen.clone()) - 1;
        let is_late = place.clone().greater_equal_scalar(capacity as i64);
        // What comes too late has a slot behind all others.
        let slot = (chosen * capacity as i64 + place).mask_fill(is_late.clone(), slots as i64);
        let slot = slot.squeeze_dim::<1>(1);
        let token = Tensor::<1, Int>::arange(0..choices as i64, &device) / Self::CHOICES as i64;
        let token_of_slot = Tensor::<1, Int>::zeros([slots + 1], &device);
        let token_of_slot =
            token_of_slot.select_assign(0, slot.clone(), token, IndexingUpdateOp::Add);

        let sent = x.clone().select(0, token_of_slot.slice(s![..slots]));
        let sent = sent.reshape([Self::COUNT, capacity, width]);
        let y = activation::gelu(sent.matmul(self.inner.val())).matmul(self.outer.val());
        let y = y.reshape([slots, width]).select(0, slot.clamp_max(slots as i64 - 1));
        let y = y.reshape([tokens, Self::CHOICES, width]);
        let weights = weights.mask_fill(is_late.reshape([tokens, Self::CHOICES]), 0.0);
        let y = y * weights.cast(x.dtype()).unsqueeze_dim::<3>(2);

        let loads = is_chosen.float().mean_dim(0);
        let balance = (loads * shares.mean_dim(0)).sum() * Self::COUNT as f64;
        (y.sum_dim(1).squeeze_dim(1), balance)
    }
}

#[derive(Module, Debug)]
struct MixtureLayer {
    norms: [LayerNorm; 2],
    attention: MultiHeadAttention,
    experts: Experts,
}

/// GPT-2 with a mixture of experts (Shazeer et al., "Outrageously Large Neural Networks", 2017) in each layer.
#[derive(Module, Debug)]
pub(crate) struct Mixture {
    words: Embedding,
    places: Embedding,
    layers: Vec<MixtureLayer>,
    norm: LayerNorm,
}

impl Mixture {
    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        let Shape { width, layers, classes, length, .. } = *shape;
        let norm = || LayerNormConfig::new(width).init(device);
        let attention = MultiHeadAttentionConfig::new(width, width / 64).with_dropout(0.0);
        let layer = |_| MixtureLayer {
            norms: [norm(), norm()],
            attention: attention.init(device),
            experts: Experts::new(width, device),
        };
        Self {
            words: EmbeddingConfig::new(classes, width).init(device),
            places: EmbeddingConfig::new(length, width).init(device),
            layers: (0..layers).map(layer).collect(),
            norm: norm(),
        }
    }

    pub(crate) fn loss(
        &self,
        (ids, places, targets): (Tensor<2, Int>, Tensor<2, Int>, Tensor<1, Int>),
    ) -> Tensor<1> {
        /// What balanced loads count beside the words.
        const BALANCE: f64 = 0.01;
        let [batch, length] = ids.dims();
        let mask = generate_autoregressive_mask(batch, length, &ids.device());
        let mut x = self.words.forward(ids) + self.places.forward(places);
        let mut balances = vec![];
        for layer in &self.layers {
            let input = MhaInput::self_attn(layer.norms[0].forward(x.clone()));
            x = x + layer.attention.forward(input.mask_attn(mask.clone())).context;
            let tokens = layer.norms[1].forward(x.clone()).flatten::<2>(0, 1);
            let (y, balance) = layer.experts.forward(tokens);
            x = x.clone() + y.reshape(x.dims());
            balances.push(balance);
        }
        let table = self.words.weight.val().transpose().unsqueeze::<3>();
        let loss = cross_entropy(self.norm.forward(x).matmul(table), targets);
        loss + Tensor::cat(balances, 0).mean() * BALANCE
    }
}

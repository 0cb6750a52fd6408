// Losses of `nn`.

use blackburn_tests::programs::{Data, Program, program};
use burn::tensor::Tensor;
use nn::loss::{
    BinaryCrossEntropyLossConfig, CTCLossConfig, CosineEmbeddingLossConfig, CrossEntropyLoss,
    CrossEntropyLossConfig, GaussianNLLLossConfig, HingeEmbeddingLossConfig, HuberLossConfig,
    KLDivLossConfig, LpLossConfig, MarginRankingLossConfig, MseLoss, MultiMarginLossConfig,
    PoissonNllLossConfig, RNNTLossConfig, Reduction, SmoothL1LossConfig, SoftMarginLoss,
    TripletMarginLossConfig,
};

const ROWS: usize = 6;
const CLASSES: usize = 7;

pub(super) fn programs() -> Vec<Box<dyn Program>> {
    [of_classes(), of_numbers(), of_distances(), of_sequences()].into_iter().flatten().collect()
}

/// The loss of logits.
fn classified(module: &CrossEntropyLoss, data: &Data<'_>) -> Tensor<1> {
    module.forward(data.result([ROWS, CLASSES]), data.ids([ROWS], 0, CLASSES as i64))
}

fn of_classes() -> Vec<Box<dyn Program>> {
    vec![
        program("CrossEntropyLoss", 8, |device| CrossEntropyLoss::new(Some(1), device), classified),
        program(
            "CrossEntropyLoss with weights",
            8,
            |device| {
                let weights = (1..=CLASSES).map(|class| class as f32 / 4.0).collect();
                CrossEntropyLossConfig::new().with_weights(Some(weights)).init(device)
            },
            classified,
        ),
        program(
            "CrossEntropyLoss with smoothing",
            8,
            |device| CrossEntropyLossConfig::new().with_smoothing(Some(0.1)).init(device),
            classified,
        ),
        program(
            "CrossEntropyLoss of probabilities",
            8,
            |device| CrossEntropyLossConfig::new().with_logits(false).init(device),
            |module, data| {
                module.forward(data.shares([ROWS, CLASSES]), data.ids([ROWS], 0, CLASSES as i64))
            },
        ),
        program(
            "BinaryCrossEntropyLoss",
            8,
            |device| BinaryCrossEntropyLossConfig::new().with_logits(true).init(device),
            |module, data| module.forward(data.result([ROWS, 3]), data.ids([ROWS, 3], 0, 2)),
        ),
        program(
            "BinaryCrossEntropyLoss with weights",
            8,
            |device| {
                let config = BinaryCrossEntropyLossConfig::new().with_smoothing(Some(0.1));
                config.with_weights(Some(vec![0.5, 1.0, 2.0])).init(device)
            },
            |module, data| module.forward(data.shares([ROWS, 3]), data.ids([ROWS, 3], 0, 2)),
        ),
        program(
            "MultiMarginLoss",
            8,
            |_| MultiMarginLossConfig::new().init(),
            |module, data| {
                let input = data.result([ROWS, CLASSES]);
                module.forward(input, data.ids([ROWS], 0, CLASSES as i64), Reduction::Mean)
            },
        ),
    ]
}

/// A program of a loss, with so many roundings, of a result and a target.
macro_rules! compared {
    ($name:literal, $roundings:literal, $init:expr, $result:ident, $target:ident) => {
        program($name, $roundings, $init, |module, data| {
            let result = data.$result([ROWS, 4]);
            let target = data.$target(&result);
            module.forward(result, target, Reduction::Mean)
        })
    };
}

fn of_numbers() -> Vec<Box<dyn Program>> {
    vec![
        compared!("MseLoss", 4, |_| MseLoss::new(), result, target),
        compared!("HuberLoss", 6, |_| HuberLossConfig::new(0.5).init(), result, target),
        compared!("LpLoss", 4, |_| LpLossConfig::new(1.0).init(), result, target),
        compared!("KLDivLoss", 6, |_| KLDivLossConfig::new().init(), result, target),
        compared!("PoissonNllLoss", 5, |_| PoissonNllLossConfig::new().init(), result, target),
        compared!("SoftMarginLoss", 8, |_| SoftMarginLoss::new(), result, signs),
        compared!(
            "HingeEmbeddingLoss",
            4,
            |_| HingeEmbeddingLossConfig::new().init(),
            result,
            signs
        ),
        program(
            "SmoothL1Loss",
            6,
            |_| SmoothL1LossConfig::new().init(),
            |module, data| {
                let result = data.result([ROWS, 4]);
                let target = data.target(&result);
                module.forward(result, target)
            },
        ),
        program(
            "GaussianNLLLoss",
            8,
            |_| GaussianNLLLossConfig::new().init(),
            |module, data| {
                let result = data.result([ROWS, 4]);
                let target = data.target(&result);
                module.forward(result, target, data.shares([ROWS, 4]), Reduction::Mean)
            },
        ),
    ]
}

fn of_distances() -> Vec<Box<dyn Program>> {
    vec![
        program(
            "MarginRankingLoss",
            5,
            |_| MarginRankingLossConfig::new().with_margin(0.5).init(),
            |module, data| {
                let first = data.result([ROWS, 4]);
                let signs = data.signs(&first);
                module.forward(first, data.result([ROWS, 4]), signs, Reduction::Mean)
            },
        ),
        program(
            "CosineEmbeddingLoss",
            8,
            |_| CosineEmbeddingLossConfig::new().init(),
            |module, data| {
                // Ones and minus ones.
                let signs = data.ids([ROWS], 0, 2) * 2 - 1;
                module.forward(data.result([ROWS, 8]), data.result([ROWS, 8]), signs)
            },
        ),
        program(
            "TripletMarginLoss",
            8,
            |_| TripletMarginLossConfig::new().init(),
            |module, data| {
                let [anchor, positive, negative] = [0; 3].map(|_| data.result([ROWS, 8]));
                module.forward(anchor, positive, negative, Reduction::Mean)
            },
        ),
    ]
}

fn of_sequences() -> Vec<Box<dyn Program>> {
    vec![
        program(
            "CTCLoss",
            20,
            |_| CTCLossConfig::new().init(),
            |module, data| {
                let logits = data.normal([8, 2, 5]);
                let logarithms = burn::tensor::activation::log_softmax(logits, 2);
                let [seq, labels] =
                    [[8, 7], [3, 2]].map(|lengths| Tensor::from_data(lengths, data.device()));
                let targets = data.ids([2, 3], 1, 4);
                let logarithms = data.for_loss(logarithms);
                module.forward_with_reduction(logarithms, targets, seq, labels, Reduction::Mean)
            },
        ),
        program(
            "RNNTLoss",
            30,
            |_| RNNTLossConfig::new().init(),
            |module, data| {
                let [seq, labels] =
                    [[4, 3], [3, 2]].map(|lengths| Tensor::from_data(lengths, data.device()));
                let targets = data.ids([2, 3], 1, 4);
                let logits = data.result([2, 4, 4, 5]);
                module.forward_with_reduction(logits, targets, seq, labels, Reduction::Mean)
            },
        ),
    ]
}

//! Ranks add, agree and share.

use super::{config, free_port, on_ranks, on_ranks_with, world};
use crate::{DistributedError, Group, Wire};
use burn::{
    module::{Module, ModuleVisitor, Param},
    nn::{Linear, LinearConfig},
    optim::GradientsParams,
    tensor::{DType, Device, FloatDType, Tensor, TensorData},
};
use half::bf16;

fn model(device: &Device) -> Linear {
    LinearConfig::new(3, 5).init(device)
}

/// Numbers without a pattern, other ones for each rank.
fn numbers(rank: usize, length: usize) -> Vec<f32> {
    (0..length)
        .map(|i| ((i * 7919 + rank * 104_729 + 1) as f32).sin() * 10f32.powi(i as i32 % 7))
        .collect()
}

/// Gradients of `model` of these numbers.
fn gradients(model: &Linear, rank: usize, dtype: FloatDType) -> GradientsParams {
    let device = Device::flex();
    let mut gradients = GradientsParams::new();
    let weight = TensorData::new(numbers(rank, 15), [3, 5]);
    let weight = Tensor::<2>::from_data(weight, (&device, DType::F32)).cast(dtype);
    gradients.register(model.weight.id, weight);
    let bias = TensorData::new(numbers(rank + 10, 5), [5]);
    let bias = Tensor::<1>::from_data(bias, (&device, DType::F32)).cast(dtype);
    gradients.register(model.bias.as_ref().expect("there is one").id, bias);
    gradients
}

fn weight(model: &Linear, gradients: &GradientsParams) -> TensorData {
    gradients.get::<2>(model.weight.id).expect("the weight has one").into_data()
}

/// The mean of what two ranks have, on each.
fn means(dtype: FloatDType, wire: Wire, weights: [f64; 2]) -> Vec<TensorData> {
    on_ranks_with(
        2,
        |config| config.with_wire(wire),
        |group| {
            let model = model(&Device::flex());
            let own = gradients(&model, group.rank(), dtype);
            let mean = group.mean(&model, own, weights[group.rank()]).expect("nothing is wrong");
            weight(&model, &mean)
        },
    )
}

#[test]
fn the_sum_of_two_is_rounded_once_in_f32() {
    let expected: Vec<f32> =
        numbers(0, 15).iter().zip(numbers(1, 15)).map(|(a, b)| (a + b) / 2.0).collect();
    for mean in means(FloatDType::F32, Wire::AsTheyAre, [4.0, 4.0]) {
        assert_eq!(mean.try_to_vec::<f32>().expect("f32"), expected);
    }
}

#[test]
fn the_sum_of_two_is_rounded_once_in_bf16() {
    let of = |rank| numbers(rank, 15).into_iter().map(|x| bf16::from_f32(x).to_f32());
    let sums = || of(0).zip(of(1)).map(|(a, b)| bf16::from_f32(a + b));
    let expected: Vec<f32> =
        sums().map(|sum| bf16::from_f32(sum.to_f32() / 2.0).to_f32()).collect();
    for mean in means(FloatDType::BF16, Wire::AsTheyAre, [1.0, 1.0]) {
        assert_eq!(mean.dtype(), DType::BF16);
        assert_eq!(mean.iter::<f32>().collect::<Vec<f32>>(), expected);
    }
    // The same on the way where gradients are f32, and the mean of bf16 sums in f32.
    let expected: Vec<f32> = sums().map(|sum| sum.to_f32() / 2.0).collect();
    for mean in means(FloatDType::F32, Wire::Bf16, [1.0, 1.0]) {
        assert_eq!(mean.dtype(), DType::F32);
        assert_eq!(mean.iter::<f32>().collect::<Vec<f32>>(), expected);
    }
}

#[test]
fn sixteen_bits_may_move_in_f32() {
    let of = |rank| numbers(rank, 15).into_iter().map(|x| bf16::from_f32(x).to_f32());
    let expected: Vec<f32> = of(0).zip(of(1)).map(|(a, b)| (a + b) / 2.0).collect();
    for mean in means(FloatDType::BF16, Wire::F32, [1.0, 1.0]) {
        assert_eq!(mean.try_to_vec::<f32>().expect("f32"), expected);
    }
}

#[test]
fn ranks_count_by_weight() {
    let (a, b) = (numbers(0, 15), numbers(1, 15));
    for mean in means(FloatDType::F32, Wire::AsTheyAre, [1.0, 3.0]) {
        let mean = mean.try_to_vec::<f32>().expect("f32");
        for ((mean, a), b) in mean.iter().zip(&a).zip(&b) {
            let expected = (f64::from(*a) + 3.0 * f64::from(*b)) / 4.0;
            // A product, a sum and a product, each rounded.
            let bound = 2f64.powi(-24) * (f64::from(a.abs()) + 9.0 * f64::from(b.abs()));
            assert!((f64::from(*mean) - expected).abs() <= bound, "{mean} against {expected}");
        }
    }
}

#[test]
fn a_rank_without_data_counts_nothing_and_gets_all() {
    for mean in means(FloatDType::F32, Wire::AsTheyAre, [2.0, 0.0]) {
        assert_eq!(mean.try_to_vec::<f32>().expect("f32"), numbers(0, 15));
    }
    let all = on_ranks(3, |group| {
        let model = model(&Device::flex());
        let (own, weight_of) = match group.rank() {
            1 => (gradients(&model, 1, FloatDType::F32), 2.0),
            _ => (GradientsParams::new(), 0.0),
        };
        let loss =
            Tensor::from_data([if weight_of > 0.0 { 7.0f32 } else { f32::NAN }], &Device::flex());
        let (mean, extras) =
            group.mean_with(&model, own, vec![loss], weight_of).expect("one rank has data");
        (weight(&model, &mean), extras[0].clone().into_scalar::<f32>())
    });
    for (mean, loss) in all {
        assert_eq!(mean.try_to_vec::<f32>().expect("f32"), numbers(1, 15));
        assert_eq!(loss, 7.0);
    }
}

#[test]
fn a_gradient_that_some_ranks_lack_counts_as_zero_there() {
    let all = on_ranks(2, |group| {
        let model = model(&Device::flex());
        let mut own = gradients(&model, group.rank(), FloatDType::F32);
        let bias = model.bias.as_ref().expect("there is one").id;
        if group.rank() == 0 {
            own.remove::<1>(bias);
        }
        let mean = group.mean(&model, own, 1.0).expect("nothing is wrong");
        mean.get::<1>(bias).expect("one rank has it").into_data()
    });
    let expected: Vec<f32> = numbers(11, 5).iter().map(|x| x / 2.0).collect();
    for mean in all {
        assert_eq!(mean.try_to_vec::<f32>().expect("f32"), expected);
    }
}

#[test]
fn all_ranks_have_the_same_bits_with_more_of_them() {
    let all = on_ranks(5, |group| {
        let model = model(&Device::flex());
        let own = gradients(&model, group.rank(), FloatDType::F32);
        weight(&model, &group.mean(&model, own, 1.0).expect("nothing is wrong"))
    });
    let sum =
        |index: usize| (1..5).fold(numbers(0, 15)[index], |sum, r| sum + numbers(r, 15)[index]);
    let expected: Vec<f32> = (0..15).map(|index| sum(index) * (0.2f64 as f32)).collect();
    for mean in all {
        assert_eq!(mean.try_to_vec::<f32>().expect("f32"), expected);
    }
}

/// All numbers of a module.
fn values(module: &impl Module) -> Vec<f32> {
    #[derive(Default)]
    struct Values(Vec<f32>);
    impl ModuleVisitor for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.extend(param.val().into_data().iter::<f32>());
        }
    }
    let mut values = Values::default();
    module.visit(&mut values);
    values.0
}

#[test]
fn all_ranks_begin_with_rank_0s_numbers_and_identities() {
    let all = on_ranks(3, |group| {
        let device = Device::flex().autodiff();
        let own = model(&device);
        let before = values(&own);
        let model = group.broadcast(own).expect("nothing is wrong");
        assert!(model.weight.is_require_grad() && model.weight.val().is_autodiff());
        (before, values(&model), model.weight.id.val())
    });
    for (before, after, id) in &all {
        assert_eq!(*after, all[0].0);
        assert_eq!(*id, all[0].2);
        let is_rank_0s = *before == all[0].0;
        assert!(is_rank_0s || before != after, "what a rank had made no difference");
    }
    assert_ne!(all[0].0, all[1].0, "all ranks had the same numbers anyhow");
}

/// A parameter in two places.
#[derive(Module, Debug)]
struct Tied {
    first: Linear,
    second: Linear,
}

#[test]
fn a_parameter_in_two_places_stays_one() {
    on_ranks(2, |group| {
        let device = Device::flex().autodiff();
        let first = LinearConfig::new(3, 3).with_bias(false).init(&device);
        let tied = Tied { second: first.clone(), first };
        let tied = group.broadcast(tied).expect("nothing is wrong");
        let x = Tensor::<2>::ones([1, 3], &device);
        let loss = (tied.first.forward(x.clone()) + tied.second.forward(x)).sum();
        let own = GradientsParams::from_grads(loss.backward(), &tied);
        let gradient = own.get::<2>(tied.first.weight.id).expect("it has one");
        // One from each place.
        assert!(gradient.into_data().iter::<f32>().all(|x| x == 2.0));
    });
}

#[test]
fn other_modules_are_refused_by_all_and_the_parameter_is_named() {
    let all = on_ranks(2, |group| {
        let width = 5 + group.rank();
        let module = LinearConfig::new(3, width).init(&Device::flex().autodiff());
        group.broadcast(module).map(drop).expect_err("the modules differ").to_string()
    });
    for message in all {
        let expected = "the ranks differ in the module: rank 0 has weight [3, 5] in F32, rank 1 has \
                        weight [3, 6] in F32";
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn small_things_are_shared_in_the_order_of_ranks() {
    let all = on_ranks(4, |group| {
        let rank = group.rank();
        group.barrier().expect("all are here");
        (
            group.gather("ranks", &rank).expect("all are here"),
            group.sum(0.1 * rank as f64).expect("all are here"),
            group.all(rank != 2).expect("all are here"),
            group.any(rank == 2).expect("all are here"),
            group.local_rank(),
        )
    });
    for (rank, (ranks, sum, all_of_them, any, local)) in all.into_iter().enumerate() {
        assert_eq!(ranks, [0, 1, 2, 3]);
        assert_eq!(sum, 0.0 + 0.1 + 0.2 + 0.1 * 3.0);
        assert!(!all_of_them && any);
        assert_eq!(local, rank, "all are on one machine");
    }
}

#[test]
fn what_differs_is_named_by_rank() {
    let all = on_ranks(3, |group| {
        let same = group.agree("the seed", &42);
        let differs = group.agree("the data", &if group.rank() == 1 { "b" } else { "a" });
        let options = |batch: usize| [("--seed", "42".into()), ("--batch", batch.to_string())];
        let all_same = group.agree_on(&options(8));
        let one_differs = group.agree_on(&options(8 - group.rank() / 2));
        let one_is_missing = group.agree_on(&options(8)[..2 - group.rank() / 2]);
        let refused = [differs, one_differs, one_is_missing];
        (same.and(all_same), refused.map(|one| one.expect_err("a rank differs").to_string()))
    });
    for (same, refused) in all {
        assert!(same.is_ok());
        let expected = [
            r#"the ranks differ in the data: ranks [0, 2] have "a", rank 1 has "b""#,
            "the ranks differ in --batch: ranks [0, 1] have 8, rank 2 has 7",
            "the ranks differ in --batch: ranks [0, 1] have 8, rank 2 has none",
        ];
        assert_eq!(refused, expected);
    }
}

#[test]
fn weights_that_make_no_sense_are_refused() {
    let module = model(&Device::flex());
    for (weight, expected) in
        [(-1.0, "`weight`: expected a finite number of at least 0, got -1"), (f64::NAN, "got NaN")]
    {
        let refused = Group::alone().mean(&module, GradientsParams::new(), weight);
        let message = refused.map(drop).expect_err(expected).to_string();
        assert!(message.contains(expected), "{message}");
    }
    let all = on_ranks(2, |group| {
        let module = model(&Device::flex());
        group.mean(&module, GradientsParams::new(), 0.0).map(drop).expect_err("no data").to_string()
    });
    assert!(all.iter().all(|message| message.contains("a rank with a weight above 0")), "{all:?}");
}

#[test]
fn another_type_of_gradients_is_refused() {
    let all = on_ranks(2, |group| {
        let model = model(&Device::flex());
        let dtype = if group.rank() == 0 { FloatDType::F32 } else { FloatDType::BF16 };
        let own = gradients(&model, group.rank(), dtype);
        group.mean(&model, own, 1.0).map(drop).expect_err("types differ").to_string()
    });
    for message in all {
        let expected = "the type of gradient 0: rank 0 has F32, rank 1 has BF16";
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn one_alone_needs_nobody() {
    let group = Group::join(&config(world(0, 1, free_port()))).expect("it is alone");
    let model = model(&Device::flex());
    let own = gradients(&model, 0, FloatDType::F32);
    let mean = group.mean(&model, own, 3.0).expect("nothing is wrong");
    assert_eq!(weight(&model, &mean).try_to_vec::<f32>().expect("f32"), numbers(0, 15));
    assert_eq!(group.gather("ranks", &0).expect("nothing is wrong"), [0]);
    assert!(group.is_main() && group.at_step(1).is_ok());
}

#[test]
fn ranks_that_do_not_come_are_named() {
    let start = std::time::Duration::from_millis(300);
    let config = config(world(0, 3, free_port())).with_start_timeout(start);
    let refused = Group::join(&config).map(drop).expect_err("nobody comes");
    assert!(matches!(&refused, DistributedError::Absent { missing, .. } if missing == &[1, 2]));
    let config = super::config(world(1, 2, free_port())).with_start_timeout(start);
    let message = Group::join(&config).map(drop).expect_err("nobody is there").to_string();
    assert!(message.contains("rank 1 of 2 has not found rank 0 at 127.0.0.1:"), "{message}");
}

#[test]
fn a_port_in_use_is_passed_over() {
    // A stranger who says nothing, as a store of another program does.
    let stranger = std::net::TcpListener::bind("127.0.0.1:0").expect("there are free ports");
    let port = stranger.local_addr().expect("it listens").port();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            scope.spawn(move || {
                let config = config(world(rank, 2, port));
                Group::join(&config).expect("both come").barrier().expect("both are here");
            });
        }
    });
}

#[test]
fn two_jobs_may_begin_at_one_port() {
    let port = free_port();
    std::thread::scope(|scope| {
        for (job, rank) in [("a", 0), ("b", 0), ("a", 1), ("b", 1)] {
            scope.spawn(move || {
                let world = crate::World { job: job.into(), ..world(rank, 2, port) };
                let group = Group::join(&config(world)).expect("both of a job find each other");
                let jobs = group.gather("jobs", &job.to_owned()).expect("both are here");
                assert_eq!(jobs, [job, job]);
            });
        }
    });
}

#[test]
fn a_rank_of_another_number_of_ranks_is_refused() {
    let port = free_port();
    let (zero, one) = std::thread::scope(|scope| {
        let join = |rank, size| {
            let start = std::time::Duration::from_secs(2);
            let config = config(world(rank, size, port)).with_start_timeout(start);
            Group::join(&config).map(drop).expect_err("they do not fit").to_string()
        };
        let zero = scope.spawn(move || join(0, 2));
        let one = scope.spawn(move || join(1, 3));
        (zero.join().expect("no panic"), one.join().expect("no panic"))
    });
    assert!(one.contains("it expects 3 ranks, and rank 0 2"), "{one}");
    assert!(zero.contains("[1] did not come"), "{zero}");
}

//! Convolutions of channels that Hopper's copies take in whole boxes.

use super::{Convolution, IMAGE, Lies, check_all};
use blackburn_kernels::{
    DeviceProfile, Family,
    conv::{ConvBlueprint, variants::PASSES},
};
use blackburn_reference::{conv::ConvCase, storage::Storage};
use blackburn_tests::{buffers::dtype, on_cuda_with};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

pub(super) fn trials() -> Vec<Trial> {
    let trial = |storage: Storage| {
        let name = format!("conv::channels_of_whole_boxes_are_within_bounds_in_{storage:?}");
        Trial::ignorable_test(name.to_lowercase(), move || {
            on_cuda_with(dtype(storage), |client| whole_boxes(client, storage))
        })
    };
    Storage::ALL.into_iter().map(trial).collect()
}

/// That each pass has a plan on the fastest tensor cores that its operands suit.
fn is_offered(client: &Client, case: ConvCase, storage: Storage) -> Result<(), Failed> {
    let family = match (DeviceProfile::of(client).compute_capability, storage) {
        (Some(90), Storage::F16 | Storage::Bf16) => Family::Wgmma,
        (Some(80..), _) => Family::Mma,
        _ => return Ok(()),
    };
    for pass in PASSES {
        let problem = Convolution::new(case, pass, storage).problem(storage)?;
        let plans = ConvBlueprint::candidates(&problem, client);
        let is_of_family = |plan: &ConvBlueprint| matches!(plan, ConvBlueprint::Implicit(plan) if plan.family == family);
        if !plans.iter().any(is_of_family) {
            return Err(format!("{pass:?} of {case} is not offered {family}: {plans:?}").into());
        }
    }
    Ok(())
}

/// With everything else that such a copy walks by.
fn whole_boxes(client: &Client, storage: Storage) -> Result<(), Failed> {
    // Neither tiles nor blocks of terms end where images do.
    let images = ConvCase { batch: 3, in_channels: 64, out_channels: 192, ..IMAGE }.padded(1);
    let turned = ConvCase { in_channels: 192, out_channels: 64, ..images };
    for case in [images, images.strided(2)] {
        is_offered(client, case, storage)?;
    }
    let uneven = ConvCase { padding: [[0, 2], [3, 1]], ..images };
    check_all(
        client,
        storage,
        [
            images,
            turned,
            images.strided(2),
            ConvCase { stride: [3, 1], ..uneven },
            ConvCase { dilation: [2, 1], ..uneven },
            images.dilated(3).padded(3),
            ConvCase { kernel: [5; 2], ..images }.padded(2),
            ConvCase { kernel: [2, 4], ..images },
            ConvCase { kernel: [1; 2], ..images }.padded(0).strided(2),
            ConvCase { batch: 67, input: [2, 3], ..images },
            // Sums over pixels in splits, the last of which is not full.
            ConvCase { batch: 5, input: [21, 19], ..images },
        ],
    )?;
    for pass in PASSES {
        Convolution::new(images, pass, storage).check(client, Storage::F32)?;
    }
    for lies in [[Lies::WithGaps; 2], [Lies::InOrder; 2], [Lies::ChannelsLast; 2]] {
        for pass in PASSES {
            Convolution::new(images, pass, storage).lying(lies).check(client, storage)?;
        }
    }
    Ok(())
}

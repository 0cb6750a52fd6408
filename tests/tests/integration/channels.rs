//! Images joined by their channels, and parts of channels: every number where it belongs, on the kernel, in the order of
//! memory that was. Joints of long lists along any dimension.

use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::{
    blocks::{Block, blocks_of},
    on_burn_device,
    tensors::{tensor, values},
    trials_in,
};
use burn::{
    prelude::*,
    tensor::{Slice, module::conv2d, ops::ConvOptions},
};
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;

pub(crate) fn trials() -> Vec<Trial> {
    type Test = fn(&Device) -> Result<(), Failed>;
    let trial = |name: &str, test: Test| {
        Trial::ignorable_test(format!("channels::{name}"), move || {
            on_burn_device(|device| test(&device))
        })
    };
    let tests: [(&str, Test); 6] = [
        ("volumes_are_joined_and_parted", volumes),
        ("other_slices_and_joints_are_burn_s", others),
        ("images_without_channels_join_nothing", empty),
        ("gradients_of_joined_images_are_parts", gradients),
        ("long_lists_of_whole_numbers_are_joined", whole_numbers),
        ("between_convolutions_nothing_else_is_copied", between_convolutions),
    ];
    let mut trials: Vec<Trial> = tests.map(|(name, test)| trial(name, test)).into();
    let name = "channels::images_of_every_order_are_joined_and_parted";
    trials.extend(trials_in(name, &Storage::ALL, images));
    trials.extend(trials_in("channels::long_lists_are_joined", &Storage::ALL, long_lists));
    trials
}

/// How a tensor lies.
#[derive(Clone, Copy, Debug)]
enum Lies {
    /// Pixels side by side.
    PixelsLast,
    /// Channels side by side.
    ChannelsLast,
    /// As some channels of more of them, side by side.
    Between,
    /// Columns and rows in each other's place.
    Turned,
}

/// Dimensions with the second one behind the others, and back.
fn orders<const D: usize>() -> [[isize; D]; 2] {
    let last = |dim: usize| if dim == 0 { 0 } else { (dim % (D - 1) + 1) as isize };
    let back = |dim: usize| match dim {
        0 => 0,
        1 => D as isize - 1,
        dim => dim as isize - 1,
    };
    [std::array::from_fn(last), std::array::from_fn(back)]
}

/// Numbers and a tensor of them that lies so.
fn drawn<const D: usize>(
    seed: u64,
    shape: [usize; D],
    lies: Lies,
    storage: Storage,
    device: &Device,
) -> Result<(Vec<f64>, Tensor<D>), Failed> {
    let numbers = normal(seed, shape.iter().product(), 1.0, storage);
    let [to_last, back] = orders::<D>();
    let host: Tensor<D> = tensor(&numbers, shape, storage, device);
    let settled = |x: Tensor<D>| -> Result<Tensor<D>, Failed> {
        // Through the host: a fusion may write what it makes in any order.
        let shape = x.dims();
        values(x).map(|numbers| tensor(&numbers, shape, storage, device))
    };
    let tensor: Tensor<D> = match lies {
        Lies::PixelsLast => host,
        Lies::ChannelsLast => settled(host.permute(to_last))?.permute(back),
        Lies::Between => {
            let zeros = host.zeros_like();
            let wide = settled(Tensor::cat(vec![zeros.clone(), host, zeros], 1).permute(to_last))?;
            let channels = shape[1];
            let mut parts = [Slice::full(); D];
            parts[1] = Slice::from(channels..2 * channels);
            wide.permute(back).slice(parts)
        }
        Lies::Turned => settled(host.swap_dims(D - 2, D - 1))?.swap_dims(D - 2, D - 1),
    };
    Ok((numbers, tensor))
}

/// What one image after the other has of each tensor.
fn joined_numbers(parts: &[Vec<f64>], images: usize) -> Vec<f64> {
    let image = |image: usize| {
        parts.iter().flat_map(move |numbers| {
            let size = numbers.len() / images;
            numbers[image * size..(image + 1) * size].iter().copied()
        })
    };
    (0..images).flat_map(image).collect()
}

fn ours(blocks: &[Block]) -> usize {
    let kernels = blocks.iter().flat_map(|block| &block.kernels);
    kernels.filter(|kernel| kernel.contains("blackburn_kernels::overwrite::")).count()
}

fn same(what: &str, made: Vec<f64>, expected: &[f64]) -> Result<(), Failed> {
    if made == expected {
        return Ok(());
    }
    let place = made.iter().zip(expected).position(|(a, b)| a != b);
    Err(format!("{what}: the first other number is at {place:?} of {}", expected.len()).into())
}

fn check<const D: usize>(
    shape: [usize; D],
    channels: [usize; 2],
    lie: [Lies; 2],
    storage: Storage,
    device: &Device,
) -> Result<(), Failed> {
    let told = format!("{channels:?} channels of {shape:?}, {lie:?}, {storage:?}");
    let of = |place: usize| {
        let mut shape = shape;
        shape[1] = channels[place];
        drawn(place as u64 + 1, shape, lie[place], storage, device)
    };
    let ((first, x), (second, y)) = (of(0)?, of(1)?);
    let expected = joined_numbers(&[first, second.clone()], shape[0]);
    device.sync().map_err(|error| error.to_string())?;
    let (joined, blocks) = blocks_of(device, || Ok(Tensor::cat(vec![x, y], 1)))?;
    if ours(&blocks) == 0 {
        return Err(format!("{told}: not on the kernel: {blocks:#?}").into());
    }
    let mut parts = [Slice::full(); D];
    parts[1] = Slice::from(-(channels[1] as isize)..);
    let (part, _) = blocks_of(device, || Ok(joined.clone().slice(parts)))?;
    same(&format!("{told}: joined"), values(joined)?, &expected)?;
    same(&format!("{told}: a part"), values(part)?, &second)
}

fn images(device: &Device, storage: Storage) -> Result<(), Failed> {
    use Lies::{Between, ChannelsLast, PixelsLast, Turned};

    let lie = [
        [ChannelsLast, ChannelsLast],
        [PixelsLast, PixelsLast],
        [PixelsLast, ChannelsLast],
        [Between, ChannelsLast],
        [ChannelsLast, Turned],
        [Turned, Turned],
    ];
    for lie in lie {
        for channels in [[16, 8], [3, 5], [1, 7]] {
            check([2, 0, 5, 6], channels, lie, storage, device)?;
        }
    }
    // One pixel, and one image.
    check([3, 0, 1, 1], [4, 6], [ChannelsLast; 2], storage, device)?;
    check([1, 0, 4, 4], [4, 6], [ChannelsLast, PixelsLast], storage, device)
}

fn volumes(device: &Device) -> Result<(), Failed> {
    for lies in [Lies::PixelsLast, Lies::ChannelsLast, Lies::Between] {
        check([2, 0, 3, 4, 5], [8, 4], [lies; 2], F32, device)?;
    }
    Ok(())
}

/// Tensors of which every third has its columns and rows in each other's place. Their sizes differ where they are joined.
fn long_lists(device: &Device, storage: Storage) -> Result<(), Failed> {
    const COUNT: usize = 37;
    for dim in 0..3 {
        let sizes: Vec<usize> = (0..COUNT).map(|part| (part + 2) % 4).collect();
        let of = |part: usize| {
            let mut shape = [3, 4, 5];
            shape[dim] = sizes[part];
            let lies = if part % 3 == 1 { Lies::Turned } else { Lies::PixelsLast };
            drawn::<3>(part as u64, shape, lies, storage, device)
        };
        let drawn: Vec<_> = (0..COUNT).map(of).collect::<Result<_, _>>()?;
        let (numbers, tensors): (Vec<Vec<f64>>, Vec<Tensor<3>>) = drawn.into_iter().unzip();
        let outer: usize = [3, 4, 5][..dim].iter().product();
        let mut expected = joined_numbers(&numbers, outer);
        expected.iter_mut().for_each(|number| *number = storage.round(*number + *number));
        device.sync().map_err(|error| error.to_string())?;
        let (joined, blocks) = blocks_of(device, || {
            let joined = Tensor::cat(tensors, dim);
            Ok(joined.clone() + joined)
        })?;
        let told = format!("along {dim}, {storage:?}");
        // Sixteen a launch; some go by vectors.
        if !(2..=9).contains(&ours(&blocks)) {
            return Err(format!("{told}: {} launches: {blocks:#?}", ours(&blocks)).into());
        }
        same(&told, values(joined)?, &expected)?;
    }
    Ok(())
}

fn whole_numbers(device: &Device) -> Result<(), Failed> {
    const COUNT: i64 = 700;
    let one = |number| Tensor::<1, Int>::from_data([number], device);
    let parts: Vec<_> = (0..COUNT).map(one).collect();
    device.sync().map_err(|error| error.to_string())?;
    let (joined, blocks) = blocks_of(device, || Ok(Tensor::cat(parts, 0)))?;
    let found: Vec<i64> = joined.into_data().iter().collect();
    match ours(&blocks) {
        1..=88 if found == (0..COUNT).collect::<Vec<_>>() => Ok(()),
        launches => Err(format!("{launches} launches, {found:?}").into()),
    }
}

/// Along other dimensions, with steps, of whole numbers.
fn others(device: &Device) -> Result<(), Failed> {
    let shape = [2, 6, 4, 5];
    let (numbers, x) = drawn(1, shape, Lies::ChannelsLast, F32, device)?;
    let (_, blocks) = blocks_of(device, || {
        let every_other = x.clone().slice([Slice::full(), Slice::new(0, None, 2)]);
        let reversed = x.clone().slice([Slice::full(), Slice::new(0, None, -1)]);
        let corner = x.clone().slice(s![.., 1..4, 1..3, ..]);
        let rows = Tensor::cat(vec![x.clone(), x.clone()], 2);
        let at = |image: usize, channel: usize, row: usize, column: usize| {
            numbers[((image * 6 + channel) * 4 + row) * 5 + column]
        };
        let of = |channels: &[usize], rows: &[usize]| -> Vec<f64> {
            let pixels = |image, channel| {
                let line = move |row: &usize| {
                    let row = *row;
                    (0..5).map(move |column| (image, channel, row, column))
                };
                rows.iter().flat_map(line)
            };
            let images = (0..2).flat_map(|image| channels.iter().map(move |at| (image, *at)));
            let places = images.flat_map(|(image, channel)| pixels(image, channel));
            places.map(|(image, channel, row, column)| at(image, channel, row, column)).collect()
        };
        let all = [0, 1, 2, 3];
        same("every other channel", values(every_other)?, &of(&[0, 2, 4], &all))?;
        same("channels reversed", values(reversed)?, &of(&[5, 4, 3, 2, 1, 0], &all))?;
        same("a corner", values(corner)?, &of(&[1, 2, 3], &[1, 2]))?;
        let twice = [0, 1, 2, 3, 0, 1, 2, 3];
        same("rows joined", values(rows)?, &of(&[0, 1, 2, 3, 4, 5], &twice))
    })?;
    match ours(&blocks) {
        0 => Ok(()),
        _ => Err(format!("the kernel does not serve these: {blocks:#?}").into()),
    }
}

fn empty(device: &Device) -> Result<(), Failed> {
    let (numbers, x) = drawn(1, [2, 3, 4, 5], Lies::ChannelsLast, F32, device)?;
    let none: Tensor<4> = Tensor::zeros([2, 0, 4, 5], device);
    let joined = Tensor::cat(vec![none.clone(), x], 1);
    same("with nothing", values(joined)?, &numbers)?;
    let nothing = Tensor::cat(vec![none.clone(), none], 1);
    match nothing.dims() {
        [2, 0, 4, 5] => Ok(()),
        dims => Err(format!("nothing joined is {dims:?}").into()),
    }
}

/// The gradient of each is that part of what comes back. In 16 bits no part begins where a view of it may.
fn gradients(device: &Device) -> Result<(), Failed> {
    let training = device.clone().autodiff();
    let on = |x: Tensor<4>| Tensor::<4>::from_inner(x).require_grad();
    let (_, x) = drawn(1, [2, 5, 3, 3], Lies::ChannelsLast, Storage::F16, device)?;
    let (_, y) = drawn(2, [2, 3, 3, 3], Lies::ChannelsLast, Storage::F16, device)?;
    let (numbers, dy) = drawn(3, [2, 8, 3, 3], Lies::ChannelsLast, Storage::F16, device)?;
    let (x, y, dy) = (on(x), on(y), Tensor::<4>::from_inner(dy));
    training.sync().map_err(|error| error.to_string())?;
    let ((dx, dy), blocks) = blocks_of(device, || {
        let joined = Tensor::cat(vec![x.clone(), y.clone()], 1);
        let gradients = (joined * dy).sum().backward();
        Ok((x.grad(&gradients), y.grad(&gradients)))
    })?;
    let (dx, dy) = (dx.ok_or("x has no gradient")?, dy.ok_or("y has no gradient")?);
    let image =
        |image: usize, pixels: std::ops::Range<usize>| numbers[image * 72..][pixels].to_vec();
    let of = |pixels: std::ops::Range<usize>| [image(0, pixels.clone()), image(1, pixels)].concat();
    same("dx", values(dx)?, &of(0..45))?;
    same("dy", values(dy)?, &of(45..72))?;
    match ours(&blocks) {
        // Burn joins them, and multiplies on the way.
        2 => Ok(()),
        launches => Err(format!("{launches} launches: {blocks:#?}").into()),
    }
}

/// Images of convolutions are joined and convolved without a copy.
fn between_convolutions(device: &Device) -> Result<(), Failed> {
    let options = || ConvOptions::new([1; 2], [0; 2], [1; 2], 1);
    let (_, x) = drawn(1, [2, 8, 6, 6], Lies::ChannelsLast, F32, device)?;
    let (_, narrow) = drawn(2, [8, 8, 1, 1], Lies::PixelsLast, F32, device)?;
    let (_, wide) = drawn(3, [8, 16, 1, 1], Lies::PixelsLast, F32, device)?;
    device.sync().map_err(|error| error.to_string())?;
    let (y, blocks) = blocks_of(device, || {
        let once = conv2d(x, narrow.clone(), None, options());
        let twice = conv2d(once.clone(), narrow, None, options());
        Ok(conv2d(Tensor::cat(vec![once, twice], 1), wide, None, options()))
    })?;
    values(y)?;
    let copies = blocks.iter().flat_map(|block| &block.kernels);
    let copies = copies.filter(|kernel| kernel.contains("contiguous")).count();
    // Weights are copied where the device leaves gaps behind their rows.
    match (ours(&blocks), copies) {
        (1, 0..=3) => Ok(()),
        counts => Err(format!("{counts:?} launches of the kernel and copies: {blocks:#?}").into()),
    }
}

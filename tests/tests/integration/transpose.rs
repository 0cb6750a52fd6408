//! Matrices turned over, to the bit.

use blackburn_kernels::{KernelError, buffer::Buffer, transpose::transpose};
use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::{
    buffers::{download, dtype, upload},
    on_device, on_device_with,
};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

/// Rows, columns, and how far columns are apart: around squares of 32 and 64, odd rows, with gaps and without.
const SHAPES: [[usize; 3]; 8] = [
    [2, 2, 2],
    [1, 6, 2],
    [31, 34, 32],
    [64, 64, 64],
    [65, 66, 70],
    [127, 2, 128],
    [33, 1000, 34],
    [500, 130, 500],
];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials: Vec<Trial> = Storage::ALL
        .map(|storage| {
            let name = format!("transpose::rows_follow_each_other_in_{storage:?}").to_lowercase();
            Trial::ignorable_test(name, move || {
                on_device_with(dtype(storage), |client| turned(client, storage))
            })
        })
        .into();
    trials
        .push(Trial::ignorable_test("transpose::bad_arguments_are_named", || on_device(refusals)));
    trials
}

fn turned(client: &Client, storage: Storage) -> Result<(), Failed> {
    for [rows, columns, pitch] in SHAPES {
        let numbers = normal(1, columns * pitch, 1.0, storage);
        let source = upload(client, &numbers, storage);
        let target = upload(client, &vec![0.5; rows * columns], storage);
        transpose(client, &source, &target.clone(), columns, pitch)?;
        let found = download(client, target, storage)?;
        for (place, found) in found.into_iter().enumerate() {
            let (row, column) = (place / columns, place % columns);
            let expected = numbers[column * pitch + row];
            if found != expected {
                let named = format!("{rows} x {columns}, {pitch} apart, at {row}, {column}");
                return Err(format!("{named}: {found} in the place of {expected}").into());
            }
        }
    }
    Ok(())
}

fn refusals(client: &Client) -> Result<(), Failed> {
    let of = |storage, elements: usize| upload(client, &vec![1.0; elements], storage);
    let floats = |elements| of(Storage::F32, elements);
    let named = |source: &Buffer, target: &Buffer, columns, pitch| match transpose(
        client, source, target, columns, pitch,
    ) {
        Err(KernelError::InvalidProblem { argument, .. }) => Ok(argument),
        other => Err(Failed::from(format!("{other:?}"))),
    };
    // Too short, too near each other, no whole number of rows, and another type.
    assert_eq!(named(&floats(11), &floats(12), 3, 4)?, "source");
    assert_eq!(named(&floats(12), &floats(12), 3, 3)?, "source");
    assert_eq!(named(&floats(12), &floats(13), 3, 4)?, "target");
    assert_eq!(named(&floats(12), &of(Storage::F16, 12), 3, 4)?, "target");
    // Pairs of 2 bytes that lie in no word.
    for (columns, pitch) in [(3, 4), (4, 3)] {
        let [source, target] = [(); 2].map(|()| of(Storage::F16, 12));
        let refused = transpose(client, &source, &target, columns, pitch);
        assert!(matches!(refused, Err(KernelError::Unsupported { .. })), "{refused:?}");
    }
    transpose(client, &floats(0), &floats(0), 3, 4)?;
    Ok(())
}

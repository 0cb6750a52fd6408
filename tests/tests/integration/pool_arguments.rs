//! Arguments that pools refuse, by name, and problems that they leave to others.

use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    pool::{
        PoolProblem, PoolWindow, Windows, average_pool, average_pool_backward, max_pool,
        max_pool_backward,
    },
};
use blackburn_reference::storage::Storage;
use blackburn_tests::{
    buffers::{dtype, upload, upload_behind, upload_integers},
    on_device,
};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};
use std::fmt::Debug;

const F32: Storage = Storage::F32;

pub(super) fn trials() -> Vec<Trial> {
    let trial = |name: &str, test: fn(&Client) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("pool::{name}"), move || on_device(test))
    };
    vec![
        trial("arguments_that_do_not_go_with_the_problem_are_named", named),
        trial("what_no_kernel_serves_is_declined", declined),
    ]
}

/// Two images of 6 by 6 pixels to 3 by 3, of 4 channels.
fn problem() -> PoolProblem {
    PoolProblem::contiguous([2, 6, 6, 4], PoolWindow::square(2, 2), dtype(F32))
}

fn numbers(client: &Client, count: usize) -> Buffer {
    upload(client, &vec![1.0; count], F32)
}

fn expect_named<T: Debug>(result: Result<T, KernelError>, expected: &str) -> Result<(), Failed> {
    match result {
        Err(KernelError::InvalidProblem { op: "pool", argument, .. }) if argument == expected => {
            Ok(())
        }
        other => Err(format!("{expected}: {other:?}").into()),
    }
}

fn expect_declined<T: Debug>(result: Result<T, KernelError>) -> Result<(), Failed> {
    match result {
        Err(KernelError::Unsupported { op: "pool", .. }) => Ok(()),
        other => Err(format!("{other:?}").into()),
    }
}

fn named(client: &Client) -> Result<(), Failed> {
    let [x, dy] = [288, 72].map(|count| numbers(client, count));
    let indices = upload_integers(client, &[0; 72]);
    let short = |buffer: &Buffer| Buffer { elements: buffer.elements - 1, ..buffer.clone() };
    let problem = problem();
    max_pool(client, &problem, &x, true)?;
    max_pool_backward(client, &problem, &dy, &indices)?;
    expect_named(max_pool(client, &problem, &short(&x), true), "x")?;
    expect_named(average_pool(client, &problem, &short(&x), true), "x")?;
    expect_named(max_pool_backward(client, &problem, &short(&dy), &indices), "dy")?;
    expect_named(average_pool_backward(client, &problem, &short(&dy), false), "dy")?;
    expect_named(max_pool_backward(client, &problem, &dy, &short(&indices)), "indices")?;
    // Of another type.
    expect_named(max_pool_backward(client, &problem, &dy, &dy), "indices")?;
    let apart = PoolProblem { x_stride: 5, ..problem };
    expect_named(max_pool(client, &apart, &x, false), "x")?;
    let narrow = PoolProblem { x_stride: 3, ..problem };
    expect_named(max_pool(client, &narrow, &x, false), "x_stride")
}

fn declined(client: &Client) -> Result<(), Failed> {
    let x = numbers(client, 288);
    let problem = problem();
    expect_declined(max_pool(client, &PoolProblem { images: 0, ..problem }, &x, false))?;
    let adaptive = PoolProblem { windows: Windows::Adaptive, ..problem };
    expect_declined(max_pool(client, &adaptive, &x, false))?;
    let of = |window| PoolProblem::contiguous([2, 6, 6, 4], window, dtype(F32));
    let dilated = of(PoolWindow { dilation: [2; 2], ..PoolWindow::square(2, 2) });
    expect_declined(average_pool(client, &dilated, &x, false))?;
    let outside = of(PoolWindow { padding: [2; 2], ..PoolWindow::square(2, 2) });
    expect_declined(average_pool(client, &outside, &x, false))?;
    let askew = upload_behind(client, 1, &vec![1.0; 288], F32);
    expect_declined(max_pool(client, &problem, &askew, false))
}

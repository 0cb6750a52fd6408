//! Ranks as threads, where nothing may fail, and as processes, where they do.

mod faults;
mod numbers;
mod state;

use crate::{Group, GroupConfig, Launcher, World};
use std::{net::TcpListener, time::Duration};

/// The world of a rank of this machine.
pub(super) fn world(rank: usize, size: usize, port: u16) -> World {
    World {
        rank,
        size,
        local_rank: None,
        address: "127.0.0.1".into(),
        port,
        job: format!("tests {port}"),
        launcher: Launcher::Torch,
    }
}

/// A port that nobody listens on.
pub(super) fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("there are free ports");
    listener.local_addr().expect("it listens").port()
}

pub(super) fn config(world: World) -> GroupConfig {
    GroupConfig::default()
        .with_world(world)
        .with_timeout(Duration::from_secs(5))
        .with_start_timeout(Duration::from_secs(20))
        .without_ending_the_process()
}

/// What `work` gives on each of `size` ranks, which are threads.
pub(super) fn on_ranks<T: Send>(size: usize, work: impl Fn(Group) -> T + Sync) -> Vec<T> {
    on_ranks_with(size, |config| config, work)
}

/// As `on_ranks`, with options.
pub(super) fn on_ranks_with<T: Send>(
    size: usize,
    options: impl Fn(GroupConfig) -> GroupConfig + Sync,
    work: impl Fn(Group) -> T + Sync,
) -> Vec<T> {
    let port = free_port();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let (options, work) = (&options, &work);
                scope.spawn(move || {
                    let config = options(config(world(rank, size, port)));
                    work(Group::join(&config).expect("all ranks come"))
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

//! Ranks for tests: threads of one process.

use blackburn_distributed::{Group, GroupConfig, Launcher, World};
use std::{net::TcpListener, time::Duration};

/// What `work` gives on each of `size` ranks, which are threads of this process.
pub(crate) fn on_ranks<T: Send>(size: usize, work: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let listener = TcpListener::bind("127.0.0.1:0").expect("there are free ports");
    let port = listener.local_addr().expect("it listens").port();
    drop(listener);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let world = World {
                    rank,
                    size,
                    local_rank: None,
                    address: "127.0.0.1".into(),
                    port,
                    job: format!("trainers {port}"),
                    launcher: Launcher::Torch,
                };
                let config = GroupConfig::default()
                    .with_world(world)
                    .with_start_timeout(Duration::from_secs(20))
                    .with_patience(Duration::from_secs(20))
                    .without_ending_the_process();
                let work = &work;
                scope.spawn(move || work(Group::join(&config).expect("all ranks come")))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

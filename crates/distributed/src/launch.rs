//! Starts a program's own ranks on one machine.

use crate::{DistributedError, Group, GroupConfig};
use std::{
    io,
    net::TcpListener,
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

/// How long ranks have to end by themselves once one has failed: NCCL's have five seconds.
const GRACE: Duration = Duration::from_secs(10);
/// How long those have that were asked to.
const LAST_GRACE: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(20);

/// Which of the processes this one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launched {
    /// A rank, which goes on as ever.
    Rank,
    /// The process that has started the ranks, when they have ended. It has nothing left to do but to end with
    /// this code: 0 if all ranks ended with it, otherwise that of the first which did not.
    Ended(u8),
}

/// What [`start`] has come to.
#[derive(Clone, Debug)]
pub enum Started {
    /// This process is a rank of the group.
    Rank(Group),
    /// This process has started the ranks, and they have ended: see [`Launched::Ended`].
    Ended(u8),
}

/// Joins the ranks that train together, for a program with an option for their number: with `Some`, it
/// [launches](launch) them first, in a process that no launcher has started.
///
/// # Errors
///
/// As [`launch`] and [`Group::join`].
pub fn start(ranks: Option<usize>, config: &GroupConfig) -> Result<Started, DistributedError> {
    match ranks.map_or(Ok(Launched::Rank), launch)? {
        Launched::Rank => Ok(Started::Rank(Group::join(config)?)),
        Launched::Ended(code) => Ok(Started::Ended(code)),
    }
}

/// Starts this program anew as `ranks` processes of this machine, with the same arguments, and waits for them.
/// Call it first in `main`, before a device is touched:
///
/// ```no_run
/// use blackburn_distributed::{Group, GroupConfig, Launched, launch};
///
/// if let Launched::Ended(code) = launch(2)? {
///     std::process::exit(code.into());
/// }
/// let group = Group::join(&GroupConfig::default())?;
/// println!("{group}");
/// # Ok::<(), blackburn_distributed::DistributedError>(())
/// ```
///
/// In a process that a launcher has started as a rank (this function among them), and for one rank, it does
/// nothing. When a rank ends with an error, the others have 10 s to end by themselves, which they do as soon as
/// they notice; then they are ended. They are ended, too, when this process is (on Linux).
///
/// # Errors
///
/// When `ranks` is 0, another launcher has started another number of ranks, or a process cannot be started.
pub fn launch(ranks: usize) -> Result<Launched, DistributedError> {
    let refused = |expected, actual| {
        let (operation, argument) = ("launch", "ranks");
        Err(DistributedError::Argument { operation, argument, expected, actual })
    };
    let world = crate::world::World::from_environment()?;
    match (world.size, ranks) {
        (_, 0) => return refused("at least 1", "0".into()),
        (1, 1) => return Ok(Launched::Rank),
        (1, _) => {}
        (size, _) if size == ranks => return Ok(Launched::Rank),
        (size, _) => {
            let actual = format!("{ranks}, where a launcher has started {size}");
            return refused("what the launcher was asked for, or nothing", actual);
        }
    }
    let failed = |rank: usize| {
        move |error: io::Error| DistributedError::Launch {
            rank,
            size: ranks,
            reason: error.to_string(),
        }
    };
    // Free now; rank 0 tries the next ones if it is not by then.
    let port = TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| Ok(listener.local_addr()?.port()))
        .map_err(failed(0))?;
    let program = std::env::current_exe().map_err(failed(0))?;
    let mut children = Vec::new();
    for rank in 0..ranks {
        let mut command = Command::new(&program);
        command
            .args(std::env::args_os().skip(1))
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("TORCHELASTIC_RUN_ID", format!("launch {}", std::process::id()))
            .env_remove("TORCHELASTIC_USE_AGENT_STORE")
            .stdin(Stdio::null());
        ends_with_parent(&mut command);
        match command.spawn() {
            Ok(child) => children.push(child),
            Err(error) => {
                end(&mut children);
                return Err(failed(rank)(error));
            }
        }
    }
    Ok(Launched::Ended(wait(children)))
}

/// Waits for all, and ends those that do not end where one has failed.
fn wait(mut children: Vec<Child>) -> u8 {
    let mut code = 0;
    let mut failed_at: Option<Instant> = None;
    while !children.is_empty() {
        children.retain_mut(|child| match child.try_wait() {
            Ok(None) => true,
            Ok(Some(status)) if status.success() => false,
            Ok(Some(status)) => {
                if failed_at.is_none() {
                    (code, failed_at) = (code_of(status), Some(Instant::now()));
                }
                false
            }
            Err(_) => false,
        });
        if failed_at.is_some_and(|since| since.elapsed() > GRACE) {
            end(&mut children);
            return code;
        }
        std::thread::sleep(PAUSE);
    }
    code
}

fn code_of(status: ExitStatus) -> u8 {
    // One that a signal has ended has no code.
    status.code().and_then(|code| u8::try_from(code).ok()).filter(|code| *code != 0).unwrap_or(1)
}

/// Asks the processes to end, and ends those that do not.
fn end(children: &mut [Child]) {
    #[cfg(unix)]
    for child in children.iter() {
        // SAFETY: signals to a process that this one has started and not waited for, so that its number is
        // still its own.
        unsafe {
            libc::kill(child.id() as libc::pid_t, libc::SIGTERM);
            // One that was stopped hears of it when it goes on.
            libc::kill(child.id() as libc::pid_t, libc::SIGCONT);
        }
    }
    let since = Instant::now();
    let is_alive = |child: &mut Child| matches!(child.try_wait(), Ok(None));
    while cfg!(unix) && since.elapsed() < LAST_GRACE && children.iter_mut().any(is_alive) {
        std::thread::sleep(PAUSE);
    }
    for child in children {
        // It may have ended in the meantime.
        let _ = child.kill();
        let _ = child.wait();
    }
}

#[cfg(target_os = "linux")]
fn ends_with_parent(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    // SAFETY: the closure makes one system call and allocates nothing, as it must between fork and exec.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        });
    }
}

#[cfg(not(target_os = "linux"))]
fn ends_with_parent(_command: &mut Command) {}

//! How ranks find each other.

use super::{Control, Limits, State, frame, frame::Message, watch};
use crate::{error::DistributedError, world::World};
use gethostname::gethostname;
use std::{
    io::{self, ErrorKind},
    net::{IpAddr, Ipv4Addr, TcpListener, TcpStream, ToSocketAddrs},
    sync::{Arc, Condvar, Mutex},
    time::{Duration, Instant},
};

/// Ports that are tried after the first, which another program may have.
const FURTHER_PORTS: u16 = 9;
/// How long a stranger has to say who it is.
const HELLO: Duration = Duration::from_secs(2);
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(20);

/// A rank among the others.
pub(crate) struct Joined {
    pub(crate) control: Arc<Control>,
    /// By which this rank reaches each other one.
    pub(crate) addresses: Vec<IpAddr>,
}

/// Waits until all ranks of `world` are there.
pub(crate) fn join(
    world: &World,
    limits: Limits,
    start: Duration,
) -> Result<Joined, DistributedError> {
    let host = gethostname().to_string_lossy().into_owned();
    match world.rank {
        0 => gather(world, limits, start, host),
        _ => find(world, limits, start, host),
    }
}

/// Rank 0: waits for the others.
fn gather(
    world: &World,
    limits: Limits,
    start: Duration,
    host: String,
) -> Result<Joined, DistributedError> {
    let listener = listen(world.port)?;
    let since = Instant::now();
    let mut hosts = vec![host; world.size];
    let mut addresses = vec![IpAddr::from(Ipv4Addr::LOCALHOST); world.size];
    let mut streams: Vec<Option<TcpStream>> = (0..world.size).map(|_| None).collect();
    loop {
        let missing: Vec<usize> = (1..world.size).filter(|rank| streams[*rank].is_none()).collect();
        if missing.is_empty() {
            break;
        }
        if since.elapsed() > start {
            return Err(DistributedError::Absent { missing, size: world.size, waited: start });
        }
        if let Some(gone) =
            (1..world.size).find(|rank| streams[*rank].as_ref().is_some_and(is_gone))
        {
            let reason = format!(
                "rank {gone} (host {}) has died while ranks {missing:?} were waited for",
                hosts[gone]
            );
            return Err(DistributedError::Refused { rank: 0, reason });
        }
        let Ok((stream, from)) = listener.accept() else {
            std::thread::sleep(PAUSE);
            continue;
        };
        // Strangers and ranks of other jobs go their way.
        if let Ok((rank, its_host, stream)) = receive(world, stream, &streams) {
            tracing::debug!("rank {rank} has come from {its_host} ({from})");
            (hosts[rank], addresses[rank], streams[rank]) = (its_host, from.ip(), Some(stream));
        }
    }
    let message = Message::Welcome {
        hosts: hosts.clone(),
        addresses: addresses.iter().map(ToString::to_string).collect(),
    };
    for (rank, stream) in streams.iter_mut().enumerate() {
        let Some(stream) = stream else { continue };
        frame::write(stream, &message, &[]).map_err(|error| DistributedError::Refused {
            rank: 0,
            reason: format!("rank {rank} (host {}) has gone again: {error}", hosts[rank]),
        })?;
    }
    build(world, limits, hosts, streams, addresses)
}

fn listen(port: u16) -> Result<TcpListener, DistributedError> {
    let mut reason = String::new();
    for port in port..=port.saturating_add(FURTHER_PORTS) {
        match TcpListener::bind(("0.0.0.0", port)) {
            Ok(listener) => {
                listener.set_nonblocking(true).map_err(|error| refused(0, &error))?;
                return Ok(listener);
            }
            Err(error) => reason = error.to_string(),
        }
    }
    Err(DistributedError::Listen { port, further: FURTHER_PORTS, reason })
}

/// Whether the other end is closed.
fn is_gone(stream: &TcpStream) -> bool {
    if stream.set_nonblocking(true).is_err() {
        return true;
    }
    let peeked = stream.peek(&mut [0]);
    let is_open =
        matches!(&peeked, Ok(1..)) || peeked.is_err_and(|e| e.kind() == ErrorKind::WouldBlock);
    stream.set_nonblocking(false).is_err() || !is_open
}

/// Who has come.
fn receive(
    world: &World,
    mut stream: TcpStream,
    known: &[Option<TcpStream>],
) -> io::Result<(usize, String, TcpStream)> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(HELLO))?;
    let Message::Hello { protocol, version, job, rank, size, host } = frame::read(&mut stream)?.0
    else {
        return Err(ErrorKind::InvalidData.into());
    };
    let ours = env!("CARGO_PKG_VERSION");
    if job != world.job {
        frame::write(&mut stream, &Message::OtherJob, &[])?;
        return Err(ErrorKind::PermissionDenied.into());
    }
    let reason = if protocol != frame::PROTOCOL || version != ours {
        Some(format!("it runs Blackburn {version}, and rank 0 {ours}"))
    } else if size != world.size {
        Some(format!("it expects {size} ranks, and rank 0 {}", world.size))
    } else if known.get(rank).is_none_or(Option::is_some) || rank == 0 {
        Some(format!("there is a rank {rank} already"))
    } else {
        None
    };
    if let Some(reason) = reason {
        frame::write(&mut stream, &Message::Refused { reason }, &[])?;
        return Err(ErrorKind::PermissionDenied.into());
    }
    frame::write(&mut stream, &Message::Expected, &[])?;
    stream.set_read_timeout(None)?;
    Ok((rank, host, stream))
}

/// All ranks but 0: looks for rank 0.
fn find(
    world: &World,
    limits: Limits,
    start: Duration,
    host: String,
) -> Result<Joined, DistributedError> {
    let since = Instant::now();
    let address = format!("{}:{}", world.address, world.port);
    let hello = || Message::Hello {
        protocol: frame::PROTOCOL,
        version: env!("CARGO_PKG_VERSION").into(),
        job: world.job.clone(),
        rank: world.rank,
        size: world.size,
        host: host.clone(),
    };
    let mut reason = String::from("nothing answers");
    for port in (world.port..=world.port.saturating_add(FURTHER_PORTS)).cycle() {
        if since.elapsed() > start {
            break;
        }
        let found = connect(&world.address, port).and_then(|mut stream| {
            frame::write(&mut stream, &hello(), &[])?;
            Ok(stream)
        });
        let mut stream = match found {
            Ok(stream) => stream,
            Err(error) => {
                // A name that is not known yet, as that of a machine that starts, may be later.
                if error.kind() != ErrorKind::ConnectionRefused {
                    reason = error.to_string();
                }
                std::thread::sleep(PAUSE);
                continue;
            }
        };
        // A stranger may never answer, and rank 0 does at once.
        let left = start.saturating_sub(since.elapsed()).max(PAUSE);
        let mut answer = |patience| {
            stream.set_read_timeout(Some(patience))?;
            frame::read(&mut stream)
        };
        let answer = match answer(HELLO.min(left)) {
            Ok((Message::Expected, _)) => answer(left),
            other => other,
        };
        match answer {
            Ok((Message::Welcome { hosts, addresses }, _)) => {
                return settle(world, limits, stream, hosts, &addresses);
            }
            Ok((Message::Refused { reason: why }, _)) => {
                return Err(DistributedError::Refused { rank: world.rank, reason: why });
            }
            Ok(_) => std::thread::sleep(PAUSE),
            Err(error) => {
                reason = format!("it closed the connection before all ranks were there ({error})");
                std::thread::sleep(PAUSE);
            }
        }
    }
    let (rank, size) = (world.rank, world.size);
    Err(DistributedError::Unreachable { rank, size, address, waited: start, reason })
}

fn connect(address: &str, port: u16) -> io::Result<TcpStream> {
    let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
    for address in (address, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, HELLO) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// All ranks but 0: rank 0 has answered.
fn settle(
    world: &World,
    limits: Limits,
    stream: TcpStream,
    hosts: Vec<String>,
    addresses: &[String],
) -> Result<Joined, DistributedError> {
    let failed = |error: io::Error| refused(world.rank, &error);
    stream.set_read_timeout(None).map_err(failed)?;
    let first = stream.peer_addr().map_err(failed)?.ip();
    let reached = |(rank, address): (usize, &String)| match address.parse::<IpAddr>() {
        // Rank 0 sees ranks of its own machine at an address that others have for themselves.
        Ok(address) if rank > 0 && !address.is_loopback() => address,
        _ => first,
    };
    let addresses = addresses.iter().enumerate().map(reached).collect();
    let mut streams: Vec<Option<TcpStream>> = (0..world.size).map(|_| None).collect();
    streams[0] = Some(stream);
    build(world, limits, hosts, streams, addresses)
}

fn build(
    world: &World,
    limits: Limits,
    hosts: Vec<String>,
    streams: Vec<Option<TcpStream>>,
    addresses: Vec<IpAddr>,
) -> Result<Joined, DistributedError> {
    let failed = |error: io::Error| refused(world.rank, &error);
    let mut readers = Vec::new();
    for (rank, stream) in streams.iter().enumerate() {
        let Some(stream) = stream else { continue };
        // Whoever reads nothing for so long is as good as gone.
        stream.set_write_timeout(Some(limits.silence)).map_err(failed)?;
        readers.push((rank, stream.try_clone().map_err(failed)?));
    }
    let control = Arc::new(Control {
        rank: world.rank,
        size: world.size,
        hosts,
        limits,
        streams: streams.into_iter().map(|stream| stream.map(Mutex::new)).collect(),
        state: Mutex::new(State::new(world.size)),
        changed: Condvar::new(),
        on_failure: Mutex::default(),
    });
    watch::start(&control, readers);
    Ok(Joined { control, addresses })
}

fn refused(rank: usize, error: &io::Error) -> DistributedError {
    DistributedError::Refused { rank, reason: error.to_string() }
}

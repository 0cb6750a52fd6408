//! Numbers over TCP: a connection between each two ranks.
//!
//! A sum is in two rounds. Each rank owns an equal share of the numbers: it gets that share from all others, adds
//! in the order of ranks, and sends all others the result. So each number crosses the network twice, whatever
//! the number of ranks, and all ranks have the same bits.

use super::{
    EngineError,
    host::{Link, Numbers},
};
use crate::{
    control::{Joined, lock},
    error::DistributedError,
};
use serde::{Deserialize, Serialize};
use std::{
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, Shutdown, TcpListener, TcpStream},
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Connections to all other ranks.
#[derive(Debug)]
pub(crate) struct Tcp {
    rank: usize,
    /// By rank; none to itself.
    streams: Vec<Option<Mutex<TcpStream>>>,
    /// Messages are counted, so that ranks that are not at the same point are noticed.
    messages: AtomicU64,
}

/// Before the bytes of each message.
const HEADER: usize = 16;

/// What a rank says of itself to those that it connects to.
#[derive(Serialize, Deserialize)]
struct Place {
    port: u16,
    /// Known to the ranks of this group alone.
    secret: u64,
}

impl Tcp {
    /// Connects to all other ranks.
    pub(crate) fn new(joined: &Joined, start: Duration) -> Result<Self, DistributedError> {
        let control = &joined.control;
        let (rank, size) = (control.rank(), control.size());
        let failed = |error: io::Error| DistributedError::Refused {
            rank,
            reason: format!("connections for numbers cannot be made: {error}"),
        };
        let listener =
            TcpListener::bind((IpAddr::from(Ipv4Addr::UNSPECIFIED), 0)).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        let secret = u64::from(std::process::id()) << 32 | u64::from(port);
        let own = serde_json::to_vec(&Place { port, secret }).map_err(io::Error::other);
        let places = control
            .share("connections for numbers", own.map_err(failed)?)?
            .iter()
            .map(|place| serde_json::from_slice(place).map_err(io::Error::other))
            .collect::<io::Result<Vec<Place>>>()
            .map_err(failed)?;
        let mut streams: Vec<Option<Mutex<TcpStream>>> = (0..size).map(|_| None).collect();
        let since = Instant::now();
        // To those before it; those after it come by themselves.
        for (other, place) in places.iter().enumerate().take(rank) {
            let mut stream =
                TcpStream::connect((joined.addresses[other], place.port)).map_err(failed)?;
            stream.set_nodelay(true).map_err(failed)?;
            stream.write_all(&hello(place.secret, rank)).map_err(failed)?;
            streams[other] = Some(Mutex::new(stream));
        }
        while streams.iter().filter(|stream| stream.is_some()).count() + 1 < size {
            control.check()?;
            if since.elapsed() > start {
                let waited = start.as_secs_f64();
                let what = format!("has not been reached by all others within {waited} s");
                return Err(control.explain(rank, &what));
            }
            let Ok((stream, _)) = listener.accept() else {
                std::thread::sleep(Duration::from_millis(5));
                continue;
            };
            if let Ok((other, stream)) = receive(stream, secret)
                && let Some(place) = streams.get_mut(other)
            {
                *place = Some(Mutex::new(stream));
            }
        }
        Ok(Self { rank, streams, messages: AtomicU64::new(0) })
    }

    /// The others, and their connections.
    fn others(&self) -> impl Iterator<Item = (usize, &Mutex<TcpStream>)> {
        let there =
            |(rank, stream): (usize, &'_ Option<Mutex<TcpStream>>)| stream.as_ref().map(|_| rank);
        let ranks: Vec<usize> = self.streams.iter().enumerate().filter_map(there).collect();
        ranks.into_iter().filter_map(|rank| Some((rank, self.streams[rank].as_ref()?)))
    }

    /// Sends what `outgoing` gives for each rank, and takes what each sends, at the same time.
    fn exchange<'a>(
        &self,
        outgoing: impl Fn(usize) -> Option<&'a [u8]>,
        incoming: impl Fn(usize) -> Option<usize>,
    ) -> Result<Vec<Option<Vec<u8>>>, EngineError> {
        let number = self.messages.fetch_add(1, Ordering::Relaxed);
        std::thread::scope(|scope| {
            let mut senders = Vec::new();
            for (other, stream) in self.others() {
                let Some(bytes) = outgoing(other) else { continue };
                // A clone, since the other direction is read at the same time.
                let sender = lock(stream).try_clone();
                senders.push((other, scope.spawn(move || send(&mut sender?, number, bytes))));
            }
            let mut received: Vec<Option<Vec<u8>>> = vec![None; self.streams.len()];
            let mut failed = None;
            for (other, stream) in self.others() {
                let Some(length) = incoming(other) else { continue };
                let taken = lock(stream).try_clone().map_err(Trouble::from);
                match taken.and_then(|mut stream| receive_bytes(&mut stream, number, length)) {
                    Ok(bytes) => received[other] = Some(bytes),
                    Err(trouble) => {
                        failed = Some(EngineError { rank: other, what: trouble.0 });
                        // Senders may wait for somebody who waits for this rank.
                        self.abort();
                        break;
                    }
                }
            }
            for (other, sender) in senders {
                let sent = sender.join().unwrap_or_else(|_| Err(io::Error::other("a panic")));
                if let (Err(error), None) = (sent, &failed) {
                    let what = format!("takes no numbers: {error}");
                    failed = Some(EngineError { rank: other, what });
                }
            }
            failed.map_or(Ok(received), Err)
        })
    }

    /// The numbers that a rank adds up.
    fn share(&self, length: usize, rank: usize) -> std::ops::Range<usize> {
        let size = self.streams.len();
        length * rank / size..length * (rank + 1) / size
    }
}

impl Link for Tcp {
    fn sum(&self, numbers: &mut Numbers) -> Result<(), EngineError> {
        let (length, bytes) = (numbers.len(), numbers.size());
        let own = self.share(length, self.rank);
        let parts = self.exchange(
            |other| Some(numbers.bytes(self.share(length, other))),
            |_| Some(own.len() * bytes),
        )?;
        let mine = numbers.bytes(own.clone());
        let parts: Vec<&[u8]> = parts.iter().map(|part| part.as_deref().unwrap_or(mine)).collect();
        let sums = numbers.summed(&parts);
        let shares =
            self.exchange(|_| Some(&sums), |other| Some(self.share(length, other).len() * bytes))?;
        for (rank, share) in shares.iter().enumerate() {
            numbers.set(self.share(length, rank).start, share.as_ref().unwrap_or(&sums));
        }
        Ok(())
    }

    fn spread(&self, bytes: &mut [u8], root: usize) -> Result<(), EngineError> {
        let read: &[u8] = bytes;
        let length = read.len();
        let mut received = self.exchange(
            |_| (self.rank == root).then_some(read),
            |other| (other == root).then_some(length),
        )?;
        if let Some(new) = received.get_mut(root).and_then(Option::take) {
            bytes.copy_from_slice(&new);
        }
        Ok(())
    }

    fn abort(&self) {
        for (_, stream) in self.others() {
            // It may be closed already.
            let _ = lock(stream).shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        self.abort();
    }
}

/// What went wrong, after "rank N".
struct Trouble(String);

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self(format!("sends no numbers: {error}"))
    }
}

fn send(stream: &mut TcpStream, number: u64, bytes: &[u8]) -> io::Result<()> {
    let mut header = number.to_le_bytes().to_vec();
    header.extend((bytes.len() as u64).to_le_bytes());
    stream.write_all(&header)?;
    stream.write_all(bytes)
}

fn receive_bytes(stream: &mut TcpStream, number: u64, length: usize) -> Result<Vec<u8>, Trouble> {
    let mut header = [0; HEADER];
    stream.read_exact(&mut header)?;
    let [n0, n1, n2, n3, n4, n5, n6, n7, its_length @ ..] = header;
    let its_number = u64::from_le_bytes([n0, n1, n2, n3, n4, n5, n6, n7]);
    let its_length = u64::from_le_bytes(its_length);
    if (its_number, its_length) != (number, length as u64) {
        return Err(Trouble(format!(
            "sends {its_length} bytes as its message {its_number}, where this rank waits for {length} \
             bytes as message {number}: the ranks do different things"
        )));
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn hello(secret: u64, rank: usize) -> [u8; HEADER] {
    let mut hello = [0; HEADER];
    hello[..8].copy_from_slice(&secret.to_le_bytes());
    hello[8..].copy_from_slice(&(rank as u64).to_le_bytes());
    hello
}

/// Who has come.
fn receive(mut stream: TcpStream, secret: u64) -> io::Result<(usize, TcpStream)> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    let mut said = [0; HEADER];
    stream.read_exact(&mut said)?;
    stream.set_read_timeout(None)?;
    let [s0, s1, s2, s3, s4, s5, s6, s7, rank @ ..] = said;
    match u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]) == secret {
        true => Ok((u64::from_le_bytes(rank) as usize, stream)),
        false => Err(io::ErrorKind::PermissionDenied.into()),
    }
}

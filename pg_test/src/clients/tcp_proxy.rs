//! A worker's network link to the server: a TCP proxy that can swallow or delay bytes without either side noticing.

use crate::process::PATIENCE;
use anyhow::Result;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A direction of a network link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Requests,
    Answers,
    Both,
}

/// A state of a worker's network link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkState {
    Swallows(Direction),
    DelaysAnswers(Duration),
    Restored,
}

/// The link of one worker, for all its connections.
pub struct TcpProxy {
    port: u16,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// The port of the server or the pooler.
    target: AtomicU16,
    swallows_requests: AtomicBool,
    swallows_answers: AtomicBool,
    delay_ms: AtomicU64,
    holds: AtomicBool,
    is_holding: AtomicBool,
    gone: AtomicBool,
    /// The number of connections, and of answers that followed a request.
    opened: AtomicU64,
    round_trips: AtomicU64,
    /// True if the last message was a request.
    is_after_request: AtomicBool,
    connections: Mutex<Vec<Arc<Connection>>>,
}

/// Both sockets of what the worker takes for one connection.
struct Connection {
    client: TcpStream,
    server: TcpStream,
    /// True if bytes or an end were swallowed, so that the connection can never continue.
    is_broken: AtomicBool,
}

impl TcpProxy {
    /// Makes a link to this port.
    pub fn start(target: u16) -> Result<TcpProxy> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        let shared = Arc::new(Shared::default());
        shared.target.store(target, SeqCst);
        let behind = shared.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                while behind.holds.load(SeqCst) && !behind.gone.load(SeqCst) {
                    behind.is_holding.store(true, SeqCst);
                    std::thread::sleep(Duration::from_millis(5));
                }
                behind.is_holding.store(false, SeqCst);
                if behind.gone.load(SeqCst) {
                    return;
                }
                // If no server listens, the client's connection is closed.
                let _ = connect(&behind, client);
            }
        });
        Ok(TcpProxy { port, shared })
    }

    /// The port to which the worker connects.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The number of connections so far.
    pub fn connections(&self) -> u64 {
        self.shared.opened.load(SeqCst)
    }

    /// The number of answers that followed a request, counting one connection at a time.
    pub fn round_trips(&self) -> u64 {
        self.shared.round_trips.load(SeqCst)
    }

    /// Directs new connections to this port.
    pub fn redirect(&self, target: u16) {
        self.shared.target.store(target, SeqCst);
    }

    pub fn set(&self, state: LinkState) {
        match state {
            LinkState::Swallows(direction) => {
                self.shared.swallows_requests.store(direction != Direction::Answers, SeqCst);
                self.shared.swallows_answers.store(direction != Direction::Requests, SeqCst);
            }
            LinkState::DelaysAnswers(delay) => {
                self.shared.delay_ms.store(delay.as_millis() as u64, SeqCst);
            }
            LinkState::Restored => self.restore(),
        }
    }

    /// Holds new connections: the client waits for the server's first message.
    pub fn hold(&self) {
        self.shared.holds.store(true, SeqCst);
    }

    /// Returns true if a connection is being held.
    pub fn is_holding(&self) -> bool {
        self.shared.is_holding.load(SeqCst)
    }

    /// Lets held and new connections through.
    pub fn let_through(&self) {
        self.shared.holds.store(false, SeqCst);
    }

    fn restore(&self) {
        self.shared.swallows_requests.store(false, SeqCst);
        self.shared.swallows_answers.store(false, SeqCst);
        self.shared.delay_ms.store(0, SeqCst);
        self.shared.connections().retain(|connection| {
            let is_broken = connection.is_broken.load(SeqCst);
            if is_broken {
                connection.end();
            }
            !is_broken
        });
    }
}

impl Drop for TcpProxy {
    fn drop(&mut self) {
        self.shared.gone.store(true, SeqCst);
        self.shared.connections().iter().for_each(|connection| connection.end());
        // Wakes the listener, which then ends.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
    }
}

impl Shared {
    fn connections(&self) -> MutexGuard<'_, Vec<Arc<Connection>>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    fn count(&self, direction: Direction) {
        let was_after_request =
            self.is_after_request.swap(direction == Direction::Requests, SeqCst);
        if was_after_request && direction == Direction::Answers {
            self.round_trips.fetch_add(1, SeqCst);
        }
    }
}

impl Connection {
    fn end(&self) {
        let _ = self.client.shutdown(Shutdown::Both);
        let _ = self.server.shutdown(Shutdown::Both);
    }
}

fn connect(shared: &Arc<Shared>, client: TcpStream) -> Result<()> {
    let target = SocketAddr::from((Ipv4Addr::LOCALHOST, shared.target.load(SeqCst)));
    let server = TcpStream::connect_timeout(&target, PATIENCE)?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let connection = Arc::new(Connection { client, server, is_broken: AtomicBool::new(false) });
    shared.opened.fetch_add(1, SeqCst);
    shared.connections().push(connection.clone());
    for direction in [Direction::Requests, Direction::Answers] {
        let (shared, connection) = (shared.clone(), connection.clone());
        std::thread::spawn(move || carry(&shared, &connection, direction));
    }
    Ok(())
}

/// Copies bytes in one direction until the connection ends.
fn carry(shared: &Shared, connection: &Connection, direction: Direction) {
    let (mut from, mut to, swallows) = match direction {
        Direction::Requests => (&connection.client, &connection.server, &shared.swallows_requests),
        _ => (&connection.server, &connection.client, &shared.swallows_answers),
    };
    let mut bytes = [0; 16 * 1024];
    loop {
        let count = from.read(&mut bytes).unwrap_or(0);
        if count > 0 {
            shared.count(direction);
        }
        if direction == Direction::Answers {
            std::thread::sleep(Duration::from_millis(shared.delay_ms.load(SeqCst)));
        }
        if swallows.load(SeqCst) {
            connection.is_broken.store(true, SeqCst);
        } else if count == 0 || to.write_all(&bytes[..count]).is_err() {
            return connection.end();
        }
        if count == 0 {
            return;
        }
    }
}

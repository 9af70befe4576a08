//! A worker's network link to the server: a TCP proxy that can swallow or delay bytes without either side noticing.

use crate::process::PATIENCE;
use anyhow::Result;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A direction of a network link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Requests,
    Answers,
}

use Direction::{Answers, Requests};

pub const BOTH: &[Direction] = &[Requests, Answers];

/// The link of one worker, for all its connections.
pub struct TcpProxy {
    port: u16,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// The port of the server or the pooler.
    target: AtomicU16,
    /// Whether requests are swallowed, and answers.
    swallows: [AtomicBool; 2],
    delay_ms: AtomicU64,
    holds: AtomicBool,
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
        let link = TcpProxy { port, shared: Arc::default() };
        link.redirect(target);
        let shared = link.shared.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                shared.opened.fetch_add(1, SeqCst);
                while shared.holds.load(SeqCst) && !shared.gone.load(SeqCst) {
                    std::thread::sleep(Duration::from_millis(5));
                }
                if shared.gone.load(SeqCst) {
                    return;
                }
                // If no server listens, the client's connection is closed.
                let _ = connect(&shared, client);
            }
        });
        Ok(link)
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

    /// Swallows what goes in these directions, and nothing else.
    pub fn swallow(&self, directions: &[Direction]) {
        for direction in BOTH {
            let swallows = &self.shared.swallows[*direction as usize];
            swallows.store(directions.contains(direction), SeqCst);
        }
    }

    /// Delays each answer.
    pub fn delay_answers(&self, delay: Duration) {
        self.shared.delay_ms.store(delay.as_millis() as u64, SeqCst);
    }

    /// Swallows and delays nothing more. Connections that have lost something end.
    pub fn restore(&self) {
        self.swallow(&[]);
        self.delay_answers(Duration::ZERO);
        self.shared.connections().retain(|connection| {
            let is_broken = connection.is_broken.load(SeqCst);
            if is_broken {
                connection.end();
            }
            !is_broken
        });
    }

    /// Holds new connections, whose clients wait for the server's first message, or lets them through.
    pub fn hold(&self, holds: bool) {
        self.shared.holds.store(holds, SeqCst);
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

impl Connection {
    fn end(&self) {
        let _ = self.client.shutdown(Shutdown::Both);
        let _ = self.server.shutdown(Shutdown::Both);
    }
}

fn connect(shared: &Arc<Shared>, client: TcpStream) -> Result<()> {
    let target = (Ipv4Addr::LOCALHOST, shared.target.load(SeqCst)).into();
    let server = TcpStream::connect_timeout(&target, PATIENCE)?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let connection = Arc::new(Connection { client, server, is_broken: AtomicBool::new(false) });
    shared.connections().push(connection.clone());
    for &direction in BOTH {
        let (shared, connection) = (shared.clone(), connection.clone());
        std::thread::spawn(move || carry(&shared, &connection, direction));
    }
    Ok(())
}

/// Copies bytes in one direction until the connection ends.
fn carry(shared: &Shared, connection: &Connection, direction: Direction) {
    let (mut from, mut to) = match direction {
        Requests => (&connection.client, &connection.server),
        Answers => (&connection.server, &connection.client),
    };
    let mut bytes = [0; 16 * 1024];
    loop {
        let count = from.read(&mut bytes).unwrap_or(0);
        let is_answer = direction == Answers;
        if count > 0 && shared.is_after_request.swap(!is_answer, SeqCst) && is_answer {
            shared.round_trips.fetch_add(1, SeqCst);
        }
        if is_answer {
            std::thread::sleep(Duration::from_millis(shared.delay_ms.load(SeqCst)));
        }
        if shared.swallows[direction as usize].load(SeqCst) {
            connection.is_broken.store(true, SeqCst);
        } else if count == 0 || to.write_all(&bytes[..count]).is_err() {
            return connection.end();
        }
        if count == 0 {
            return;
        }
    }
}

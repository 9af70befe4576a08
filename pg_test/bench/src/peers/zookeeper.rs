//! ZooKeeper: one server, on the same disk. An ephemeral node is created if it does not exist, and deleted again; the
//! zxid of its creation is the token. The few messages that are needed are encoded here by hand. The peer takes part if
//! Java and ZooKeeper's Java library are installed; the tests do not install them.

use crate::peer::{Locker, Peer};
use crate::workbench::Workbench;
use anyhow::{Context, Result, bail, ensure};
use pg_test::service::{self, Service};
use pg_test::setup::Package;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// The peer's name in the report.
pub const NAME: &str = "ZooKeeper";
/// ZooKeeper's default tick.
const TICK: Duration = Duration::from_secs(2);

/// A ZooKeeper server that is stopped with the bench.
struct ZooKeeper(Service);

/// Starts a server with its default settings.
pub fn start(bench: &Workbench) -> Result<Box<dyn Peer>> {
    if bench.options.short {
        bail!("left out of the short form, as Java starts slowly");
    }
    if !service::zookeeper_packages().iter().all(Package::is_installed) {
        bail!("the package libzookeeper-java, or a Java, is not installed");
    }
    Ok(Box::new(ZooKeeper(service::zookeeper(bench.harness.rundir(), TICK)?)))
}

impl Peer for ZooKeeper {
    fn name(&self) -> String {
        NAME.to_owned()
    }

    fn join(&self, _client: usize) -> Result<Box<dyn Locker>> {
        Ok(Box::new(Client::open(self.0.port())?))
    }
}

/// The session timeout.
const TIMEOUT: Duration = Duration::from_secs(40);

struct Client {
    stream: TcpStream,
    sent: i32,
}

const CREATE: i32 = 1;
const DELETE: i32 = 2;
const CLOSE: i32 = -11;
const NODE_EXISTS: i32 = -110;

impl Client {
    fn open(port: u16) -> Result<Client> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_nodelay(true)?;
        // A client that connects during startup may never get an answer, which must not use up the whole wait.
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        let mut client = Client { stream, sent: 0 };
        // The fields are the version, the last zxid seen, the timeout in ms, no session yet, and no password.
        let timeout = int(TIMEOUT.as_millis() as i32);
        let hello = [int(0), vec![0; 8], timeout, vec![0; 8], text(&[0; 16])];
        let answer = client.exchange(&hello.concat())?;
        let timeout = answer.get(4..8).context("a short answer")?;
        ensure!(timeout != [0; 4], "it gave no session");
        Ok(client)
    }

    fn exchange(&mut self, message: &[u8]) -> Result<Vec<u8>> {
        self.stream.write_all(&text(message))?;
        let mut length = [0; 4];
        self.stream.read_exact(&mut length)?;
        let mut answer = vec![0; usize::try_from(i32::from_be_bytes(length))?];
        self.stream.read_exact(&mut answer)?;
        Ok(answer)
    }

    /// Sends a request and returns the zxid and the error of the answer.
    fn call(&mut self, kind: i32, rest: &[Vec<u8>]) -> Result<(i64, i32)> {
        self.sent += 1;
        let answer = self.exchange(&[int(self.sent), int(kind), rest.concat()].concat())?;
        let head = answer.first_chunk::<16>().context("a short answer")?;
        let (xid, zxid, error) = (&head[0..4], &head[4..12], &head[12..16]);
        ensure!(xid == self.sent.to_be_bytes(), "an answer to another question");
        Ok((i64::from_be_bytes(zxid.try_into()?), i32::from_be_bytes(error.try_into()?)))
    }
}

impl Locker for Client {
    fn acquire(&mut self, name: &str) -> Result<Option<i64>> {
        let path = text(format!("/{name}").as_bytes());
        // The fields are the path and data, one ACL with all rights for world:anyone, and 1 for ephemeral.
        let (world, anyone) = (text(b"world"), text(b"anyone"));
        match self.call(CREATE, &[path, text(b"bench"), int(1), int(31), world, anyone, int(1)])? {
            (zxid, 0) => Ok(Some(zxid)),
            (_, NODE_EXISTS) => Ok(None),
            (_, error) => bail!("ZooKeeper's error {error}"),
        }
    }

    fn release(&mut self, name: &str, _token: i64) -> Result<()> {
        // Deletes any version.
        let (_, error) = self.call(DELETE, &[text(format!("/{name}").as_bytes()), int(-1)])?;
        ensure!(error == 0, "ZooKeeper's error {error}");
        Ok(())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.call(CLOSE, &[]);
    }
}

fn int(number: i32) -> Vec<u8> {
    number.to_be_bytes().to_vec()
}

/// Bytes after their length, the encoding of texts and whole messages.
fn text(bytes: &[u8]) -> Vec<u8> {
    [&int(bytes.len() as i32), bytes].concat()
}

//! ZooKeeper, one server, on the same disk: an ephemeral node is created where there is none and deleted
//! again; the zxid of its creation is the token. The few messages that are needed are written here by hand.
//! It takes part where its Java library and a Java are installed: the lab does not install those itself.

use crate::peer::{Locker, Peer};
use crate::workbench::Workbench;
use anyhow::{bail, ensure, Context, Result};
use pg_test::service::{self, Service};
use pg_test::setup::Package;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Its name in the report.
pub const NAME: &str = "ZooKeeper";
/// As it has when nothing else is said.
const TICK: Duration = Duration::from_secs(2);

/// A ZooKeeper that was started for the bench and ends with it.
struct ZooKeeper(Service);

/// Starts a server with its built-in settings.
pub fn start(bench: &Workbench) -> Result<Box<dyn Peer>> {
    if bench.options.short {
        bail!("left out of the short form, as Java starts slowly");
    }
    if !service::zookeeper_packages().iter().all(Package::is_installed) {
        bail!("the package libzookeeper-java, or a Java, is not installed");
    }
    Ok(Box::new(ZooKeeper(service::zookeeper(bench.lab.rundir(), TICK)?)))
}

impl Peer for ZooKeeper {
    fn name(&self) -> String {
        NAME.to_owned()
    }

    fn join(&self, _client: usize) -> Result<Box<dyn Locker>> {
        Ok(Box::new(Client::open(self.0.port())?))
    }
}

/// How long a session lives on of which nothing is heard.
const TIMEOUT: Duration = Duration::from_secs(40);

struct Client {
    stream: TcpStream,
    asked: i32,
}

const CREATE: i32 = 1;
const DELETE: i32 = 2;
const CLOSE: i32 = -11;
const NODE_EXISTS: i32 = -110;

impl Client {
    fn open(port: u16) -> Result<Client> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_nodelay(true)?;
        // A client that connects while it still starts may never be answered: that must not use up the whole wait.
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        let mut client = Client { stream, asked: 0 };
        // Version, last zxid seen, timeout in ms, no session yet, no password.
        let timeout = int(TIMEOUT.as_millis() as i32);
        let hello = [int(0), vec![0; 8], timeout, vec![0; 8], text(&[0; 16])];
        let answer = client.ask(&hello.concat())?;
        let timeout = answer.get(4..8).context("a short answer")?;
        ensure!(timeout != [0; 4], "it gave no session");
        Ok(client)
    }

    fn ask(&mut self, message: &[u8]) -> Result<Vec<u8>> {
        self.stream.write_all(&text(message))?;
        let mut length = [0; 4];
        self.stream.read_exact(&mut length)?;
        let mut answer = vec![0; usize::try_from(i32::from_be_bytes(length))?];
        self.stream.read_exact(&mut answer)?;
        Ok(answer)
    }

    /// The zxid and the error of an answer.
    fn call(&mut self, kind: i32, rest: &[Vec<u8>]) -> Result<(i64, i32)> {
        self.asked += 1;
        let answer = self.ask(&[int(self.asked), int(kind), rest.concat()].concat())?;
        let head = answer.first_chunk::<16>().context("a short answer")?;
        let (xid, zxid, error) = (&head[0..4], &head[4..12], &head[12..16]);
        ensure!(xid == self.asked.to_be_bytes(), "an answer to another question");
        Ok((i64::from_be_bytes(zxid.try_into()?), i32::from_be_bytes(error.try_into()?)))
    }
}

impl Locker for Client {
    fn acquire(&mut self, name: &str) -> Result<Option<i64>> {
        let path = text(format!("/{name}").as_bytes());
        // Path and data; one right, all that there are, for the world's anyone; 1 is ephemeral.
        let (world, anyone) = (text(b"world"), text(b"anyone"));
        match self.call(CREATE, &[path, text(b"bench"), int(1), int(31), world, anyone, int(1)])? {
            (zxid, 0) => Ok(Some(zxid)),
            (_, NODE_EXISTS) => Ok(None),
            (_, error) => bail!("ZooKeeper's error {error}"),
        }
    }

    fn release(&mut self, name: &str, _token: i64) -> Result<()> {
        // Whatever its version.
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

/// Bytes behind their number, as texts and whole messages are.
fn text(bytes: &[u8]) -> Vec<u8> {
    [&int(bytes.len() as i32), bytes].concat()
}

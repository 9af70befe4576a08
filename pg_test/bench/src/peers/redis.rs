//! Redis as its documentation recommends: SET NX PX, released by compare-and-delete in Lua, with a counter for a
//! fencing token in the same script. The server is Debian's, with its default settings or with an append-only file that
//! is flushed at each command.

use crate::peer::{Locker, Peer, TTL};
use crate::workbench::Workbench;
use ::redis::{Connection, Script};
use anyhow::{Result, ensure};
use pg_test::service::{self, Service};

/// The peers' names in the report.
pub const NAME: &str = "Redis, default durability";
/// The variant that loses nothing in a crash.
pub const NAME_DURABLE: &str = "Redis, appendfsync always";

/// A Redis server that is stopped with the bench.
pub struct Redis {
    server: Service,
    durable: bool,
}

/// Starts a server with its default settings, which writes a snapshot from time to time, or one that flushes each
/// write.
pub fn start(bench: &Workbench, durable: bool) -> Result<Box<dyn Peer>> {
    Ok(Box::new(Redis { server: service::redis(bench.harness.rundir(), durable)?, durable }))
}

const ACQUIRE: &str = "
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
    return redis.call('INCR', 'token')
end
return false";

const RELEASE: &str = "
if redis.call('GET', KEYS[1]) == ARGV[1] then
    return redis.call('DEL', KEYS[1])
end
return 0";

impl Peer for Redis {
    fn name(&self) -> String {
        if self.durable { NAME_DURABLE } else { NAME }.to_owned()
    }

    fn join(&self, index: usize) -> Result<Box<dyn Locker>> {
        let server = ::redis::Client::open(format!("redis://127.0.0.1:{}/", self.server.port()))?;
        let (acquire, release) = (Script::new(ACQUIRE), Script::new(RELEASE));
        let (connection, holder) = (server.get_connection()?, format!("client {index}"));
        Ok(Box::new(Client { connection, holder, acquire, release }))
    }
}

struct Client {
    connection: Connection,
    holder: String,
    acquire: Script,
    release: Script,
}

impl Locker for Client {
    fn acquire(&mut self, name: &str) -> Result<Option<i64>> {
        let mut call = self.acquire.prepare_invoke();
        call.key(name).arg(&self.holder).arg(TTL.as_millis() as u64);
        Ok(call.invoke(&mut self.connection)?)
    }

    fn release(&mut self, name: &str, _token: i64) -> Result<()> {
        let mut call = self.release.prepare_invoke();
        let deleted: i64 = call.key(name).arg(&self.holder).invoke(&mut self.connection)?;
        ensure!(deleted == 1, "the lease was lost");
        Ok(())
    }
}

//! pg_fence itself.

use crate::peer::{Locker, Peer};
use crate::workbench::Workbench;
use anyhow::{Context, Result};
use pg_test::{Conninfo, Session};
use postgres::Statement;

/// Its name in the report.
pub const NAME: &str = "pg_fence";
/// With leases that end with their session.
pub const NAME_SESSION: &str = "pg_fence, session => true";

/// The extension's functions, called by prepared statements.
pub struct Ours {
    conninfo: Conninfo,
    name: &'static str,
    /// Further arguments of an acquire.
    arguments: &'static str,
}

pub fn prepare(bench: &Workbench) -> Result<Box<dyn Peer>> {
    Ok(Box::new(Ours { conninfo: bench.conninfo(), name: NAME, arguments: "" }))
}

pub fn prepare_session(bench: &Workbench) -> Result<Box<dyn Peer>> {
    let arguments = ", session => true";
    Ok(Box::new(Ours { conninfo: bench.conninfo(), name: NAME_SESSION, arguments }))
}

impl Peer for Ours {
    fn name(&self) -> String {
        self.name.to_owned()
    }

    fn join(&self, index: usize) -> Result<Box<dyn Locker>> {
        client(self.conninfo.connect()?, format!("client {index}"), self.arguments)
    }
}

/// A client by this session that acquires with these further arguments.
pub fn client(mut session: Session, holder: String, arguments: &str) -> Result<Box<dyn Locker>> {
    let mut acquiring =
        |more: &str| session.prepare(&format!("SELECT lease_acquire($1, $2{arguments}{more})"));
    let (acquire, wait) = (acquiring("")?, acquiring(", wait => '10 min'")?);
    let renew = session.prepare("SELECT lease_renew($1, $2)")?;
    let release = session.prepare("SELECT lease_release($1, $2)")?;
    Ok(Box::new(Client { session, holder, acquire, wait, renew, release }))
}

struct Client {
    session: Session,
    holder: String,
    acquire: Statement,
    wait: Statement,
    renew: Statement,
    release: Statement,
}

impl Locker for Client {
    fn acquire(&mut self, name: &str) -> Result<Option<i64>> {
        Ok(self.session.query_one(&self.acquire, &[&name, &self.holder])?.get(0))
    }

    fn release(&mut self, name: &str, token: i64) -> Result<()> {
        let closing: Option<i64> = self.session.query_one(&self.release, &[&name, &token])?.get(0);
        closing.map(drop).context("the lease was lost")
    }

    fn renew(&mut self, name: &str, token: i64) -> Result<()> {
        let renewed: Option<i64> = self.session.query_one(&self.renew, &[&name, &token])?.get(0);
        renewed.map(drop).context("the lease was lost")
    }

    fn wait(&mut self, name: &str) -> Result<i64> {
        let token: Option<i64> = self.session.query_one(&self.wait, &[&name, &self.holder])?.get(0);
        token.context("waited in vain")
    }
}

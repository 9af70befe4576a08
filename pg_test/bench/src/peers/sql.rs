//! A lease that is taken by SQL: prepared statements, and a session a client.

use crate::peer::{poll, Locker, Peer};
use anyhow::{Context, Result};
use pg_test::{Conninfo, Session};
use postgres::types::{ToSql, Type};
use postgres::Statement;
use std::time::Duration;

/// The statements of a client. `$1` is the name of the lease, and `$2`, where there is one, the holder or the token. A
/// row is a success, and its first column the token, if it is a number; no row, NULL or false is a refusal.
#[derive(Default)]
pub struct Statements {
    pub acquire: String,
    pub release: String,
    pub renew: Option<String>,
    /// Else it asks again every 10 ms.
    pub wait: Option<String>,
}

/// One that takes part.
pub struct Sql {
    pub name: &'static str,
    pub conninfo: Conninfo,
    pub statements: Statements,
}

impl Peer for Sql {
    fn name(&self) -> String {
        self.name.to_owned()
    }

    fn join(&self, client: usize) -> Result<Box<dyn Locker>> {
        let session = self.conninfo.connect()?;
        Ok(Box::new(Client::new(session, format!("client {client}"), &self.statements)?))
    }
}

/// A client; others build on it.
pub struct Client {
    pub session: Session,
    holder: String,
    acquire: Statement,
    release: Statement,
    renew: Option<Statement>,
    wait: Option<Statement>,
}

impl Client {
    pub fn new(mut session: Session, holder: String, statements: &Statements) -> Result<Client> {
        let acquire = session.prepare(&statements.acquire)?;
        let release = session.prepare(&statements.release)?;
        let mut prepare =
            |sql: &Option<String>| sql.as_deref().map(|sql| session.prepare(sql)).transpose();
        let (renew, wait) = (prepare(&statements.renew)?, prepare(&statements.wait)?);
        Ok(Client { session, holder, acquire, release, renew, wait })
    }
}

fn call(
    session: &mut Session,
    statement: &Statement,
    name: &str,
    second: &(dyn ToSql + Sync),
) -> Result<Option<i64>> {
    let given = [&name as &(dyn ToSql + Sync), second];
    let row = session.query_opt(statement, &given[..statement.params().len()])?;
    Ok(row.and_then(|row| match *row.columns()[0].type_() {
        Type::BOOL => row.get::<_, bool>(0).then_some(0),
        Type::INT8 => row.get(0),
        _ => Some(0),
    }))
}

impl Locker for Client {
    fn acquire(&mut self, name: &str) -> Result<Option<i64>> {
        call(&mut self.session, &self.acquire, name, &self.holder)
    }

    fn release(&mut self, name: &str, token: i64) -> Result<()> {
        call(&mut self.session, &self.release, name, &token)?
            .map(drop)
            .context("the lease was lost")
    }

    fn renew(&mut self, name: &str, token: i64) -> Result<()> {
        let renew = self.renew.as_ref().context("it does not renew here")?;
        call(&mut self.session, renew, name, &token)?.map(drop).context("the lease was lost")
    }

    fn wait(&mut self, name: &str) -> Result<i64> {
        match &self.wait {
            None => poll(self, name, Duration::from_millis(10)),
            Some(wait) => {
                call(&mut self.session, wait, name, &self.holder)?.context("waited in vain")
            }
        }
    }
}

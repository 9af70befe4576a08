//! Who has a lease, seen from outside.

use crate::clock;
use crate::error::Error;
use crate::fence::Fence;
use crate::own::{Call, OwnConnection, argument};
use std::future::pending;
use std::time::{Duration, SystemTime};
use tokio_postgres::types::Type;

/// Between two looks.
const LOOK: Duration = Duration::from_secs(1);
/// How long one may take.
const LIMIT: Duration = Duration::from_secs(10);

/// Who has a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leader {
    /// None where nobody has it.
    pub holder: Option<String>,
    /// That of the acquire.
    pub token: Option<i64>,
    /// When it was acquired, by the server's clock.
    pub since: Option<SystemTime>,
}

/// Looks each second who has a lease, on a connection of its own. [`Fence::observe`] makes it.
pub struct Observer {
    own: OwnConnection,
    sql: String,
    name: String,
    told: Option<Leader>,
}

impl Observer {
    pub(crate) fn new(fence: &Fence, name: String) -> Observer {
        let sql = format!(
            "SELECT coalesce(holder, ''), first_token, acquired_at FROM {}lease_info($1::text) \
             WHERE state = 'held' ORDER BY first_token LIMIT 1",
            fence.schema
        );
        Observer { own: OwnConnection::new(fence.keeping.open.clone()), sql, name, told: None }
    }

    /// Who has it, the first time at once, and then after each change. Can be dropped where it waits, and called again.
    ///
    /// A server that cannot be reached is tried again; fails where that will not help.
    pub async fn changed(&mut self) -> Result<Leader, Error> {
        loop {
            match self.look().await {
                Ok(leader) if self.told.as_ref() != Some(&leader) => {
                    self.told = Some(leader.clone());
                    return Ok(leader);
                }
                Ok(_) => {}
                Err(error) if error.is_permanent() => return Err(error.of_extension()),
                Err(error) => log::debug!("who has {} is looked for again: {error}", self.name),
            }
            clock::sleep(LOOK).await;
        }
    }

    async fn look(&mut self) -> Result<Leader, Error> {
        self.own.leave_ended();
        let arguments = vec![argument(self.name.clone(), Type::TEXT)];
        let call = Call { sql: self.sql.clone(), arguments };
        let rows = self.own.call(LIMIT, &call, pending()).await?;
        let Some(row) = rows.first() else {
            return Ok(Leader { holder: None, token: None, since: None });
        };
        let read = || Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?));
        let (holder, token, since) = read().map_err(Error::unclassified)?;
        Ok(Leader { holder: Some(holder), token: Some(token), since: Some(since) })
    }
}

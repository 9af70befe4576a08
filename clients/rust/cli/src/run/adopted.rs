//! A lease that somebody else grants: etcd, ZooKeeper, another database. Their token is made known here, and there is no
//! deadline: whoever grants it tells its end, by ending this command, or by a greater token.

use crate::connection::Server;
use crate::failure::{Failure, Result, status};
use pg_fence_client::Connected;
use std::time::Duration;
use tokio_postgres::types::{ToSql, Type};

/// What the server answers where the token is too old, or was released or revoked.
const STALE: &str = "PF001";

pub struct Adopted<'a> {
    pub server: &'a Server,
    pub name: &'a str,
    pub token: i64,
    pub holder: &'a str,
}

impl Adopted<'_> {
    /// Makes the token known, or finds that it still is; a failover is mended by it. False where transactions of the
    /// one before go on for longer than `wait`. Each call is bounded by `limit` beyond that.
    pub async fn adopt(&self, wait: Duration, limit: Duration) -> Result<bool> {
        let adopted = tokio::time::timeout(wait.saturating_add(limit), async {
            let connected = self.server.connect().await?;
            self.call(&connected, wait).await
        });
        let late = |_| Failure::new(status::UNAVAILABLE, "the server did not answer in time");
        adopted.await.map_err(late)?
    }

    async fn call(&self, connected: &Connected, wait: Duration) -> Result<bool> {
        let call = self.server.function("lease_adopt($1, $2, $3, $4::interval)");
        let wait = format!("{} microseconds", wait.as_micros());
        let arguments: [(&(dyn ToSql + Sync), Type); 4] = [
            (&self.name, Type::TEXT),
            (&self.token, Type::INT8),
            (&self.holder, Type::TEXT),
            (&wait, Type::TEXT),
        ];
        let row = connected.query_typed_one(&format!("SELECT {call}"), &arguments).await;
        match row.and_then(|row| row.try_get::<_, Option<i64>>(0)) {
            Ok(token) => Ok(token.is_some()),
            Err(error) if error.code().is_some_and(|code| code.code() == STALE) => {
                let stale = format!("{} is no token of {} any more", self.token, self.name);
                Err(Failure::new(status::LOST, stale))
            }
            Err(error) => Err(Failure::of_driver(error)),
        }
    }
}

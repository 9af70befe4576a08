//! A lease that another service grants: etcd, ZooKeeper, another database. The server only registers its token. The
//! lease has no deadline: the service ends it, by ending this command or by granting a greater token.

use crate::connection::Server;
use crate::failure::{Failure, Result, status};
use pg_fence_client::Connected;
use serde_json::Value;
use std::time::Duration;
use tokio_postgres::error::DbError;
use tokio_postgres::types::Type;

pub struct AdoptedLease {
    pub server: Server,
    pub connected: Option<Connected>,
    pub name: String,
    pub token: i64,
    pub holder: String,
}

impl AdoptedLease {
    /// Registers the token, if it is not registered yet. Returns false if a transaction guards an older token, and
    /// still does after `wait`. Fails if the server has not answered `limit` after that.
    pub async fn adopt(&mut self, wait: Duration, limit: Duration) -> Result<bool> {
        let adopted = tokio::time::timeout(wait.saturating_add(limit), self.call(wait)).await;
        let late = || Failure::new(status::UNAVAILABLE, "the server did not answer in time");
        let adopted = adopted.unwrap_or_else(|_| Err(late()));
        if adopted.as_ref().is_err_and(Failure::is_transient) {
            // The next attempt opens another connection.
            self.connected = None;
        }
        adopted
    }

    async fn call(&mut self, wait: Duration) -> Result<bool> {
        let connected = match self.connected.take() {
            Some(connected) => connected,
            None => self.server.connect().await?,
        };
        let connected = self.connected.insert(connected);
        let adopt = self.server.function("lease_adopt($1, $2, $3, $4::text::interval)");
        let wait = format!("{} microseconds", wait.as_micros());
        let arguments: crate::views::Arguments = &[
            (&self.name, Type::TEXT),
            (&self.token, Type::INT8),
            (&self.holder, Type::TEXT),
            (&wait, Type::TEXT),
        ];
        let row = connected.query_typed_one(&format!("SELECT {adopt}"), arguments).await;
        let token: std::result::Result<Option<i64>, _> = row.and_then(|row| row.try_get(0));
        token.map(|token| token.is_some()).map_err(|error| match error.as_db_error() {
            Some(error) if error.code().code() == "PF001" => {
                Failure::new(status::LOST, error.message())
            }
            // The service has granted the number twice, or a holder has misread its number.
            Some(error) if error.code().code() == "PF004" => self.taken(error),
            _ => Failure::of_driver(error),
        })
    }

    /// The failure if another holder has adopted the same number.
    fn taken(&self, error: &DbError) -> Failure {
        let detail: Option<Value> =
            error.detail().and_then(|detail| serde_json::from_str(detail).ok());
        let holder = detail.as_ref().and_then(|detail| detail["holder"].as_str());
        let whose = holder.map(|holder| format!("{} is {holder}'s", self.token));
        let whose = whose.unwrap_or_else(|| error.message().to_owned());
        Failure::new(status::TAKEN, format!("{} is taken: {whose}", self.name))
    }
}

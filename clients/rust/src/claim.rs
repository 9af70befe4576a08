//! Leases of the first rows of a query that are free.

use crate::calls::interval;
use crate::clock::Moment;
use crate::error::Error;
use crate::fence::Fence;
use crate::lease::Lease;
use crate::own::{Argument, Call, OwnConnection, argument};
use crate::request::{checked_ttl, unique_holder};
use crate::state::Terms;
use serde_json::Value;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

/// A lease that was claimed, and the row that it is of.
#[derive(Debug, Clone)]
pub struct Claimed {
    /// Kept as any other.
    pub lease: Lease,
    /// As the query has it; its first column is called `claimed`.
    pub row: Row,
}

/// What is to be claimed: `fence.claim("SELECT 'job:' || id, id FROM jobs ORDER BY id", 10).acquire()`.
#[must_use = "nothing is claimed before `acquire`"]
pub struct ClaimRequest {
    fence: Fence,
    query: String,
    limit: u32,
    arguments: Vec<(Argument, Type)>,
    ttl: Duration,
    holder: Option<String>,
    metadata: Option<Value>,
}

impl ClaimRequest {
    pub(crate) fn new(fence: Fence, query: &str, limit: u32) -> ClaimRequest {
        let query = query.trim_end().trim_end_matches(';').to_owned();
        let arguments = Vec::new();
        let ttl = Duration::from_secs(30);
        ClaimRequest { fence, query, limit, arguments, ttl, holder: None, metadata: None }
    }

    /// The query's next parameter: `$1` first. Its type is said, so that nothing is prepared.
    pub fn bind(mut self, value: impl ToSql + Sync + Send + 'static, kind: Type) -> Self {
        self.arguments.push(argument(value, kind));
        self
    }

    /// As [`LeaseRequest::ttl`](crate::LeaseRequest::ttl).
    pub fn ttl(self, ttl: Duration) -> Self {
        ClaimRequest { ttl, ..self }
    }

    /// As [`LeaseRequest::holder`](crate::LeaseRequest::holder).
    pub fn holder(self, holder: impl Into<String>) -> Self {
        ClaimRequest { holder: Some(holder.into()), ..self }
    }

    /// As [`LeaseRequest::metadata`](crate::LeaseRequest::metadata).
    pub fn metadata(self, metadata: Value) -> Self {
        ClaimRequest { metadata: Some(metadata), ..self }
    }

    /// Claims them, in the order of the query: none where nothing is free. It may take a third of the ttl; what it has
    /// been granted by then without an answer ends at its ttl.
    ///
    /// Dropped where it waits, what was granted is given back.
    pub async fn acquire(self) -> Result<Vec<Claimed>, Error> {
        checked_ttl(self.ttl)?;
        let (mut answer, claimed) = oneshot::channel();
        let keeping = self.fence.keeping.clone();
        keeping.spawn(async move {
            let mut own = OwnConnection::new(self.fence.keeping.open.clone());
            let claimed = self.claim(&mut own, answer.closed()).await;
            // Before anybody renews it.
            let _ = answer.send(claimed);
            own.close().await;
        });
        claimed.await.unwrap_or_else(|gone| Err(Error::other(gone)))
    }

    async fn claim(
        mut self,
        own: &mut OwnConnection,
        given_up: impl Future<Output = ()>,
    ) -> Result<Vec<Claimed>, Error> {
        let limit = self.ttl / 3;
        let names = [format!("{} of a query", self.limit)].into();
        own.connect(limit).await.map_err(|error| error.of_acquire(&names))?;
        let before = Moment::now();
        let call = self.call();
        let rows =
            own.call(limit, &call, given_up).await.map_err(|error| error.of_acquire(&names))?;
        rows.into_iter().map(|row| self.claimed(row, before)).collect()
    }

    /// A function in LATERAL is called for one row after the other, and for no more than the limit asks for.
    fn call(&mut self) -> Call {
        let mut arguments = std::mem::take(&mut self.arguments);
        let count = arguments.len();
        let (holder, ttl, metadata, limit) = (count + 1, count + 2, count + 3, count + 4);
        let sql = format!(
            "SELECT c.*, t.token FROM ({}) AS c (claimed), LATERAL {}lease_acquire(c.claimed::text, \
             ${holder}::text, ${ttl}::text::interval, NULL, ${metadata}::text::jsonb) AS t (token) \
             WHERE t.token IS NOT NULL LIMIT ${limit}::bigint",
            self.query, self.fence.schema
        );
        arguments.extend([
            argument(self.holder.clone().unwrap_or_else(unique_holder), Type::TEXT),
            argument(interval(self.ttl), Type::TEXT),
            argument(self.metadata.as_ref().map(Value::to_string), Type::TEXT),
            argument(i64::from(self.limit), Type::INT8),
        ]);
        Call { sql, arguments }
    }

    fn claimed(&self, row: Row, before: Moment) -> Result<Claimed, Error> {
        let read = || Ok((row.try_get::<_, String>(0)?, row.try_get::<_, i64>(row.len() - 1)?));
        let (name, token) = read().map_err(Error::unclassified)?;
        let shared = self.fence.shared([name].into(), Terms::of(self.ttl));
        shared.granted(token, shared.hooks.counts_from(before));
        self.fence.keeping.keep(shared.clone(), None);
        Ok(Claimed { lease: Lease::new(shared), row })
    }
}

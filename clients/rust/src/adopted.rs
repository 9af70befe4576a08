//! A lease that somebody else grants.

use crate::calls::{closing, interval};
use crate::clock::Moment;
use crate::error::{Error, LeaseLost, LeaseTaken, Reason, classify};
use crate::fence::Fence;
use crate::guarded::{Guardable, Guarded};
use crate::holding::Holding;
use crate::own::{Call, Limits, OwnConnection, argument, only_value};
use crate::request::unique_holder;
use crate::state::{Shared, Terms};
use serde_json::Value;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio_postgres::types::Type;

/// How long a call may take beside its wait: a third of the usual ttl, for an adopted lease has none.
const LIMIT: Duration = Duration::from_secs(10);

/// How a lease is adopted: `fence.adopt("nightly", 33).acquire()`.
#[derive(Clone)]
#[must_use = "a lease is not adopted before `acquire` or `try_acquire`"]
pub struct AdoptRequest {
    fence: Fence,
    name: String,
    token: i64,
    wait: Duration,
    holder: Option<String>,
    metadata: Option<Value>,
}

impl AdoptRequest {
    pub(crate) fn new(fence: Fence, name: String, token: i64) -> AdoptRequest {
        AdoptRequest { fence, name, token, wait: Duration::ZERO, holder: None, metadata: None }
    }

    /// How long to wait for transactions that guard an older number: not at all unless said otherwise.
    pub fn wait(self, wait: Duration) -> Self {
        AdoptRequest { wait, ..self }
    }

    /// Who has it, for the view of all leases; by default a text that is unique for each adoption.
    pub fn holder(self, holder: impl Into<String>) -> Self {
        AdoptRequest { holder: Some(holder.into()), ..self }
    }

    /// For the view of all leases.
    pub fn metadata(self, metadata: Value) -> Self {
        AdoptRequest { metadata: Some(metadata), ..self }
    }

    /// Makes the number known. [`StaleToken`](Error::StaleToken) where the name has had a greater one, or this one was
    /// released; [`LeaseTaken`] where a transaction guards an older one, and did so for as long as we waited: then that
    /// one has ended all the same, and it is to be tried again.
    ///
    /// Dropped while it waits, it gives up. An adoption that comes all the same stays: the service has granted the lease.
    pub async fn acquire(self) -> Result<Adopted, Error> {
        let names = [self.name.clone()];
        self.try_acquire().await?.ok_or_else(|| LeaseTaken(names.into()).into())
    }

    /// As [`acquire`](AdoptRequest::acquire); None where a transaction guards an older number.
    pub async fn try_acquire(mut self) -> Result<Option<Adopted>, Error> {
        self.holder.get_or_insert_with(unique_holder);
        let fence = &self.fence;
        // Without a ttl its deadline never comes.
        let shared = Shared::new(
            [self.name.clone()].into(),
            Terms::of(Duration::MAX),
            fence.schema.clone(),
            fence.keeping.hooks.clone(),
            Weak::new(),
        );
        let adopted = Adopted { shared: Arc::new(shared), request: Arc::new(self) };
        let is_known =
            adopted.shared.hooks.adopts_late() || adopted.adopt(adopted.request.wait).await?;
        adopted.shared.granted(adopted.request.token, Moment::now());
        Ok(is_known.then_some(adopted))
    }
}

/// A lease that somebody else grants, known here under the number that it has there. [`Fence::adopt`] makes it.
///
/// There is no heartbeat, no deadline, no task and no connection: nothing has to be closed, and nothing happens when it is
/// dropped. Clones are the same lease. [`release`](Adopted::release) is the last word of a holder that is done: the same
/// number is refused from then on.
#[derive(Clone)]
pub struct Adopted {
    shared: Arc<Shared>,
    request: Arc<AdoptRequest>,
}

impl Adopted {
    /// What it is a lease of.
    pub fn names(&self) -> &[String] {
        &self.shared.names
    }

    /// The number that was adopted.
    pub fn token(&self) -> i64 {
        self.shared.token()
    }

    /// A transaction during which nobody adopts a greater number, and whose writes present this one. It makes the number
    /// known once more, for a failover may have lost it; [`StaleToken`](Error::StaleToken) where a greater one is known.
    ///
    /// `connection` is a tokio-postgres `Client`, a [`Connected`](crate::Connected), or a `Transaction` that is open:
    /// that is guarded from here on by a savepoint, and the code that began it ends it.
    pub async fn guard<'c>(
        &self,
        connection: &'c mut impl Guardable,
    ) -> Result<Guarded<'c>, Error> {
        Guarded::begin(vec![Holding::Adopted(self.clone())], connection, true).await
    }

    /// As [`guard`](Adopted::guard), without a lock: its writes present the number, and a greater one may be adopted until
    /// one of them is to a table that is bound to the lease.
    pub async fn present<'c>(
        &self,
        connection: &'c mut impl Guardable,
    ) -> Result<Guarded<'c>, Error> {
        Guarded::begin(vec![Holding::Adopted(self.clone())], connection, false).await
    }

    /// Gives it back: the number is refused from then on. Fails only where the lease had been lost: when the server cannot
    /// be reached, it stays until a greater number is adopted.
    pub async fn release(&self) -> Result<(), LeaseLost> {
        // A transaction that releases is waited for.
        let turn = self.shared.rest().await;
        if self.shared.is_held() {
            let mut own = self.connection();
            let limits = Limits { call: LIMIT, lock: LIMIT };
            match own
                .call_within(limits, &closing(&self.shared))
                .await
                .map(|rows| only_value(&rows))
            {
                Ok(Ok(None)) => self.shared.lose(Reason::Gone, None),
                Ok(_) => drop(self.shared.released()),
                Err(error) => {
                    log::warn!("the lease {} was not released: {error}", self.request.name);
                    self.shared.released();
                }
            }
            own.close().await;
        }
        drop(turn);
        self.shared.loss().map_or(Ok(()), Err)
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    fn connection(&self) -> OwnConnection {
        OwnConnection::new(self.request.fence.keeping.open.clone())
    }

    /// Makes the number known; false where an older one is guarded still.
    async fn adopt(&self, wait: Duration) -> Result<bool, Error> {
        let call = self.call(&self.adoption("$5::text::interval"), Some(wait));
        let mut own = self.connection();
        let (mut answer, adopted) = oneshot::channel();
        // A task of its own, so that the server hears of it where nobody waits any more.
        self.request.fence.keeping.spawn(async move {
            let outcome = own.call(LIMIT.saturating_add(wait), &call, answer.closed()).await;
            own.close().await;
            let _ = answer.send(outcome);
        });
        let outcome = adopted.await.unwrap_or_else(|gone| Err(Error::other(gone)));
        match outcome {
            Ok(rows) => Ok(only_value(&rows).map_err(Error::unclassified)?.is_some()),
            Err(error) => Err(match classify(&error) {
                Some(stale @ Error::StaleToken(_)) => stale,
                _ => error.of_acquire(&self.shared.names),
            }),
        }
    }

    fn adoption(&self, wait: &str) -> String {
        let call = format!("lease_adopt($1::text, $2::bigint, $3::text, {wait}, $4::text::jsonb)");
        self.shared.select(&call)
    }

    fn call(&self, sql: &str, wait: Option<Duration>) -> Call {
        let request = &self.request;
        let mut arguments = vec![
            argument(request.name.clone(), Type::TEXT),
            argument(request.token, Type::INT8),
            argument(request.holder.clone(), Type::TEXT),
            argument(request.metadata.as_ref().map(Value::to_string), Type::TEXT),
        ];
        arguments.extend(wait.map(|wait| argument(interval(wait), Type::TEXT)));
        Call { sql: sql.to_owned(), arguments }
    }

    // For the transactions under it

    /// Makes the number known in each transaction: a failover may have lost it, and then silences it in any case.
    pub(crate) fn guard_call(&self) -> Call {
        self.call(&self.guard_sql(), None)
    }

    fn guard_sql(&self) -> String {
        self.shared.select(&format!("lease_guard($1::text, ({}))", self.adoption("NULL")))
    }

    /// The same, its holder and its metadata, for another driver.
    #[cfg(feature = "sqlx")]
    pub(crate) fn guard_text(&self) -> (String, Option<String>, Option<String>) {
        let request = &self.request;
        (self.guard_sql(), request.holder.clone(), request.metadata.as_ref().map(Value::to_string))
    }

    /// A guard that cannot begin may after an adoption in a transaction of its own. Its own was NULL (22004), or cannot be
    /// relied on in the same transaction, at REPEATABLE READ (55000).
    pub(crate) fn can_mend(&self, error: &Error) -> bool {
        let is_mendable = matches!(error, Error::NotSpeaking(_))
            || matches!(error.sqlstate(), Some("22004" | "55000"));
        is_mendable && self.shared.hooks.adopts_again()
    }

    pub(crate) async fn mend(&self) -> Result<(), Error> {
        if self.adopt(Duration::ZERO).await? {
            self.shared.was_mended();
            return Ok(());
        }
        Err(LeaseTaken(self.shared.names.clone()).into())
    }
}

impl fmt::Debug for Adopted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adopted")
            .field("names", &self.names())
            .field("token", &self.token())
            .finish_non_exhaustive()
    }
}

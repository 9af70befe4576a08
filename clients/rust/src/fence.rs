//! Where leases come from, and how they are held.

use crate::clock;
use crate::connection::{Connected, Opener, Tls, open};
use crate::errors::Error;
use crate::heartbeat::{Event, Heartbeat, Held, Setup, now};
use crate::lease_state::{Ask, EventKind, Lead, LeadState};
use crate::statements::{Names, RowTable, holder_of_process, millis, span, unique_holder};
use crate::transaction::{Guardable, Guards, Under};
use serde_json::{Value, json};
use std::error::Error as StdError;
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;
use tokio_postgres::{Config, NoTls};
use tokio_util::sync::CancellationToken;

/// Where leases come from: one for a process. Its clones are the same. It has one connection, and
/// two threads, while it holds leases, and none otherwise. Session leases and waits have a
/// connection each.
#[derive(Clone, Debug)]
pub struct Fence(Arc<Heartbeat>);

impl Fence {
    /// By a connection string or URL, without encryption.
    pub fn new(url: &str) -> Result<Fence, Error> {
        Ok(Fence::at([url.parse()?], NoTls))
    }

    /// At the first of these that takes us, by whatever encrypts connections.
    pub fn at(configs: impl Into<Vec<Config>>, tls: impl Tls) -> Fence {
        let configs: Arc<[Config]> = configs.into().into();
        Fence::opening(Arc::new(move |limit| {
            let (configs, tls) = (configs.clone(), tls.clone());
            Box::pin(async move { open(&configs, tls, limit).await })
        }))
    }

    /// By whatever opens connections: a password that changes, a proxy. Not a pool's: they are kept
    /// for long.
    pub fn with_opener<F, O>(opener: F) -> Fence
    where
        F: Fn() -> O + Send + Sync + 'static,
        O: Future<Output = Result<Connected, Error>> + Send + 'static,
    {
        Fence::opening(Arc::new(move |_| Box::pin(opener())))
    }

    fn opening(open: Opener) -> Fence {
        let (schema, longest_beat) = (String::new(), Duration::MAX);
        Fence(Heartbeat::new(Setup { open, schema, longest_beat, on_event: Arc::new(|_| {}) }))
    }

    fn changed(self, change: impl FnOnce(&mut Setup)) -> Fence {
        let mut setup = self.0.setup.clone();
        change(&mut setup);
        Fence(Heartbeat::new(setup))
    }

    /// Another one, for an extension in a schema that is not in the search path.
    pub fn in_schema(self, schema: &str) -> Fence {
        self.changed(|setup| setup.schema = format!("\"{}\".", schema.replace('"', "\"\"")))
    }

    /// Another one, whose renewals have so long at most until another connection is tried, and not a
    /// third of the smallest ttl: for work that has to be ended some time before the deadline.
    pub fn renew_within(self, limit: Duration) -> Fence {
        self.changed(|setup| setup.longest_beat = limit)
    }

    /// Another one, which tells what becomes of leases.
    pub fn on_event(self, told: impl Fn(&Event) + Send + Sync + 'static) -> Fence {
        self.changed(|setup| setup.on_event = Arc::new(told))
    }

    /// A lease of a name; or of several names (`["order:7", "order:8"]`, a `Vec`) at once, all or
    /// none. Several names have no queue: they are tried each quarter of a second, and may starve
    /// beside waiters for each, until the wait is over.
    pub fn lease(&self, names: impl Into<Names>) -> LeaseRequest {
        LeaseRequest { fence: self.clone(), ask: Ask::new(names.into().0) }
    }

    /// A lease that is a row of a table of work, which a statement of yours has claimed: by the
    /// columns of its primary key and their values (`&[("id", &id)]`), under the token that the
    /// statement returned, with its ttl. The table is written as in SQL (`app.runs`). Finish the row
    /// in a guard that is ended by [`commit_and_release`](crate::Guarded::commit_and_release).
    pub fn keep_row(
        &self,
        table: &str,
        key: &[(&str, &(dyn Display + Sync))],
        token: i64,
        ttl: Duration,
    ) -> LeaseRequest {
        let (keys, values): (Vec<_>, Vec<_>) =
            key.iter().map(|(column, value)| ((*column).to_owned(), value.to_string())).unzip();
        let (fence, deadline) = ("fence".to_owned(), "held_until".to_owned());
        let table = Some(RowTable { name: table.to_owned(), keys, fence, deadline });
        let ask = Ask { table, token, ..Ask::new(vec![json!(values).to_string()]) };
        LeaseRequest { fence: self.clone(), ask }.ttl(ttl)
    }

    /// Does `work` whenever this process leads, and again after each loss, also of the server, the
    /// connection or the transaction. It ends when the work returns, with an error of the work's
    /// own, or when `stop` is cancelled, which the work is to look at: it is waited for, and the
    /// lease is given back after it. None: it was stopped before it led.
    ///
    /// On a loss the work is dropped where it waits. What it goes on after is a line of the log and
    /// an event, once an outage, with a growing pause.
    pub async fn lead<T, W>(
        &self,
        name: &str,
        ttl: Duration,
        stop: &CancellationToken,
        mut work: impl FnMut(Lease) -> W,
    ) -> Result<Option<T>, BoxError>
    where
        W: Future<Output = Result<T, BoxError>>,
    {
        // If the answer to an acquire was lost, its own holder takes the grant over.
        let request = || self.lease(name).ttl(ttl).reclaim(unique_holder()).wait(Duration::MAX);
        let mut lead = LeadState::new(millis(ttl), self.0.spread);
        let (mut next, mut outcome, mut held) = (Some(lead.start()), Ok(None), None);
        while let Some(step) = next {
            let waits = matches!(step, Lead::Acquire | Lead::Pause { .. });
            next = match step {
                _ if waits && stop.is_cancelled() => lead.stop(),
                Lead::Acquire => tokio::select! {
                    acquired = request().acquire() => match acquired {
                        Ok(lease) => {
                            held = Some(lease);
                            Some(lead.granted(now()))
                        }
                        Err(error) => {
                            let cause = Error::cause(&error, true);
                            outcome = Err(error.into());
                            Some(lead.not_granted(now(), cause))
                        }
                    },
                    () = stop.cancelled() => lead.stop(),
                },
                Lead::Work => {
                    let Some(lease) = held.take() else { break };
                    let done = lease.run(work(lease.clone())).await;
                    let is_lost = lease.check().is_err();
                    lease.release().await.ok();
                    match done.unwrap_or_else(|loss| Err(loss.into())) {
                        Ok(done) => {
                            outcome = Ok(Some(done));
                            Some(lead.work_done())
                        }
                        Err(error) => {
                            let cause = Error::cause(&*error, false);
                            outcome = Err(error);
                            Some(lead.work_failed(now(), cause, is_lost))
                        }
                    }
                }
                Lead::Pause { pause, begins, has_led } => {
                    if let (true, Err(error)) = (begins, &outcome) {
                        log::warn!("{name} leads no more, and it is tried again: {error}");
                    }
                    if begins && has_led {
                        let (names, kind) = (vec![name.to_owned()], EventKind::Interrupted);
                        self.0.event(Event { kind, names, token: 0, remaining: Duration::ZERO });
                    }
                    match clock::within(span(pause), stop.cancelled()).await {
                        Some(()) => lead.stop(),
                        None => lead.tick(now()),
                    }
                }
                Lead::Fail => return outcome,
                Lead::End => break,
            };
        }
        // After a stop the last error is none of the caller's.
        Ok(outcome.unwrap_or_default())
    }

    /// A lease that somebody else grants (etcd, ZooKeeper, Redis, another database), under the
    /// number that it has there. The number is that of one holder: of this process, unless
    /// [`Adopted::holder`] names another one.
    pub fn adopted(&self, name: impl Into<String>, token: i64) -> Adopted {
        Adopted { heartbeat: self.0.clone(), name: name.into(), token, holder: None }
    }

    /// A transaction that is guarded by several leases at once; see [`Lease::guard`].
    pub fn guard<'c, 'l, C: Guardable, L: IntoIterator<Item = &'l Lease>>(
        &self,
        connection: &'c mut C,
        leases: L,
    ) -> impl Future<Output = Guards<'c, C>> + Send + use<'c, 'l, C, L> {
        let leases = leases.into_iter().map(|lease| lease.0.clone()).collect();
        Under::new(&self.0, leases, None).begin(connection)
    }

    /// Gives everything back, ends all waits, and closes the connection. For SIGTERM, and the end
    /// of `main`.
    pub async fn close(&self) {
        self.0.close().await;
    }
}

/// Any error of the work.
pub type BoxError = Box<dyn StdError + Send + Sync>;

/// How a lease is asked for: `fence.lease("order:7").ttl(Duration::from_secs(30)).acquire()`.
#[derive(Debug, Clone)]
#[must_use = "a lease is not acquired before `acquire` or `hold`"]
pub struct LeaseRequest {
    fence: Fence,
    ask: Ask,
}

macro_rules! asks {
    ($($(#[$said:meta])* $name:ident($($given:ident: $kind:ty)?) $($field:ident = $value:expr),*;)*) => {
        impl LeaseRequest {$(
            $(#[$said])*
            pub fn $name(mut self $(, $given: $kind)?) -> LeaseRequest {
                $(self.ask.$field = $value;)*
                self
            }
        )*}
    };
}

asks! {
    /// How long it is held without a renewal: 30 s unless said otherwise, at least 100 ms.
    ttl(ttl: Duration) ttl = millis(ttl);
    /// How long to wait for it: not at all unless said otherwise.
    wait(wait: Duration) wait = millis(wait);
    /// The holder, for the view of all leases; by default a text that is unique for each acquire.
    holder(holder: impl Into<String>) holder = holder.into(), is_named = true;
    /// Where that holder has it already, it gets a new grant at once.
    reclaim(holder: impl Into<String>) holder = holder.into(), is_named = true, reclaims = true;
    /// It ends with its session, too. Not through a pooler.
    session() is_session = true;
    /// Others may have it shared at the same time.
    shared() is_shared = true;
    /// So many may have it at the same time.
    slots(slots: i32) slots = slots;
    /// For the view of all leases.
    metadata(metadata: Value) metadata = Some(metadata);
    /// Then it is lost, whatever its heartbeat does: for work that hangs.
    at_most(at_most: Duration) at_most = Some(millis(at_most));
}

impl LeaseRequest {
    /// The columns of a table of work ([`Fence::keep_row`]) that are not called `fence` and
    /// `held_until`: that of the token, and that of the deadline.
    pub fn columns(mut self, fence: &str, deadline: &str) -> LeaseRequest {
        if let Some(table) = &mut self.ask.table {
            (table.fence, table.deadline) = (fence.to_owned(), deadline.to_owned());
        }
        self
    }

    /// Acquires it; [`Error::LeaseTaken`] where it is taken, and stayed so for as long as we
    /// waited. Dropped while it waits, it gives up; a grant that comes all the same is given back.
    pub async fn acquire(self) -> Result<Lease, Error> {
        Ok(Lease(self.fence.0.acquire(self.ask.checked()?).await?.into()))
    }

    /// Does `work` under the lease, and releases it. On a loss the work is dropped where it waits,
    /// and the answer is [`Error::LeaseLost`]; so it is after a loss that the work did not notice.
    /// An error of the work comes out unchanged.
    pub async fn hold<T, E, W>(self, work: impl FnOnce(Lease) -> W) -> Result<T, E>
    where
        W: Future<Output = Result<T, E>>,
        E: From<Error>,
    {
        let lease = self.acquire().await?;
        let outcome = lease.run(work(lease.clone())).await;
        let released = lease.release().await;
        let done = outcome??;
        released?;
        Ok(done)
    }
}

/// A lease that is kept until it is released or lost, by the heartbeat that all leases of a
/// [`Fence`] share.
///
/// Clones are the same lease, for other tasks. When the last one is dropped, it is given back in
/// the background.
#[derive(Clone, Debug)]
pub struct Lease(Arc<Held>);

impl Lease {
    /// The names that it is a lease of; the table and the key of a row.
    pub fn names(&self) -> &[String] {
        &self.0.grant.names
    }

    /// The token that the acquire returned; it serves for as long as the lease is held.
    pub fn token(&self) -> i64 {
        self.0.grant.token
    }

    /// Whether it is ours at this moment, by our own clock.
    pub fn held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// How long it is ours if no renewal comes through any more.
    pub fn remaining(&self) -> Duration {
        self.0.heartbeat.remaining(&self.0.grant)
    }

    /// Fails when it is ours no more. For long steps between transactions, and before each call to
    /// the outside.
    pub fn check(&self) -> Result<(), Error> {
        self.0.heartbeat.check(&self.0.grant)
    }

    /// Resolves as soon as the lease is lost, at the deadline at the latest; to None where it ends
    /// without a loss. It borrows the lease, for nothing is told of one that is dropped:
    ///
    /// ```compile_fail,E0716
    /// # async fn work(fence: pg_fence_client::Fence) -> Result<(), pg_fence_client::Error> {
    /// let lost = fence.lease("order:7").acquire().await?.lost();
    /// lost.await;
    /// # Ok(())
    /// # }
    /// ```
    pub fn lost(&self) -> impl Future<Output = Option<Error>> + Send {
        let (grant, mut status) = (self.0.grant.clone(), self.0.grant.status.subscribe());
        async move {
            status.wait_for(|status| status.over.is_some()).await.ok()?;
            grant.loss()
        }
    }

    /// The result of `work`, unless the lease is lost before: then the work is dropped where it
    /// waits.
    pub async fn run<T>(&self, work: impl Future<Output = T>) -> Result<T, Error> {
        tokio::select! {
            biased;
            done = work => Ok(done),
            Some(loss) = self.lost() => Err(loss),
        }
    }

    /// A transaction during which nobody else is granted the lease, and whose writes present its
    /// token. It does not begin when the lease is lost.
    ///
    /// `connection` is a tokio-postgres `Client`, a [`Connected`], sqlx's `PgConnection`, or a
    /// transaction that is open: that is guarded from here on by a savepoint, and the code that
    /// began it ends it.
    ///
    /// Until the transaction ends, the lease is kept, also where it is dropped.
    pub fn guard<'c, C: Guardable>(
        &self,
        connection: &'c mut C,
    ) -> impl Future<Output = Guards<'c, C>> + Send + use<'c, C> {
        Under::new(&self.0.heartbeat, vec![self.0.clone()], None).begin(connection)
    }

    /// Gives it back, and waits for that. Fails only where the lease had been lost: when the server
    /// cannot be reached, it ends at its ttl. Dropped while it waits, it goes on in the background.
    pub async fn release(&self) -> Result<(), Error> {
        let mut status = self.0.grant.status.subscribe();
        self.0.heartbeat.input(|states| states.release(self.0.grant.id));
        let _ = status.wait_for(|status| status.over.is_some()).await;
        self.0.grant.loss().map_or(Ok(()), Err)
    }
}

/// Settings to open a connection with (`options` of libpq and of most drivers, `PGOPTIONS`), so
/// that all that it writes presents the token: for code that knows nothing of fences. Not through a
/// pooler, which takes no options.
pub fn options(lease: &Lease) -> String {
    format!("-c pg_fence.token={}", lease.token())
}

/// A lease that somebody else grants. It has no heartbeat and nothing to close: the service says
/// when it ends.
#[derive(Debug, Clone)]
pub struct Adopted {
    heartbeat: Arc<Heartbeat>,
    name: String,
    token: i64,
    holder: Option<String>,
}

impl Adopted {
    /// The same number, of a holder that several processes have in common.
    pub fn holder(mut self, holder: impl Into<String>) -> Adopted {
        self.holder = Some(holder.into());
        self
    }

    /// As [`Lease::guard`]. [`Error::LeaseTaken`]: a transaction guards an older number, try again;
    /// or another holder, which it names, has adopted this number.
    pub fn guard<'c, C: Guardable>(
        &self,
        connection: &'c mut C,
    ) -> impl Future<Output = Guards<'c, C>> + Send + use<'c, C> {
        let holder = self.holder.clone().unwrap_or_else(holder_of_process);
        let adopted = Some((&*self.name, self.token, holder));
        Under::new(&self.heartbeat, Vec::new(), adopted).begin(connection)
    }
}

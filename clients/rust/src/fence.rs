//! Fences and their leases: the verbs of a program.

use crate::clock;
use crate::connection::{Connected, Opener, Tls, open};
use crate::errors::{BoxError, Error, code_of, type_of};
use crate::heartbeat::{Event, Heartbeat, Held, Setup, now};
use crate::lease_state::{EventKind, LeadEnd, LeadState, Options, Pause, RowTable};
use crate::statements::{millis, quoted, span};
use crate::transaction::{GuardState, Guardable, Guards};
use serde_json::{Value, json};
use std::fmt::Display;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use tokio_postgres::{Config, NoTls};
use tokio_util::sync::CancellationToken;

/// The source of leases: one for a process. Its clones are the same fence. It has one connection,
/// and two threads, while it holds leases, and none otherwise. Session leases and waits have a
/// connection each.
#[derive(Clone, Debug)]
pub struct Fence(Arc<Heartbeat>);

impl Fence {
    /// A fence by a connection string or URL, without encryption.
    pub fn new(url: &str) -> Result<Fence, Error> {
        Ok(Fence::at([url.parse()?], NoTls))
    }

    /// A fence on the first of these servers that accepts a connection, with any TLS of
    /// tokio-postgres (`NoTls` for none).
    pub fn at(configs: impl Into<Vec<Config>>, tls: impl Tls) -> Fence {
        let configs: Arc<[Config]> = configs.into().into();
        Fence::from_opener(Arc::new(move |limit| {
            let (configs, tls) = (configs.clone(), tls.clone());
            Box::pin(async move { open(&configs, tls, limit).await })
        }))
    }

    /// A fence with a function that opens connections, as for passwords that change, or a proxy.
    /// The function must not take them from a pool, because the fence keeps them for long.
    pub fn with_opener<F, O>(opener: F) -> Fence
    where
        F: Fn() -> O + Send + Sync + 'static,
        O: Future<Output = Result<Connected, Error>> + Send + 'static,
    {
        Fence::from_opener(Arc::new(move |_| {
            let opening = opener();
            Box::pin(async move {
                let connected = opening.await?;
                connected.check_idle().await?;
                Ok(connected)
            })
        }))
    }

    fn from_opener(open: Opener) -> Fence {
        let (schema, longest_beat) = (String::new(), Duration::MAX);
        Fence(Heartbeat::new(Setup { open, schema, longest_beat, on_event: Arc::new(|_| {}) }))
    }

    fn with_setup(self, change: impl FnOnce(&mut Setup)) -> Fence {
        let mut setup = self.0.setup.clone();
        change(&mut setup);
        Fence(Heartbeat::new(setup))
    }

    /// Another fence, for an extension in a schema that is not on the search path.
    pub fn in_schema(self, schema: &str) -> Fence {
        self.with_setup(|setup| setup.schema = quoted(schema) + ".")
    }

    /// Another fence, whose renewals take at most `limit` until another connection is tried;
    /// without it, a third of the smallest ttl. For work that has to end some time before the
    /// deadline.
    pub fn renew_within(self, limit: Duration) -> Fence {
        self.with_setup(|setup| setup.longest_beat = limit)
    }

    /// Another fence, which calls the function with each event of its leases. It must not block,
    /// and cannot acquire a lease of that fence.
    pub fn on_event(self, on_event: impl Fn(&Event) + Send + Sync + 'static) -> Fence {
        self.with_setup(|setup| setup.on_event = Arc::new(on_event))
    }

    /// A lease of a name; or of several names (`["order:7", "order:8"]`, a `Vec`) at once, all or
    /// none. Several names have no queue: they are tried each quarter of a second until the wait is
    /// over, and may starve if others wait for each of the names.
    pub fn lease(&self, names: impl Into<Names>) -> LeaseRequest {
        LeaseRequest { fence: self.clone(), options: Options::new(names.into().0) }
    }

    /// A lease that is a row of a table of work. A statement of the program has claimed the row
    /// before, with the given ttl, and has returned the token. The key is the columns of the
    /// primary key with their values (`&[("id", &id)]`). The table is written as in SQL
    /// (`app.runs`). Finish the row in a guard that is ended by
    /// [`commit_and_release`](crate::Guarded::commit_and_release).
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
        let options = Options { table, token, ..Options::new(vec![json!(values).to_string()]) };
        LeaseRequest { fence: self.clone(), options }.ttl(ttl)
    }

    /// Does `work` whenever this process leads, and again after each loss of the lease, the server,
    /// the connection or the transaction. It ends when the work returns or fails with an error of
    /// its own, or when `stop` is cancelled. The work has to watch `stop`: `lead` waits for the end
    /// of the work, and then releases the lease. The result is None after a stop, unless the work
    /// has returned. Work that returns after a loss of the lease is begun again, too.
    ///
    /// On a loss the work is dropped at its next `await`. After a loss or an outage `lead` pauses,
    /// each time for longer, before it acquires again. Each outage is one line of the log and one
    /// event.
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
        let mut lead = LeadState::new(millis(ttl), self.0.jitter);
        loop {
            let acquired = tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(None),
                acquired = request().acquire() => acquired,
            };
            let (error, is_lost): (BoxError, _) = match acquired {
                Ok(lease) => {
                    lead.granted(now());
                    match lease.hold(work(lease.clone())).await {
                        Ok(done) => return Ok(Some(done)),
                        Err(error) => (error, lease.0.grant.loss().is_some()),
                    }
                }
                Err(error) => (error.into(), false),
            };
            let (code, is_stopped) = (code_of(&*error), stop.is_cancelled());
            let failed = (type_of(&*error), &*code);
            let next = lead.failed(now(), failed, is_lost, is_stopped, self.0.is_closing());
            let Pause { pause, begins_outage, has_led } = match next {
                Ok(pause) => pause,
                Err(LeadEnd::Stopped) => return Ok(None),
                Err(LeadEnd::Own | LeadEnd::Closed) => return Err(error),
            };
            if begins_outage {
                self.0.warn(format!("{name} leads no more, and it is tried again: {error}"));
            }
            if begins_outage && has_led {
                let (names, kind) = (vec![name.to_owned()], EventKind::Interrupted);
                self.0.event(Event { kind, names, token: 0, remaining: Duration::ZERO });
            }
            clock::within(span(pause), stop.cancelled()).await;
        }
    }

    /// A lease that another service grants (etcd, ZooKeeper, Redis, another database), by the
    /// number that it has there. The number belongs to one holder: this process, unless
    /// [`Adopted::holder`] names another holder.
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
        GuardState::new(&self.0, leases, None).begin(connection)
    }

    /// Releases all leases, ends all waits, and closes the connection. For SIGTERM, and the end of
    /// `main`.
    pub async fn close(&self) {
        self.0.close().await;
    }
}

/// The shortest ttl, in milliseconds: a shorter one leaves no time for a renewal.
const SHORTEST_TTL: i64 = 100;

/// The name or names of a lease: a string, or an array, a `Vec` or a slice of strings.
#[derive(Debug, Clone)]
pub struct Names(Vec<String>);

macro_rules! names {
    ($(($($generics:tt)*) $kind:ty: $given:ident => $names:expr;)*) => {$(
        impl<$($generics)*> From<$kind> for Names {
            fn from($given: $kind) -> Names {
                Names($names)
            }
        }
    )*};
}

names! {
    () &str: name => vec![name.to_owned()];
    () &String: name => vec![name.clone()];
    () String: name => vec![name];
    (N: Into<String>, const COUNT: usize) [N; COUNT]: names => names.into_iter().map(Into::into).collect();
    (N: Into<String>) Vec<N>: names => names.into_iter().map(Into::into).collect();
    (N: Into<String> + Clone) &[N]: names => names.iter().cloned().map(Into::into).collect();
}

/// A request for a lease: `fence.lease("order:7").ttl(Duration::from_secs(30)).acquire()`.
#[derive(Debug, Clone)]
#[must_use = "a lease is not acquired before `acquire` or `hold`"]
pub struct LeaseRequest {
    fence: Fence,
    options: Options,
}

macro_rules! options {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $kind:ty)?)
        $($field:ident = $value:expr),*;)*) =>
    {
        impl LeaseRequest {$(
            $(#[$doc])*
            pub fn $name(mut self $(, $argument: $kind)?) -> LeaseRequest {
                $(self.options.$field = $value;)*
                self
            }
        )*}
    };
}

options! {
    /// How long the lease lasts without a renewal: at least 100 ms, and 30 s by default.
    ttl(ttl: Duration) ttl = millis(ttl);
    /// How long to wait for the lease: by default not at all.
    wait(wait: Duration) wait = millis(wait);
    /// The holder, for the view of all leases: by default a text that is unique for each acquire.
    holder(holder: impl Into<String>) holder = holder.into(), is_named = true;
    /// The holder, which gets a new grant at once if it has the lease already.
    reclaim(holder: impl Into<String>) holder = holder.into(), is_named = true, reclaim = true;
    /// A session lease, which also ends with its session. It does not work through a pooler.
    session() is_session = true;
    /// A shared lease: other holders may have it shared at the same time.
    shared() is_shared = true;
    /// The number of holders that may have the lease at the same time.
    slots(slots: i32) slots = slots;
    /// Data that the view of all leases shows.
    metadata(metadata: Value) metadata = Some(metadata);
    /// How long the lease is held at most. Then it is lost, whatever its heartbeat does: for work
    /// that hangs.
    at_most(at_most: Duration) at_most = Some(millis(at_most));
}

impl Options {
    fn new(names: Vec<String>) -> Options {
        Options { names, ttl: 30_000, slots: 1, ..Options::default() }
    }

    /// Checks the options, and adds a unique holder unless the program has named one.
    fn checked(mut self) -> Result<Options, Error> {
        let is_plain = !self.is_shared && self.slots == 1 && !self.reclaim;
        let has_no_options =
            is_plain && !self.is_session && !self.is_named && self.metadata.is_none();
        if self.table.is_some() && !(has_no_options && self.wait == 0) {
            return Err(Error::Invalid("a row takes no options but ttl, at_most and columns"));
        }
        if self.names.len() > 1 && !is_plain {
            let exclusive = "several names at once are exclusive: no shared, slots or reclaim";
            return Err(Error::Invalid(exclusive));
        }
        if self.ttl < SHORTEST_TTL {
            return Err(Error::Invalid("ttl is 100 ms or more, for it is renewed meanwhile"));
        }
        if self.at_most == Some(0) {
            return Err(Error::Invalid("at_most is 1 ms or more"));
        }
        if !self.is_named {
            self.holder = unique_holder();
        }
        Ok(self)
    }
}

/// Returns a holder that no other acquire has.
fn unique_holder() -> String {
    holder(&RandomState::new())
}

/// Returns the holder of adopted leases, unless the program names it: all fences of this process
/// have the same. A forked process has another.
fn holder_of_process() -> String {
    static RANDOM: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    holder(&RANDOM)
}

/// Returns the host, the process and a random number.
fn holder(random: &RandomState) -> String {
    let host = nix::sys::utsname::uname();
    let host = host.as_ref().map(|host| host.nodename().to_string_lossy()).unwrap_or_default();
    format!("{host}/{}/{:08x}", std::process::id(), random.hash_one(()) as u32)
}

impl LeaseRequest {
    /// The columns of the token and of the deadline in a table of work ([`Fence::keep_row`]), if
    /// they are not called `fence` and `held_until`.
    pub fn columns(mut self, fence: &str, deadline: &str) -> LeaseRequest {
        if let Some(table) = &mut self.options.table {
            (table.fence, table.deadline) = (fence.to_owned(), deadline.to_owned());
        }
        self
    }

    /// Acquires the lease. Fails with [`Error::LeaseTaken`] if another holder has it until the wait
    /// is over. If the future is dropped, the acquire is given up, and a grant that comes later is
    /// released.
    pub async fn acquire(self) -> Result<Lease, Error> {
        Ok(Lease(self.fence.0.acquire(self.options.checked()?).await?.into()))
    }

    /// Acquires the lease, does `work`, and releases the lease. On a loss the work is dropped at
    /// its next `await`, and the result is [`Error::LeaseLost`], as it is after a loss that the
    /// work did not notice. An error of the work is returned unchanged.
    pub async fn hold<T, E, W>(self, work: impl FnOnce(Lease) -> W) -> Result<T, E>
    where
        W: Future<Output = Result<T, E>>,
        E: From<Error>,
    {
        let lease = self.acquire().await?;
        lease.hold(work(lease.clone())).await
    }
}

/// A lease that is renewed until it is released or lost, by the heartbeat of its [`Fence`].
///
/// Clones are the same lease, for other tasks. When the last clone is dropped, the lease is
/// released in the background.
#[derive(Clone, Debug)]
pub struct Lease(Arc<Held>);

impl Lease {
    /// The names of the lease; of a row lease, its table and its key.
    pub fn names(&self) -> &[String] {
        &self.0.grant.names
    }

    /// The token that the acquire returned. It is valid for as long as the lease is held.
    pub fn token(&self) -> i64 {
        self.0.grant.token
    }

    /// True if the lease is held at this moment, by this computer's clock.
    pub fn held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// How long the lease remains held if no further renewal succeeds.
    pub fn remaining(&self) -> Duration {
        self.0.heartbeat.remaining(&self.0.grant)
    }

    /// Fails with [`Error::LeaseLost`] if the lease is not held. For long steps between
    /// transactions, and before each call to another service.
    pub fn check(&self) -> Result<(), Error> {
        self.0.heartbeat.check(&self.0.grant)
    }

    /// Resolves as soon as the lease is lost, at the deadline at the latest; or to None if the
    /// lease ends without a loss. The future borrows the lease, because a dropped lease reports no
    /// loss:
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
            status.wait_for(|status| status.end.is_some()).await.ok()?;
            grant.loss()
        }
    }

    /// Returns the result of `work`. If the lease is lost before, the work is dropped at its next
    /// `await`, and the result is [`Error::LeaseLost`]. Without the lease the work does not begin.
    pub async fn run<T>(&self, work: impl Future<Output = T>) -> Result<T, Error> {
        self.check()?;
        tokio::select! {
            biased;
            done = work => Ok(done),
            Some(loss) = self.lost() => Err(loss),
        }
    }

    /// Does the work, and releases the lease. The work may return because it has noticed a loss.
    async fn hold<T, E>(&self, work: impl Future<Output = Result<T, E>>) -> Result<T, E>
    where
        E: From<Error>,
    {
        let outcome = self.run(work).await;
        let released = self.release().await;
        let done = outcome??;
        Ok(released.map(|()| done)?)
    }

    /// Begins a transaction during which nobody else is granted the lease, and whose writes present
    /// the lease's token. Fails with [`Error::LeaseLost`] if the lease is lost.
    ///
    /// `connection` is a tokio-postgres `Client`, a [`Connected`], sqlx's `PgConnection`, or an
    /// open transaction. An open transaction is guarded from here on, by a savepoint, and ended by
    /// the code that began it.
    ///
    /// The lease is renewed until the transaction ends, also if the `Lease` is dropped.
    pub fn guard<'c, C: Guardable>(
        &self,
        connection: &'c mut C,
    ) -> impl Future<Output = Guards<'c, C>> + Send + use<'c, C> {
        GuardState::new(&self.0.heartbeat, vec![self.0.clone()], None).begin(connection)
    }

    /// Releases the lease, and waits for the server's answer. Fails only if the lease was lost
    /// before: if the server cannot be reached, the lease ends at its ttl. If the future is
    /// dropped, the release goes on in the background.
    pub async fn release(&self) -> Result<(), Error> {
        let mut status = self.0.grant.status.subscribe();
        self.0.heartbeat.input(|states| states.release(self.0.grant.id));
        let _ = status.wait_for(|status| status.end.is_some()).await;
        self.0.grant.loss().map_or(Ok(()), Err)
    }
}

/// Settings for a new connection (`options` of libpq and of most drivers, `PGOPTIONS`), with which
/// all its writes present the token: for code that knows nothing of fences. They do not work
/// through a pooler, which does not accept options.
pub fn options(lease: &Lease) -> String {
    format!("-c pg_fence.token={}", lease.token())
}

/// A lease that another service grants. It has no heartbeat and nothing to close: that service
/// decides when it ends.
#[derive(Debug, Clone)]
pub struct Adopted {
    heartbeat: Arc<Heartbeat>,
    name: String,
    token: i64,
    holder: Option<String>,
}

impl Adopted {
    /// The same number, for a holder that several processes share.
    pub fn holder(mut self, holder: impl Into<String>) -> Adopted {
        self.holder = Some(holder.into());
        self
    }

    /// Begins a transaction, as [`Lease::guard`] does. Fails with [`Error::LeaseTaken`] if a
    /// transaction guards an older number (try again), or if another holder has adopted this number
    /// (the error names that holder).
    pub fn guard<'c, C: Guardable>(
        &self,
        connection: &'c mut C,
    ) -> impl Future<Output = Guards<'c, C>> + Send + use<'c, C> {
        let holder = self.holder.clone().unwrap_or_else(holder_of_process);
        let adopted = Some((&*self.name, self.token, holder));
        GuardState::new(&self.heartbeat, Vec::new(), adopted).begin(connection)
    }
}

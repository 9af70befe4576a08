//! Transactions under leases, whichever driver they are of.

use crate::connection::Connected;
use crate::errors::{Error, Reason, Refused};
use crate::heartbeat::{Grant, Heartbeat, Held, lock};
use crate::lease_state::{Id, LeaseStates, Stage};
use crate::statements::{Place, counted, qualified};
use serde_json::{Value, json};
use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use tokio::task::AbortHandle;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row, ToStatement, Transaction};

/// A connection on which a transaction under a lease can be begun: tokio-postgres' [`Client`], a
/// [`Connected`], a [`Transaction`] or [`Guard`] that is open; with the feature `sqlx` its
/// `PgConnection`, too.
pub trait Guardable: Send {
    /// The driver's transaction.
    #[doc(hidden)]
    type Begun<'c>: Open
    where
        Self: 'c;

    #[doc(hidden)]
    fn begin(&mut self) -> impl Future<Output = Begun<Self::Begun<'_>>> + Send;

    /// The handle that breaks it off.
    #[doc(hidden)]
    fn cut(&self) -> Option<AbortHandle> {
        None
    }
}

/// A transaction, which is whole, or a savepoint.
pub type Begun<T> = Result<(T, bool), Error>;

/// Fails with 25P02 in a transaction that has failed, and with 22P02 in any other than the guard's:
/// the setting is local to it.
pub const OURS: &str = "SELECT current_setting('pg_fence.token')::bigint";

/// The functions of a guard, for each lease.
const GUARD: &str = "lease_guard(x.name, x.token)";
const ADOPT: &str = "lease_guard(x.name, lease_adopt(x.name, x.token, x.holder))";
const GUARD_ROW: &str =
    "lease_guard_row(x.relation, x.keys, x.name::jsonb, x.token, x.fence, x.deadline)";
const RELEASE_ROW: &str = "(SELECT * FROM lease_release_rows(
    x.relation, x.keys, ARRAY[x.name::jsonb], ARRAY[x.token], x.fence, x.deadline))";

/// A count, the process of the server, and when the transaction began.
pub type Counted = (i64, i32, f64);

/// A driver's transaction, or savepoint. Dropped, it is rolled back.
#[doc(hidden)]
pub trait Open: Send + Sized {
    fn text(&mut self, sql: &'static str) -> impl Future<Output = Result<(), Error>> + Send;

    /// Runs a statement with these pairs as its argument, without a prepared one: poolers do not
    /// stand that.
    fn count(
        &mut self,
        sql: &str,
        pairs: &str,
    ) -> impl Future<Output = Result<Counted, Error>> + Send;

    /// A COMMIT of a transaction that has failed rolls back and is no error, and one without any
    /// transaction is a warning. So `OURS` comes before it if the transaction is whole.
    fn commit(self, is_whole: bool) -> impl Future<Output = Result<(), Error>> + Send;
}

impl Open for Transaction<'_> {
    async fn text(&mut self, sql: &'static str) -> Result<(), Error> {
        Ok(self.batch_execute(sql).await?)
    }

    async fn count(&mut self, sql: &str, pairs: &str) -> Result<Counted, Error> {
        let row = self.query_typed_one(sql, &[(&pairs, Type::TEXT)]).await?;
        Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?))
    }

    async fn commit(self, is_whole: bool) -> Result<(), Error> {
        if !is_whole {
            return Ok(Transaction::commit(self).await?);
        }
        self.batch_execute(&format!("{OURS}; COMMIT")).await?;
        // Its drop would send a ROLLBACK. It owns nothing.
        mem::forget(self);
        Ok(())
    }
}

macro_rules! begins {
    ($($of:ty: $is_whole:literal, $one:ident => $on:expr $(, $cut:item)?;)*) => {$(
        impl Guardable for $of {
            type Begun<'c>
                = Transaction<'c>
            where
                Self: 'c;

            async fn begin(&mut self) -> Begun<Transaction<'_>> {
                let $one = self;
                Ok(($on.transaction().await?, $is_whole))
            }

            $($cut)?
        }
    )*};
}

begins! {
    Client: true, one => one;
    Connected: true, one => one, fn cut(&self) -> Option<AbortHandle> { Some(self.task.abort_handle()) };
    Transaction<'_>: false, one => one;
    Guard<'_>: false, one => one.transaction;
}

/// The leases, or the number, that a transaction is under.
pub(crate) struct Under {
    heartbeat: Arc<Heartbeat>,
    /// None is given back while the transaction runs. An adopted one is not among them.
    leases: Vec<Arc<Held>>,
    names: Vec<String>,
    /// Row leases, and the names of all others, as the arguments of the statements.
    rows: Vec<Value>,
    pairs: Vec<Value>,
    is_whole: bool,
    /// Row leases whose window was over before it began. The table's trigger checks their last
    /// write, and they have no other.
    late: Vec<Id>,
    /// True while the transaction has written the rows of row leases.
    is_touching: bool,
    /// How far the transaction has come that releases the leases, if it does.
    last: Option<Stage>,
    cut: Option<AbortHandle>,
    /// Where what hangs can be found: not in a savepoint, for its transaction goes on without it.
    place: Option<Place>,
    /// How many statements are under way, or were dropped where they were.
    hanging: AtomicUsize,
}

impl Under {
    /// Under leases, or under the number of an adopted one, which has no grant.
    pub fn new(
        heartbeat: &Arc<Heartbeat>,
        leases: Vec<Arc<Held>>,
        adopted: Option<(&str, i64, String)>,
    ) -> Under {
        let (mut names, mut rows, mut pairs) = (Vec::new(), Vec::new(), Vec::new());
        for Grant { names: of, token, row, .. } in leases.iter().map(|lease| &*lease.grant) {
            names.extend(of.clone());
            match row {
                Some(row) => rows.push(row.clone()),
                None => pairs.extend(of.iter().map(|name| json!({ "name": name, "token": token }))),
            }
        }
        if let Some((name, token, holder)) = adopted {
            names.push(name.to_owned());
            pairs.push(json!({ "name": name, "token": token, "holder": holder }));
        }
        Under {
            heartbeat: heartbeat.clone(),
            leases,
            names,
            rows,
            pairs,
            is_whole: true,
            late: Vec::new(),
            is_touching: false,
            last: None,
            cut: None,
            place: None,
            hanging: 0.into(),
        }
    }

    fn grants(&self) -> impl Iterator<Item = &Grant> {
        self.leases.iter().map(|lease| &*lease.grant)
    }

    fn ids(&self) -> Vec<Id> {
        self.grants().map(|grant| grant.id).collect()
    }

    /// The next renewal is to tell whether they are lost.
    fn suspect(&self) {
        self.heartbeat.input(|states| states.suspect(&self.ids()));
    }

    /// Tells how far the transaction has come that releases them.
    fn tell_last(&self, stage: Stage) {
        self.heartbeat.input(|states| states.last(&self.ids(), stage));
    }

    fn is_adopted(&self) -> bool {
        self.leases.is_empty()
    }

    /// `Send` is said, for the compiler does not find it out if a guard is within another.
    #[allow(clippy::manual_async_fn)]
    pub fn begin<'c, C: Guardable>(
        mut self,
        connection: &'c mut C,
    ) -> impl Future<Output = Guards<'c, C>> + Send + use<'c, C> {
        async move {
            if self.names.is_empty() {
                return Err(Error::Invalid("a guard takes a lease"));
            }
            if self.leases.iter().any(|lease| !Arc::ptr_eq(&lease.heartbeat, &self.heartbeat)) {
                return Err(Error::Invalid("a guard takes leases of its own fence"));
            }
            self.cut = connection.cut();
            for grant in self.leases.iter().map(|lease| &*lease.grant) {
                match self.heartbeat.check(grant) {
                    Err(Error::LeaseLost { reason: Reason::Deadline, .. })
                        if grant.row.is_some() =>
                    {
                        self.late.push(grant.id);
                    }
                    checked => checked?,
                }
                // From here on a loss breaks it off.
                lock(&grant.guards).extend(self.cut.clone());
            }
            // Nor does it begin if one was lost meanwhile.
            self.loss().map_or(Ok(()), Err)?;
            let transaction;
            (transaction, self.is_whole) = self.or_loss(connection.begin()).await?;
            let mut guard = Guarded { transaction, under: self };
            let mut entered = guard.enter().await;
            let is_silent = entered.as_ref().is_err_and(|error| error.has_state("PF004"));
            if is_silent && guard.under.is_whole && !guard.under.is_adopted() {
                // After a failover no token speaks until its holder has renewed.
                guard.under.touches(false);
                guard.under.heartbeat.renew(&guard.under.leases).await;
                guard.under.or_loss(guard.transaction.text("ROLLBACK; BEGIN")).await?;
                entered = guard.enter().await;
            }
            let table = guard.under.rows.first().and_then(|row| row["relation"].as_str());
            match entered.map_err(|error| error.of_call("", table)) {
                Ok(()) => Ok(guard),
                // NULL from lease_adopt: a transaction guards an older number. PF004 from it:
                // another holder has adopted this number.
                Err(Error::Refused(Refused { sqlstate, detail, .. }))
                    if matches!(sqlstate.as_str(), "22004" | "PF004")
                        && guard.under.is_adopted() =>
                {
                    let holder = detail.get("holder").and_then(Value::as_str).map(str::to_owned);
                    let (names, remaining, waits_for) = (guard.under.names.clone(), None, None);
                    Err(Error::LeaseTaken { names, holder, remaining, waits_for })
                }
                Err(error) => Err(error),
            }
        }
    }

    /// Tells the heartbeat that the rows of row leases are written, or that the transaction has ended.
    fn touches(&mut self, begins: bool) {
        let is_changed = mem::replace(&mut self.is_touching, begins) != begins;
        for grant in self.grants().filter(|grant| is_changed && grant.row.is_some()) {
            let input = if begins { LeaseStates::touches } else { LeaseStates::ended };
            self.heartbeat.input(|states| input(states, grant.id));
        }
    }

    fn loss(&self) -> Option<Error> {
        self.grants().filter(|grant| !self.late.contains(&grant.id)).find_map(Grant::loss)
    }

    /// The result of a call, unless a loss is first.
    async fn or_loss<T>(&self, call: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        let lost = async {
            let mut changed = self.heartbeat.changed.subscribe();
            loop {
                match self.loss() {
                    Some(loss) => return loss,
                    None => drop(changed.changed().await),
                }
            }
        };
        self.hanging.fetch_add(1, Relaxed);
        tokio::select! {
            biased;
            done = call => {
                self.hanging.fetch_sub(1, Relaxed);
                let Err(error) = done else { return done };
                if error.has_state("PF001") || error.has_state("PF004") {
                    self.suspect();
                }
                // That of a connection that was broken off because of a loss is the loss.
                let is_cut = matches!(error, Error::TransactionLost { .. });
                Err(self.loss().filter(|_| is_cut).unwrap_or(error))
            }
            lost = lost => Err(lost),
        }
    }
}

/// The meaning of a refused commit.
fn told_of_commit(mut error: Error) -> Error {
    let sqlstate = error.sqlstate();
    let (message, in_doubt) = match (sqlstate.as_deref(), &mut error) {
        (Some("25P02"), _) => ("a statement of it has failed: all of it is rolled back", false),
        (Some("22P02" | "3B001"), _) => {
            ("the work has ended it itself: what came after that was not guarded", true)
        }
        // The server ends an idle transaction before it reads the commit.
        (Some("25P03" | "25P04"), _) => return error,
        (_, Error::TransactionLost { in_doubt, .. } | Error::LeaseLost { in_doubt, .. }) => {
            *in_doubt = true;
            return error;
        }
        _ => return error,
    };
    Error::TransactionLost { message: message.to_owned(), sqlstate, in_doubt }
}

impl Drop for Under {
    fn drop(&mut self) {
        let cut = self.cut.as_ref().map(AbortHandle::id);
        for grant in self.grants() {
            lock(&grant.guards).retain(|one| Some(one.id()) != cut);
        }
        if let Some(stage) = self.last {
            self.tell_last(stage);
        }
        self.touches(false);
        // A caller that gave up a statement, or lost it, is not to be held up by it. It is not
        // known here what a driver's own method does, so the server is asked after each loss.
        let hangs = *self.hanging.get_mut() > 0 || self.loss().is_some();
        if let (true, Some(place)) = (hangs, self.place) {
            self.heartbeat.cancel(place);
        }
    }
}

/// The outcome of beginning one on such a connection.
pub type Guards<'c, C> = Result<Guarded<<C as Guardable>::Begun<'c>>, Error>;

/// On tokio-postgres.
pub type Guard<'c> = Guarded<Transaction<'c>>;

/// A driver's transaction under leases, to be ended by [`commit`](Guarded::commit) or
/// [`commit_and_release`](Guarded::commit_and_release); dropped, it is rolled back.
///
/// It dereferences to the driver's transaction. The methods of that name here do more: a loss ends
/// them where they wait, and errors come out as [types](Error). A call by dereferencing ends with
/// the connection, which a loss breaks off where it is a [`Connected`].
#[must_use = "dropped, it is rolled back"]
pub struct Guarded<T: Open> {
    // Rolled back before the loss need not break it off any more.
    transaction: T,
    under: Under,
}

impl<T: Open> Guarded<T> {
    /// Runs a statement for each of these, and tells whether each of its answers was no NULL.
    async fn call(&mut self, function: &str, of: Vec<Value>) -> Result<bool, Error> {
        if of.is_empty() {
            return Ok(true);
        }
        let Guarded { transaction, under } = self;
        let sql = qualified(&under.heartbeat.setup.schema, &counted(function));
        let (expected, of) = (of.len() as i64, Value::from(of).to_string());
        let (count, process, began) = under.or_loss(transaction.count(&sql, &of)).await?;
        under.place = under.is_whole.then_some((process, began));
        Ok(count == expected)
    }

    async fn enter(&mut self) -> Result<(), Error> {
        let (rows, pairs) = (self.under.rows.clone(), self.under.pairs.clone());
        if !self.call(GUARD_ROW, rows).await? {
            return Err(self.gone());
        }
        self.under.touches(true);
        self.call(if self.under.is_adopted() { ADOPT } else { GUARD }, pairs).await?;
        Ok(())
    }

    /// The server has said that a lease is not ours.
    fn gone(&self) -> Error {
        self.under.suspect();
        Error::lost(&self.under.names, Reason::Gone, false)
    }

    /// Commits. It refuses if a statement has failed, or the work has ended the transaction by
    /// itself, which PostgreSQL takes for a success.
    pub async fn commit(mut self) -> Result<(), Error> {
        self.under.late.clear();
        match self.under.loss() {
            Some(loss) => Err(loss),
            None => self.end().await,
        }
    }

    async fn end(self) -> Result<(), Error> {
        let Guarded { transaction, mut under } = self;
        let (is_whole, is_last) = (under.is_whole, under.last.is_some());
        if is_last {
            // The stage if this is dropped while it waits.
            under.last = Some(if is_whole { Stage::InDoubt } else { Stage::RolledBack });
        }
        let ended = under.or_loss(transaction.commit(is_whole)).await.map_err(told_of_commit);
        let is_in_doubt = matches!(
            ended,
            Err(Error::TransactionLost { in_doubt: true, .. }
                | Error::LeaseLost { in_doubt: true, .. })
        );
        let stage = match &ended {
            Ok(()) if is_whole => Stage::Committed,
            Ok(()) => Stage::Inner,
            Err(_) if is_whole && is_in_doubt => Stage::InDoubt,
            Err(_) => Stage::RolledBack,
        };
        under.last = is_last.then_some(stage);
        if ended.is_ok() {
            under.place = None;
        }
        ended
    }

    /// Gives the leases back by the last write of this transaction, and commits. In a transaction
    /// that goes on they are given back when that commits, and live on if it does not.
    pub async fn commit_and_release(mut self) -> Result<(), Error> {
        // The heartbeat leaves out what is about to be released.
        self.under.tell_last(Stage::Begins);
        self.under.last = Some(Stage::RolledBack);
        // No commit is on its way yet: any other error leaves no doubt.
        let told = |error: Error| match error.has_state("25P02") {
            true => told_of_commit(error),
            false => error,
        };
        // The work may have given a row up by itself.
        let (rows, pairs) = (self.under.rows.clone(), self.under.pairs.clone());
        self.call(RELEASE_ROW, rows).await.map_err(told)?;
        if !self.call("lease_release(x.name, x.token)", pairs).await.map_err(told)? {
            return Err(self.gone());
        }
        self.end().await
    }
}

macro_rules! calls {
    ($($name:ident($($given:ident: $kind:ty),*) -> $of:ty;)*) => {
        impl Guard<'_> {$(
            #[doc = concat!("As [`Transaction::", stringify!($name), "`].")]
            pub async fn $name(&self, $($given: $kind),*) -> Result<$of, Error> {
                self.under.or_loss(async { Ok(self.transaction.$name($($given),*).await?) }).await
            }
        )*}
    };
}

calls! {
    batch_execute(sql: &str) -> ();
    execute(statement: &(impl ?Sized + ToStatement), params: &[&(dyn ToSql + Sync)]) -> u64;
    query(statement: &(impl ?Sized + ToStatement), params: &[&(dyn ToSql + Sync)]) -> Vec<Row>;
    query_one(statement: &(impl ?Sized + ToStatement), params: &[&(dyn ToSql + Sync)]) -> Row;
    execute_typed(sql: &str, params: &[(&(dyn ToSql + Sync), Type)]) -> u64;
    query_typed(sql: &str, params: &[(&(dyn ToSql + Sync), Type)]) -> Vec<Row>;
    query_opt(statement: &(impl ?Sized + ToStatement), params: &[&(dyn ToSql + Sync)]) -> Option<Row>;
}

impl<T: Open> Deref for Guarded<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.transaction
    }
}

impl<T: Open> DerefMut for Guarded<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.transaction
    }
}

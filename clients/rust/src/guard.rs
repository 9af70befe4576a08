//! Transactions under leases, whichever driver they are of.

use crate::asked::Place;
use crate::connected::Connected;
use crate::error::{Error, Reason, Refused};
use crate::keeper::{Held, Keeper};
use crate::lease::{EventKind, Grant, lock, pairs};
use serde_json::Value;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use tokio::task::AbortHandle;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row, ToStatement, Transaction};

/// A connection on which a transaction under a lease can be begun: tokio-postgres' [`Client`], a [`Connected`], a
/// [`Transaction`] or [`Guard`] that is open; with the feature `sqlx` its `PgConnection`, too.
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

/// Refused in a transaction that has failed (25P02), and outside of the guard's own (22P02), of which alone the token is.
pub const OURS: &str = "SELECT current_setting('pg_fence.token')::bigint";

/// Names, their tokens, and the holder of one that is adopted.
pub type Of = (Vec<String>, Vec<i64>, Vec<String>);
/// A count, the process of the server, and when the transaction began.
pub type Row3 = (i64, i32, f64);

/// A driver's transaction, or savepoint. Dropped, it is rolled back.
#[doc(hidden)]
pub trait Open: Send + Sized {
    fn text(&mut self, sql: &'static str) -> impl Future<Output = Result<(), Error>> + Send;

    /// Of a statement with these names, tokens and holders, without a prepared one, which poolers do not stand.
    fn row(&mut self, sql: &str, of: &Of) -> impl Future<Output = Result<Row3, Error>> + Send;

    /// A COMMIT of a transaction that has failed rolls back and is no error, and one without any transaction is a
    /// warning; so where it is whole `OURS` comes before it.
    fn commit(self, is_whole: bool) -> impl Future<Output = Result<(), Error>> + Send;
}

impl Open for Transaction<'_> {
    async fn text(&mut self, sql: &'static str) -> Result<(), Error> {
        Ok(self.batch_execute(sql).await?)
    }

    async fn row(&mut self, sql: &str, (names, tokens, holders): &Of) -> Result<Row3, Error> {
        let arguments: [(&(dyn ToSql + Sync), Type); 3] =
            [(names, Type::TEXT_ARRAY), (tokens, Type::INT8_ARRAY), (holders, Type::TEXT_ARRAY)];
        let row = self.query_typed_one(sql, &arguments).await?;
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

/// The lease or number that a transaction is under.
pub(crate) struct Under {
    keeper: Arc<Keeper>,
    /// Held on to, so that none is given back while the transaction runs.
    _leases: Vec<Arc<Held>>,
    grants: Vec<Arc<Grant>>,
    /// In an order that is the same everywhere, so that no two wait for each other.
    of: Of,
    is_whole: bool,
    is_releasing: bool,
    cut: Option<AbortHandle>,
    /// Where what hangs can be found: not in a savepoint, for its transaction goes on without it.
    place: Option<Place>,
    /// A statement is under way; or was dropped where it was.
    hangs: AtomicBool,
}

impl Under {
    pub fn leases(keeper: &Arc<Keeper>, leases: Vec<Arc<Held>>) -> Under {
        let grants: Vec<_> = leases.iter().map(|lease| lease.grant.clone()).collect();
        let mut pairs = pairs(&grants);
        pairs.sort();
        let (names, tokens) = pairs.into_iter().unzip();
        Under::new(keeper, leases, grants, (names, tokens, Vec::new()))
    }

    /// Of a lease that is adopted, which has no grant.
    pub fn adopted(keeper: &Arc<Keeper>, of: Of) -> Under {
        Under::new(keeper, Vec::new(), Vec::new(), of)
    }

    fn new(keeper: &Arc<Keeper>, leases: Vec<Arc<Held>>, grants: Vec<Arc<Grant>>, of: Of) -> Under {
        let (is_whole, is_releasing, cut, place) = (true, false, None, None);
        let (keeper, hangs) = (keeper.clone(), false.into());
        Under { keeper, _leases: leases, grants, of, is_whole, is_releasing, cut, place, hangs }
    }

    /// `Send` is said, for the compiler does not find it out where a guard is within another.
    #[allow(clippy::manual_async_fn)]
    pub fn begin<'c, C: Guardable>(
        mut self,
        connection: &'c mut C,
    ) -> impl Future<Output = Guards<'c, C>> + Send + use<'c, C> {
        async move {
            if self.of.0.is_empty() {
                return Err(Error::Invalid("a guard takes a lease"));
            }
            self.cut = connection.cut();
            for grant in &self.grants {
                self.keeper.check(grant)?;
                // From here on a loss breaks it off.
                lock(&grant.guards).extend(self.cut.clone());
            }
            // Nor does it begin where one was lost meanwhile.
            self.loss().map_or(Ok(()), Err)?;
            let transaction;
            (transaction, self.is_whole) = self.or_loss(connection.begin()).await?;
            let mut guard = Guarded { transaction, under: self };
            let function = match guard.under.grants.is_empty() {
                true => "lease_guard(x.name, lease_adopt(x.name, x.token, x.holder))",
                false => "lease_guard(x.name, x.token)",
            };
            let mut entered = guard.count(function).await;
            let Under { keeper, grants, is_whole, .. } = &guard.under;
            let is_silent = entered.as_ref().is_err_and(|error| error.has_state("PF004"));
            if is_silent && *is_whole && !grants.is_empty() {
                // After a failover no token speaks until its holder has renewed.
                let (renews, grants) = (keeper.clone(), grants.clone());
                keeper.run(async move { renews.keep(&grants).await }).await?;
                guard.under.or_loss(guard.transaction.text("ROLLBACK; BEGIN")).await?;
                entered = guard.count(function).await;
            }
            match entered.map_err(Error::of_call) {
                Ok(_) => Ok(guard),
                // NULL from lease_adopt: a transaction guards an older number. PF004 from it: another holder has adopted this
                // number.
                Err(Error::Refused(Refused { sqlstate, detail, .. }))
                    if matches!(sqlstate.as_str(), "22004" | "PF004")
                        && guard.under.grants.is_empty() =>
                {
                    let holder = detail.get("holder").and_then(Value::as_str).map(str::to_owned);
                    Err(Error::LeaseTaken {
                        names: guard.under.of.0.clone(),
                        holder,
                        remaining: None,
                    })
                }
                Err(error) => Err(error),
            }
        }
    }

    fn loss(&self) -> Option<Error> {
        self.grants.iter().find_map(|grant| grant.loss())
    }

    /// The result of a call, unless a loss is first.
    async fn or_loss<T>(&self, call: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        let lost = async {
            let mut changed = self.keeper.changed.subscribe();
            loop {
                match self.loss() {
                    Some(loss) => return loss,
                    None => drop(changed.changed().await),
                }
            }
        };
        self.hangs.store(true, Relaxed);
        tokio::select! {
            biased;
            done = call => {
                self.hangs.store(false, Relaxed);
                let Err(error) = done else { return done };
                if error.has_state("PF001") || error.has_state("PF004") {
                    self.keeper.beat_at(&self.grants, Duration::ZERO);
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
fn told_of_commit(error: Error) -> Error {
    let lost = |message: &str, in_doubt| {
        let (message, sqlstate) = (message.to_owned(), error.sqlstate());
        Error::TransactionLost { message, sqlstate, in_doubt }
    };
    match (error.sqlstate().as_deref(), &error) {
        (Some("25P02"), _) => lost("a statement of it has failed: all of it is rolled back", false),
        (Some("22P02" | "3B001"), _) => {
            lost("the work has ended it itself: what came after that was not guarded", true)
        }
        // The server ends an idle transaction before it reads the commit.
        (Some("25P03" | "25P04"), _) => error,
        (_, Error::TransactionLost { message, .. }) => lost(message, true),
        (_, Error::LeaseLost { names, reason, .. }) => {
            Error::LeaseLost { names: names.clone(), reason: *reason, in_doubt: true }
        }
        _ => error,
    }
}

impl Drop for Under {
    fn drop(&mut self) {
        let cut = self.cut.as_ref().map(AbortHandle::id);
        for grant in &self.grants {
            lock(&grant.guards).retain(|one| Some(one.id()) != cut);
            if self.is_releasing {
                grant.rest(false);
            }
        }
        // A caller that gave up a statement, or lost it, is not to be held up by it. It is not known here what a
        // driver's own method does, so the server is asked after each loss.
        let hangs = *self.hangs.get_mut() || self.loss().is_some();
        if let (true, Some(place)) = (hangs, self.place) {
            self.keeper.cancel(place);
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
/// It dereferences to the driver's transaction. The methods of that name here do more: a loss ends them where they wait,
/// and errors come out as [types](Error). A call by dereferencing ends with the connection, which a loss breaks off
/// where it is a [`Connected`].
#[must_use = "dropped, it is rolled back"]
pub struct Guarded<T: Open> {
    // Rolled back before the loss need not break it off any more.
    transaction: T,
    under: Under,
}

impl<T: Open> Guarded<T> {
    /// How often the answer of a function is not NULL.
    async fn count(&mut self, function: &str) -> Result<i64, Error> {
        let Guarded { transaction, under } = self;
        let call = function.replace("lease_", &format!("{}lease_", under.keeper.setup.schema));
        let sql = format!(
            "SELECT count({call}), pg_backend_pid(), extract(epoch FROM now())::float8 \
             FROM unnest($1::text[], $2::bigint[], $3::text[]) AS x(name, token, holder)"
        );
        let (count, process, began) = under.or_loss(transaction.row(&sql, &under.of)).await?;
        under.place = under.is_whole.then_some((process, began));
        Ok(count)
    }

    /// Commits. It refuses where a statement has failed, or the work has ended the transaction by itself, which
    /// PostgreSQL takes for a success.
    pub async fn commit(self) -> Result<(), Error> {
        self.end().await.map(drop)
    }

    async fn end(self) -> Result<Under, Error> {
        let Guarded { transaction, mut under } = self;
        match under.or_loss(transaction.commit(under.is_whole)).await {
            Ok(()) => {
                under.place = None;
                Ok(under)
            }
            Err(error) => Err(told_of_commit(error)),
        }
    }

    /// Gives the leases back by the last write of this transaction, and commits.
    pub async fn commit_and_release(mut self) -> Result<(), Error> {
        // A renewal would tell that they are locked, or gone.
        self.under.is_releasing = true;
        self.under.grants.iter().for_each(|grant| grant.rest(true));
        let count = self.count("lease_release(x.name, x.token)").await.map_err(|error| {
            // No commit is on its way yet: any other error leaves no doubt.
            if error.has_state("25P02") { told_of_commit(error) } else { error }
        })?;
        let Under { keeper, grants, of: (names, ..), .. } = &self.under;
        if count < names.len() as i64 {
            keeper.end(grants, Reason::Gone);
            let (names, reason) = (names.clone(), Reason::Gone);
            return Err(Error::LeaseLost { names, reason, in_doubt: false });
        }
        let under = self.end().await?;
        let released = under.keeper.end(&under.grants, Reason::Released);
        released.iter().for_each(|grant| under.keeper.tell(EventKind::Released, grant));
        Ok(())
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

//! Transactions under leases, whichever driver they are of.

use crate::asked::Pairs;
use crate::connected::{Connected, Cut};
use crate::error::{Error, Reason};
use crate::keeper::{EventKind, Grant, Keeper, lock, pairs};
use std::future::Future;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row, ToStatement, Transaction};

/// What a transaction under a lease can be begun on: tokio-postgres' [`Client`], a [`Connected`], a [`Transaction`] or
/// [`Guard`] that is open; with the feature `sqlx` its `PgConnection`, too.
pub trait Guardable: Send {
    /// The driver's transaction.
    #[doc(hidden)]
    type Begun<'c>: Open
    where
        Self: 'c;

    /// Whether it begins a transaction of its own, and not a savepoint.
    #[doc(hidden)]
    fn is_whole(&self) -> bool;

    #[doc(hidden)]
    fn begin(&mut self) -> impl Future<Output = Result<Self::Begun<'_>, Error>> + Send;

    /// What ends whatever hangs on it.
    #[doc(hidden)]
    fn cut(&self) -> Option<Cut> {
        None
    }
}

/// A driver's transaction, or savepoint. Dropped, it is rolled back.
#[doc(hidden)]
pub trait Open: Send + Sized {
    fn text(&mut self, sql: &'static str) -> impl Future<Output = Result<(), Error>> + Send;

    /// Of a statement with these names and tokens, without a prepared one, which poolers do not stand.
    fn count(
        &mut self,
        sql: &str,
        names: &[String],
        tokens: &[i64],
    ) -> impl Future<Output = Result<i64, Error>> + Send;

    /// A COMMIT of a transaction that has failed rolls back and is no error, and one without any transaction is a
    /// warning; so where it is whole something comes before it that is refused in both cases.
    fn commit(self, is_whole: bool) -> impl Future<Output = Result<(), Error>> + Send;

    fn rollback(self) -> impl Future<Output = Result<(), Error>> + Send;
}

impl Open for Transaction<'_> {
    async fn text(&mut self, sql: &'static str) -> Result<(), Error> {
        Ok(self.batch_execute(sql).await?)
    }

    async fn count(&mut self, sql: &str, names: &[String], tokens: &[i64]) -> Result<i64, Error> {
        let arguments: [(&(dyn ToSql + Sync), Type); 2] =
            [(&names, Type::TEXT_ARRAY), (&tokens, Type::INT8_ARRAY)];
        Ok(self.query_typed_one(sql, &arguments).await?.try_get(0)?)
    }

    async fn commit(self, is_whole: bool) -> Result<(), Error> {
        if !is_whole {
            return Ok(Transaction::commit(self).await?);
        }
        self.batch_execute("SAVEPOINT pg_fence_commits; COMMIT").await?;
        // Its drop would send a ROLLBACK. It owns nothing.
        mem::forget(self);
        Ok(())
    }

    async fn rollback(self) -> Result<(), Error> {
        Ok(Transaction::rollback(self).await?)
    }
}

macro_rules! begins {
    ($($of:ty, $is_whole:literal, $path:ident $(. $field:ident)?, $cut:expr;)*) => {$(
        impl Guardable for $of {
            type Begun<'c>
                = Transaction<'c>
            where
                Self: 'c;

            fn is_whole(&self) -> bool {
                $is_whole
            }

            async fn begin(&mut self) -> Result<Transaction<'_>, Error> {
                let $path = self;
                Ok($path$(.$field)?.transaction().await?)
            }

            fn cut(&self) -> Option<Cut> {
                ($cut)(self)
            }
        }
    )*};
}

begins! {
    Client, true, one, |_| None;
    Connected, true, one, |one: &Connected| Some(one.cut.clone());
    Transaction<'_>, false, one, |_| None;
    Guard<'_>, false, one.transaction, |_| None;
}

/// What a transaction is under.
pub(crate) struct Under {
    keeper: Arc<Keeper>,
    grants: Vec<Arc<Grant>>,
    /// In an order that is the same everywhere, so that no two wait for each other.
    names: Vec<String>,
    tokens: Vec<i64>,
    is_whole: bool,
    cut: Option<Cut>,
    /// A statement is under way; or was dropped where it was.
    hangs: AtomicBool,
}

impl Under {
    /// The pairs are the grants', or of an adopted lease, which has none.
    pub fn new(keeper: &Arc<Keeper>, grants: Vec<Arc<Grant>>, mut pairs: Pairs) -> Under {
        pairs.sort();
        let (names, tokens) = pairs.into_iter().unzip();
        let (keeper, hangs) = (keeper.clone(), AtomicBool::new(false));
        Under { keeper, grants, names, tokens, is_whole: true, cut: None, hangs }
    }

    pub fn leases(keeper: &Arc<Keeper>, grants: Vec<Arc<Grant>>) -> Under {
        let pairs = pairs(&grants);
        Under::new(keeper, grants, pairs)
    }

    /// `Send` is said, for the compiler does not find it out where a guard is within another.
    pub fn begin<'c, C: Guardable>(
        mut self,
        connection: &'c mut C,
    ) -> impl Future<Output = Guards<'c, C>> + Send + use<'c, C> {
        (self.is_whole, self.cut) = (connection.is_whole(), connection.cut());
        Guarded::begin(self, connection.begin())
    }

    /// From here on a loss breaks it off. It does not begin where one is lost already.
    fn enter(&self) -> Result<(), Error> {
        for grant in &self.grants {
            lock(&grant.guards).extend(self.cut.iter().map(|cut| cut.connection.clone()));
        }
        if self.names.is_empty() {
            return Err(Error::Invalid("a guard takes a lease"));
        }
        self.grants.iter().try_for_each(|grant| self.keeper.check(grant))
    }

    fn loss(&self) -> Option<Error> {
        self.grants.iter().find_map(|grant| grant.loss())
    }

    /// What a call comes to, unless a loss is first.
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
        self.hangs.store(true, Ordering::Relaxed);
        tokio::select! {
            biased;
            done = call => {
                self.hangs.store(false, Ordering::Relaxed);
                done.map_err(|error| self.told(error))
            }
            lost = lost => Err(lost),
        }
    }

    /// An error of a connection that was broken off because of a loss is the loss.
    fn told(&self, error: Error) -> Error {
        if let (Error::TransactionLost { .. }, Some(loss)) = (&error, self.loss()) {
            return loss;
        }
        if error.has_state("PF001") || error.has_state("PF004") {
            self.keeper.beat_soon(&self.grants);
        }
        error
    }

    /// After a failover no token speaks until its holder has renewed. Whether it does.
    async fn can_mend(&self, error: &Error) -> bool {
        if self.grants.is_empty() || !self.is_whole || !error.has_state("PF004") {
            return false;
        }
        let (keeper, grants) = (self.keeper.clone(), self.grants.clone());
        let renewed = self.keeper.run(async move { keeper.keep(&grants).await }).await;
        renewed.is_ok() && self.loss().is_none()
    }

    /// As the statement that begins it tells it.
    fn told_of_begin(&self, error: Error) -> Error {
        match error.of_call(None) {
            // NULL from lease_adopt: a transaction guards an older number.
            told if self.grants.is_empty() && told.has_state("22004") => {
                Error::LeaseTaken { names: self.names.clone(), holder: None, remaining: None }
            }
            // The renewal that was to mend it may have found it lost.
            told => self.loss().unwrap_or(told),
        }
    }

    /// What a commit that was refused means. The server ends an idle transaction before it reads the commit.
    fn told_of_commit(&self, mut error: Error) -> Error {
        let sqlstate = error.sqlstate();
        let (message, is_in_doubt) = match sqlstate.as_deref() {
            Some("25P02") => ("a statement of it has failed: all of it is rolled back", false),
            Some("25P01" | "3B001") => {
                ("the work has ended it itself: what came after that was not guarded", true)
            }
            Some("25P03" | "25P04") => return error,
            _ => {
                if let Error::LeaseLost { in_doubt, .. } | Error::TransactionLost { in_doubt, .. } =
                    &mut error
                {
                    *in_doubt = true;
                }
                return error;
            }
        };
        Error::TransactionLost { message: message.to_owned(), sqlstate, in_doubt: is_in_doubt }
    }
}

impl Drop for Under {
    fn drop(&mut self) {
        let Some(cut) = &self.cut else { return };
        for grant in &self.grants {
            lock(&grant.guards).retain(|one| one.id() != cut.connection.id());
        }
        // Whoever gave up a statement is not to be held up by it.
        if *self.hangs.get_mut() {
            let _ = self.keeper.spawn((cut.cancel)());
        }
    }
}

/// Grants that are about to be released: a renewal would tell that they are locked, or gone.
struct Resting(Vec<Arc<Grant>>);

impl Resting {
    fn begin(grants: Vec<Arc<Grant>>) -> Resting {
        grants.iter().for_each(|grant| grant.rest(true));
        Resting(grants)
    }
}

impl Drop for Resting {
    fn drop(&mut self) {
        self.0.iter().for_each(|grant| grant.rest(false));
    }
}

/// What comes of beginning one on such a connection.
pub type Guards<'c, C> = Result<Guarded<<C as Guardable>::Begun<'c>>, Error>;

/// On tokio-postgres.
pub type Guard<'c> = Guarded<Transaction<'c>>;

/// A driver's transaction under leases, to be ended by [`commit`](Guarded::commit) or
/// [`commit_and_release`](Guarded::commit_and_release); dropped, it is rolled back.
///
/// It dereferences to the driver's transaction. The methods of that name here do more: a loss ends them where they wait,
/// and errors come out as [types](Error). For what is reached by dereferencing, a loss breaks off the connection where it
/// is a [`Connected`], and [`told`](Guarded::told) types the error.
#[must_use = "dropped, it is rolled back"]
pub struct Guarded<T: Open> {
    // Rolled back before the loss need not break it off any more.
    transaction: T,
    under: Under,
}

impl<T: Open> Guarded<T> {
    async fn begin(
        under: Under,
        begun: impl Future<Output = Result<T, Error>> + Send,
    ) -> Result<Guarded<T>, Error> {
        under.enter()?;
        let mut guard = Guarded { transaction: under.or_loss(begun).await?, under };
        let function = match guard.under.grants.is_empty() {
            true => "lease_guard(x.name, lease_adopt(x.name, x.token))",
            false => "lease_guard(x.name, x.token)",
        };
        let mut entered = guard.count(function).await;
        if let Err(error) = &entered
            && guard.under.can_mend(error).await
        {
            guard.under.or_loss(guard.transaction.text("ROLLBACK; BEGIN")).await?;
            entered = guard.count(function).await;
        }
        match entered {
            Ok(_) => Ok(guard),
            Err(error) => Err(guard.under.told_of_begin(error)),
        }
    }

    /// How often the answer of a function is not NULL.
    async fn count(&mut self, function: &str) -> Result<i64, Error> {
        let Guarded { transaction, under } = self;
        let call = function.replace("lease_", &format!("{}lease_", under.keeper.setup.schema));
        let sql =
            format!("SELECT count({call}) FROM unnest($1::text[], $2::bigint[]) AS x(name, token)");
        under.or_loss(transaction.count(&sql, &under.names, &under.tokens)).await
    }

    /// The typed error in one of the driver. One of a connection that was broken off because of a loss is the loss.
    pub fn told(&self, error: impl Into<Error>) -> Error {
        self.under.told(error.into())
    }

    /// Commits. It refuses where a statement has failed, or the work has ended the transaction by itself, which
    /// PostgreSQL takes for a success.
    pub async fn commit(self) -> Result<(), Error> {
        let Guarded { transaction, under } = self;
        let committed = under.or_loss(transaction.commit(under.is_whole)).await;
        committed.map_err(|error| under.told_of_commit(error))
    }

    /// Gives the leases back by the last write of this transaction, and commits.
    pub async fn commit_and_release(mut self) -> Result<(), Error> {
        let (keeper, resting) =
            (self.under.keeper.clone(), Resting::begin(self.under.grants.clone()));
        let count = self.count("lease_release(x.name, x.token)").await?;
        if count < self.under.names.len() as i64 {
            keeper.end(&resting.0, Reason::Gone);
            let (names, reason) = (self.under.names.clone(), Reason::Gone);
            return Err(Error::LeaseLost { names, reason, in_doubt: false });
        }
        self.commit().await?;
        let released = keeper.end(&resting.0, Reason::Released);
        released.iter().for_each(|grant| keeper.tell(EventKind::Released, grant));
        Ok(())
    }

    /// Rolls back, and waits for that.
    pub async fn rollback(self) -> Result<(), Error> {
        let Guarded { transaction, under } = self;
        under.or_loss(transaction.rollback()).await
    }
}

macro_rules! calls {
    ($($name:ident($($argument:ident: $kind:ty),*) -> $of:ty;)*) => {
        impl Guard<'_> {$(
            #[doc = concat!("As [`Transaction::", stringify!($name), "`].")]
            pub async fn $name(&self, $($argument: $kind),*) -> Result<$of, Error> {
                self.under.or_loss(async { Ok(self.transaction.$name($($argument),*).await?) }).await
            }
        )*}
    };
}

calls! {
    batch_execute(sql: &str) -> ();
    execute(statement: &(impl ?Sized + ToStatement), params: &[&(dyn ToSql + Sync)]) -> u64;
    query(statement: &(impl ?Sized + ToStatement), params: &[&(dyn ToSql + Sync)]) -> Vec<Row>;
    query_one(statement: &(impl ?Sized + ToStatement), params: &[&(dyn ToSql + Sync)]) -> Row;
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

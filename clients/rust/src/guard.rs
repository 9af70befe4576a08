//! Transactions under leases, whichever driver they are of.

use crate::asked::Pairs;
use crate::connected::{Connected, Cut};
use crate::error::{Error, LeaseLost, LeaseTaken, Reason, TransactionLost};
use crate::keeper::{EventKind, Grant, Keeper, lock, pairs};
use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row, ToStatement, Transaction};

/// What a transaction under a lease can be begun on: tokio-postgres' [`Client`], a [`Connected`], a [`Transaction`] or
/// [`Guard`] that is open; with the feature `sqlx` its `PgConnection`, too.
pub trait Guardable: sealed::Begins {}

impl<T: sealed::Begins> Guardable for T {}

pub(crate) mod sealed {
    use super::{Cut, Error};
    use std::future::Future;

    /// A driver's transaction, or savepoint. Dropped, it is rolled back.
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

    pub trait Begins: Send {
        type Begun<'c>: Open
        where
            Self: 'c;

        /// Whether it begins a transaction of its own, and not a savepoint.
        fn is_whole(&self) -> bool;

        fn begin(&mut self) -> impl Future<Output = Result<Self::Begun<'_>, Error>> + Send;

        /// What ends whatever hangs on it.
        fn cut(&self) -> Option<Cut> {
            None
        }
    }
}

use sealed::{Begins, Open};

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
        impl Begins for $of {
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
    Connected, true, one, |one: &Connected| Some(one.cut());
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
        Under { keeper, grants, names, tokens, cut: None, hangs }
    }

    pub fn leases(keeper: &Arc<Keeper>, grants: Vec<Arc<Grant>>) -> Under {
        let pairs = pairs(&grants);
        Under::new(keeper, grants, pairs)
    }

    /// `Send` is said, for the compiler does not find it out where a guard is within another.
    pub fn begin<'c, C: Guardable>(
        self,
        connection: &'c mut C,
    ) -> impl Future<Output = Guards<'c, C>> + Send + use<'c, C> {
        let (is_whole, cut) = (connection.is_whole(), connection.cut());
        Guarded::begin(self, is_whole, cut, connection.begin())
    }

    /// How often the answer of a function is not NULL.
    fn sql(&self, function: &str) -> String {
        let schema = &self.keeper.setup.schema;
        let function = function.replace("lease_", &format!("{schema}lease_"));
        format!("SELECT count({function}) FROM unnest($1::text[], $2::bigint[]) AS x(name, token)")
    }

    /// From here on a loss breaks it off. It does not begin where one is lost already.
    fn enter(&mut self, cut: Option<Cut>) -> Result<(), Error> {
        self.cut = cut;
        for grant in &self.grants {
            lock(&grant.guards).extend(self.cut.iter().map(|cut| cut.connection.clone()));
        }
        self.grants.iter().try_for_each(|grant| self.keeper.check(grant))
    }

    fn loss(&self) -> Option<LeaseLost> {
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
            lost = lost => Err(Error::LeaseLost(lost)),
        }
    }

    /// An error of a connection that was broken off because of a loss is the loss.
    fn told(&self, error: Error) -> Error {
        if let (Error::TransactionLost(_), Some(loss)) = (&error, self.loss()) {
            return Error::LeaseLost(loss);
        }
        if error.has_state("PF001") || error.has_state("PF004") {
            self.keeper.beat_soon(&self.grants);
        }
        error
    }

    /// After a failover no token speaks until its holder has renewed. Whether it does.
    async fn can_mend(&self, error: &Error) -> bool {
        if self.grants.is_empty() || !error.has_state("PF004") {
            return false;
        }
        let (keeper, grants) = (self.keeper.clone(), self.grants.clone());
        let renewed = self.keeper.run(async move { keeper.keep(&grants).await }).await;
        renewed.is_ok() && self.loss().is_none()
    }

    /// As the statement that begins it tells it.
    fn told_of_begin(&self, error: Error) -> Error {
        match (self.loss(), error.of_call(None)) {
            // The renewal that was to mend it has found it lost.
            (Some(loss), _) => Error::LeaseLost(loss),
            // NULL from lease_adopt: a transaction guards an older number.
            (_, told) if self.grants.is_empty() && told.has_state("22004") => {
                let names = self.names.clone();
                Error::LeaseTaken(LeaseTaken { names, holder: None, remaining: None })
            }
            (_, told) => told,
        }
    }

    /// What a commit that was refused means. The server ends an idle transaction before it reads the commit.
    fn told_of_commit(&self, mut error: Error) -> Error {
        let state = error.sqlstate();
        let lost = |message: &str, in_doubt| {
            let (message, sqlstate) = (message.to_owned(), state.clone());
            Error::TransactionLost(TransactionLost { message, sqlstate, in_doubt })
        };
        match (state.as_deref(), &mut error) {
            (Some("25P02"), _) => {
                lost("a statement of it has failed: all of it is rolled back", false)
            }
            (Some("25P01" | "3B001"), _) => {
                lost("the work has ended it itself: what came after that was not guarded", true)
            }
            (Some("25P03" | "25P04"), _) => error,
            (_, Error::LeaseLost(LeaseLost { in_doubt, .. })) => {
                *in_doubt = true;
                error
            }
            (_, Error::TransactionLost(TransactionLost { in_doubt, .. })) => {
                *in_doubt = true;
                error
            }
            _ => error,
        }
    }
}

impl Drop for Under {
    fn drop(&mut self) {
        let Some(cut) = &self.cut else { return };
        for grant in &self.grants {
            lock(&grant.guards).retain(|one| one.id() != cut.connection.id());
        }
        // Whoever gave up a statement is not to be held up by it.
        if *self.hangs.get_mut()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn((cut.cancel)());
        }
    }
}

/// Grants that are about to be released: a renewal would tell that they are locked, or gone.
struct Resting<'g>(&'g [Arc<Grant>]);

impl<'g> Resting<'g> {
    fn begin(grants: &'g [Arc<Grant>]) -> Resting<'g> {
        grants.iter().for_each(|grant| grant.rest(true));
        Resting(grants)
    }
}

impl Drop for Resting<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|grant| grant.rest(false));
    }
}

/// What comes of beginning one on such a connection.
pub type Guards<'c, C> = Result<Guarded<<C as sealed::Begins>::Begun<'c>>, Error>;

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
    is_whole: bool,
}

impl<T: Open> Guarded<T> {
    async fn begin(
        mut under: Under,
        is_whole: bool,
        cut: Option<Cut>,
        begun: impl Future<Output = Result<T, Error>> + Send,
    ) -> Result<Guarded<T>, Error> {
        under.enter(cut)?;
        let transaction = under.or_loss(begun).await?;
        let mut guard = Guarded { transaction, under, is_whole };
        let mut entered = guard.enter().await;
        if let Err(error) = &entered
            && is_whole
            && guard.under.can_mend(error).await
        {
            guard.under.or_loss(guard.transaction.text("ROLLBACK; BEGIN")).await?;
            entered = guard.enter().await;
        }
        match entered {
            Ok(_) => Ok(guard),
            Err(error) => Err(guard.under.told_of_begin(error)),
        }
    }

    async fn enter(&mut self) -> Result<i64, Error> {
        self.count(match self.under.grants.is_empty() {
            true => "lease_guard(x.name, lease_adopt(x.name, x.token))",
            false => "lease_guard(x.name, x.token)",
        })
        .await
    }

    async fn count(&mut self, function: &str) -> Result<i64, Error> {
        let Guarded { transaction, under, .. } = self;
        let sql = under.sql(function);
        under.or_loss(transaction.count(&sql, &under.names, &under.tokens)).await
    }

    /// The typed error in one of the driver. One of a connection that was broken off because of a loss is the loss.
    pub fn told(&self, error: impl Into<Error>) -> Error {
        self.under.told(error.into())
    }

    /// What `work` does on the driver's transaction, unless a lease is lost before: then the work is dropped where it
    /// waits. Its errors come out as types.
    pub async fn run<O, E: Into<Error>>(
        &mut self,
        work: impl AsyncFnOnce(&mut T) -> Result<O, E>,
    ) -> Result<O, Error> {
        let work = async { work(&mut self.transaction).await.map_err(Into::into) };
        self.under.or_loss(work).await
    }

    /// Commits. It refuses where a statement has failed, or the work has ended the transaction by itself, which
    /// PostgreSQL takes for a success.
    pub async fn commit(self) -> Result<(), Error> {
        let Guarded { transaction, under, is_whole } = self;
        let committed = under.or_loss(transaction.commit(is_whole)).await;
        committed.map_err(|error| under.told_of_commit(error))
    }

    /// Gives the leases back by the last write of this transaction, and commits.
    pub async fn commit_and_release(mut self) -> Result<(), Error> {
        let (keeper, grants) = (self.under.keeper.clone(), self.under.grants.clone());
        let _resting = Resting::begin(&grants);
        let (count, names) =
            (self.count("lease_release(x.name, x.token)").await?, &self.under.names);
        if count < names.len() as i64 {
            keeper.end(&grants, Reason::Gone);
            let (names, reason) = (names.clone(), Reason::Gone);
            return Err(Error::LeaseLost(LeaseLost { names, reason, in_doubt: false }));
        }
        self.commit().await?;
        let released = keeper.end(&grants, Reason::Released);
        released.iter().for_each(|grant| keeper.tell(EventKind::Released, grant));
        Ok(())
    }

    /// Rolls back, and waits for that.
    pub async fn rollback(self) -> Result<(), Error> {
        let Guarded { transaction, under, .. } = self;
        under.or_loss(transaction.rollback()).await
    }
}

macro_rules! calls {
    ($($name:ident -> $of:ty;)*) => {
        impl Guard<'_> {$(
            #[doc = concat!("As [`Transaction::", stringify!($name), "`].")]
            pub async fn $name<S>(&self, statement: &S, params: &[&(dyn ToSql + Sync)]) -> Result<$of, Error>
            where
                S: ?Sized + ToStatement,
            {
                self.under.or_loss(async { Ok(self.transaction.$name(statement, params).await?) }).await
            }
        )*}
    };
}

calls! {
    execute -> u64;
    query -> Vec<Row>;
    query_one -> Row;
    query_opt -> Option<Row>;
}

impl Guard<'_> {
    /// As [`Transaction::batch_execute`].
    pub async fn batch_execute(&self, sql: &str) -> Result<(), Error> {
        self.under.or_loss(async { Ok(self.transaction.batch_execute(sql).await?) }).await
    }
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

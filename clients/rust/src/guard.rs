//! Transactions under leases.

use crate::connected::Connected;
use crate::error::{Error, LeaseLost, LeaseTaken, Reason, TransactionLost};
use crate::keeper::{Breaker, Grant, Keeper, lock};
use crate::line::{BoxFuture, Call};
use std::future::Future;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row, ToStatement, Transaction};

/// What a transaction under a lease can be begun on: a [`Client`], a [`Connected`], a [`Transaction`], a [`Guard`].
pub trait Guardable: sealed::Begins {}

impl<T: sealed::Begins> Guardable for T {}

type Begun<'c> = Result<Transaction<'c>, tokio_postgres::Error>;

mod sealed {
    use super::{AbortHandle, Begun, BoxFuture, Client, Connected, Future, Guard, Transaction};

    pub trait Begins: Send {
        /// Whether it begins a transaction of its own, and not a savepoint.
        const IS_WHOLE: bool;

        fn begin(&mut self) -> impl Future<Output = Begun<'_>> + Send;

        /// What breaks it off.
        fn breaker(&self) -> Option<AbortHandle> {
            None
        }

        /// What ends its statement in the server.
        fn cancel(&self) -> Option<BoxFuture<()>> {
            None
        }
    }

    impl Begins for Client {
        const IS_WHOLE: bool = true;

        async fn begin(&mut self) -> Begun<'_> {
            self.transaction().await
        }
    }

    impl Begins for Connected {
        const IS_WHOLE: bool = true;

        async fn begin(&mut self) -> Begun<'_> {
            self.transaction().await
        }

        fn breaker(&self) -> Option<AbortHandle> {
            Some(Connected::breaker(self))
        }

        fn cancel(&self) -> Option<BoxFuture<()>> {
            Some(Connected::cancel(self))
        }
    }

    impl Begins for Transaction<'_> {
        const IS_WHOLE: bool = false;

        async fn begin(&mut self) -> Begun<'_> {
            self.transaction().await
        }
    }

    impl Begins for Guard<'_> {
        const IS_WHOLE: bool = false;

        async fn begin(&mut self) -> Begun<'_> {
            self.transaction.transaction().await
        }
    }
}

/// What a transaction is under, whichever driver it is on.
pub(crate) struct Under {
    keeper: Arc<Keeper>,
    pub grants: Vec<Arc<Grant>>,
    /// In an order that is the same everywhere, so that no two wait for each other.
    names: Vec<String>,
    tokens: Vec<i64>,
    begins: &'static str,
    key: u64,
    loss: watch::Sender<Option<LeaseLost>>,
    /// A statement is under way; or was dropped where it was.
    hangs: AtomicBool,
    cancel: Mutex<Option<BoxFuture<()>>>,
}

impl Under {
    pub fn leases(keeper: &Arc<Keeper>, grants: Vec<Arc<Grant>>) -> Under {
        let names = |grant: &Arc<Grant>| {
            let token = grant.token;
            grant.names.iter().map(move |name| (name.clone(), token)).collect::<Vec<_>>()
        };
        let mut pairs: Vec<(String, i64)> = grants.iter().flat_map(names).collect();
        pairs.sort();
        Under::new(keeper, grants, pairs, "lease_guard(x.name, x.token)")
    }

    pub fn adopted(keeper: &Arc<Keeper>, name: &str, token: i64) -> Under {
        let pairs = vec![(name.to_owned(), token)];
        Under::new(
            keeper,
            Vec::new(),
            pairs,
            "lease_guard(x.name, LEASE.lease_adopt(x.name, x.token))",
        )
    }

    fn new(
        keeper: &Arc<Keeper>,
        grants: Vec<Arc<Grant>>,
        pairs: Vec<(String, i64)>,
        begins: &'static str,
    ) -> Under {
        static KEYS: AtomicU64 = AtomicU64::new(0);
        let (names, tokens) = pairs.into_iter().unzip();
        let key = KEYS.fetch_add(1, Ordering::Relaxed);
        let loss = watch::Sender::new(None);
        let (keeper, hangs) = (keeper.clone(), AtomicBool::new(false));
        Under { keeper, grants, names, tokens, begins, key, loss, hangs, cancel: Mutex::default() }
    }

    /// Of a function of the names `$1` and the tokens `$2`: how often its answer is not NULL.
    pub fn sql(&self, function: &str) -> String {
        let function = function.replace("LEASE.", &self.keeper.schema);
        let schema = &self.keeper.schema;
        format!(
            "SELECT count({schema}{function}) FROM unnest($1::text[], $2::bigint[]) AS x(name, token)"
        )
    }

    pub fn begins(&self) -> String {
        self.sql(self.begins)
    }

    pub fn releases(&self) -> String {
        self.sql("lease_release(x.name, x.token)")
    }

    pub fn arguments(&self) -> (Vec<String>, Vec<i64>) {
        (self.names.clone(), self.tokens.clone())
    }

    /// From here on a loss breaks the transaction off. It does not begin where one is lost already.
    pub fn enter(&self, connection: Option<AbortHandle>) -> Result<(), Error> {
        let breaker = Breaker { connection, loss: self.loss.clone() };
        self.grants.iter().for_each(|grant| grant.enter(self.key, &breaker));
        self.grants.iter().try_for_each(|grant| self.keeper.check(grant))
    }

    /// What a call comes to, unless a loss is first.
    pub async fn or_loss<T, E>(&self, call: impl Future<Output = Result<T, E>>) -> Result<T, Error>
    where
        Error: From<E>,
    {
        let mut loss = self.loss.subscribe();
        self.hangs.store(true, Ordering::Relaxed);
        let call = async {
            let done = call.await;
            self.hangs.store(false, Ordering::Relaxed);
            done
        };
        tokio::select! {
            biased;
            done = call => done.map_err(|error| self.told(error.into())),
            lost = async { loss.wait_for(Option::is_some).await.ok().and_then(|loss| loss.clone()) } => {
                Err(lost.map_or_else(|| Error::other("nobody tells losses"), Error::LeaseLost))
            }
        }
    }

    /// One that comes of a connection that was broken off because of a loss is the loss.
    pub fn told(&self, error: Error) -> Error {
        if let (Error::TransactionLost(_), Some(loss)) = (&error, &*self.loss.borrow()) {
            return Error::LeaseLost(loss.clone());
        }
        if matches!(&error, Error::Refused(refused) if matches!(&*refused.sqlstate, "PF001" | "PF004"))
        {
            self.keeper.beat_soon(&self.grants);
        }
        error
    }

    /// As the statement that begins it tells it.
    pub fn told_of_begin(&self, error: Error) -> Error {
        // The renewal that was to mend it has found it lost.
        let lost = |grant: &Arc<Grant>| Some(grant.loss(grant.reason()?));
        if let Some(loss) = self.grants.iter().find_map(lost) {
            return Error::LeaseLost(loss);
        }
        match error.of_call(None) {
            // NULL from lease_adopt: a transaction guards an older number.
            Error::Refused(refused) if self.grants.is_empty() && refused.sqlstate == "22004" => {
                Error::LeaseTaken(LeaseTaken {
                    names: self.names.clone(),
                    holder: None,
                    remaining: None,
                })
            }
            told => told,
        }
    }

    /// After a failover no token speaks until its holder has renewed. Whether it does.
    pub async fn can_mend(&self, error: &Error) -> bool {
        if self.grants.is_empty() || error.sqlstate().as_deref() != Some("PF004") {
            return false;
        }
        let (keeper, grants) = (self.keeper.clone(), self.grants.clone());
        let renewed = async move {
            keeper.keep(&grants).await;
            Ok(())
        };
        self.keeper.run(renewed).await.is_ok()
            && self.grants.iter().all(|grant| grant.reason().is_none())
    }

    /// So many of the names were released.
    pub fn released(&self, count: i64) -> Result<(), Error> {
        if count == self.names.len() as i64 {
            return Ok(());
        }
        self.keeper.end(&self.grants, Reason::Gone);
        let lost = LeaseLost { names: self.names.clone(), reason: Reason::Gone, in_doubt: false };
        Err(Error::LeaseLost(lost))
    }

    /// The commit of a release has come to that.
    pub fn rested<T>(&self, outcome: Result<T, Error>) -> Result<T, Error> {
        for grant in &self.grants {
            if outcome.is_ok() {
                self.keeper.end(std::slice::from_ref(grant), Reason::Released);
                self.keeper.was_released(grant, true);
            }
            grant.rest(false);
        }
        outcome
    }

    /// The same leases, for what comes after its end.
    pub fn aside(&self) -> Under {
        Under::leases(&self.keeper, self.grants.clone())
    }

    pub fn rest(&self) {
        self.grants.iter().for_each(|grant| grant.rest(true));
    }

    /// What a commit that was refused means. The server ends an idle transaction before it reads the commit.
    pub fn told_of_commit(&self, error: Error, state: Option<&str>) -> Error {
        let lost = |message: &str, in_doubt| {
            Error::TransactionLost(TransactionLost { message: message.to_owned(), in_doubt })
        };
        match state {
            Some("25P02") => lost("a statement of it has failed: all of it is rolled back", false),
            Some("25P01" | "3B001") => {
                lost("the work has ended it itself: what came after that was not guarded", true)
            }
            Some("25P03" | "25P04") => error,
            _ => error.of_commit(),
        }
    }
}

impl Drop for Under {
    fn drop(&mut self) {
        self.grants.iter().for_each(|grant| grant.leave(self.key));
        // Whoever gave up a statement is not to be held up by it.
        if let (true, Some(cancel)) =
            (self.hangs.load(Ordering::Relaxed), lock(&self.cancel).take())
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(cancel);
        }
    }
}

/// A transaction under leases, to be ended by [`commit`](Guard::commit) or
/// [`commit_and_release`](Guard::commit_and_release); dropped, it is rolled back.
///
/// It dereferences to tokio-postgres' [`Transaction`]. The methods of that name here do more: a loss ends them where
/// they wait, and errors come out as [types](Error). For what is reached by dereferencing, a loss breaks off the
/// connection where it is a [`Connected`], and [`told`](Guard::told) types the error.
#[must_use = "dropped, it is rolled back"]
pub struct Guard<'c> {
    // Rolled back before the loss need not break it off any more.
    pub(crate) transaction: Transaction<'c>,
    under: Under,
    is_whole: bool,
}

impl<'c> Guard<'c> {
    pub(crate) async fn begin<C: Guardable>(
        mut under: Under,
        connection: &'c mut C,
    ) -> Result<Guard<'c>, Error> {
        under.cancel = Mutex::new(connection.cancel());
        under.enter(connection.breaker())?;
        let transaction = under.or_loss(connection.begin()).await?;
        let guard = Guard { transaction, under, is_whole: C::IS_WHOLE };
        match guard.count(guard.under.begins()).await {
            Err(error) if C::IS_WHOLE && guard.under.can_mend(&error).await => {
                guard.batch_execute("ROLLBACK; BEGIN").await?;
                guard.count(guard.under.begins()).await
            }
            entered => entered,
        }
        .map_err(|error| guard.under.told_of_begin(error))?;
        Ok(guard)
    }

    async fn count(&self, sql: String) -> Result<i64, Error> {
        let (names, tokens) = self.under.arguments();
        let call = Call::new(sql).with(names, Type::TEXT_ARRAY).with(tokens, Type::INT8_ARRAY);
        let rows = self.under.or_loss(call.rows(self.transaction.client())).await?;
        Ok(rows.first().map_or(Ok(0), |row| row.try_get(0))?)
    }

    /// The typed error in one of the driver. One of a connection that was broken off because of a loss is the loss.
    pub fn told(&self, error: tokio_postgres::Error) -> Error {
        self.under.told(error.into())
    }

    /// Commits. It refuses where a statement has failed, or the work has ended the transaction by itself, which
    /// PostgreSQL takes for a success.
    pub async fn commit(self) -> Result<(), Error> {
        let Guard { transaction, under, is_whole } = self;
        if !is_whole {
            let mut state = None;
            let committed =
                async { transaction.commit().await.inspect_err(|error| state = state_of(error)) };
            let outcome = under.or_loss(committed).await;
            return outcome.map_err(|error| under.told_of_commit(error, state.as_deref()));
        }
        let mut state = None;
        let committed = async {
            transaction.batch_execute(COMMIT).await.inspect_err(|error| state = state_of(error))
        };
        let outcome = under.or_loss(committed).await;
        if outcome.is_ok() {
            // Its drop would send a ROLLBACK. It owns nothing.
            mem::forget(transaction);
        }
        outcome.map_err(|error| under.told_of_commit(error, state.as_deref()))
    }

    /// Gives the leases back by the last write of this transaction, and commits.
    pub async fn commit_and_release(self) -> Result<(), Error> {
        // The heartbeat rests meanwhile: a renewal would tell that the lease is locked, or gone.
        self.under.rest();
        let aside = self.under.aside();
        let outcome = async {
            let count = self.count(self.under.releases()).await?;
            self.under.released(count)?;
            self.commit().await
        };
        aside.rested(outcome.await)
    }

    /// Rolls back, and waits for that.
    pub async fn rollback(self) -> Result<(), Error> {
        let Guard { transaction, under, .. } = self;
        under.or_loss(transaction.rollback()).await
    }

    /// As [`Transaction::execute`].
    pub async fn execute<T>(
        &self,
        statement: &T,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<u64, Error>
    where
        T: ?Sized + ToStatement,
    {
        self.under.or_loss(self.transaction.execute(statement, params)).await
    }

    /// As [`Transaction::query`].
    pub async fn query<T>(
        &self,
        statement: &T,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, Error>
    where
        T: ?Sized + ToStatement,
    {
        self.under.or_loss(self.transaction.query(statement, params)).await
    }

    /// As [`Transaction::query_opt`].
    pub async fn query_opt<T>(
        &self,
        statement: &T,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<Option<Row>, Error>
    where
        T: ?Sized + ToStatement,
    {
        self.under.or_loss(self.transaction.query_opt(statement, params)).await
    }

    /// As [`Transaction::batch_execute`].
    pub async fn batch_execute(&self, sql: &str) -> Result<(), Error> {
        self.under.or_loss(self.transaction.batch_execute(sql)).await
    }
}

fn state_of(error: &tokio_postgres::Error) -> Option<String> {
    error.code().map(|state| state.code().to_owned())
}

impl<'c> Deref for Guard<'c> {
    type Target = Transaction<'c>;

    fn deref(&self) -> &Transaction<'c> {
        &self.transaction
    }
}

impl DerefMut for Guard<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.transaction
    }
}

/// A COMMIT of a transaction that has failed rolls back and is no error, and one without any transaction is a warning; so
/// something comes before it that is refused in both cases.
pub(crate) const COMMIT: &str = "SAVEPOINT pg_fence_commits; COMMIT";

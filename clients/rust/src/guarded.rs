//! Transactions under a lease.

use crate::calls::closing;
use crate::connected::Connected;
use crate::error::{Error, Reason};
use crate::holding::{Holding, Under};
use crate::lease::Lease;
use crate::own::{Call, argument};
use std::future::Future;
use std::mem;
use std::ops::{Deref, DerefMut};
use tokio::task::AbortHandle;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row, SimpleQueryMessage, ToStatement, Transaction};

/// What a transaction under a lease can be begun on: a [`Client`], a [`Connected`], a [`Transaction`].
pub trait Guardable: sealed::Begins {}

impl<T: sealed::Begins> Guardable for T {}

mod sealed {
    use super::*;

    pub trait Begins: Send {
        /// Whether it begins a transaction of its own, and not a savepoint.
        const IS_WHOLE: bool = true;

        fn begin(
            &mut self,
        ) -> impl Future<Output = Result<Transaction<'_>, tokio_postgres::Error>> + Send;

        /// What breaks it off.
        fn breaker(&self) -> Option<AbortHandle> {
            None
        }
    }

    impl Begins for Client {
        async fn begin(&mut self) -> Result<Transaction<'_>, tokio_postgres::Error> {
            self.transaction().await
        }
    }

    impl Begins for Connected {
        async fn begin(&mut self) -> Result<Transaction<'_>, tokio_postgres::Error> {
            self.transaction().await
        }

        fn breaker(&self) -> Option<AbortHandle> {
            Some(Connected::breaker(self))
        }
    }

    impl Begins for Transaction<'_> {
        const IS_WHOLE: bool = false;

        async fn begin(&mut self) -> Result<Transaction<'_>, tokio_postgres::Error> {
            self.transaction().await
        }
    }
}

/// A transaction under a lease, to be ended by [`commit`](Guarded::commit) or
/// [`commit_and_release`](Guarded::commit_and_release); dropped, it is rolled back.
///
/// It dereferences to tokio-postgres' [`Transaction`]. The methods of that name here do more: a loss ends them where
/// they wait, and errors come out as [types](Error). For what is reached by dereferencing, a loss breaks off the
/// connection where it is a [`Connected`], and [`told`](Guarded::told) types the error.
#[must_use = "dropped, it is rolled back"]
pub struct Guarded<'c> {
    // Rolled back before the loss need not break it off any more.
    transaction: Transaction<'c>,
    under: Under,
    is_whole: bool,
}

/// A transaction that guards several leases at once, by one statement. It ends, or is lost, with all of them.
///
/// As [`Lease::guard`] otherwise.
pub async fn guard_all<'c, 'l>(
    leases: impl IntoIterator<Item = &'l Lease>,
    connection: &'c mut impl Guardable,
) -> Result<Guarded<'c>, Error> {
    let holdings: Vec<_> = leases.into_iter().map(|lease| Holding::Lease(lease.clone())).collect();
    if holdings.is_empty() {
        return Err(Error::other("there is no lease to guard"));
    }
    Guarded::begin(holdings, connection, true).await
}

impl<'c> Guarded<'c> {
    pub(crate) async fn begin<C: Guardable>(
        holdings: Vec<Holding>,
        connection: &'c mut C,
        guards: bool,
    ) -> Result<Guarded<'c>, Error> {
        let under = Under::enter(holdings, connection.breaker());
        under.prepare().await?;
        let transaction = under.or_loss(connection.begin()).await?;
        let guarded = Guarded { transaction, under, is_whole: C::IS_WHOLE };
        match guarded.enter(guards).await {
            // After a failover no token speaks until its holder has renewed, or adopted again.
            Err(error) if C::IS_WHOLE && guarded.under.can_mend(&error) => {
                guarded.batch_execute("ROLLBACK").await?;
                if !guarded.under.mend().await? {
                    return Err(error);
                }
                guarded.batch_execute("BEGIN").await?;
                guarded.enter(guards).await?;
                guarded.under.was_mended();
            }
            entered => entered?,
        }
        Ok(guarded)
    }

    /// Guards each lease, or presents the token.
    async fn enter(&self, guards: bool) -> Result<(), Error> {
        let call = if guards { self.under.guard_call() } else { presents(self.under.token()) };
        self.value(call).await.map(drop).map_err(Error::of_extension)
    }

    async fn value(&self, call: Call) -> Result<Option<i64>, Error> {
        let rows = self.or_loss(call.rows(self.transaction.client())).await?;
        Ok(rows.first().and_then(|row| row.try_get(0).ok()))
    }

    async fn or_loss<T>(
        &self,
        call: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T, Error> {
        self.under.or_loss(call).await
    }

    /// The typed error in one of the driver. One of a connection that was broken off because of a loss is the loss.
    pub fn told(&self, error: tokio_postgres::Error) -> Error {
        self.under.told(error)
    }

    // Its end

    /// Commits. An error that is [in doubt](Error::is_in_doubt) is that of a commit that was on its way.
    ///
    /// It refuses where the transaction has failed (25P02), or has been ended by the work itself (25P01), which
    /// PostgreSQL takes for a success.
    pub async fn commit(self) -> Result<(), Error> {
        self.under.check()?;
        let Guarded { transaction, under, is_whole } = self;
        let outcome = if is_whole {
            let committed = under.unless_lost(transaction.batch_execute(COMMIT)).await;
            if committed.is_ok() {
                // Its drop would send a ROLLBACK. It owns nothing.
                mem::forget(transaction);
            }
            committed
        } else {
            under.unless_lost(transaction.commit()).await
        };
        outcome.map_err(Error::in_doubt)
    }

    /// Gives the leases back by the last write of this transaction, and commits. Dropped where it waits, both may have
    /// come to pass; the heartbeat goes on, and finds out.
    pub async fn commit_and_release(self) -> Result<(), Error> {
        let all: Vec<_> = self.under.all_shared().cloned().collect();
        // The heartbeat rests meanwhile: a renewal would wait for the end of this transaction.
        let mut resting = Vec::new();
        for shared in &all {
            resting.push(shared.run(shared.rest()).await?);
            if self.value(closing(shared)).await?.is_none() {
                shared.lose(Reason::Gone, None);
                shared.check()?;
            }
        }
        self.commit().await?;
        for shared in &all {
            shared.released();
        }
        drop(resting);
        Ok(())
    }

    /// Rolls back, and waits for that.
    pub async fn rollback(self) -> Result<(), Error> {
        let Guarded { transaction, under, .. } = self;
        under.or_loss(transaction.rollback()).await
    }

    // Statements

    /// As [`Transaction::execute`].
    pub async fn execute<T>(
        &self,
        statement: &T,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<u64, Error>
    where
        T: ?Sized + ToStatement,
    {
        self.or_loss(self.transaction.execute(statement, params)).await
    }

    /// As [`Transaction::execute_typed`].
    pub async fn execute_typed(
        &self,
        sql: &str,
        params: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<u64, Error> {
        self.or_loss(self.transaction.execute_typed(sql, params)).await
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
        self.or_loss(self.transaction.query(statement, params)).await
    }

    /// As [`Transaction::query_one`].
    pub async fn query_one<T>(
        &self,
        statement: &T,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<Row, Error>
    where
        T: ?Sized + ToStatement,
    {
        self.or_loss(self.transaction.query_one(statement, params)).await
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
        self.or_loss(self.transaction.query_opt(statement, params)).await
    }

    /// As [`Transaction::query_typed`].
    pub async fn query_typed(
        &self,
        sql: &str,
        params: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Vec<Row>, Error> {
        self.or_loss(self.transaction.query_typed(sql, params)).await
    }

    /// As [`Transaction::simple_query`].
    pub async fn simple_query(&self, sql: &str) -> Result<Vec<SimpleQueryMessage>, Error> {
        self.or_loss(self.transaction.simple_query(sql)).await
    }

    /// As [`Transaction::batch_execute`].
    pub async fn batch_execute(&self, sql: &str) -> Result<(), Error> {
        self.or_loss(self.transaction.batch_execute(sql)).await
    }
}

impl<'c> Deref for Guarded<'c> {
    type Target = Transaction<'c>;

    fn deref(&self) -> &Transaction<'c> {
        &self.transaction
    }
}

impl DerefMut for Guarded<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.transaction
    }
}

/// A COMMIT of a transaction that has failed rolls back and is no error, and one without any transaction is a warning; so
/// something comes before it that is refused in both cases.
pub(crate) const COMMIT: &str = "SAVEPOINT pg_fence_commits; COMMIT";

/// As text: there is no set_config that takes a number.
pub(crate) fn presents(token: i64) -> Call {
    Call {
        sql: "SELECT set_config('pg_fence.token', $1, true)::bigint".to_owned(),
        arguments: vec![argument(token.to_string(), Type::TEXT)],
    }
}

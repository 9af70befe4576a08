//! Transactions under a lease.

use crate::connected::Connected;
use crate::error::{Error, Reason, classify};
use crate::holding::Holding;
use crate::keeper::call_on_names;
use crate::own::Call;
use crate::state::{Entered, Shared};
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
    entered: Entered,
    holding: Holding,
    is_whole: bool,
}

impl<'c> Guarded<'c> {
    pub(crate) async fn begin<C: Guardable>(
        holding: Holding,
        connection: &'c mut C,
        guards: bool,
    ) -> Result<Guarded<'c>, Error> {
        let entered = holding.shared().enter(connection.breaker());
        holding.shared().check()?;
        holding.prepare().await?;
        let transaction = or_loss(holding.shared(), connection.begin()).await?;
        let guarded = Guarded { transaction, entered, holding, is_whole: C::IS_WHOLE };
        match guarded.enter(guards).await {
            // After a failover no token speaks until its holder has renewed, or adopted again.
            Err(error) if C::IS_WHOLE && guarded.holding.can_mend(&error) => {
                guarded.batch_execute("ROLLBACK").await?;
                if !guarded.holding.mend().await? {
                    return Err(error);
                }
                guarded.batch_execute("BEGIN").await?;
                guarded.enter(guards).await?;
                guarded.shared().was_mended();
            }
            entered => entered?,
        }
        Ok(guarded)
    }

    fn shared(&self) -> &Shared {
        self.holding.shared()
    }

    /// Guards each lease, or presents the token.
    async fn enter(&self, guards: bool) -> Result<(), Error> {
        if !guards {
            // As text: there is no set_config that takes a number.
            let sql = "SELECT set_config('pg_fence.token', $1, true)";
            let token = self.shared().token().to_string();
            return self.query_typed(sql, &[(&token, Type::TEXT)]).await.map(drop);
        }
        for call in self.holding.guard_calls() {
            self.value(call).await?;
        }
        Ok(())
    }

    async fn value(&self, call: Call) -> Result<Option<i64>, Error> {
        self.or_loss(call.value(self.transaction.client())).await
    }

    async fn or_loss<T>(
        &self,
        call: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T, Error> {
        or_loss(self.shared(), call).await
    }

    /// The typed error in one of the driver. One of a connection that was broken off because of a loss is the loss.
    pub fn told(&self, error: tokio_postgres::Error) -> Error {
        told(self.shared(), error)
    }

    // Its end

    /// Commits. An error that is [in doubt](Error::is_in_doubt) is that of a commit that was on its way.
    pub async fn commit(self) -> Result<(), Error> {
        self.shared().check()?;
        let Guarded { transaction, entered: _entered, holding, is_whole } = self;
        let shared = holding.shared();
        let outcome = if is_whole {
            // A COMMIT of a transaction that has failed rolls back and is no error; so something comes before it that
            // is refused then.
            let committed = unless_lost(shared, transaction.batch_execute("SELECT; COMMIT")).await;
            if committed.is_ok() {
                // Its drop would send a ROLLBACK. It owns nothing.
                mem::forget(transaction);
            }
            committed
        } else {
            unless_lost(shared, transaction.commit()).await
        };
        outcome.map_err(Error::in_doubt)
    }

    /// Gives the lease back by the last write of this transaction, and commits. Dropped where it waits, both may have
    /// come to pass; the heartbeat goes on, and finds out.
    pub async fn commit_and_release(self) -> Result<(), Error> {
        let shared = self.holding.shared().clone();
        // The heartbeat rests meanwhile: a renewal would wait for the end of this transaction.
        let renewing = shared.run(shared.renewing.lock()).await?;
        let closing = self.value(call_on_names(&shared, "lease_release")).await?;
        if closing.is_none() {
            shared.lose(Reason::Gone, None);
            shared.check()?;
        }
        self.commit().await?;
        shared.released();
        drop(renewing);
        Ok(())
    }

    /// Rolls back, and waits for that.
    pub async fn rollback(self) -> Result<(), Error> {
        let Guarded { transaction, entered: _entered, holding, .. } = self;
        or_loss(holding.shared(), transaction.rollback()).await
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

/// Does not begin a call when the lease is lost.
async fn or_loss<T>(
    shared: &Shared,
    call: impl Future<Output = Result<T, tokio_postgres::Error>>,
) -> Result<T, Error> {
    shared.check()?;
    unless_lost(shared, call).await
}

/// What a call comes to, unless the lease is lost before: then the call is dropped where it waits. The server may
/// have it all the same.
async fn unless_lost<T>(
    shared: &Shared,
    call: impl Future<Output = Result<T, tokio_postgres::Error>>,
) -> Result<T, Error> {
    shared.run(call).await?.map_err(|error| told(shared, error))
}

fn told(shared: &Shared, error: tokio_postgres::Error) -> Error {
    let found = classify(&error);
    match (found, shared.loss()) {
        (Some(Error::TransactionLost(_)), Some(loss)) => {
            loss.shown_by(Error::unclassified(error)).into()
        }
        (Some(found), _) => {
            if matches!(found, Error::StaleToken(_) | Error::NotSpeaking(_)) {
                shared.refuse();
            }
            found
        }
        (None, _) => Error::unclassified(error),
    }
}

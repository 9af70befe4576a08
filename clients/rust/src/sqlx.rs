//! Transactions under a lease on connections of sqlx.

use crate::error::Error;
use crate::fence::{Adopted, Lease};
use crate::guard::Under;
use sqlx::postgres::PgConnection;
use sqlx::{Connection, Executor, Postgres, Transaction};
use std::ops::{Deref, DerefMut};

/// As [`Guard`](crate::Guard), on a connection of sqlx: to be ended by [`commit`](SqlxGuard::commit) or
/// [`commit_and_release`](SqlxGuard::commit_and_release); dropped, it is rolled back.
///
/// It dereferences to the [`PgConnection`]: `query.execute(&mut *guard)` fails as sqlx does, which
/// [`told`](SqlxGuard::told), and `?` into an [`Error`], make a type of. [`run`](SqlxGuard::run) does so by itself,
/// and ends what hangs on a loss.
#[must_use = "dropped, it is rolled back"]
pub struct SqlxGuard<'c> {
    transaction: Transaction<'c, Postgres>,
    under: Under,
    is_whole: bool,
}

impl Lease {
    /// As [`guard`](Lease::guard), on a connection of sqlx (a pool's: `&mut *connection`). In a transaction that is open
    /// on it, it is a savepoint, and the code that began that transaction ends it.
    pub async fn guard_sqlx<'c>(
        &self,
        connection: &'c mut PgConnection,
    ) -> Result<SqlxGuard<'c>, Error> {
        SqlxGuard::begin(self.under(), connection).await
    }
}

impl Adopted {
    /// As [`guard`](Adopted::guard), on a connection of sqlx.
    pub async fn guard_sqlx<'c>(
        &self,
        connection: &'c mut PgConnection,
    ) -> Result<SqlxGuard<'c>, Error> {
        SqlxGuard::begin(self.under(), connection).await
    }
}

impl<'c> SqlxGuard<'c> {
    async fn begin(under: Under, connection: &'c mut PgConnection) -> Result<SqlxGuard<'c>, Error> {
        under.enter(None)?;
        let is_whole = !connection.is_in_transaction();
        let transaction = under.or_loss(connection.begin()).await?;
        let mut guard = SqlxGuard { transaction, under, is_whole };
        let begins = guard.under.begins();
        let mut entered = guard.count(&begins).await;
        if let Err(error) = &entered
            && is_whole
            && guard.under.can_mend(error).await
        {
            guard.under.or_loss(guard.transaction.execute("ROLLBACK; BEGIN")).await?;
            entered = guard.count(&begins).await;
        }
        entered.map_err(|error| guard.under.told_of_begin(error))?;
        Ok(guard)
    }

    /// Nothing of it is kept as a prepared statement, which poolers do not stand.
    async fn count(&mut self, sql: &str) -> Result<i64, Error> {
        let (names, tokens) = self.under.arguments();
        let call = sqlx::query_scalar(sql).bind(names).bind(tokens).persistent(false);
        self.under.or_loss(call.fetch_one(&mut *self.transaction)).await
    }

    /// What `work` does on the connection, unless the lease is lost before: then the work is dropped where it waits. Its
    /// errors come out as types.
    pub async fn run<T>(
        &mut self,
        work: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>,
    ) -> Result<T, Error> {
        self.under.or_loss(work(&mut self.transaction)).await
    }

    /// The typed error in one of sqlx. One that comes after a loss is the loss.
    pub fn told(&self, error: sqlx::Error) -> Error {
        self.under.told(error.into())
    }

    /// As [`Guard::commit`](crate::Guard::commit).
    pub async fn commit(self) -> Result<(), Error> {
        let SqlxGuard { mut transaction, under, is_whole } = self;
        let mut state = None;
        let committed = async {
            let state_of =
                |error: &sqlx::Error| Some(error.as_database_error()?.code()?.into_owned());
            if is_whole {
                // sqlx takes the ROLLBACK of a transaction that has failed for a success.
                let before = transaction.execute("SAVEPOINT pg_fence_commits").await;
                before.inspect_err(|error| state = state_of(error))?;
            }
            transaction.commit().await.inspect_err(|error| state = state_of(error))
        };
        let outcome = under.or_loss(committed).await;
        outcome.map_err(|error| under.told_of_commit(error, state.as_deref()))
    }

    /// As [`Guard::commit_and_release`](crate::Guard::commit_and_release).
    pub async fn commit_and_release(mut self) -> Result<(), Error> {
        self.under.rest();
        let aside = self.under.aside();
        let outcome = async {
            let releases = self.under.releases();
            let count = self.count(&releases).await?;
            self.under.released(count)?;
            self.commit().await
        };
        aside.rested(outcome.await)
    }

    /// Rolls back, and waits for that.
    pub async fn rollback(self) -> Result<(), Error> {
        let SqlxGuard { transaction, under, .. } = self;
        under.or_loss(transaction.rollback()).await
    }
}

impl Deref for SqlxGuard<'_> {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.transaction
    }
}

impl DerefMut for SqlxGuard<'_> {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.transaction
    }
}

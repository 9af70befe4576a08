//! Transactions under a lease on connections of sqlx.

use crate::error::Error;
use crate::guard::{Guardable, Open};
use sqlx::postgres::PgConnection;
use sqlx::{Connection, Executor, Postgres, Transaction};

impl Guardable for PgConnection {
    type Begun<'c> = Transaction<'c, Postgres>;

    /// In a transaction that is open on it, it is a savepoint.
    fn is_whole(&self) -> bool {
        !self.is_in_transaction()
    }

    async fn begin(&mut self) -> Result<Transaction<'_, Postgres>, Error> {
        Ok(Connection::begin(self).await?)
    }
}

impl Open for Transaction<'_, Postgres> {
    async fn text(&mut self, sql: &'static str) -> Result<(), Error> {
        self.execute(sql).await?;
        Ok(())
    }

    async fn count(&mut self, sql: &str, names: &[String], tokens: &[i64]) -> Result<i64, Error> {
        let call = sqlx::query_scalar(sql).bind(names).bind(tokens).persistent(false);
        Ok(call.fetch_one(&mut **self).await?)
    }

    async fn commit(mut self, is_whole: bool) -> Result<(), Error> {
        if is_whole {
            self.text("SAVEPOINT pg_fence_commits").await?;
        }
        Ok(Transaction::commit(self).await?)
    }

    async fn rollback(self) -> Result<(), Error> {
        Ok(Transaction::rollback(self).await?)
    }
}

//! Transactions under a lease on connections of sqlx.

use crate::errors::Error;
use crate::transaction::{Begun, Counted, Guardable, OURS, Open};
use sqlx::postgres::PgConnection;
use sqlx::{Connection, Executor, Postgres, Transaction};

impl Guardable for PgConnection {
    type Begun<'c> = Transaction<'c, Postgres>;

    /// In a transaction that is open on it, it is a savepoint.
    async fn begin(&mut self) -> Begun<Transaction<'_, Postgres>> {
        let is_whole = !self.is_in_transaction();
        Ok((Connection::begin(self).await?, is_whole))
    }
}

impl Open for Transaction<'_, Postgres> {
    async fn text(&mut self, sql: &'static str) -> Result<(), Error> {
        self.execute(sql).await?;
        Ok(())
    }

    async fn count(&mut self, sql: &str, pairs: &str) -> Result<Counted, Error> {
        let call = sqlx::query_as(sql).bind(pairs).persistent(false);
        Ok(call.fetch_one(&mut **self).await?)
    }

    async fn commit(mut self, is_whole: bool) -> Result<(), Error> {
        if is_whole {
            self.text(OURS).await?;
        }
        Ok(Transaction::commit(self).await?)
    }
}

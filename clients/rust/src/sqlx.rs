//! Transactions that are guarded by leases, on connections of sqlx.

use crate::errors::BoxError;
use crate::statements::{ServerTransaction, THIS_TRANSACTION};
use crate::transaction::{Begun, Checked, Guardable, OpenTransaction};
use sqlx::postgres::PgConnection;
use sqlx::{Connection, Executor, Postgres, Transaction};
use std::sync::OnceLock;

impl Guardable for PgConnection {
    type Begun<'c> = Transaction<'c, Postgres>;

    /// Begins a savepoint if the connection is in a transaction.
    async fn begin_guarded(&mut self) -> Begun<Transaction<'_, Postgres>> {
        let is_whole = !self.is_in_transaction();
        if !is_whole {
            // If the savepoint failed, sqlx would roll back the program's transaction, and run the
            // next statements of that in autocommit.
            self.execute("SELECT 1").await?;
        }
        Ok((self.begin().await?, is_whole))
    }
}

impl OpenTransaction for Transaction<'_, Postgres> {
    async fn run_sql(&mut self, sql: &str) -> Result<(), BoxError> {
        self.execute(sql).await?;
        Ok(())
    }

    async fn count(
        &mut self,
        sql: &str,
        pairs: &str,
        transaction: &OnceLock<ServerTransaction>,
    ) -> Result<i64, BoxError> {
        if transaction.get().is_none() {
            let query = sqlx::query_as(THIS_TRANSACTION).persistent(false);
            let _ = transaction.set(query.fetch_one(&mut **self).await?);
        }
        let query = sqlx::query_scalar(sql).bind(pairs).persistent(false);
        Ok(query.fetch_one(&mut **self).await?)
    }

    async fn commit(mut self, is_whole: bool, check: &str) -> Result<Checked, BoxError> {
        if is_whole && let Err(error) = self.run_sql(check).await {
            return Ok(Err(error));
        }
        Ok(Ok(Transaction::commit(self).await?))
    }
}

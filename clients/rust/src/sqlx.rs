//! Transactions under a lease on connections of sqlx.

use crate::adopted::Adopted;
use crate::error::{Error, Reason};
use crate::holding::{Holding, Under};
use crate::lease::Lease;
use crate::state::Shared;
use sqlx::postgres::{PgArguments, PgConnectOptions, PgConnection, PgRow};
use sqlx::query::Query;
use sqlx::{Connection, Executor, Postgres, Row, Transaction};
use std::ops::{Deref, DerefMut};

/// As [`Guarded`](crate::Guarded), on a connection of sqlx: to be ended by [`commit`](SqlxGuarded::commit) or
/// [`commit_and_release`](SqlxGuarded::commit_and_release); dropped, it is rolled back.
///
/// It dereferences to the [`PgConnection`]: `query.execute(&mut *guarded)` fails as sqlx does, which
/// [`told`](SqlxGuarded::told), and `?` into an [`Error`], make a type of. [`run`](SqlxGuarded::run) does so by itself,
/// and ends what hangs on a loss.
#[must_use = "dropped, it is rolled back"]
pub struct SqlxGuarded<'c> {
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
    ) -> Result<SqlxGuarded<'c>, Error> {
        SqlxGuarded::begin(Holding::Lease(self.clone()), connection, true).await
    }

    /// As [`present`](Lease::present), on a connection of sqlx.
    pub async fn present_sqlx<'c>(
        &self,
        connection: &'c mut PgConnection,
    ) -> Result<SqlxGuarded<'c>, Error> {
        SqlxGuarded::begin(Holding::Lease(self.clone()), connection, false).await
    }

    /// As [`options`](Lease::options), for connections and pools of sqlx.
    pub fn options_sqlx(&self, options: PgConnectOptions) -> PgConnectOptions {
        options.options([("pg_fence.token", self.token())])
    }
}

impl Adopted {
    /// As [`guard`](Adopted::guard), on a connection of sqlx.
    pub async fn guard_sqlx<'c>(
        &self,
        connection: &'c mut PgConnection,
    ) -> Result<SqlxGuarded<'c>, Error> {
        SqlxGuarded::begin(Holding::Adopted(self.clone()), connection, true).await
    }

    /// As [`present`](Adopted::present), on a connection of sqlx.
    pub async fn present_sqlx<'c>(
        &self,
        connection: &'c mut PgConnection,
    ) -> Result<SqlxGuarded<'c>, Error> {
        SqlxGuarded::begin(Holding::Adopted(self.clone()), connection, false).await
    }
}

impl<'c> SqlxGuarded<'c> {
    async fn begin(
        holding: Holding,
        connection: &'c mut PgConnection,
        guards: bool,
    ) -> Result<SqlxGuarded<'c>, Error> {
        let under = Under::enter(vec![holding], None);
        under.prepare().await?;
        let is_whole = !connection.is_in_transaction();
        let transaction = under.or_loss(connection.begin()).await?;
        let mut guarded = SqlxGuarded { transaction, under, is_whole };
        match guarded.enter(guards).await {
            // After a failover no token speaks until its holder has renewed, or adopted again.
            Err(error) if is_whole && guarded.under.can_mend(&error) => {
                guarded.execute_raw("ROLLBACK").await?;
                if !guarded.under.mend().await? {
                    return Err(error);
                }
                guarded.execute_raw("BEGIN").await?;
                guarded.enter(guards).await?;
                guarded.under.was_mended();
            }
            entered => entered?,
        }
        Ok(guarded)
    }

    async fn enter(&mut self, guards: bool) -> Result<(), Error> {
        if !guards {
            let token = self.under.token().to_string();
            let sql = "SELECT set_config('pg_fence.token', $1, true)";
            return self.row(sqlx::query(sql).bind(token)).await.map(drop);
        }
        let (shared, adopts) = match &self.under.holdings[0] {
            Holding::Adopted(adopted) if adopted.shared().hooks.adopts_again() => {
                (adopted.shared(), Some(adopted.clone()))
            }
            one => (one.shared(), None),
        };
        let (names, token) = (shared.names.to_vec(), shared.token());
        let entered = match adopts {
            Some(adopted) => {
                let (sql, holder, metadata) = adopted.guard_text();
                let query = sqlx::query(&sql).bind(names[0].clone()).bind(token);
                self.row(query.bind(holder).bind(metadata)).await
            }
            None => {
                let sql = on_names(shared, "lease_guard", "$2::bigint");
                self.row(sqlx::query(&sql).bind(names).bind(token)).await
            }
        };
        entered.map(drop).map_err(Error::of_extension)
    }

    /// Nothing of it is kept as a prepared statement, which poolers do not stand.
    async fn row(&mut self, query: Query<'_, Postgres, PgArguments>) -> Result<PgRow, Error> {
        let row = query.persistent(false).fetch_one(&mut *self.transaction);
        self.under.or_loss(row).await
    }

    async fn execute_raw(&mut self, sql: &str) -> Result<(), Error> {
        self.under.or_loss(self.transaction.execute(sql)).await.map(drop)
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
        self.under.told(error)
    }

    /// As [`Guarded::commit`](crate::Guarded::commit).
    pub async fn commit(mut self) -> Result<(), Error> {
        self.under.check()?;
        if self.is_whole {
            // sqlx takes the ROLLBACK of a transaction that has failed for a success.
            self.execute_raw("SAVEPOINT pg_fence_commits").await?;
        }
        let SqlxGuarded { transaction, under, .. } = self;
        under.unless_lost(transaction.commit()).await.map_err(Error::in_doubt)
    }

    /// As [`Guarded::commit_and_release`](crate::Guarded::commit_and_release).
    pub async fn commit_and_release(mut self) -> Result<(), Error> {
        let shared = self.under.holdings[0].shared().clone();
        let resting = shared.run(shared.rest()).await?;
        let left = crate::calls::interval(shared.lives_on());
        let (names, token) = (shared.names.to_vec(), shared.token());
        let row = if shared.lives_on().is_zero() {
            let sql = on_names(&shared, "lease_release", "$2::bigint");
            self.row(sqlx::query(&sql).bind(names).bind(token)).await?
        } else {
            let sql = on_names(&shared, "lease_renew", "$2::bigint, $3::text::interval");
            self.row(sqlx::query(&sql).bind(names).bind(token).bind(left)).await?
        };
        if row.try_get::<Option<i64>, _>(0)?.is_none() {
            shared.lose(Reason::Gone, None);
            shared.check()?;
        }
        self.commit().await?;
        shared.released();
        drop(resting);
        Ok(())
    }

    /// Rolls back, and waits for that.
    pub async fn rollback(self) -> Result<(), Error> {
        let SqlxGuarded { transaction, under, .. } = self;
        under.or_loss(transaction.rollback()).await
    }
}

/// A function of the lease's names, which are the array `$1`.
fn on_names(shared: &Shared, function: &str, others: &str) -> String {
    match shared.names.len() {
        1 => shared.select(&format!("{function}(($1::text[])[1], {others})")),
        _ => shared.select(&format!("{function}_all($1::text[], {others})")),
    }
}

impl Deref for SqlxGuarded<'_> {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.transaction
    }
}

impl DerefMut for SqlxGuarded<'_> {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.transaction
    }
}

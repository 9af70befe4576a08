//! Transactions that are guarded by leases, with any driver.

use crate::connection::Connected;
use crate::errors::{BoxError, Error, code_of, is_fatal, server_error, session_of};
use crate::heartbeat::{Grant, Heartbeat, Held, lock};
use crate::lease_state::{
    ErrorType, GuardFailure, GuardStage, GuardedBy, Id, LeaseStates, Reason, Session, Stage,
    guard_failed,
};
use crate::statements::{ServerTransaction, THIS_TRANSACTION, counted, qualified};
use serde_json::{Value, json};
use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use tokio::task::AbortHandle;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row, ToStatement, Transaction};

/// A connection on which a guard can begin: tokio-postgres' [`Client`], a [`Connected`], or an open
/// [`Transaction`] or [`Guard`]; with the feature `sqlx` also sqlx's `PgConnection`.
pub trait Guardable: Send {
    /// The driver's transaction.
    #[doc(hidden)]
    type Begun<'c>: OpenTransaction
    where
        Self: 'c;

    #[doc(hidden)]
    fn begin_guarded(&mut self) -> impl Future<Output = Begun<Self::Begun<'_>>> + Send;

    /// The handle that cuts the connection, if a loss may do so.
    #[doc(hidden)]
    fn cut(&self) -> Option<AbortHandle> {
        None
    }
}

/// A transaction with `true`, or a savepoint with `false`.
pub type Begun<T> = Result<(T, bool), BoxError>;

/// The result of [`check_transaction`].
pub type Checked = Result<(), BoxError>;

/// Returns a statement that fails with 25P02 in a transaction that has failed, and with 22012 in any
/// other than the guard's, which began then, or in none.
fn check_transaction(began: f64) -> String {
    format!("SELECT 1 / (extract(epoch FROM now())::float8 = {began})::int")
}

/// The function calls of a guard, for each pair `x`.
const GUARD: &str = "lease_guard(x.name, x.token)";
const ADOPT: &str = "lease_guard(x.name, lease_adopt(x.name, x.token, x.holder))";
const GUARD_ROW: &str =
    "lease_guard_row(x.relation, x.keys, x.name::jsonb, x.token, x.fence, x.deadline)";
const RELEASE_ROW: &str = "(SELECT * FROM lease_release_rows(
    x.relation, x.keys, ARRAY[x.name::jsonb], ARRAY[x.token], x.fence, x.deadline))";

/// A driver's transaction or savepoint. When it is dropped, it is rolled back. Its errors are those
/// of the driver.
#[doc(hidden)]
pub trait OpenTransaction: Send + Sized {
    /// Runs statements without arguments.
    fn run_sql(&mut self, sql: &str) -> impl Future<Output = Result<(), BoxError>> + Send;

    /// Runs a statement of [`counted`] with these pairs. Before its answer, for which it may wait
    /// for a lock, it sets the transaction, unless that is known. The statements are not prepared,
    /// because poolers do not support that.
    fn count(
        &mut self,
        sql: &str,
        pairs: &str,
        transaction: &OnceLock<ServerTransaction>,
    ) -> impl Future<Output = Result<i64, BoxError>> + Send;

    /// Commits. A COMMIT after a failed statement rolls back without an error, and one without a
    /// transaction is a warning: so `check` is sent before it. A RELEASE needs it only if the driver
    /// would not undo the savepoint after an error. If the check has failed, nothing is committed.
    fn commit(
        self,
        is_whole: bool,
        check: &str,
    ) -> impl Future<Output = Result<Checked, BoxError>> + Send;
}

impl OpenTransaction for Transaction<'_> {
    async fn run_sql(&mut self, sql: &str) -> Result<(), BoxError> {
        Ok(self.batch_execute(sql).await?)
    }

    async fn count(
        &mut self,
        sql: &str,
        pairs: &str,
        transaction: &OnceLock<ServerTransaction>,
    ) -> Result<i64, BoxError> {
        let identifies = async {
            if transaction.get().is_none() {
                let row = self.query_typed_one(THIS_TRANSACTION, &[]).await?;
                let _ = transaction.set((row.try_get(0)?, row.try_get(1)?));
            }
            Ok(())
        };
        // Both are sent at once.
        let args: [(&(dyn ToSql + Sync), Type); 1] = [(&pairs, Type::TEXT)];
        let ((), row) = tokio::try_join!(identifies, self.query_typed_one(sql, &args))?;
        Ok(row.try_get(0)?)
    }

    async fn commit(self, is_whole: bool, check: &str) -> Result<Checked, BoxError> {
        if !is_whole {
            // The driver does not undo a savepoint whose RELEASE fails: the program's transaction
            // would have failed, too, and its COMMIT would roll back without an error.
            if let Err(error) = self.batch_execute(check).await {
                return Ok(Err(error.into()));
            }
            return Ok(Ok(Transaction::commit(self).await?));
        }
        let had_ended = self.client().is_closed();
        // Both are sent at once. After a check that has failed, the COMMIT rolls back.
        match tokio::join!(self.batch_execute(check), self.batch_execute("COMMIT")) {
            // The session has ended, maybe after the COMMIT.
            (Err(error), _) if !had_ended && session_of(&error) == Session::Closed => {
                Err(error.into())
            }
            (Err(error), _) => Ok(Err(error.into())),
            (Ok(()), committed) => {
                committed?;
                // The drop of the driver's transaction would send a ROLLBACK. It owns nothing.
                mem::forget(self);
                Ok(Ok(()))
            }
        }
    }
}

macro_rules! guardable {
    ($($kind:ty: $is_whole:literal, $this:ident => $client:expr $(, $cut:item)?;)*) => {$(
        impl Guardable for $kind {
            type Begun<'c>
                = Transaction<'c>
            where
                Self: 'c;

            async fn begin_guarded(&mut self) -> Begun<Transaction<'_>> {
                let $this = self;
                Ok(($client.transaction().await?, $is_whole))
            }

            $($cut)?
        }
    )*};
}

guardable! {
    Client: true, client => client;
    Connected: true, connected => connected, fn cut(&self) -> Option<AbortHandle> {
        Some(self.task.abort_handle())
    };
    Transaction<'_>: false, transaction => transaction;
    Guard<'_>: false, guard => guard.transaction;
}

/// The leases of a guard, or its adopted lease, and the state of its transaction.
pub(crate) struct GuardState {
    heartbeat: Arc<Heartbeat>,
    of: GuardedBy,
    /// The leases, which are not released while the transaction runs. An adopted lease is not here.
    leases: Vec<Arc<Held>>,
    names: Vec<String>,
    /// The arguments of the statements: the rows of row leases, and the names of all other leases.
    rows: Vec<Value>,
    pairs: Vec<Value>,
    /// False for a savepoint.
    is_whole: bool,
    /// Row leases whose window was over before the transaction began. The transaction may still
    /// release them, as the table's trigger checks that write, but not commit anything else.
    late: Vec<Id>,
    /// True while the transaction has locked the rows of row leases.
    has_row_locks: bool,
    /// The stage of a transaction that releases the leases; None if it does not.
    stage: Option<Stage>,
    /// The handle that cuts the connection.
    cut: Option<AbortHandle>,
    /// The transaction in which the guard has begun, until it has ended.
    transaction: OnceLock<ServerTransaction>,
    /// The number of statements that run, or were dropped before their answers.
    running: AtomicUsize,
}

impl GuardState {
    /// Guards with leases, or with the name, number and holder of an adopted lease, which has no
    /// grant.
    pub fn new(
        heartbeat: &Arc<Heartbeat>,
        leases: Vec<Arc<Held>>,
        adopted: Option<(&str, i64, String)>,
    ) -> GuardState {
        let (mut names, mut rows, mut pairs) = (Vec::new(), Vec::new(), Vec::new());
        for grant in leases.iter().map(|lease| &*lease.grant) {
            names.extend(grant.names.clone());
            let pair = |name| json!({ "name": name, "token": grant.token });
            match &grant.row {
                Some(row) => rows.push(row.clone()),
                None => pairs.extend(grant.names.iter().map(pair)),
            }
        }
        if let Some((name, token, holder)) = adopted {
            names.push(name.to_owned());
            pairs.push(json!({ "name": name, "token": token, "holder": holder }));
        }
        let of = match (leases.is_empty(), pairs.is_empty()) {
            (true, _) => GuardedBy::Adopted,
            (false, true) => GuardedBy::Rows,
            (false, false) => GuardedBy::Names,
        };
        GuardState {
            heartbeat: heartbeat.clone(),
            of,
            leases,
            names,
            rows,
            pairs,
            is_whole: true,
            late: Vec::new(),
            has_row_locks: false,
            stage: None,
            cut: None,
            transaction: OnceLock::new(),
            running: 0.into(),
        }
    }

    fn grants(&self) -> impl Iterator<Item = &Grant> {
        self.leases.iter().map(|lease| &*lease.grant)
    }

    fn ids(&self) -> Vec<Id> {
        self.grants().map(|grant| grant.id).collect()
    }

    /// Renews the leases at once, which shows if they are lost.
    fn suspect(&self) {
        self.heartbeat.input(|states| states.suspect(&self.ids()));
    }

    /// Reports the stage of the transaction that releases the leases.
    fn report_stage(&self, stage: Stage) {
        self.heartbeat.input(|states| states.last_transaction(&self.ids(), stage));
    }

    /// Begins the guard. `Send` is declared, because the compiler does not infer it for a guard
    /// within another.
    #[allow(clippy::manual_async_fn)]
    pub fn begin<'c, C: Guardable>(
        mut self,
        connection: &'c mut C,
    ) -> impl Future<Output = Guards<'c, C>> + Send + use<'c, C> {
        async move {
            if self.names.is_empty() {
                return Err(Error::Invalid("a guard takes a lease"));
            }
            if self.leases.iter().any(|lease| !Arc::ptr_eq(&lease.heartbeat, &self.heartbeat)) {
                return Err(Error::Invalid("a guard takes leases of its own fence"));
            }
            self.cut = connection.cut();
            for grant in self.leases.iter().map(|lease| &*lease.grant) {
                match self.heartbeat.check(grant) {
                    Err(Error::LeaseLost { reason: Reason::Deadline, .. })
                        if grant.row.is_some() =>
                    {
                        self.late.push(grant.id);
                    }
                    checked => checked?,
                }
                // From here on a loss cuts the connection.
                lock(&grant.guards).extend(self.cut.clone());
            }
            // A lease may have been lost between its check and the line above.
            self.loss().map_or(Ok(()), Err)?;
            let transaction;
            let begun = self.or_loss(GuardStage::Open, connection.begin_guarded());
            (transaction, self.is_whole) = begun.await?;
            let mut guard = Guarded { transaction, state: self };
            let mut entered = guard.enter().await;
            if entered.as_ref().is_err_and(|failed| failed.follows.again) {
                // After a failover the server refuses each token until its holder has renewed it.
                guard.state.set_row_locks(false);
                guard.state.heartbeat.renew(&guard.state.leases).await;
                guard.state.transaction = OnceLock::new();
                let begun = guard.transaction.run_sql("ROLLBACK; BEGIN");
                guard.state.or_loss(GuardStage::Open, begun).await?;
                entered = guard.enter().await;
            }
            if entered? { Ok(guard) } else { Err(guard.gone()) }
        }
    }

    /// Reports that the rows of row leases are locked, or that the transaction has ended.
    fn set_row_locks(&mut self, locked: bool) {
        let is_changed = mem::replace(&mut self.has_row_locks, locked) != locked;
        for grant in self.grants().filter(|grant| is_changed && grant.row.is_some()) {
            let input = if locked { LeaseStates::row_locked } else { LeaseStates::row_unlocked };
            self.heartbeat.input(|states| input(states, grant.id));
        }
    }

    /// The leases whose loss ends the transaction.
    fn watched(&self) -> impl Iterator<Item = &Grant> {
        self.grants().filter(|grant| !self.late.contains(&grant.id))
    }

    fn loss(&self) -> Option<Error> {
        self.watched().find_map(Grant::loss)
    }

    /// The loss of a lease, or the error of a row whose window is over in this transaction.
    fn loss_or_over(&self) -> Option<Error> {
        let mut errors = self.watched().filter_map(|grant| self.heartbeat.check(grant).err());
        errors.find(|error| !matches!(error, Error::LeaseLost { reason: Reason::Released, .. }))
    }

    /// Returns the result of a call, or the loss of a lease if that comes first.
    async fn or_loss<T, E: Into<BoxError>>(
        &self,
        stage: GuardStage,
        call: impl Future<Output = Result<T, E>>,
    ) -> Result<T, Failed> {
        let lost = async {
            self.heartbeat.wait_until(|_| self.loss().is_some()).await;
            self.loss()
        };
        self.running.fetch_add(1, Relaxed);
        tokio::select! {
            biased;
            done = call => {
                self.running.fetch_sub(1, Relaxed);
                done.map_err(|error| self.failed(stage, error))
            }
            Some(loss) = lost => Err(self.failed(stage, loss)),
        }
    }

    /// Returns the error of a call that has failed, or that a loss has ended.
    fn failed(&self, stage: GuardStage, error: impl Into<BoxError>) -> Failed {
        let error = Error::other(error);
        let (code, is_fatal, session) = (code_of(&error), is_fatal(&error), session_of(&error));
        let (stage, code) = match (stage, &*code) {
            // Here the check follows the release, which may have been committed by itself.
            (GuardStage::Check, "22012") => (GuardStage::Commit, "no transaction"),
            // There is no savepoint, or no transaction.
            (GuardStage::Commit, "3B001" | "25P01") if !self.is_whole => (stage, "no transaction"),
            (_, code) => (stage, code),
        };
        let (mut loss, is_inner) = (self.loss_or_over(), !self.is_whole);
        let is_lost = loss.is_some();
        let follows = guard_failed(stage, code, is_fatal, session, self.of, is_inner, is_lost);
        if follows.suspect {
            self.suspect();
        }
        if let Some(Error::LeaseLost { in_doubt, .. }) = &mut loss {
            *in_doubt = follows.in_doubt;
        }
        let error = match follows.error {
            Some(ErrorType::LeaseLost) => loss.unwrap_or(error),
            Some(ErrorType::TransactionLost) => {
                Error::transaction_lost(&error, code, follows.in_doubt)
            }
            Some(ErrorType::LeaseTaken) => {
                let detail = server_error(&error).map(|refused| refused.detail).unwrap_or_default();
                let holder = detail.get("holder").and_then(Value::as_str).map(str::to_owned);
                let (names, remaining, waits_for) = (self.names.clone(), None, None);
                Error::LeaseTaken { names, holder, remaining, waits_for }
            }
            kind => {
                let row = self.rows.first().filter(|_| self.of == GuardedBy::Rows);
                error.typed(kind, "", row.and_then(|row| row["relation"].as_str()))
            }
        };
        Failed { error, follows }
    }
}

/// An error of a guard's call, and what follows from it.
struct Failed {
    error: Error,
    follows: GuardFailure,
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Error {
        failed.error
    }
}

impl Drop for GuardState {
    fn drop(&mut self) {
        let cut = self.cut.as_ref().map(AbortHandle::id);
        for grant in self.grants() {
            lock(&grant.guards).retain(|one| Some(one.id()) != cut);
        }
        if let Some(stage) = self.stage {
            self.report_stage(stage);
        }
        self.set_row_locks(false);
        // A statement that the program gave up must not delay what comes after it. A driver's own
        // method may also be running, which is not visible here: so each loss cancels. After a
        // savepoint the program's transaction goes on.
        let may_run = *self.running.get_mut() > 0 || self.loss().is_some();
        if let (true, Some(transaction)) = (may_run && self.is_whole, self.transaction.get()) {
            self.heartbeat.cancel(*transaction);
        }
    }
}

/// The result of beginning a guard on a connection of type `C`.
pub type Guards<'c, C> = Result<Guarded<<C as Guardable>::Begun<'c>>, Error>;

/// A guard on tokio-postgres.
pub type Guard<'c> = Guarded<Transaction<'c>>;

/// A driver's transaction that is guarded by leases. It is ended by [`commit`](Guarded::commit) or
/// [`commit_and_release`](Guarded::commit_and_release). When it is dropped, it is rolled back.
///
/// It dereferences to the driver's transaction. Those methods of the driver that are repeated here
/// do more: they return as soon as a lease is lost, and their errors are [typed](Error). Any other
/// method ends with the connection, which a loss cuts if it is a [`Connected`].
#[must_use = "dropped, it is rolled back"]
pub struct Guarded<T: OpenTransaction> {
    // Dropped first: it is rolled back while a loss can still cut the connection.
    transaction: T,
    state: GuardState,
}

impl<T: OpenTransaction> Guarded<T> {
    /// Calls a function for each of the pairs. Returns true if no result was NULL.
    async fn call(
        &mut self,
        stage: GuardStage,
        function: &str,
        pairs: Vec<Value>,
    ) -> Result<bool, Failed> {
        if pairs.is_empty() {
            return Ok(true);
        }
        let Guarded { transaction, state } = self;
        let sql = qualified(&state.heartbeat.setup.schema, &counted(function));
        let (expected, pairs) = (pairs.len() as i64, Value::from(pairs).to_string());
        let counts = transaction.count(&sql, &pairs, &state.transaction);
        Ok(state.or_loss(stage, counts).await? == expected)
    }

    /// Presents the tokens. Returns false if a row's lease is lost.
    async fn enter(&mut self) -> Result<bool, Failed> {
        let (rows, pairs) = (self.state.rows.clone(), self.state.pairs.clone());
        let is_held = self.call(GuardStage::Begin, GUARD_ROW, rows).await?;
        if is_held {
            self.state.set_row_locks(true);
            let is_adopted = self.state.of == GuardedBy::Adopted;
            let function = if is_adopted { ADOPT } else { GUARD };
            self.call(GuardStage::Begin, function, pairs).await?;
        }
        Ok(is_held)
    }

    /// The error if the server says that a lease is lost.
    fn gone(&self) -> Error {
        self.state.suspect();
        Error::lost(&self.state.names, Reason::Gone, false)
    }

    /// Commits. Fails if a lease is lost, if a statement has failed, or if the work has ended the
    /// transaction itself; PostgreSQL would report success in both of the latter cases.
    pub async fn commit(mut self) -> Result<(), Error> {
        self.state.late.clear();
        self.end().await
    }

    async fn end(self) -> Result<(), Error> {
        self.state.loss().map_or(Ok(()), Err)?;
        let Guarded { transaction, mut state } = self;
        let (is_whole, is_last) = (state.is_whole, state.stage.is_some());
        if is_last {
            // The stage that is reported if this future is dropped during the commit.
            state.stage = Some(if is_whole { Stage::InDoubt } else { Stage::RolledBack });
        }
        let (_, began) = state.transaction.get().copied().unwrap_or_default();
        let check = check_transaction(began);
        let sent = state.or_loss(GuardStage::Commit, transaction.commit(is_whole, &check)).await;
        let checked =
            |checked: Checked| checked.map_err(|error| state.failed(GuardStage::Check, error));
        let ended = sent.and_then(checked);
        let stage = match &ended {
            Ok(()) if is_whole => Stage::Committed,
            Ok(()) => Stage::Inner,
            Err(failed) => failed.follows.last,
        };
        state.stage = is_last.then_some(stage);
        if ended.is_ok() {
            state.transaction.take();
        }
        Ok(ended?)
    }

    /// Releases the leases by the last write of this transaction, and commits. In a savepoint the
    /// leases are released when the program's transaction commits, and stay held if it rolls back.
    pub async fn commit_and_release(mut self) -> Result<(), Error> {
        // The heartbeat does not renew a lease that the transaction releases.
        self.state.report_stage(Stage::Begins);
        self.state.stage = Some(Stage::RolledBack);
        // A NULL is no error for rows: the work may have released its row itself.
        let (rows, pairs) = (self.state.rows.clone(), self.state.pairs.clone());
        self.call(GuardStage::Release, RELEASE_ROW, rows).await?;
        let function = "lease_release(x.name, x.token)";
        if !self.call(GuardStage::Release, function, pairs).await? {
            return Err(self.gone());
        }
        self.end().await
    }
}

macro_rules! calls {
    ($($name:ident($($argument:ident: $kind:ty),*) -> $result:ty;)*) => {
        impl Guard<'_> {$(
            #[doc = concat!("As [`Transaction::", stringify!($name), "`].")]
            pub async fn $name(&self, $($argument: $kind),*) -> Result<$result, Error> {
                let call = self.transaction.$name($($argument),*);
                Ok(self.state.or_loss(GuardStage::Work, call).await?)
            }
        )*}
    };
}

calls! {
    batch_execute(sql: &str) -> ();
    execute(statement: &(impl ?Sized + ToStatement), params: &[&(dyn ToSql + Sync)]) -> u64;
    query(statement: &(impl ?Sized + ToStatement), params: &[&(dyn ToSql + Sync)]) -> Vec<Row>;
    query_one(statement: &(impl ?Sized + ToStatement), params: &[&(dyn ToSql + Sync)]) -> Row;
    execute_typed(sql: &str, params: &[(&(dyn ToSql + Sync), Type)]) -> u64;
    query_typed(sql: &str, params: &[(&(dyn ToSql + Sync), Type)]) -> Vec<Row>;
    query_opt(statement: &(impl ?Sized + ToStatement), params: &[&(dyn ToSql + Sync)]) -> Option<Row>;
}

impl<T: OpenTransaction> Deref for Guarded<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.transaction
    }
}

impl<T: OpenTransaction> DerefMut for Guarded<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.transaction
    }
}

//! One run of a demo scenario: its database, its workers, and the timeline of their steps.

use crate::Harness;
use crate::client::{Conninfo, Rows, Session, literal, microseconds};
use crate::fault::Fault;
use crate::process::{PATIENCE, wait_until};
use crate::timeline::{Mark, Timeline};
use crate::worker::Worker;
use anyhow::{Context, Result, ensure};
use postgres::SimpleQueryMessage;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// With this ttl or a longer one, a lease that expires too early is a failure, however slow the machine is.
const LONGEST_TTL: Duration = Duration::from_secs(27);

/// The counters that are not zero, in the order of the view's columns.
const COUNTED: &str = "SELECT string_agg(replace(c.key, '_', ' ') || ' ' || c.value, ', ' ORDER BY a.attnum) \
    FROM fence.stats s, jsonb_each_text(to_jsonb(s) - 'stats_reset' - 'wait_time') AS c \
    JOIN pg_attribute a ON a.attrelid = 'fence.stats'::regclass AND a.attname = c.key WHERE c.value <> '0'";

/// One demo scenario.
pub struct DemoScenario {
    /// Its name in a word or two.
    pub title: &'static str,
    pub summary: &'static str,
    /// The protection without which it goes wrong, and what goes wrong.
    pub without: (&'static str, &'static str),
    /// Runs the scenario once, for [`DemoRun::play`]. Returns the outcome in one line, or an error that names the
    /// broken promise.
    pub(crate) play: fn(&DemoRun) -> Result<String>,
}

/// One run of a scenario, in a database with the extension.
pub struct DemoRun<'a> {
    harness: &'a Harness,
    conninfo: Conninfo,
    timeline: &'a Timeline,
    /// The ttl of its leases.
    pub ttl: Duration,
    protecting: bool,
    /// The deadline of the grant that the scenario currently depends on, by the server's clock, in microseconds since
    /// 1970.
    needed_until: Mutex<Option<i64>>,
}

impl<'a> DemoRun<'a> {
    /// Returns a run in the database of `conninfo`, which has the extension.
    pub fn new(harness: &'a Harness, conninfo: Conninfo, timeline: &'a Timeline) -> DemoRun<'a> {
        let ttl = Duration::from_secs(1);
        let needed_until = Mutex::new(None);
        DemoRun { harness, conninfo, timeline, ttl, protecting: true, needed_until }
    }

    /// Runs a scenario and returns its outcome, or an error that names the broken promise.
    ///
    /// If the machine stalls, a lease may expire before the scenario intends it. A failure then shows nothing, so the
    /// scenario is run again with a longer ttl. The server's clock decides whether the deadline had passed.
    pub fn play(&mut self, scenario: &DemoScenario) -> Result<String> {
        loop {
            let mut session = self.session()?;
            self.begin_counting()?;
            *self.needed_until() = None;
            let error = match (scenario.play)(self) {
                Err(error) if self.ttl < LONGEST_TTL && self.has_run_out(&mut session)? => error,
                outcome => return outcome,
            };
            self.ttl = (3 * self.ttl).min(LONGEST_TTL);
            let ttl = self.ttl_sql();
            self.note(format!("{error:#}"));
            self.note(format!(
                "the machine was too slow: a lease ran out early. Again, with {ttl}"
            ));
            session.run(LEAVE_NOTHING)?;
        }
    }

    /// Returns true if the deadline of a grant that the scenario depends on has passed.
    fn has_run_out(&self, session: &mut Session) -> Result<bool> {
        let now: i64 =
            session.one(&format!("SELECT {}", microseconds("clock_timestamp()")), &[])?;
        Ok(self.needed_until().is_some_and(|deadline| deadline <= now))
    }

    fn needed_until(&self) -> MutexGuard<'_, Option<i64>> {
        self.needed_until.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Declares that the scenario depends on this grant, until it lets it expire.
    fn needs(&self, lease: &str, token: i64) -> Result<()> {
        let deadline = microseconds("expires_at");
        let sql = format!("SELECT max({deadline}) FROM lease_info($1) WHERE token = $2");
        let deadline: Option<i64> = self.session()?.one(&sql, &[&lease, &token])?;
        // A grant that is gone has expired.
        *self.needed_until() = Some(deadline.unwrap_or(0));
        Ok(())
    }

    /// Leaves out every protection, to show what goes wrong without it.
    pub fn without_protection(mut self) -> DemoRun<'a> {
        self.protecting = false;
        self
    }

    /// Returns true if tables are fenced and transactions guarded in this run.
    pub fn is_protecting(&self) -> bool {
        self.protecting
    }

    /// Opens an observer's session.
    pub fn session(&self) -> Result<Session> {
        self.conninfo.clone().application("onlooker").connect()
    }

    /// Starts a worker process whose steps are not in the timeline.
    pub fn silent_worker(&self, name: &str) -> Result<Worker> {
        self.harness.worker(name, &self.conninfo)
    }

    /// Starts a worker process whose steps are in the timeline.
    pub fn worker(&self, name: &str) -> Result<LoggedWorker<'_>> {
        Ok(LoggedWorker { scenario: self, worker: self.silent_worker(name)? })
    }

    /// Makes a table and fences it. `options` follow the table in the call of `fence_protect`.
    pub fn fenced_table(&self, name: &str, definition: &str, options: &str) -> Result<()> {
        let mut session = self.session()?;
        session.run(&format!("DROP TABLE IF EXISTS {name}"))?;
        session.run(&format!("CREATE TABLE {name} ({definition}, fence bigint)"))?;
        let protect = format!("fence_protect('{name}'{options})");
        if self.protecting {
            session.run(&format!("SELECT {protect}"))?;
            self.note(protect);
        }
        Ok(())
    }

    /// Runs statements that are no part of the scenario.
    pub fn run(&self, sql: &str) -> Result<()> {
        self.session()?.run(sql)
    }

    /// Adds an event without a worker to the timeline.
    pub fn note(&self, text: impl std::fmt::Display) {
        self.timeline.tell("", Mark::Note, text);
    }

    /// Adds a step of a [`DemoRun::silent_worker`] to the timeline.
    pub fn tell(&self, worker: &str, mark: Mark, text: impl std::fmt::Display) {
        self.timeline.tell(worker, mark, text);
    }

    /// Runs a query, shows its result, and returns it.
    pub fn table(&self, title: &str, sql: &str) -> Result<Rows> {
        let mut session = self.session()?;
        let messages = session.simple_query(sql).with_context(|| sql.to_owned())?;
        let mut header = Vec::new();
        let mut rows = Rows::new();
        for message in &messages {
            if let SimpleQueryMessage::Row(row) = message {
                header = row.columns().iter().map(|column| column.name().to_owned()).collect();
                rows.push((0..row.len()).map(|i| row.get(i).map(str::to_owned)).collect());
            }
        }
        let shown: Vec<Vec<String>> = rows
            .iter()
            .map(|row| row.iter().map(|cell| cell.clone().unwrap_or("-".to_owned())).collect())
            .collect();
        self.timeline.table(title, &header, &shown);
        Ok(rows)
    }

    /// Resets the counters, so that `counted` covers only this run.
    fn begin_counting(&self) -> Result<()> {
        self.run("SELECT fence_stats_reset()")
    }

    /// Shows the counters and the refused writes of this run. Returns the number of refused writes.
    pub fn counted(&self) -> Result<usize> {
        let counted = self.session()?.text(COUNTED)?.unwrap_or_default();
        self.note(format!("fence.stats: {counted}"));
        let refusals = "SELECT sqlstate, relation, key, lease, presented, stored, holder, application_name AS worker \
                        FROM fence.refusals ORDER BY refused_at LIMIT 5";
        if self.session()?.rows(refusals)?.is_empty() {
            return Ok(0);
        }
        Ok(self.table("fence.refusals", refusals)?.len())
    }

    /// Waits until the deadline of a lease has passed, by the server's clock.
    pub fn wait_until_expired(&self, lease: &str) -> Result<()> {
        let mut session = self.session()?;
        let sql = "SELECT expires_at <= clock_timestamp() FROM lease_info($1)";
        wait_until("the lease expires", PATIENCE, || session.one(sql, &[&lease]).unwrap_or(false))?;
        self.note(format!("the ttl of '{lease}' has passed"));
        Ok(())
    }

    /// Returns the ttl as SQL.
    fn ttl_sql(&self) -> String {
        format!("'{} s'", self.ttl.as_secs_f64())
    }
}

/// Ends what is left of a run that began after this session: sessions that still wait for a lease, and grants.
const LEAVE_NOTHING: &str = "SELECT pg_terminate_backend(other.pid, 60000)
      FROM pg_stat_activity AS other, pg_stat_activity AS own
     WHERE own.pid = pg_backend_pid() AND other.datname = own.datname AND other.backend_start > own.backend_start;
    SELECT lease_revoke(name) FROM fence.leases";

/// A worker process whose steps are in the timeline.
pub struct LoggedWorker<'a> {
    scenario: &'a DemoRun<'a>,
    worker: Worker,
}

impl LoggedWorker<'_> {
    /// Returns the worker process itself.
    pub fn worker(&mut self) -> &mut Worker {
        &mut self.worker
    }

    /// Adds an event of this worker to the timeline.
    pub fn tell(&self, mark: Mark, text: impl std::fmt::Display) {
        self.scenario.tell(&self.worker.name, mark, text);
    }

    /// Acquires a free lease and returns the token.
    pub fn acquires(&mut self, lease: &str) -> Result<i64> {
        let call = self.acquire_call(lease, "");
        let token = self.worker.number(&format!("SELECT {call}"))?;
        let token = token.with_context(|| format!("{call} says that the lease is taken"))?;
        self.tell(Mark::Holds, format!("{call} -> {token}"));
        self.scenario.needs(lease, token)?;
        Ok(token)
    }

    /// Tries to acquire a lease that is held.
    pub fn finds_taken(&mut self, lease: &str) -> Result<()> {
        let call = self.acquire_call(lease, "");
        let token = self.worker.number(&format!("SELECT {call}"))?;
        ensure!(token.is_none(), "{call} granted {token:?} though somebody has the lease");
        self.tell(Mark::Taken, format!("{call} -> NULL"));
        Ok(())
    }

    /// Starts to wait for a held lease. [`LoggedWorker::is_granted`] ends the wait.
    pub fn waits_for(&mut self, lease: &str) -> Result<()> {
        let call = self.acquire_call(lease, ", wait => '1 min'");
        self.worker.send(&format!("SELECT {call}"))?;
        self.tell(Mark::Note, format!("{call} waits"));
        Ok(())
    }

    /// Returns the token from a wait for this lease.
    pub fn is_granted(&mut self, lease: &str) -> Result<i64> {
        let rows = self.worker.outcome(PATIENCE)??;
        let token = rows.first().and_then(|row| row.first()?.as_deref());
        let token = token.context("the wait was in vain")?.parse()?;
        self.tell(Mark::Holds, format!("... and is granted token {token}"));
        self.scenario.needs(lease, token)?;
        Ok(token)
    }

    fn acquire_call(&self, lease: &str, options: &str) -> String {
        let (lease, holder) = (literal(lease), literal(&self.worker.name));
        format!("lease_acquire({lease}, {holder}, {}{options})", self.scenario.ttl_sql())
    }

    /// Calls a function that returns a token or NULL.
    pub fn calls(&mut self, call: &str) -> Result<Option<i64>> {
        let token = self.worker.number(&format!("SELECT {call}"))?;
        let shown = token.map_or("NULL".to_owned(), |token| token.to_string());
        let goes_on = token.is_some() && !call.starts_with("lease_release");
        let mark = if goes_on { Mark::Holds } else { Mark::Ended };
        self.tell(mark, format!("{call} -> {shown}"));
        Ok(token)
    }

    /// Runs a write that must succeed.
    pub fn writes(&mut self, sql: &str) -> Result<Rows> {
        let rows = self.worker.rows(sql)?;
        self.tell(Mark::Writes, sql);
        Ok(rows)
    }

    /// Opens a transaction, guarded by its lease if there is protection.
    pub fn begins(&mut self, lease: &str, token: i64) -> Result<()> {
        let guard = format!("SELECT lease_guard({}, {token})", literal(lease));
        let sql =
            if self.scenario.protecting { format!("BEGIN; {guard}") } else { "BEGIN".to_owned() };
        self.worker.rows(&sql)?;
        self.tell(Mark::Note, sql);
        Ok(())
    }

    pub fn commits(&mut self) -> Result<()> {
        self.worker.rows("COMMIT")?;
        self.tell(Mark::Note, "COMMIT");
        Ok(())
    }

    /// Freezes the worker (SIGSTOP) just before a statement, which is the first thing it does when it resumes.
    pub fn freezes_before(&mut self, sql: &str) -> Result<()> {
        self.freezes()?;
        self.worker.send(sql)?;
        self.tell(Mark::Note, format!("its next step would be: {sql}"));
        Ok(())
    }

    /// Freezes the worker (SIGSTOP): its lease may expire.
    pub fn freezes(&mut self) -> Result<()> {
        *self.scenario.needed_until() = None;
        self.worker.freeze()?;
        self.tell(Mark::Frozen, format!("process {} gets SIGSTOP", self.worker.pid()));
        Ok(())
    }

    /// Resumes the worker (SIGCONT).
    pub fn wakes(&mut self) -> Result<()> {
        self.tell(Mark::Wakes, format!("process {} gets SIGCONT", self.worker.pid()));
        self.worker.thaw()
    }

    /// Resumes the worker. The statement before which it was frozen must succeed.
    pub fn wakes_and_does(&mut self, sql: &str) -> Result<Rows> {
        self.wakes()?;
        let rows = self.worker.outcome(PATIENCE)?.with_context(|| sql.to_owned())?;
        self.tell(Mark::Writes, sql);
        Ok(rows)
    }

    /// Resumes the worker. The statement before which it was frozen must be refused if there is protection.
    pub fn wakes_too_late(&mut self, sql: &str, sqlstate: &str) -> Result<Option<Fault>> {
        if !self.scenario.protecting {
            return self.wakes_and_does(sql).map(|_| None);
        }
        self.wakes()?;
        let outcome = self.worker.outcome(PATIENCE)?;
        let fault = crate::fault::expect_err(outcome, sqlstate).with_context(|| sql.to_owned())?;
        self.scenario.timeline.refused(&self.worker.name, sql, &fault);
        Ok(Some(fault))
    }
}

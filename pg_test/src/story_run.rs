//! One run of a story: its database, its workers, and the timeline that shows what they do.

use crate::client::{literal, microseconds, Conninfo, Rows, Session};
use crate::fault::Fault;
use crate::process::{wait_until, PATIENCE};
use crate::timeline::{Mark, Timeline};
use crate::worker::Worker;
use crate::Lab;
use anyhow::{ensure, Context, Result};
use postgres::SimpleQueryMessage;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// From this ttl on, a lease that runs out too early is a failure, however slow the machine is.
const LONGEST_TTL: Duration = Duration::from_secs(27);

/// The counters that are not zero, in the order of the view's columns.
const COUNTED: &str = "SELECT string_agg(replace(c.key, '_', ' ') || ' ' || c.value, ', ' ORDER BY a.attnum) \
    FROM fence.stats s, jsonb_each_text(to_jsonb(s) - 'stats_reset' - 'wait_time') AS c \
    JOIN pg_attribute a ON a.attrelid = 'fence.stats'::regclass AND a.attname = c.key WHERE c.value <> '0'";

/// One example of what the extension is for.
pub struct Story {
    /// Its name in a word or two.
    pub title: &'static str,
    pub plot: &'static str,
    /// The protection without which it goes wrong, and how it does.
    pub without: (&'static str, &'static str),
    /// Plays it once, as [`StoryRun::play`] asks for: the outcome in a line, or the promise that was not kept.
    pub(crate) play: fn(&StoryRun) -> Result<String>,
}

/// One run of a story, in a database that has the extension.
pub struct StoryRun<'a> {
    lab: &'a Lab,
    conninfo: Conninfo,
    timeline: &'a Timeline,
    /// How long a lease lives.
    pub ttl: Duration,
    protecting: bool,
    /// The deadline of the grant that the story needs just now, by the server's clock in microseconds since 1970.
    needed_until: Mutex<Option<i64>>,
}

impl<'a> StoryRun<'a> {
    /// A run in the database of `conninfo`, which has the extension.
    pub fn new(lab: &'a Lab, conninfo: Conninfo, timeline: &'a Timeline) -> StoryRun<'a> {
        let ttl = Duration::from_secs(1);
        let needed_until = Mutex::new(None);
        StoryRun { lab, conninfo, timeline, ttl, protecting: true, needed_until }
    }

    /// Plays a story: its outcome, or the promise that was not kept.
    ///
    /// On a machine that stands still for a while, a lease may run out before the story is ready for that. A failure
    /// then breaks no promise, so the story is played again with a longer ttl. Whether the deadline had passed is
    /// judged by the server's clock.
    pub fn play(&mut self, story: &Story) -> Result<String> {
        loop {
            let mut session = self.session()?;
            self.begin_counting()?;
            *self.needed_until() = None;
            let error = match (story.play)(self) {
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

    /// Whether the deadline has passed of a grant that the story needs.
    fn has_run_out(&self, session: &mut Session) -> Result<bool> {
        let now: i64 =
            session.one(&format!("SELECT {}", microseconds("clock_timestamp()")), &[])?;
        Ok(self.needed_until().is_some_and(|deadline| deadline <= now))
    }

    fn needed_until(&self) -> MutexGuard<'_, Option<i64>> {
        self.needed_until.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on the story needs this grant, until it lets it run out.
    fn needs(&self, lease: &str, token: i64) -> Result<()> {
        let deadline = microseconds("expires_at");
        let sql = format!("SELECT max({deadline}) FROM lease_info($1) WHERE token = $2");
        let deadline: Option<i64> = self.session()?.one(&sql, &[&lease, &token])?;
        // A grant that is not there any more has run out already.
        *self.needed_until() = Some(deadline.unwrap_or(0));
        Ok(())
    }

    /// Every protection left out: to see what a story is worth without it.
    pub fn without_protection(mut self) -> StoryRun<'a> {
        self.protecting = false;
        self
    }

    /// Whether tables are fenced and transactions guarded here.
    pub fn is_protecting(&self) -> bool {
        self.protecting
    }

    /// A session of somebody who looks on.
    pub fn session(&self) -> Result<Session> {
        self.conninfo.clone().application("onlooker").connect()
    }

    /// A worker process of which the timeline says nothing.
    pub fn silent_worker(&self, name: &str) -> Result<Worker> {
        self.lab.worker(name, &self.conninfo)
    }

    /// A worker process whose steps the timeline shows.
    pub fn worker(&self, name: &str) -> Result<ToldWorker<'_>> {
        Ok(ToldWorker { story: self, worker: self.silent_worker(name)? })
    }

    /// Makes a table and fences it: `options` follow the table in the call of `fence_protect`.
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

    /// Runs statements that are no part of the story.
    pub fn run(&self, sql: &str) -> Result<()> {
        self.session()?.run(sql)
    }

    /// Shows something that no worker does.
    pub fn note(&self, text: impl std::fmt::Display) {
        self.timeline.tell("", Mark::Note, text);
    }

    /// Shows a step of a worker that is a [`StoryRun::silent_worker`].
    pub fn tell(&self, worker: &str, mark: Mark, text: impl std::fmt::Display) {
        self.timeline.tell(worker, mark, text);
    }

    /// Shows the outcome of a query, and returns it.
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

    /// Counts from zero, so that `counted` is about this run.
    fn begin_counting(&self) -> Result<()> {
        self.run("SELECT fence_stats_reset()")
    }

    /// Shows what the database has counted since, and which writes it has refused; returns how many those were.
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

    /// The ttl as SQL.
    fn ttl_sql(&self) -> String {
        format!("'{} s'", self.ttl.as_secs_f64())
    }
}

/// Ends what is left of a play that began after this session: sessions that still wait for a lease, and grants.
const LEAVE_NOTHING: &str = "SELECT pg_terminate_backend(other.pid, 60000)
      FROM pg_stat_activity AS other, pg_stat_activity AS own
     WHERE own.pid = pg_backend_pid() AND other.datname = own.datname AND other.backend_start > own.backend_start;
    SELECT lease_revoke(name) FROM fence.leases";

/// A worker process whose steps the timeline shows.
pub struct ToldWorker<'a> {
    story: &'a StoryRun<'a>,
    worker: Worker,
}

impl ToldWorker<'_> {
    /// The worker behind it.
    pub fn worker(&mut self) -> &mut Worker {
        &mut self.worker
    }

    /// Tells something about it.
    pub fn tell(&self, mark: Mark, text: impl std::fmt::Display) {
        self.story.tell(&self.worker.name, mark, text);
    }

    /// Acquires a lease that is free, and returns the token.
    pub fn acquires(&mut self, lease: &str) -> Result<i64> {
        let call = self.acquire_call(lease, "");
        let token = self.worker.number(&format!("SELECT {call}"))?;
        let token = token.with_context(|| format!("{call} says that the lease is taken"))?;
        self.tell(Mark::Holds, format!("{call} -> {token}"));
        self.story.needs(lease, token)?;
        Ok(token)
    }

    /// Tries to acquire a lease that somebody has.
    pub fn finds_taken(&mut self, lease: &str) -> Result<()> {
        let call = self.acquire_call(lease, "");
        let token = self.worker.number(&format!("SELECT {call}"))?;
        ensure!(token.is_none(), "{call} granted {token:?} though somebody has the lease");
        self.tell(Mark::Taken, format!("{call} -> NULL"));
        Ok(())
    }

    /// Starts to wait for a lease that somebody has; [`ToldWorker::is_granted`] ends the wait.
    pub fn waits_for(&mut self, lease: &str) -> Result<()> {
        let call = self.acquire_call(lease, ", wait => '1 min'");
        self.worker.send(&format!("SELECT {call}"))?;
        self.tell(Mark::Note, format!("{call} waits"));
        Ok(())
    }

    /// The token that a wait for this lease ended with.
    pub fn is_granted(&mut self, lease: &str) -> Result<i64> {
        let rows = self.worker.outcome(PATIENCE)??;
        let token = rows.first().and_then(|row| row.first()?.as_deref());
        let token = token.context("the wait was in vain")?.parse()?;
        self.tell(Mark::Holds, format!("... and is granted token {token}"));
        self.story.needs(lease, token)?;
        Ok(token)
    }

    fn acquire_call(&self, lease: &str, options: &str) -> String {
        let (lease, holder) = (literal(lease), literal(&self.worker.name));
        format!("lease_acquire({lease}, {holder}, {}{options})", self.story.ttl_sql())
    }

    /// Calls something that returns a token or NULL.
    pub fn calls(&mut self, call: &str) -> Result<Option<i64>> {
        let token = self.worker.number(&format!("SELECT {call}"))?;
        let shown = token.map_or("NULL".to_owned(), |token| token.to_string());
        let goes_on = token.is_some() && !call.starts_with("lease_release");
        let mark = if goes_on { Mark::Holds } else { Mark::Ended };
        self.tell(mark, format!("{call} -> {shown}"));
        Ok(token)
    }

    /// Runs a write that must go through.
    pub fn writes(&mut self, sql: &str) -> Result<Rows> {
        let rows = self.worker.rows(sql)?;
        self.tell(Mark::Writes, sql);
        Ok(rows)
    }

    /// Opens a transaction, guarded by its lease where there is protection.
    pub fn begins(&mut self, lease: &str, token: i64) -> Result<()> {
        let guard = format!("SELECT lease_guard({}, {token})", literal(lease));
        let sql =
            if self.story.protecting { format!("BEGIN; {guard}") } else { "BEGIN".to_owned() };
        self.worker.rows(&sql)?;
        self.tell(Mark::Note, sql);
        Ok(())
    }

    pub fn commits(&mut self) -> Result<()> {
        self.worker.rows("COMMIT")?;
        self.tell(Mark::Note, "COMMIT");
        Ok(())
    }

    /// Freezes it (SIGSTOP) just before a statement: that is the first thing it does when it wakes.
    pub fn freezes_before(&mut self, sql: &str) -> Result<()> {
        self.freezes()?;
        self.worker.send(sql)?;
        self.tell(Mark::Note, format!("its next step would be: {sql}"));
        Ok(())
    }

    /// Freezes it (SIGSTOP): its lease may run out.
    pub fn freezes(&mut self) -> Result<()> {
        *self.story.needed_until() = None;
        self.worker.freeze()?;
        self.tell(Mark::Frozen, format!("process {} gets SIGSTOP", self.worker.pid()));
        Ok(())
    }

    /// Wakes it (SIGCONT).
    pub fn wakes(&mut self) -> Result<()> {
        self.tell(Mark::Wakes, format!("process {} gets SIGCONT", self.worker.pid()));
        self.worker.thaw()
    }

    /// Wakes it; the statement it was frozen before goes through.
    pub fn wakes_and_does(&mut self, sql: &str) -> Result<Rows> {
        self.wakes()?;
        let rows = self.worker.outcome(PATIENCE)?.with_context(|| sql.to_owned())?;
        self.tell(Mark::Writes, sql);
        Ok(rows)
    }

    /// Wakes it; the statement it was frozen before must be refused, where there is protection.
    pub fn wakes_too_late(&mut self, sql: &str, sqlstate: &str) -> Result<Option<Fault>> {
        if !self.story.protecting {
            return self.wakes_and_does(sql).map(|_| None);
        }
        self.wakes()?;
        let outcome = self.worker.outcome(PATIENCE)?;
        let fault = crate::fault::expect_err(outcome, sqlstate).with_context(|| sql.to_owned())?;
        self.story.timeline.refused(&self.worker.name, sql, &fault);
        Ok(Some(fault))
    }
}

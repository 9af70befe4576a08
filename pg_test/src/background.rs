//! A session in a thread of its own, so that a test can see it wait and let it continue.

use crate::client::{Conninfo, Notices, Rows, Session, notices_in};
use crate::edition;
use crate::fault::Fault;
use crate::process::{PATIENCE, wait_until};
use anyhow::{Context, Result, ensure};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

/// The outcome of a statement.
pub type Outcome = Result<Rows, Fault>;

/// A session that runs one statement at a time without blocking its owner.
pub struct Background {
    statements: Sender<String>,
    outcomes: Receiver<Outcome>,
    pending: Option<String>,
    early: Option<Outcome>,
    notices: Notices,
    conninfo: Conninfo,
    probe: Option<Session>,
    pid: i32,
    /// True if sleeping counts as waiting: a waiter of the lite edition sleeps between its attempts.
    pub waits_asleep: bool,
}

impl Background {
    /// Connects twice: the second connection observes the first.
    pub fn connect(conninfo: &Conninfo) -> Result<Background> {
        let mut background = Background::connect_once(conninfo)?;
        background.probe()?;
        Ok(background)
    }

    /// Connects once, and a second time when the session is first observed.
    pub fn connect_once(conninfo: &Conninfo) -> Result<Background> {
        let mut session = conninfo.connect()?;
        let (pid, notices) = (session.pid(), session.notices.clone());
        let (statements, inbox) = mpsc::channel::<String>();
        let (outbox, outcomes) = mpsc::channel();
        std::thread::Builder::new().name(format!("session {pid}")).spawn(move || {
            for sql in inbox {
                if outbox.send(session.try_rows(&sql)).is_err() {
                    return;
                }
            }
        })?;
        Ok(Background {
            statements,
            outcomes,
            pending: None,
            early: None,
            notices,
            conninfo: conninfo.clone(),
            probe: None,
            pid,
            waits_asleep: edition::is_lite(),
        })
    }

    /// Observes the session through another connection: its own may go through a pooler.
    pub fn look_from(&mut self, conninfo: Conninfo) {
        self.conninfo = conninfo;
    }

    /// The observing session: a superuser's, not subject to limits of a pooler or a role.
    fn probe(&mut self) -> Result<&mut Session> {
        let probe = match self.probe.take() {
            Some(probe) => probe,
            None => self.conninfo.clone().user("postgres").connect()?,
        };
        Ok(self.probe.insert(probe))
    }

    /// The pid of the session's backend.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// The notices and warnings received since the last call.
    pub fn notices(&mut self) -> Vec<Fault> {
        notices_in(&self.notices)
    }

    /// The statement whose outcome has not been taken yet.
    pub fn pending(&self) -> Option<&str> {
        self.pending.as_deref()
    }

    /// Starts a statement without waiting for its outcome.
    pub fn send(&mut self, sql: &str) -> Result<()> {
        ensure!(self.pending.is_none(), "still at: {:?}", self.pending);
        self.statements.send(sql.to_owned()).context("the session's thread is gone")?;
        self.pending = Some(sql.to_owned());
        Ok(())
    }

    /// Returns true if the statement has ended.
    pub fn is_finished(&mut self) -> bool {
        if self.early.is_none() {
            self.early = self.outcomes.try_recv().ok();
        }
        self.early.is_some()
    }

    /// The outcome of the statement; an error if it does not come within `limit`.
    pub fn outcome(&mut self, limit: Duration) -> Result<Outcome> {
        let sql = self.pending.clone().context("no statement was sent")?;
        let outcome = match self.early.take() {
            Some(outcome) => outcome,
            None => self.outcomes.recv_timeout(limit).with_context(|| {
                format!("no outcome within {limit:?}, waiting for {:?}: {sql}", self.waits_for())
            })?,
        };
        self.pending = None;
        Ok(outcome)
    }

    /// The rows of the statement; an error if it fails.
    pub fn rows(&mut self) -> Result<Rows> {
        let sql = self.pending.clone().unwrap_or_default();
        self.outcome(PATIENCE)?.context(sql)
    }

    /// The error of the statement, which must have that SQLSTATE.
    pub fn refused(&mut self, sqlstate: &str) -> Result<Fault> {
        let outcome = self.outcome(PATIENCE)?;
        crate::fault::expect_err(outcome, sqlstate)
    }

    /// Runs a statement to its end.
    pub fn run(&mut self, sql: &str) -> Result<Rows> {
        self.send(sql)?;
        self.rows()
    }

    /// The type and event of the backend's wait (`"Lock"`, `"advisory"`); `None` if it works or is gone.
    pub fn waits_for(&mut self) -> Option<(String, String)> {
        let sql = format!(
            "SELECT wait_event_type, wait_event FROM pg_stat_activity WHERE pid = {} \
             AND state = 'active' AND wait_event IS NOT NULL",
            self.pid
        );
        let row = self.probe().ok()?.rows(&sql).ok()?.pop()?;
        Some((row[0].clone()?, row[1].clone()?))
    }

    /// The pids of the backends that block this one.
    pub fn blocked_by(&mut self) -> Result<Vec<i32>> {
        let pid = self.pid;
        self.probe()?.one("SELECT pg_blocking_pids($1)", &[&pid])
    }

    /// Waits until the statement waits for a lock or in an extension; fails if it ends instead.
    pub fn wait_until_blocked(&mut self) -> Result<()> {
        let blocked = self.blocks_or_ends()?;
        let outcome = &self.early;
        ensure!(blocked, "it should wait, but it ended: {:?} {outcome:?}", self.pending);
        Ok(())
    }

    /// Waits until the statement waits for a lock or in an extension (true), or has ended (false).
    pub fn blocks_or_ends(&mut self) -> Result<bool> {
        let mut finished = false;
        wait_until("the session is blocked", PATIENCE, || {
            finished = self.is_finished();
            let waits_for = self.waits_for();
            let waits_for = waits_for.as_ref().map(|(kind, event)| (kind.as_str(), event.as_str()));
            let sleeps = waits_for == Some(("Timeout", "PgSleep")) && self.waits_asleep;
            // A commit may also wait for a standby.
            let is_blocked = matches!(waits_for, Some(("Lock" | "Extension", _) | (_, "SyncRep")));
            finished || sleeps || is_blocked
        })?;
        Ok(!finished)
    }

    pub fn cancel(&mut self) -> Result<()> {
        let pid = self.pid;
        self.probe()?.one::<bool>("SELECT pg_cancel_backend($1)", &[&pid]).map(drop)
    }

    pub fn terminate(&mut self) -> Result<()> {
        let pid = self.pid;
        self.probe()?.one::<bool>("SELECT pg_terminate_backend($1)", &[&pid]).map(drop)
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // The thread ends with its statement; its answer is no longer needed.
        if self.pending.is_some() && !self.is_finished() {
            let _ = self.terminate();
        }
    }
}

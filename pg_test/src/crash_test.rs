//! A server that crashes with as little on disk as Postgres allows.
//!
//! The processes that write in the background are frozen and everything is checkpointed, so what a
//! session has not flushed itself is lost for certain. Beside the tokens a plain sequence is drawn
//! from: that it loses values shows that the crash was one.

use crate::client::Session;
use crate::cluster::{Builder, Cluster};
use crate::process::{self, wait_until, PATIENCE};
use anyhow::{Context, Result};
use nix::sys::signal::Signal;

/// A server that will crash, and what its clients have seen so far.
pub struct CrashTest {
    cluster: Cluster,
    /// The processes that write in the background.
    frozen: Vec<i32>,
    /// Sessions that are open when it crashes.
    open: Vec<Session>,
    old: i64,
    seen: i64,
    plain_seen: i64,
}

/// The tokens that clients had seen before the crash, and those that they are given after it.
#[derive(Debug, Clone, Copy)]
pub struct CrashOutcome {
    /// The greatest token seen.
    pub seen: i64,
    /// The first token after the crash.
    pub next: i64,
    /// The greatest value of the plain sequence seen; 0 when none was drawn.
    pub plain_seen: i64,
    /// The plain sequence's first value after the crash.
    pub plain_next: i64,
}

impl CrashOutcome {
    fn after(cluster: &Cluster, seen: i64, plain_seen: i64) -> Result<CrashOutcome> {
        let mut session = cluster.connect("postgres")?;
        let next = session.one(&format!("SELECT lease_acquire('after {seen}')"), &[])?;
        let plain_next = session.one("SELECT nextval('plain')", &[])?;
        Ok(CrashOutcome { seen, next, plain_seen, plain_next })
    }

    /// Whether a token that was seen is given out again.
    pub fn reissued(&self) -> bool {
        self.next <= self.seen
    }

    /// Whether the plain sequence gives out a value again.
    pub fn plain_reissued(&self) -> bool {
        self.plain_next <= self.plain_seen
    }
}

impl CrashTest {
    /// A new server with the extension, about to crash.
    pub fn start(builder: Builder) -> Result<CrashTest> {
        let cluster = builder.set("autovacuum", "off").start()?;
        cluster.connect("postgres")?.run(
            "CREATE EXTENSION pg_fence; CREATE SEQUENCE plain; SELECT lease_acquire('old'), nextval('plain')",
        )?;
        CrashTest::again(cluster)
    }

    /// The same server once more: nothing is left to write, and nobody but its sessions would.
    pub fn again(cluster: Cluster) -> Result<CrashTest> {
        let mut session = cluster.connect("postgres")?;
        session.run("SELECT lease_revoke('old')")?;
        let old = session.one("SELECT lease_acquire('old', 'h', ttl => '1 hour')", &[])?;
        CrashTest::with_old(cluster, old)
    }

    /// The same server after a restart, since when nothing was drawn.
    pub fn untouched(cluster: Cluster) -> Result<CrashTest> {
        cluster.restart()?;
        CrashTest::with_old(cluster, 0)
    }

    fn with_old(cluster: Cluster, old: i64) -> Result<CrashTest> {
        // The next draw logs again, as the first one after any checkpoint does.
        let mut test = CrashTest {
            cluster,
            frozen: Vec::new(),
            open: Vec::new(),
            old,
            seen: old,
            plain_seen: 0,
        };
        test.checkpoint()?;
        Ok(test)
    }

    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Writes all that there is to write, while its sessions stay open.
    pub fn checkpoint(&mut self) -> Result<()> {
        self.cluster.thaw(&self.frozen)?;
        self.frozen.clear();
        self.cluster.connect("postgres")?.run("CHECKPOINT")?;
        for title in ["walwriter", "background writer", "checkpointer"] {
            self.frozen.extend(self.cluster.freeze(title)?);
        }
        Ok(())
    }

    /// How far the log is on disk.
    pub fn flushed(&self) -> Result<String> {
        let mut session = self.cluster.connect("postgres")?;
        Ok(session.text("SELECT pg_current_wal_flush_lsn()")?.unwrap_or_default())
    }

    /// The token of the lease `old`, which is held for an hour.
    pub fn old(&self) -> i64 {
        self.old
    }

    /// One more session, open until the crash; `settings` are run in it first.
    pub fn session(&mut self, settings: &str) -> Result<usize> {
        let mut session = self.cluster.connect("postgres")?;
        session.run(settings)?;
        self.open.push(session);
        Ok(self.open.len() - 1)
    }

    /// Runs statements in a session.
    pub fn run(&mut self, session: usize, sql: &str) -> Result<()> {
        self.open[session].run(sql)
    }

    /// Has a client see a token: `sql` gives it.
    pub fn see(&mut self, session: usize, sql: &str) -> Result<i64> {
        let text = self.open[session].text(sql)?;
        let token: i64 = text.with_context(|| format!("no token: {sql}"))?.parse()?;
        self.seen = self.seen.max(token);
        Ok(token)
    }

    /// Has a client see a value of the plain sequence.
    pub fn see_plain(&mut self, session: usize) -> Result<()> {
        let value: i64 = self.open[session].one("SELECT nextval('plain')", &[])?;
        self.plain_seen = self.plain_seen.max(value);
        Ok(())
    }

    /// Crashes the server, starts it again and draws.
    pub fn crash(self) -> Result<(CrashOutcome, Cluster)> {
        let (seen, plain_seen) = (self.seen, self.plain_seen);
        let cluster = self.crash_only()?;
        Ok((CrashOutcome::after(&cluster, seen, plain_seen)?, cluster))
    }

    /// Crashes the server and starts it again.
    pub fn crash_only(self) -> Result<Cluster> {
        self.cluster.kill9()?;
        drop(self.open);
        self.cluster.start()?;
        Ok(self.cluster)
    }

    /// As `crash`, but one backend alone is killed, that of the session opened last: the server ends the others
    /// and recovers by itself.
    pub fn crash_of_one(self) -> Result<(CrashOutcome, Cluster)> {
        let (seen, plain_seen) = (self.seen, self.plain_seen);
        let cluster = self.crash_of_one_only()?;
        Ok((CrashOutcome::after(&cluster, seen, plain_seen)?, cluster))
    }

    /// As `crash_of_one`, and nothing is drawn.
    pub fn crash_of_one_only(mut self) -> Result<Cluster> {
        let mut victim = self.open.pop().context("no session is open")?;
        // One more than the victim: only when it is gone has the server noticed.
        self.open.push(self.cluster.connect("postgres")?);
        process::signal(victim.pid(), Signal::SIGKILL)?;
        wait_until("the session is gone", PATIENCE, || victim.run("SELECT 1").is_err())?;
        // Until the server has noticed, it may still let somebody in.
        for mut other in self.open {
            wait_until("all sessions are gone", PATIENCE, || other.run("SELECT 1").is_err())?;
        }
        self.cluster.wait_ready(PATIENCE)?;
        Ok(self.cluster)
    }
}

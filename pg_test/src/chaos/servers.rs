//! Where a run takes place: a primary, a standby, and the tables.

use super::kind::{row_of, MULTI_HOLDER};
use super::maintenance;
use super::worker::DATABASE;
use crate::cassert;
use crate::clock::Clock;
use crate::cluster::{Builder, Cluster};
use crate::prefix::Prefix;
use anyhow::{Context, Result};
use std::sync::Arc;
use std::thread::JoinHandle;

const TABLES: &str = "
    CREATE EXTENSION pg_fence;
    CREATE TABLE bound (id int PRIMARY KEY, version bigint NOT NULL, uid bigint);
    CREATE TABLE free (LIKE bound INCLUDING ALL);
    CREATE TABLE desk (id int PRIMARY KEY, lease int NOT NULL, version bigint NOT NULL, uid bigint);
    CREATE TABLE line (lease int PRIMARY KEY, n bigint NOT NULL);
    -- Traces, without any constraint that would hide what went wrong.
    CREATE TABLE grants (lease int, n bigint, what text, token bigint, first bigint, uid bigint,
                         asked timestamptz, expires timestamptz);
    CREATE INDEX ON grants (lease, n);
    CREATE INDEX ON grants (lease, what, first);
    CREATE TABLE writes (relation text, id int, lease int, version bigint, token bigint, first bigint,
                         uid bigint, current bigint);";

/// The primary, the standby that is made or follows it, and the clock of both.
pub struct Servers {
    prefix: Arc<Prefix>,
    clock: Clock,
    primary: Arc<Cluster>,
    standby: Option<JoinHandle<Result<Cluster>>>,
    ready: Option<Cluster>,
    /// Of primaries that are gone.
    crashes: Vec<String>,
}

impl Servers {
    /// Starts a primary with rows to write for so many leases and workers, and begins to make a standby.
    pub fn prepare(
        prefix: Arc<Prefix>,
        leases: i32,
        workers: u32,
        maintains: bool,
    ) -> Result<Servers> {
        let clock = Clock::new(&prefix.rundir().path().join("clock"))?;
        let primary = Arc::new(builder(&prefix, &clock).start()?);
        primary.connect("postgres")?.run(&format!("CREATE DATABASE {DATABASE}"))?;
        let last = leases - 1;
        let mut session = primary.connect(DATABASE)?;
        session.run(TABLES)?;
        session.run(&format!(
            "INSERT INTO bound SELECT i, 0 FROM generate_series(0, {last}) AS i;
             INSERT INTO free SELECT i, 0 FROM generate_series(0, {last}) AS i;
             INSERT INTO line SELECT i, 0 FROM generate_series(0, {last}) AS i;
             SELECT fence_protect('bound', lease => 'job:{{id}}'), fence_protect('free')"
        ))?;
        for lease in MULTI_HOLDER {
            session.run(&format!("INSERT INTO line VALUES ({lease}, 0)"))?;
            for worker in 0..workers {
                let (_, row) = row_of(lease, worker);
                session.run(&format!("INSERT INTO desk VALUES ({row}, {lease}, 0)"))?;
            }
        }
        session.run("SELECT fence_protect('desk', lease => 'job:{lease}')")?;
        if maintains {
            prefix.bring_repack()?;
            session.run(maintenance::PREPARATION)?;
            session.run(maintenance::FILLER)?;
        }
        let (standby, ready, crashes) = (None, None, Vec::new());
        let mut servers = Servers { prefix, clock, primary, standby, ready, crashes };
        servers.make_standby();
        Ok(servers)
    }

    pub fn primary(&self) -> &Arc<Cluster> {
        &self.primary
    }

    /// The clock that servers believe in.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// What must not be in the logs of all primaries: failed assertions, internal errors, corrupted tables and
    /// indexes, and server processes that died of anything but SIGKILL, which is what the nemesis uses.
    pub fn crashes(&self) -> Vec<String> {
        let log = self.primary.log().unwrap_or_default();
        let mut crashes = self.crashes.clone();
        crashes.extend(cassert::failures_in(&log));
        let died =
            |line: &str| line.contains("was terminated by signal") && !line.contains("by signal 9");
        let internal = |line: &str| line.contains(" XX00") && line.contains(" ERROR: ");
        crashes.extend(log.lines().filter(|line| died(line) || internal(line)).map(str::to_owned));
        crashes
    }

    /// Begins to make a standby.
    fn make_standby(&mut self) {
        let (builder, primary) = (builder(&self.prefix, &self.clock), self.primary.clone());
        self.standby = Some(std::thread::spawn(move || {
            let standby = builder.standby_of(&primary)?;
            standby.start()?;
            Ok(standby)
        }));
    }

    /// Whether a standby follows the primary. One that could not be made is made again.
    pub fn has_standby(&mut self) -> bool {
        if self.standby.as_ref().is_some_and(JoinHandle::is_finished) {
            let made = self.standby.take().and_then(|thread| thread.join().ok());
            self.ready = made.and_then(Result::ok);
        }
        let follows = |standby: &Cluster| {
            let mut session = standby.connect("postgres").ok()?;
            let sql = "SELECT count(*) > 0 FROM pg_stat_wal_receiver WHERE status = 'streaming'";
            session.one::<bool>(sql, &[]).ok()
        };
        if self.ready.as_ref().is_some_and(|standby| follows(standby) == Some(true)) {
            return true;
        }
        if self.ready.is_none() && self.standby.is_none() {
            self.make_standby();
        }
        false
    }

    /// Waits for a standby being made, whatever becomes of it.
    pub fn settle(&mut self) {
        if let Some(thread) = self.standby.take() {
            self.ready = thread.join().ok().and_then(Result::ok);
        }
    }

    /// Kills the primary for good and promotes the standby.
    pub fn fail_over(&mut self) -> Result<()> {
        let standby = self.ready.take().context("there is no standby")?;
        self.primary.kill9()?;
        self.crashes = self.crashes();
        standby.promote()?;
        self.primary = Arc::new(standby);
        // The first draw jumps; so does none of a standby that is made from here.
        let mut session = self.primary.connect(DATABASE)?;
        session.run("SELECT lease_acquire('failover', ttl => '1 ms')")?;
        self.make_standby();
        Ok(())
    }
}

fn builder(prefix: &Arc<Prefix>, clock: &Clock) -> Builder {
    // A killed process loses nothing of what the kernel has, so syncing would only cost time.
    let builder = Builder::new(prefix.clone()).without_fsync();
    // The log tells of processes that died of themselves, and of SQLSTATEs. Maintenance writes much, and a standby that is still
    // being made must find all of it.
    let builder = builder.set("log_line_prefix", "%m [%p] %e ").set("log_checkpoints", "off");
    clock.give(builder.set("wal_keep_size", "1GB").set("max_connections", "60"))
}

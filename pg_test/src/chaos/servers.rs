//! Where a run takes place: a primary, a standby, and the tables.

use super::kind::{adopted, row_of, MULTI_HOLDER};
use super::maintenance;
use super::rows;
use super::worker::{DATABASE, WORKER};
use crate::cassert;
use crate::clock::Clock;
use crate::cluster::{Builder, Cluster};
use crate::dropped_files;
use crate::edition;
use crate::prefix::Prefix;
use anyhow::{Context, Result};
use std::sync::Arc;
use std::thread::JoinHandle;

const TABLES: &str = "
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

/// The servers of a run.
#[derive(Debug, Clone, Copy)]
pub struct Stage {
    /// How many exclusive leases have a row to write.
    pub leases: i32,
    /// How many leases that a lock service grants have one.
    pub adopted: usize,
    /// How many workers have rows of their own, under the leases that several may hold at once.
    pub workers: u32,
    /// Whether tables are maintained meanwhile.
    pub maintains: bool,
}

/// The primary, the standby that is made or follows it, and the clock of both.
pub struct Servers {
    prefix: Arc<Prefix>,
    clock: Clock,
    primary: Arc<Cluster>,
    standby: Option<JoinHandle<Result<Cluster>>>,
    ready: Option<Cluster>,
    /// Of primaries that are gone, and of standbys that died.
    crashes: Vec<String>,
}

impl Servers {
    /// Starts a primary with rows to write, and begins to make a standby.
    pub fn prepare(prefix: Arc<Prefix>, stage: Stage) -> Result<Servers> {
        let Stage { leases, workers, .. } = stage;
        let clock = Clock::new(&prefix.new_dir("clock")?.join("clock"))?;
        let primary = Arc::new(builder(&prefix, &clock).start()?);
        primary.connect("postgres")?.run(&format!("CREATE DATABASE {DATABASE}"))?;
        let last = leases - 1;
        let mut session = primary.connect(DATABASE)?;
        if edition::is_lite() {
            // As on a platform: by the owner of the database, who is no superuser.
            session.run(&format!(
                "CREATE ROLE keeper LOGIN; ALTER DATABASE {DATABASE} OWNER TO keeper; CREATE ROLE {WORKER} LOGIN"
            ))?;
            let keeper = primary.conninfo(DATABASE).user("keeper");
            keeper.connect()?.run("CREATE EXTENSION pg_fence")?;
        } else {
            session.run("CREATE EXTENSION pg_fence")?;
        }
        session.run(TABLES)?;
        session.run(rows::TABLES)?;
        session.run(&format!(
            "INSERT INTO bound SELECT i, 0 FROM generate_series(0, {last}) AS i;
             INSERT INTO free SELECT i, 0 FROM generate_series(0, {last}) AS i;
             INSERT INTO line SELECT i, 0 FROM generate_series(0, {last}) AS i"
        ))?;
        for lease in adopted(stage.adopted) {
            session.run(&format!(
                "INSERT INTO bound VALUES ({lease}, 0); INSERT INTO line VALUES ({lease}, 0)"
            ))?;
        }
        session.run(
            "SELECT fence_protect('bound', lease => 'job:{id}'); SELECT fence_protect('free')",
        )?;
        for lease in MULTI_HOLDER {
            session.run(&format!("INSERT INTO line VALUES ({lease}, 0)"))?;
            for worker in 0..workers {
                let (_, row) = row_of(lease, worker);
                session.run(&format!("INSERT INTO desk VALUES ({row}, {lease}, 0)"))?;
            }
        }
        session.run("SELECT fence_protect('desk', lease => 'job:{lease}')")?;
        if edition::is_lite() {
            session.run(&format!(
                "SELECT fence_grant('{WORKER}');
                 GRANT ALL ON bound, free, desk, line, grants, writes, runs, changes TO {WORKER};
                 GRANT ALL ON SEQUENCE changes_n_seq TO {WORKER}"
            ))?;
        }
        if stage.maintains {
            if prefix.has_repack() {
                prefix.bring_repack()?;
                session.run("CREATE EXTENSION pg_repack")?;
            }
            session.run(maintenance::PREPARATION)?;
            session.run(maintenance::FILLER)?;
            session.run(maintenance::TABLESPACE)?;
            if maintenance::has_second_database() {
                session.run(maintenance::SECOND_DATABASE)?;
            }
        }
        let (standby, ready, crashes) = (None, None, Vec::new());
        let mut servers = Servers { prefix, clock, primary, standby, ready, crashes };
        servers.make_standby();
        Ok(servers)
    }

    /// The major version of PostgreSQL.
    pub fn major_number(&self) -> u32 {
        self.prefix.major_number()
    }

    pub fn primary(&self) -> &Arc<Cluster> {
        &self.primary
    }

    /// The clock that servers believe in.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Lines that must not be in the logs of all primaries: failed assertions, internal errors, corrupted tables and
    /// indexes, and server processes that died of anything but SIGKILL, which is what the nemesis uses. And standbys that
    /// died: nobody kills them.
    pub fn crashes(&self) -> Vec<String> {
        let log = self.primary.log().unwrap_or_default();
        let mut crashes = self.crashes.clone();
        crashes.extend(cassert::failures_in(&log));
        // A caller of a function whose extension is just dropped may be told so by an internal error of PostgreSQL's.
        let expected = format!(" XX000 {} ", maintenance::SECOND);
        let internal = |line: &str| {
            line.contains(" XX00") && line.contains(" ERROR: ") && !line.contains(&expected)
        };
        crashes.extend(log.lines().filter(|line| died(line) || internal(line)).map(str::to_owned));
        crashes
    }

    /// Begins to make a standby.
    fn make_standby(&mut self) {
        let builder = builder(&self.prefix, &self.clock);
        let primary = self.primary.clone();
        self.standby = Some(std::thread::spawn(move || {
            let standby = builder.standby_of(&primary)?;
            standby.start()?;
            Ok(standby)
        }));
    }

    /// Sees to it that there is a standby: one that could not be made, or has died, is made again.
    pub fn tend_standby(&mut self) {
        if self.standby.as_ref().is_some_and(JoinHandle::is_finished) {
            self.settle();
        }
        if let Some(dead) = self.ready.take_if(|standby| !standby.is_running()) {
            self.bury(&dead.log().unwrap_or_default());
        }
        if self.ready.is_none() && self.standby.is_none() {
            self.make_standby();
        }
    }

    /// Whether a standby is being made, which takes a while and comes to nothing when the primary goes down.
    pub fn makes_standby(&self) -> bool {
        self.standby.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Whether a standby follows the primary.
    pub fn has_standby(&self) -> bool {
        let follows = |standby: &Cluster| {
            let mut session = standby.connect("postgres").ok()?;
            let sql = "SELECT count(*) > 0 FROM pg_stat_wal_receiver WHERE status = 'streaming'";
            session.one::<bool>(sql, &[]).ok()
        };
        self.ready.as_ref().is_some_and(|standby| follows(standby) == Some(true))
    }

    /// Waits for a standby being made, whatever becomes of it.
    pub fn settle(&mut self) {
        match self.standby.take().map(JoinHandle::join) {
            Some(Ok(Ok(standby))) => self.ready = Some(standby),
            // The primary may have gone down under it.
            Some(Ok(Err(error))) => self.bury(&format!("{error:#}")),
            Some(Err(_)) | None => {}
        }
    }

    /// Notes what a standby has died of, which no standby must: what it was sent cannot be replayed.
    fn bury(&mut self, log: &str) {
        let last_words = log.lines().filter(|line| line.contains("PANIC") || died(line));
        let last_words: Vec<&str> = last_words.collect();
        if !last_words.is_empty() {
            self.crashes.push(format!("a standby died: {}", last_words.join("; ")));
        }
    }

    /// Once nobody writes any more: the standby, where there is one, replays all that the primary has written.
    pub fn see_standby_through(&mut self) -> Result<()> {
        self.note_changes_of_dropped_files()?;
        let Some(standby) = self.ready.take() else { return Ok(()) };
        let replayed = standby.wait_replayed(&self.primary);
        if !standby.is_running() {
            self.bury(&standby.log()?);
        } else if replayed.is_err() {
            let log = standby.log_end(3);
            self.crashes.push(format!("the standby has stopped replaying; its log ends: {log}"));
        }
        Ok(())
    }

    /// Notes what the primary has logged of files that were dropped before, whether or not a standby has died of it.
    fn note_changes_of_dropped_files(&mut self) -> Result<()> {
        let changed = dropped_files::changed_lately(&self.primary)?;
        let note = |first| format!("{} changes of dropped files, such as {first}", changed.len());
        self.crashes.extend(changed.first().map(note));
        Ok(())
    }

    /// Kills the primary for good and promotes the standby. False where that has died of what it had still to replay:
    /// then the primary goes on.
    pub fn fail_over(&mut self) -> Result<bool> {
        let standby = self.ready.take().context("there is no standby")?;
        self.primary.kill9()?;
        let promoted = standby.promote();
        if promoted.is_err() && !standby.is_running() {
            self.bury(&standby.log()?);
            self.primary.start()?;
            return Ok(false);
        }
        promoted?;
        // A server that was killed may leave a log of which nothing can be read; at the end of a run all must be.
        if let Err(error) = self.note_changes_of_dropped_files() {
            eprintln!("the log of a killed primary was not looked at: {error:#}");
        }
        self.crashes = self.crashes();
        self.primary = Arc::new(standby);
        // The first draw jumps; so does none of a standby that is made from here.
        // Where it is refused, that is what to say: it has failed over all the same, and what that cut off was not lost.
        let drawn = self
            .primary
            .connect(DATABASE)
            .and_then(|mut session| session.run("SELECT lease_acquire('failover', ttl => '1 ms')"));
        self.crashes
            .extend(drawn.err().map(|error| format!("no lease after a failover: {error:#}")));
        self.make_standby();
        Ok(true)
    }
}

/// Whether a line of a log tells of a server process that has died of itself.
fn died(line: &str) -> bool {
    line.contains("was terminated by signal") && !line.contains("by signal 9")
}

fn builder(prefix: &Arc<Prefix>, clock: &Clock) -> Builder {
    // A killed process loses nothing of what the kernel has, so syncing would only cost time.
    let builder = Builder::new(prefix.clone()).without_fsync();
    // The log tells of processes that died of themselves, and of SQLSTATEs. Maintenance writes much, and a standby that is still
    // being made must find all of it.
    let builder = builder.set("log_line_prefix", "%m [%p] %e %d ").set("log_checkpoints", "off");
    // A tablespace of that kind is in the data directory, so that a standby on the same machine has one of its own.
    let builder = builder.set("allow_in_place_tablespaces", "on").set("wal_log_hints", "on");
    // For maintenance, which waits for it: what its commit drops is then known to the log long before other sessions.
    let builder = builder.set("synchronous_standby_names", "slow");
    let builder = builder.set("synchronous_commit", "local");
    let builder = builder.set("wal_retrieve_retry_interval", "200ms");
    clock.give(builder.set("wal_keep_size", "1GB").set("max_connections", "60"))
}

//! The servers of a run: a primary, a standby, and the tables.

use super::lease_kind::{MULTI_HOLDER, adopted, row_of};
use super::maintenance;
use super::rows;
use super::worker::{DATABASE, WORKER};
use crate::cassert;
use crate::clock::Clock;
use crate::cluster::{Builder, Cluster};
use crate::dropped_files;
use crate::edition;
use crate::install_dir::InstallDir;
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
                         requested timestamptz, expires timestamptz);
    CREATE INDEX ON grants (lease, n);
    CREATE INDEX ON grants (lease, what, first);
    CREATE TABLE writes (relation text, id int, lease int, version bigint, token bigint, first bigint,
                         uid bigint, current bigint);";

/// The servers of a run.
#[derive(Debug, Clone, Copy)]
pub struct Workload {
    /// The number of exclusive leases with a row to write.
    pub leases: i32,
    /// The number of adopted leases with a row.
    pub adopted: usize,
    /// The number of workers with rows of their own, under leases with several holders.
    pub workers: u32,
    /// True if tables are maintained meanwhile.
    pub maintains: bool,
}

/// The primary, the standby that is being made or follows it, and the clock of both.
pub struct Servers {
    install_dir: Arc<InstallDir>,
    clock: Clock,
    primary: Arc<Cluster>,
    standby: Option<JoinHandle<Result<Cluster>>>,
    ready: Option<Cluster>,
    /// Crashes of former primaries and standbys.
    crashes: Vec<String>,
}

impl Servers {
    /// Starts a primary with rows to write, and begins to make a standby.
    pub fn prepare(install_dir: Arc<InstallDir>, workload: Workload) -> Result<Servers> {
        let Workload { leases, workers, .. } = workload;
        let clock = Clock::new(&install_dir.new_dir("clock")?.join("clock"))?;
        let primary = Arc::new(builder(&install_dir, &clock).start()?);
        primary.connect("postgres")?.run(&format!("CREATE DATABASE {DATABASE}"))?;
        let last = leases - 1;
        let mut session = primary.connect(DATABASE)?;
        if edition::is_lite() {
            // As on a platform, the owner of the database, who is no superuser, installs it.
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
        for lease in adopted(workload.adopted) {
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
        if workload.maintains {
            if install_dir.has_repack() {
                install_dir.bring_repack()?;
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
        let mut servers = Servers { install_dir, clock, primary, standby, ready, crashes };
        servers.make_standby();
        Ok(servers)
    }

    /// The major version of PostgreSQL.
    pub fn major_number(&self) -> u32 {
        self.install_dir.major_number()
    }

    pub fn primary(&self) -> &Arc<Cluster> {
        &self.primary
    }

    /// The clock of the servers.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Lines that must not be in the logs of any primary: failed assertions, internal errors, corrupted tables and
    /// indexes, and processes that died of anything but the nemesis's SIGKILL. Also standbys that died, since nobody
    /// kills them.
    pub fn crashes(&self) -> Vec<String> {
        let log = self.primary.log().unwrap_or_default();
        let mut crashes = self.crashes.clone();
        crashes.extend(cassert::failures_in(&log));
        // If an extension is being dropped, PostgreSQL may tell a caller of its functions by an internal error.
        let expected = format!(" XX000 {} ", maintenance::SECOND);
        let internal = |line: &str| {
            line.contains(" XX00") && line.contains(" ERROR: ") && !line.contains(&expected)
        };
        crashes.extend(log.lines().filter(|line| died(line) || internal(line)).map(str::to_owned));
        crashes
    }

    /// Begins to make a standby.
    fn make_standby(&mut self) {
        let builder = builder(&self.install_dir, &self.clock);
        let primary = self.primary.clone();
        self.standby = Some(std::thread::spawn(move || {
            let standby = builder.standby_of(&primary)?;
            standby.start()?;
            Ok(standby)
        }));
    }

    /// Ensures that there is a standby: one that failed or died is made again.
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

    /// Returns true if a standby is being made, which takes a while and fails if the primary goes down.
    pub fn makes_standby(&self) -> bool {
        self.standby.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Returns true if a standby follows the primary.
    pub fn has_standby(&self) -> bool {
        let follows = |standby: &Cluster| {
            let mut session = standby.connect("postgres").ok()?;
            let sql = "SELECT count(*) > 0 FROM pg_stat_wal_receiver WHERE status = 'streaming'";
            session.one::<bool>(sql, &[]).ok()
        };
        self.ready.as_ref().is_some_and(|standby| follows(standby) == Some(true))
    }

    /// Waits for a standby that is being made, whatever the outcome.
    pub fn settle(&mut self) {
        match self.standby.take().map(JoinHandle::join) {
            Some(Ok(Ok(standby))) => self.ready = Some(standby),
            // The primary may have gone down meanwhile.
            Some(Ok(Err(error))) => self.bury(&format!("{error:#}")),
            Some(Err(_)) | None => {}
        }
    }

    /// Records why a standby died. It must not: it could not replay what it was sent.
    fn bury(&mut self, log: &str) {
        let last_words = log.lines().filter(|line| line.contains("PANIC") || died(line));
        let last_words: Vec<&str> = last_words.collect();
        if !last_words.is_empty() {
            self.crashes.push(format!("a standby died: {}", last_words.join("; ")));
        }
    }

    /// When nobody writes any more, waits until the standby, if there is one, has replayed everything.
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

    /// Records WAL of the primary that changes dropped files, whether or not a standby has died of it.
    fn note_changes_of_dropped_files(&mut self) -> Result<()> {
        let changed = dropped_files::changed_lately(&self.primary)?;
        let note = |first| format!("{} changes of dropped files, such as {first}", changed.len());
        self.crashes.extend(changed.first().map(note));
        Ok(())
    }

    /// Kills the primary for good and promotes the standby. Returns false if the standby died during replay; then the
    /// primary continues.
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
        // The WAL of a killed server may be unreadable; at the end of a run all must be readable.
        if let Err(error) = self.note_changes_of_dropped_files() {
            eprintln!("the log of a killed primary was not looked at: {error:#}");
        }
        self.crashes = self.crashes();
        self.primary = Arc::new(standby);
        // The first draw begins a new epoch, so that no standby made from here needs one. If the draw fails, that is
        // the error to report: the failover happened all the same, and what it cut off is not lost.
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

/// Returns true if a log line reports a server process that died by itself.
fn died(line: &str) -> bool {
    line.contains("was terminated by signal") && !line.contains("by signal 9")
}

fn builder(install_dir: &Arc<InstallDir>, clock: &Clock) -> Builder {
    // The kernel keeps the writes of a killed process, so syncing would only cost time.
    let builder = Builder::new(install_dir.clone()).without_fsync();
    // The log must show SQLSTATEs, and processes that died by themselves. Maintenance writes much WAL, which a standby
    // that is being made must still find.
    let builder = builder.set("log_line_prefix", "%m [%p] %e %d ").set("log_checkpoints", "off");
    // An in-place tablespace is in the data directory, so that a standby on the same machine has its own.
    let builder = builder.set("allow_in_place_tablespaces", "on").set("wal_log_hints", "on");
    // Maintenance waits for the standby: so what its commit drops is in the WAL long before other sessions know.
    let builder = builder.set("synchronous_standby_names", "slow");
    let builder = builder.set("synchronous_commit", "local");
    let builder = builder.set("wal_retrieve_retry_interval", "200ms");
    clock.give(builder.set("wal_keep_size", "1GB").set("max_connections", "60"))
}

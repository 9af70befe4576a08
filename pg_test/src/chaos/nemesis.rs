//! The nemesis: disturbances that are chosen from a seed and done to real processes.

use super::instructions::{Activity, Instructions, Leases};
use super::lease_kind::{LeaseKind, MULTI_HOLDER, adopted};
use super::maintenance::{self, Maintenance, MaintenanceReport};
use super::record::now_us;
use super::resolver::Resolver;
use super::servers::Servers;
use super::worker::{DATABASE, instructions_file};
use super::worker_pool::WorkerPool;
use crate::calls::nothing_is_left;
use crate::cluster::Cluster;
use crate::edition;
use crate::install_dir::InstallDir;
use crate::process::{self, PATIENCE};
use anyhow::{Result, ensure};
use nix::sys::signal::Signal;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

/// A kind of disturbance, with its name in the summary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Disturbance {
    /// A worker is stopped, for longer or shorter than its grants last.
    FreezeWorker,
    /// A worker is killed, and started again.
    KillWorker,
    /// A server process of a session is stopped for a while.
    FreezeBackend,
    /// A session is terminated in the middle of a transaction.
    Terminate,
    /// A statement is cancelled in the middle of a transaction.
    Cancel,
    /// A server process of a session is killed, so that the server crashes and recovers.
    KillBackend,
    /// The whole server is killed, while unwritten WAL can only be lost.
    KillServer,
    /// The primary is killed and the standby promoted, however far it is behind.
    FailOver,
    /// The server's clock is stepped.
    StepClock,
    /// A lease is revoked.
    Revoke,
    /// A transaction locks the rows of leases (FOR KEY SHARE) for a while, as a foreign key would: beside renewals that roll
    /// back, too, the rows have several lockers at once.
    LockRows,
    /// A dump is loaded over the running database; the first time, it is made.
    Restore,
    /// A new epoch begins, by `fence_new_epoch()`.
    NewEpoch,
    /// A session that reads the leases in a transaction is stopped for a while, at any point.
    FreezeReader,
}

/// A disturbance that was done.
#[derive(Debug, Clone, Copy)]
pub struct Disturbed {
    pub kind: Disturbance,
    /// The begin in microseconds of [`now_us`].
    pub at: i64,
    /// The end. The effect came in between.
    pub ended: i64,
    /// The lease, if the disturbance is about one.
    pub lease: Option<i32>,
}

/// The weight of each kind.
pub type Weights = &'static [(Disturbance, u32)];

/// All kinds, weighted about as in production.
pub const ALL: Weights = &[
    (Disturbance::FreezeWorker, 30),
    (Disturbance::KillWorker, 12),
    (Disturbance::FreezeBackend, 14),
    (Disturbance::Terminate, 16),
    (Disturbance::Cancel, 16),
    (Disturbance::KillBackend, 4),
    (Disturbance::KillServer, 6),
    (Disturbance::FailOver, 8),
    (Disturbance::StepClock, 6),
    (Disturbance::Revoke, 8),
    (Disturbance::LockRows, 10),
    (Disturbance::Restore, 5),
    (Disturbance::NewEpoch, 4),
    (Disturbance::FreezeReader, 8),
];

/// The time limit for dumps and restores, which may wait for a frozen process.
const RESTORE_LIMIT: Duration = Duration::from_secs(10);

/// Frozen processes, with the times at which to thaw them. A separate thread does that, because the nemesis may wait
/// for a server whose process was frozen while it held a lock.
struct FrozenProcesses(Arc<Mutex<Vec<(Instant, i32)>>>);

impl FrozenProcesses {
    fn new() -> FrozenProcesses {
        let freezer = FrozenProcesses(Arc::default());
        let frozen = Arc::downgrade(&freezer.0);
        std::thread::spawn(move || {
            while let Some(frozen) = frozen.upgrade() {
                let now = Instant::now();
                thaw(&frozen, |(when, _)| *when <= now);
                drop(frozen);
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        freezer
    }

    fn freeze(&self, pid: i32, ms: u64) -> Result<()> {
        process::signal(pid, Signal::SIGSTOP)?;
        locked(&self.0).push((Instant::now() + Duration::from_millis(ms), pid));
        Ok(())
    }

    fn thaw_all(&self) {
        thaw(&self.0, |_| true);
    }

    /// Removes all processes except these from the list, so that they stay frozen.
    fn forget_all_but(&self, pids: &[i32]) {
        locked(&self.0).retain(|(_, pid)| pids.contains(pid));
    }
}

fn thaw(frozen: &Mutex<Vec<(Instant, i32)>>, due: impl Fn(&(Instant, i32)) -> bool) {
    locked(frozen).retain(|one| {
        if due(one) {
            let _ = process::signal(one.1, Signal::SIGCONT);
        }
        !due(one)
    });
}

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns true if the server can write WAL. It cannot if its walwriter was frozen while it wrote, or while it
/// initialized a WAL buffer; so this fills all buffers once.
fn can_commit(primary: &Arc<Cluster>) -> bool {
    let conninfo = primary.conninfo(DATABASE);
    let (answer, answered) = mpsc::channel();
    std::thread::spawn(move || {
        let logs = "SELECT pg_logical_emit_message(true, 'chaos',
                        repeat('-', pg_size_bytes(current_setting('wal_buffers'))::integer))";
        let logged = conninfo.connect().and_then(|mut session| session.run(logs));
        let _ = answer.send(logged.is_ok());
    });
    answered.recv_timeout(Duration::from_secs(1)) == Ok(true)
}

/// The nemesis.
pub struct Nemesis {
    pub(super) servers: Servers,
    workers: WorkerPool,
    weights: Weights,
    seed: u64,
    rng: StdRng,
    pub(super) dir: PathBuf,
    pub(super) instructions: Instructions,
    freezer: FrozenProcesses,
    resolver: Option<Resolver>,
    clock_is_off: bool,
    /// The primary's walwriter, while it is frozen.
    walwriter: Vec<i32>,
    /// The dump, once it was made.
    dump: Option<PathBuf>,
    pub(super) done: Vec<Disturbed>,
}

impl Nemesis {
    /// A nemesis of these servers and workers, which has not started yet.
    pub fn new(
        servers: Servers,
        workers: WorkerPool,
        dir: PathBuf,
        seed: u64,
        weights: Weights,
        leases: Leases,
    ) -> Result<Nemesis> {
        let port = servers.primary().port();
        let instructions = Instructions { port, era: 0, leases, activity: Activity::Work };
        instructions.write(&instructions_file(&dir))?;
        let rng = StdRng::seed_from_u64(seed);
        let (freezer, clock_is_off, done) = (FrozenProcesses::new(), false, Vec::new());
        Ok(Nemesis {
            servers,
            workers,
            weights,
            seed,
            rng,
            dir,
            instructions,
            freezer,
            resolver: None,
            clock_is_off,
            walwriter: Vec::new(),
            dump: None,
            done,
        })
    }

    /// Lets the workers run and does one disturbance after the other until the time is over. If a PostgreSQL is given,
    /// its programs do maintenance meanwhile.
    pub fn disturb(
        &mut self,
        time: Duration,
        upkeep: Option<Arc<InstallDir>>,
    ) -> Result<MaintenanceReport> {
        let instructions = instructions_file(&self.dir);
        let maintenance =
            upkeep.map(|install_dir| Maintenance::start(install_dir, instructions, self.seed));
        let log = self.dir.join("log/resolver");
        self.resolver = Some(Resolver::start(instructions_file(&self.dir), &log, self.seed)?);
        self.may_hold_walwriter()?;
        self.workers.start()?;
        self.strike_for(time)?;
        if let Some(maintenance) = &maintenance {
            maintenance.tell_to_end();
        }
        self.end()?;
        let upkeep = match maintenance {
            Some(maintenance) => maintenance.end(&mut self.servers.primary().connect(DATABASE)?)?,
            None => MaintenanceReport::default(),
        };
        self.servers.see_standby_through()?;
        Ok(upkeep)
    }

    /// Does one disturbance after the other until the time is over.
    fn strike_for(&mut self, time: Duration) -> Result<()> {
        let end = Instant::now() + time;
        while Instant::now() < end {
            let pause = Duration::from_millis(self.rng.random_range(80..500));
            self.rest(pause.min(end.saturating_duration_since(Instant::now())));
            self.servers.tend_standby();
            let pick = self.weights.choose_weighted(&mut self.rng, |(_, weight)| *weight)?;
            let disturbance = pick.0;
            let at = now_us();
            // A victim may be gone already; then nothing was done.
            match self.strike(disturbance) {
                Ok(Some(lease)) => {
                    self.done.push(Disturbed { kind: disturbance, at, ended: now_us(), lease })
                }
                Ok(None) => {}
                // The run must fail only if the server cannot be reached any more.
                Err(error) if self.servers.primary().wait_ready(PATIENCE).is_ok() => {
                    eprintln!("{disturbance:?}: {error:#}");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The number of disturbances of each kind.
    pub fn count(&self) -> BTreeMap<Disturbance, usize> {
        let mut count = BTreeMap::new();
        for done in &self.done {
            *count.entry(done.kind).or_default() += 1;
        }
        count
    }

    /// Waits, and restarts workers that died meanwhile.
    fn rest(&mut self, time: Duration) {
        let end = Instant::now() + time;
        loop {
            let now = Instant::now();
            let _ = self.workers.revive();
            if now >= end {
                return;
            }
            std::thread::sleep(Duration::from_millis(10).min(end - now));
        }
    }

    /// Does a disturbance. Returns `None` if that was not possible (no standby, no such process), or else the lease
    /// that it was about, if any.
    fn strike(&mut self, disturbance: Disturbance) -> Result<Option<Option<i32>>> {
        match disturbance {
            Disturbance::FreezeWorker => {
                let ms = self.rng.random_range(200..2_500);
                let pid = self.workers.any(&mut self.rng);
                self.freezer.freeze(pid, ms)?;
            }
            Disturbance::KillWorker => self.workers.kill_any(&mut self.rng)?,
            Disturbance::FreezeBackend => {
                let ms = self.rng.random_range(50..1_800);
                let Some(pid) = self.backend(false)? else { return Ok(None) };
                self.freezer.freeze(pid, ms)?;
            }
            Disturbance::Terminate | Disturbance::Cancel => {
                let Some(pid) = self.backend(true)? else { return Ok(None) };
                let what = if disturbance == Disturbance::Cancel { "cancel" } else { "terminate" };
                let mut session = self.servers.primary().connect(DATABASE)?;
                session.run(&format!("SELECT pg_{what}_backend({pid})"))?;
            }
            // Otherwise there would seldom be a standby.
            Disturbance::KillBackend | Disturbance::KillServer if self.servers.makes_standby() => {
                return Ok(None);
            }
            Disturbance::KillBackend => {
                let Some(pid) = self.backend(false)? else { return Ok(None) };
                self.prepare_for_start()?;
                process::signal(pid, Signal::SIGKILL)?;
                self.rest(Duration::from_millis(300));
                // Otherwise the server would wait for it before it recovers.
                self.let_walwriter_go();
                self.servers.primary().wait_ready(Duration::from_secs(60))?;
            }
            Disturbance::KillServer => self.kill_server()?,
            Disturbance::FailOver => {
                if !self.servers.has_standby() {
                    return Ok(None);
                }
                if !self.fail_over()? {
                    return Ok(None);
                }
            }
            Disturbance::StepClock => {
                // The clock is never behind the true time for long, and right at a failover, because a new epoch relies
                // on it.
                let seconds = [2, 1, -1, -2][self.rng.random_range(0..4)];
                let seconds = if self.clock_is_off { 0 } else { seconds };
                self.servers.clock().step(seconds)?;
                self.clock_is_off = seconds != 0;
            }
            Disturbance::Revoke => {
                let Leases { exclusive, multi_holder, adopted: number, .. } =
                    self.instructions.leases;
                let multi_holder = MULTI_HOLDER.into_iter().filter(|_| multi_holder);
                let leases: Vec<i32> =
                    (0..exclusive).chain(multi_holder).chain(adopted(number)).collect();
                let lease = leases[self.rng.random_range(0..leases.len())];
                let mut session = self.servers.primary().connect(DATABASE)?;
                session.run("SET statement_timeout = '2s'")?;
                // An adopted lease is closed with its own number, so the token is not new.
                let drawn = LeaseKind::of(lease) != LeaseKind::Adopted;
                let revoked = session.try_rows(&format!(
                    "WITH closed AS MATERIALIZED (SELECT lease_revoke('job:{lease}') AS token),
                          next AS (UPDATE line SET n = n + 1 FROM closed
                                    WHERE lease = {lease} AND token IS NOT NULL AND {drawn}
                                    RETURNING n, token)
                     INSERT INTO grants (lease, n, what, token)
                     SELECT {lease}, n, 'revoke', token FROM next"
                ));
                return match revoked {
                    // A guarded transaction may last longer than this may wait.
                    Err(fault) if fault.sqlstate == "57014" => Ok(None),
                    revoked => revoked.map(|_| Some(Some(lease))).map_err(Into::into),
                };
            }
            // In lite, leases and rows are linked by name only, and its dumps contain the tokens themselves.
            Disturbance::LockRows | Disturbance::Restore | Disturbance::NewEpoch
                if edition::is_lite() =>
            {
                return Ok(None);
            }
            Disturbance::LockRows => {
                let time = Duration::from_millis(self.rng.random_range(50..900));
                let end = if self.rng.random_bool(0.5) { "COMMIT" } else { "ROLLBACK" };
                let mut session = self.servers.primary().connect(DATABASE)?;
                session.run("SET statement_timeout = '2s'; BEGIN")?;
                session.run("SELECT FROM fence.lease WHERE name LIKE 'job:%' FOR KEY SHARE")?;
                std::thread::spawn(move || {
                    std::thread::sleep(time);
                    // The server may be gone.
                    session.run(end)
                });
            }
            Disturbance::Restore => return Ok(self.restore()?.then_some(None)),
            Disturbance::NewEpoch => {
                let mut session = self.servers.primary().connect(DATABASE)?;
                session.run("SET statement_timeout = '5s'; SELECT fence_new_epoch()")?;
            }
            Disturbance::FreezeReader => {
                let (ms, first) = (self.rng.random_range(200..2_500), self.rng.random_range(1..30));
                let mut session = self.servers.primary().connect(DATABASE)?;
                let pid = session.pid();
                session.run(
                    "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM fence.leases",
                )?;
                let end = Instant::now() + Duration::from_millis(ms);
                std::thread::spawn(move || {
                    let mut reads = || session.run("SELECT count(*) FROM fence.leases").is_ok();
                    while Instant::now() < end && reads() {}
                });
                self.rest(Duration::from_millis(first));
                self.freezer.freeze(pid, ms)?;
            }
        }
        Ok(Some(None))
    }

    /// Makes a dump, or loads it again without `--clean`. The checker need not know, because loading a dump can only
    /// advance the tokens. Returns false if the server was unreachable, or blocked the restore.
    fn restore(&mut self) -> Result<bool> {
        // Traces that are loaded twice would be wrong, and so would a log of changes.
        const DUMP: [&str; 4] = [
            "--exclude-table-data=public.*",
            "--exclude-schema=upkeep",
            "--exclude-schema=repack",
            "--lock-wait-timeout=2s",
        ];
        let data_only = self.rng.random_bool(0.5).then_some("--data-only");
        let primary = self.servers.primary().clone();
        let program = |name, arguments: &[&str]| {
            let mut program = primary.install_dir().command(name)?;
            program.args(["--host=127.0.0.1", "--username=postgres"]);
            program.arg(format!("--port={}", primary.port())).arg(format!("--dbname={DATABASE}"));
            program.args(arguments);
            anyhow::Ok(program)
        };
        let Some(dump) = &self.dump else {
            let dump = primary.install_dir().new_dir("dump")?.join("state");
            let mut maker = program("pg_dump", &DUMP)?;
            maker.arg("--format=custom").arg("--file").arg(&dump);
            if maintenance::said_within(maker, RESTORE_LIMIT)?.is_empty() {
                self.dump = Some(dump);
            }
            return Ok(false);
        };
        let mut loader = program("pg_restore", data_only.as_slice())?;
        loader.arg(dump);
        let said = maintenance::said_within(loader, RESTORE_LIMIT)?;
        Ok(!said.contains("connection to server"))
    }

    /// A server process of any worker; with `busy`, one in the middle of a transaction.
    fn backend(&mut self, busy: bool) -> Result<Option<i32>> {
        let mut session = self.servers.primary().connect(DATABASE)?;
        let condition = if busy { "AND xact_start IS NOT NULL" } else { "" };
        let rows = session.rows(&format!(
            "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'worker %' {condition}
              ORDER BY application_name"
        ))?;
        if rows.is_empty() {
            return Ok(None);
        }
        let pick = self.rng.random_range(0..rows.len());
        Ok(rows[pick][0].as_deref().and_then(|text| text.parse().ok()))
    }

    fn tell(&mut self, activity: Activity) -> Result<()> {
        self.instructions =
            Instructions { activity, port: self.servers.primary().port(), ..self.instructions };
        self.instructions.write(&instructions_file(&self.dir))
    }

    /// If the tokens advance by the clock alone, the clock must be right when a server starts: the lite edition says so
    /// for servers on which it cannot have the WAL written.
    fn prepare_for_start(&mut self) -> Result<()> {
        let by_clock_alone = edition::is_lite() && self.servers.major_number() < 17;
        if by_clock_alone { self.set_clock_right() } else { Ok(()) }
    }

    fn kill_server(&mut self) -> Result<()> {
        self.prepare_for_start()?;
        let primary = self.servers.primary().clone();
        let asleep = self.rng.random_bool(0.7);
        if asleep {
            if self.rng.random_bool(0.5) {
                self.begin_checkpoint();
            }
            for title in ["walwriter", "background writer", "checkpointer"] {
                primary.freeze(title)?;
            }
            self.tell(Activity::Lazy)?;
            let ms = self.rng.random_range(100..900);
            self.rest(Duration::from_millis(ms));
        }
        primary.kill9()?;
        primary.start()?;
        self.may_hold_walwriter()?;
        self.tell(Activity::Work)
    }

    /// Freezes the walwriter in every other life of a primary: then a crash loses all asynchronous commits that no
    /// other commit has flushed.
    fn may_hold_walwriter(&mut self) -> Result<()> {
        self.walwriter.clear();
        let tries = if self.rng.random_bool(0.5) { 5 } else { 0 };
        for _ in 0..tries {
            let primary = self.servers.primary();
            let held = primary.freeze("walwriter")?;
            if can_commit(primary) {
                self.walwriter = held;
                break;
            }
            primary.thaw(&held)?;
        }
        Ok(())
    }

    fn let_walwriter_go(&mut self) {
        for pid in self.walwriter.drain(..) {
            let _ = process::signal(pid, Signal::SIGCONT);
        }
    }

    /// A token drawn after a checkpoint's begin must be logged again. Whether the checkpoint ends before the server
    /// dies is left to chance.
    fn begin_checkpoint(&mut self) {
        let primary = self.servers.primary().clone();
        std::thread::spawn(move || {
            let session = primary.connect(DATABASE);
            session.and_then(|mut session| session.run("CHECKPOINT")).is_ok()
        });
        let ms = self.rng.random_range(0..150);
        self.rest(Duration::from_millis(ms));
    }

    /// Steps the clock back to the true time, which is a disturbance like any other step.
    fn set_clock_right(&mut self) -> Result<()> {
        if self.clock_is_off {
            let at = now_us();
            self.servers.clock().step(0)?;
            self.clock_is_off = false;
            let (disturbance, lease) = (Disturbance::StepClock, None);
            self.done.push(Disturbed { kind: disturbance, at, ended: now_us(), lease });
        }
        Ok(())
    }

    /// Waits until the clock has passed the tokens: a server that started while the clock was ahead advanced them that
    /// far. If the standby misses that start, only the clock leads to greater tokens. Returns false if that takes too
    /// long.
    fn let_clock_pass_tokens(&mut self) -> Result<bool> {
        // The next start takes at least a second's worth of tokens beyond the last one.
        const PASSED: &str = "
            SELECT (last_value >> 20) + 2
                   < extract(epoch FROM clock_timestamp() - '2026-01-01 00:00Z'::timestamptz)
              FROM fence.token_seq";
        let mut session = self.servers.primary().connect(DATABASE)?;
        let end = Instant::now() + Duration::from_secs(10);
        while !session.one::<bool>(PASSED, &[])? {
            if Instant::now() > end {
                return Ok(false);
            }
            self.rest(Duration::from_millis(50));
        }
        Ok(true)
    }

    fn fail_over(&mut self) -> Result<bool> {
        self.set_clock_right()?;
        if !self.let_clock_pass_tokens()? {
            return Ok(false);
        }
        // From now on the standby does not receive the primary's commits.
        self.servers.primary().freeze("walsender")?;
        let activity = if self.rng.random_bool(0.5) { Activity::Lazy } else { Activity::Work };
        self.tell(activity)?;
        let ms = self.rng.random_range(100..1_200);
        self.rest(Duration::from_millis(ms));
        self.thaw_backends();
        let failed_over = self.servers.fail_over()?;
        // Counted at once: the checker uses the era to tell what a failover cut off from what was lost.
        self.instructions.era += u32::from(failed_over);
        self.may_hold_walwriter()?;
        self.tell(Activity::Work)?;
        Ok(failed_over)
    }

    /// Forgets frozen backends of a server that is to be killed: their pids may be reused.
    fn thaw_backends(&mut self) {
        self.freezer.forget_all_but(&self.workers.pids());
    }

    /// Ends the run: thaws and stops everyone, and finishes prepared transactions.
    fn end(&mut self) -> Result<()> {
        self.freezer.thaw_all();
        self.let_walwriter_go();
        self.set_clock_right()?;
        self.servers.settle();
        self.tell(Activity::Stop)?;
        self.workers.dismiss(Duration::from_secs(20));
        self.servers.primary().wait_ready(Duration::from_secs(60))?;
        self.resolver.take().map_or(Ok(()), |mut resolver| resolver.end())?;
        self.all_can_be_acquired()
    }

    /// Checks that no lock is left, and that every lease is free.
    fn all_can_be_acquired(&self) -> Result<()> {
        let mut session = self.servers.primary().connect(DATABASE)?;
        nothing_is_left(&mut session)?;
        let all = format!(
            "SELECT lease_acquire('job:' || n, wait => '30 s', ttl => '1 us') IS NOT NULL
               FROM generate_series(0, {} - 1) n",
            self.instructions.leases.exclusive
        );
        let had = session.rows(&all)?;
        ensure!(had.iter().all(|row| row[0].as_deref() == Some("t")), "not acquired: {had:?}");
        Ok(())
    }
}

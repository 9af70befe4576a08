//! The disturbances of a run: chosen from a seed, done to real processes.

use super::instructions::{Activity, Instructions, Leases};
use super::kind::{adopted, Kind, MULTI_HOLDER};
use super::maintenance::{self, Maintenance, Upkeep};
use super::record::now_us;
use super::resolver::Resolver;
use super::servers::Servers;
use super::worker::{instructions_file, DATABASE};
use super::worker_pool::WorkerPool;
use crate::calls::nothing_is_left;
use crate::cluster::Cluster;
use crate::edition;
use crate::prefix::Prefix;
use crate::process::{self, PATIENCE};
use anyhow::{ensure, Result};
use nix::sys::signal::Signal;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{mpsc, Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A kind of disturbance. The summary calls it by its name here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Disturbance {
    /// A worker is stopped for longer than its grants last, or for less.
    FreezeWorker,
    /// A worker is killed, and started again.
    KillWorker,
    /// A server process of a session is stopped for a while.
    FreezeBackend,
    /// A session is terminated in mid-transaction.
    Terminate,
    /// A statement is cancelled in mid-transaction.
    Cancel,
    /// A server process of a session is killed, so that the server crashes and recovers.
    KillBackend,
    /// The whole server is killed, while what it has not written can only be lost.
    KillServer,
    /// The primary is killed and the standby, behind by whatever it is, promoted.
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
    /// The tokens jump, by `fence_new_epoch()`.
    Jump,
    /// A session that reads the leases in a transaction is stopped for a while, wherever it is in that.
    FreezeReader,
}

/// A disturbance that was done.
#[derive(Debug, Clone, Copy)]
pub struct Disturbed {
    pub kind: Disturbance,
    /// When it began, in microseconds of [`now_us`].
    pub at: i64,
    /// When it was done. Its effect came somewhere between.
    pub ended: i64,
    /// The lease, where it is about one.
    pub lease: Option<i32>,
}

/// How likely each kind is.
pub type Weights = &'static [(Disturbance, u32)];

/// Every kind, about as often as each happens in production when compared with the others.
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
    (Disturbance::Jump, 4),
    (Disturbance::FreezeReader, 8),
];

/// A program that dumps or restores may wait for a process that is frozen.
const RESTORE_LIMIT: Duration = Duration::from_secs(10);

/// Processes that are frozen, and when each is to be thawed. A thread of its own does that, because the nemesis
/// may itself wait for a server whose process was frozen while it had a lock.
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

    /// Leaves frozen, for ever, all but these.
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

/// Whether the server writes its log. It does not where its walwriter was frozen amid that, or while it made a page of
/// the log's buffers ready: so all of them are filled once.
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

/// The one that does it.
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
    /// The primary's walwriter, while it is held.
    walwriter: Vec<i32>,
    /// The dump, once it was made.
    dump: Option<PathBuf>,
    pub(super) done: Vec<Disturbed>,
}

impl Nemesis {
    /// A nemesis of these servers and workers, which has not begun yet.
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

    /// Lets the workers work, and does one thing after another until the time is over. Maintenance is done
    /// meanwhile, where a PostgreSQL is given whose programs can do it.
    pub fn disturb(&mut self, time: Duration, upkeep: Option<Arc<Prefix>>) -> Result<Upkeep> {
        let instructions = instructions_file(&self.dir);
        let maintenance = upkeep.map(|prefix| Maintenance::start(prefix, instructions, self.seed));
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
            None => Upkeep::default(),
        };
        self.servers.see_standby_through()?;
        Ok(upkeep)
    }

    /// Does one thing after another until the time is over.
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
                // Unless the server cannot be reached any more: that must fail the run.
                Err(error) if self.servers.primary().wait_ready(PATIENCE).is_ok() => {
                    eprintln!("{disturbance:?}: {error:#}");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// How often each kind was done.
    pub fn count(&self) -> BTreeMap<Disturbance, usize> {
        let mut count = BTreeMap::new();
        for done in &self.done {
            *count.entry(done.kind).or_default() += 1;
        }
        count
    }

    /// Lets time pass; workers that died meanwhile are started again.
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

    /// Does it. None if that was not possible now (no standby, no such process); else the lease that it was about,
    /// if it was about one.
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
            // Else there would seldom be a standby.
            Disturbance::KillBackend | Disturbance::KillServer if self.servers.makes_standby() => {
                return Ok(None)
            }
            Disturbance::KillBackend => {
                let Some(pid) = self.backend(false)? else { return Ok(None) };
                self.prepare_for_start()?;
                process::signal(pid, Signal::SIGKILL)?;
                self.rest(Duration::from_millis(300));
                // Else the server would wait for it before it recovers.
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
                // Never behind the true time for long, and right at a failover: a jump relies on it.
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
                // An adopted lease is closed with its own number, which is no news.
                let drawn = Kind::of(lease) != Kind::Adopted;
                let revoked = session.try_rows(&format!(
                    "WITH closed AS MATERIALIZED (SELECT lease_revoke('job:{lease}') AS token),
                          next AS (UPDATE line SET n = n + 1 FROM closed
                                    WHERE lease = {lease} AND token IS NOT NULL AND {drawn}
                                    RETURNING n, token)
                     INSERT INTO grants (lease, n, what, token)
                     SELECT {lease}, n, 'revoke', token FROM next"
                ));
                return match revoked {
                    // A guarded transaction may go on for longer than one wants to wait here.
                    Err(fault) if fault.sqlstate == "57014" => Ok(None),
                    revoked => revoked.map(|_| Some(Some(lease))).map_err(Into::into),
                };
            }
            // Lite keeps a lease in a row by name alone, and its dumps carry the tokens themselves.
            Disturbance::LockRows | Disturbance::Restore | Disturbance::Jump if edition::is_lite() => {
                return Ok(None)
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
            Disturbance::Jump => {
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

    /// Makes a dump, or loads it again without `--clean`. The judge need not know: what a dump carries can only move the
    /// tokens on. False where the server could not be reached, or was in somebody's way.
    fn restore(&mut self) -> Result<bool> {
        // Traces that were loaded twice would tell of what was not; so would a log of changes.
        const DUMP: [&str; 4] = [
            "--exclude-table-data=public.*",
            "--exclude-schema=upkeep",
            "--exclude-schema=repack",
            "--lock-wait-timeout=2s",
        ];
        let data_only = self.rng.random_bool(0.5).then_some("--data-only");
        let primary = self.servers.primary().clone();
        let program = |name, arguments: &[&str]| {
            let mut program = primary.prefix().command(name)?;
            program.args(["--host=127.0.0.1", "--username=postgres"]);
            program.arg(format!("--port={}", primary.port())).arg(format!("--dbname={DATABASE}"));
            program.args(arguments);
            anyhow::Ok(program)
        };
        let Some(dump) = &self.dump else {
            let dump = primary.prefix().new_dir("dump")?.join("state");
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

    /// Some worker's server process; `busy`: in mid-transaction.
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

    /// Where tokens move on by the clock alone, it is right when a server starts: the lite edition says so of servers on
    /// which it cannot have the log written.
    fn prepare_for_start(&mut self) -> Result<()> {
        let by_clock_alone = edition::is_lite() && self.servers.major_number() < 17;
        if by_clock_alone {
            self.set_clock_right()
        } else {
            Ok(())
        }
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

    /// Holds the walwriter in every other life of a primary: then a crash loses all commits that did not wait for the
    /// disk, and that no other has flushed.
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

    /// A token drawn after it has to be logged again. Whether it is over when the server dies is left to chance.
    fn begin_checkpoint(&mut self) {
        let primary = self.servers.primary().clone();
        std::thread::spawn(move || {
            let session = primary.connect(DATABASE);
            session.and_then(|mut session| session.run("CHECKPOINT")).is_ok()
        });
        let ms = self.rng.random_range(0..150);
        self.rest(Duration::from_millis(ms));
    }

    /// Steps the clock back to the true time, where it is off. That is a disturbance as any other step.
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

    /// Waits until the clock has passed what the tokens have reached: a server that started while the clock was ahead
    /// drew from ahead. Where the standby misses such a start, only a clock that has passed it leads to greater tokens.
    /// False where that takes too long.
    fn let_clock_pass_tokens(&mut self) -> Result<bool> {
        // The next start takes at least a second's worth of tokens after the last one.
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
        // The standby never hears of the primary's commits from now on.
        self.servers.primary().freeze("walsender")?;
        let activity = if self.rng.random_bool(0.5) { Activity::Lazy } else { Activity::Work };
        self.tell(activity)?;
        let ms = self.rng.random_range(100..1_200);
        self.rest(Duration::from_millis(ms));
        self.thaw_backends();
        let failed_over = self.servers.fail_over()?;
        // At once: by it the judge tells what a failover cut off from what was lost.
        self.instructions.era += u32::from(failed_over);
        self.may_hold_walwriter()?;
        self.tell(Activity::Work)?;
        Ok(failed_over)
    }

    /// Frozen backends of a server that is to die must not be thawed later: their pids may be others'.
    fn thaw_backends(&mut self) {
        self.freezer.forget_all_but(&self.workers.pids());
    }

    /// The end: everyone wakes up and stops; what was left prepared is finished.
    fn end(&mut self) -> Result<()> {
        self.freezer.thaw_all();
        self.let_walwriter_go();
        self.set_clock_right()?;
        self.servers.settle();
        self.tell(Activity::Stop)?;
        self.workers.dismiss(Duration::from_secs(20));
        self.servers.primary().wait_ready(Duration::from_secs(60))?;
        self.resolver.take().map_or(Ok(()), |mut resolver| resolver.end())?;
        self.all_can_be_had()
    }

    /// No lock of anybody is left, and every lease can be had.
    fn all_can_be_had(&self) -> Result<()> {
        let mut session = self.servers.primary().connect(DATABASE)?;
        nothing_is_left(&mut session)?;
        let all = format!(
            "SELECT lease_acquire('job:' || n, wait => '30 s', ttl => '1 us') IS NOT NULL
               FROM generate_series(0, {} - 1) n",
            self.instructions.leases.exclusive
        );
        let had = session.rows(&all)?;
        ensure!(had.iter().all(|row| row[0].as_deref() == Some("t")), "not to be had: {had:?}");
        Ok(())
    }
}

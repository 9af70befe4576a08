//! A worker process: it takes leases, writes fenced rows, and records its requests and their answers.

use super::instructions::{Activity, Instructions, Leases};
use super::lease_kind::{LeaseKind, MULTI_HOLDER, adopted};
use super::lock_service::LockFiles;
use super::record::{Claimed, Event, Log, NO_LEASE, Outcome, Purpose, Record, TTL_MS, now_us};
use crate::client::{Conninfo, Rows, Session};
use crate::edition;
use crate::fault::Fault;
use anyhow::Result;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The database of a run.
pub const DATABASE: &str = "chaos";

/// The role of the servers' administrator.
const ADMINISTRATOR: &str = "postgres";
/// The role of workers of the lite edition, whose objects belong to another role that is no superuser.
pub const WORKER: &str = "worker";

/// The identity of a worker.
#[derive(Debug, Clone, clap::Args)]
pub struct Identity {
    /// Its number, by which its records are told from those of others
    pub worker: u32,
    /// How often it was started
    pub incarnation: u32,
    /// Where its choices start from
    pub seed: u64,
    /// The directory of the run
    pub dir: PathBuf,
}

impl Identity {
    /// The random choices of the worker.
    pub(super) fn rng(&self) -> StdRng {
        let number = u64::from(self.worker) << 40;
        StdRng::seed_from_u64(self.seed ^ number ^ u64::from(self.incarnation) << 20)
    }

    pub(super) fn log(&self) -> Result<Log> {
        Log::create(&self.dir.join(format!("log/{}-{}", self.worker, self.incarnation)))
    }

    /// The id of a transaction, by its number within the incarnation.
    pub(super) fn id(&self, count: i64) -> i64 {
        i64::from(self.worker) << 48 | i64::from(self.incarnation) << 28 | count
    }
}

/// A grant that the worker believes in, or did.
#[derive(Clone, Copy)]
pub(super) struct HeldLease {
    pub token: i64,
    pub first: i64,
    pub shared: bool,
}

/// The reason for which a transaction stops.
pub(super) enum Stop {
    Fault(Fault),
    /// NULL instead of a token.
    Lost,
    RolledBack,
    /// The worker itself cannot continue.
    Failed(anyhow::Error),
}

impl From<Fault> for Stop {
    fn from(fault: Fault) -> Stop {
        Stop::Fault(fault)
    }
}

impl From<anyhow::Error> for Stop {
    fn from(error: anyhow::Error) -> Stop {
        Stop::Failed(error)
    }
}

/// A result, or the reason for which the transaction stops.
pub(super) type OrStop<T> = std::result::Result<T, Stop>;

/// The next task.
#[derive(Clone, Copy)]
pub(super) struct Task {
    pub purpose: Purpose,
    pub lease: i32,
    /// The second lease, if two are acquired or renewed together.
    pub also: Option<i32>,
    /// True if a grant is to end with the session.
    pub session: bool,
}

/// A worker: its beliefs, its session, and its log.
pub(super) struct ChaosWorker {
    pub who: Identity,
    pub rng: StdRng,
    pub id: i64,
    pub held: HashMap<i32, HeldLease>,
    pub lost: HashMap<i32, HeldLease>,
    /// The leases under which it has prepared a transaction in this era.
    pub prepared_for: Vec<i32>,
    /// The latest tokens that it got for rows.
    pub claimed: Vec<Claimed>,
    /// True once the end of the transaction was requested.
    pub committing: bool,
    /// The first tokens of the grants that end with its session, or with the previous one.
    pub session_bound: Vec<i64>,
    /// The lock service whose grants are adopted.
    pub service: LockFiles,
    log: Log,
    session: Option<Session>,
    /// The pid of the latest session's backend.
    backend: i32,
    era: u32,
    count: i64,
}

/// Runs the worker process until the instructions say to stop.
pub fn work(who: Identity) -> Result<()> {
    let mut worker = ChaosWorker::new(who)?;
    while worker.turn()? {}
    Ok(())
}

/// The file with the workers' instructions.
pub fn instructions_file(dir: &Path) -> PathBuf {
    dir.join("instructions")
}

impl ChaosWorker {
    /// A new worker.
    fn new(who: Identity) -> Result<ChaosWorker> {
        let (log, rng) = (who.log()?, who.rng());
        let service = LockFiles::new(&who.dir, who.worker, who.incarnation);
        Ok(ChaosWorker {
            who,
            rng,
            id: 0,
            held: HashMap::new(),
            lost: HashMap::new(),
            prepared_for: Vec::new(),
            claimed: Vec::new(),
            committing: false,
            session_bound: Vec::new(),
            service,
            log,
            session: None,
            backend: 0,
            era: 0,
            count: 0,
        })
    }

    /// Runs one transaction, or tries to connect. Returns false if the instructions say to stop.
    fn turn(&mut self) -> Result<bool> {
        let instructions = Instructions::read(&instructions_file(&self.who.dir))?;
        if instructions.activity == Activity::Stop {
            return Ok(false);
        }
        if self.session.is_none() || self.era != instructions.era {
            self.connect(&instructions);
            self.see_the_session_before_gone()?;
        }
        if self.session.is_none() {
            std::thread::sleep(Duration::from_millis(30));
        } else {
            self.transaction(&instructions)?;
        }
        Ok(true)
    }

    fn connect(&mut self, instructions: &Instructions) {
        let name = format!("worker {}", self.who.worker);
        let conninfo = Conninfo::new(instructions.port, DATABASE)
            .user(if edition::is_lite() { WORKER } else { ADMINISTRATOR })
            .application(&name)
            .set("statement_timeout", "8s");
        self.session = Session::connect(&conninfo.to_string()).ok();
        if self.era != instructions.era {
            // After a failover, a finished transaction may be prepared again.
            for lease in self.prepared_for.drain(..) {
                self.held.remove(&lease);
                self.lost.remove(&lease);
            }
            self.era = instructions.era;
        }
    }

    /// Notices with a new session that the previous one has ended: its backend is gone.
    fn see_the_session_before_gone(&mut self) -> Result<()> {
        let Some(session) = &mut self.session else { return Ok(()) };
        let before = std::mem::replace(&mut self.backend, session.pid());
        let firsts = std::mem::take(&mut self.session_bound);
        let sql = format!("SELECT FROM pg_stat_activity WHERE pid = {before}");
        if !firsts.is_empty() && session.try_rows(&sql).is_ok_and(|rows| rows.is_empty()) {
            self.write(Event::SessionEnded(firsts))?;
        }
        Ok(())
    }

    /// Records an event.
    pub fn write(&mut self, event: Event) -> Result<()> {
        let (at, worker, era, id) = (now_us(), self.who.worker, self.era, self.id);
        self.log.write(&Record { at, worker, era, id, event })
    }

    fn choose(&mut self, instructions: &Instructions) -> Task {
        let Leases { exclusive, multi_holder, several, sessions, adopted: number, .. } =
            instructions.leases;
        let Leases { mostly_adopted, row_share, .. } = instructions.leases;
        let adopts = if mostly_adopted { 0.9 } else { 0.2 };
        let lease = if number > 0 && self.rng.random_bool(adopts) {
            self.rng.random_range(adopted(number))
        } else if multi_holder && self.rng.random_bool(0.25) {
            MULTI_HOLDER[self.rng.random_range(0..MULTI_HOLDER.len())]
        } else {
            self.rng.random_range(0..exclusive)
        };
        let session = self.rng.random_bool(0.4) && sessions;
        let task = |purpose| Task { purpose, lease, also: None, session };
        if instructions.activity == Activity::Lazy {
            return task(Purpose::Lazy);
        }
        if self.rng.random_range(0..100) < row_share {
            return Task { lease: NO_LEASE, ..task(Purpose::Row) };
        }
        let kind = LeaseKind::of(lease);
        let unguarded = if kind == LeaseKind::Exclusive { Purpose::Free } else { Purpose::Bound };
        let dice = self.rng.random_range(0..100);
        match (self.held.contains_key(&lease), self.lost.contains_key(&lease)) {
            (true, _) => task(match dice {
                0..32 => Purpose::Guarded,
                32..52 => Purpose::Bound,
                // For the lock service this is a heartbeat; here it may be another grant.
                70..87 if kind == LeaseKind::Adopted => Purpose::Adopt,
                52..70 => unguarded,
                70..87 => return Task { also: self.acquired_with(lease), ..task(Purpose::Renew) },
                87..97 => Purpose::Release,
                _ => Purpose::Lazy,
            }),
            // A worker that does not know that it has lost the lease.
            (false, true) if dice < 12 => {
                task([unguarded, Purpose::Bound, Purpose::Guarded][dice % 3])
            }
            _ if kind == LeaseKind::Adopted => task(Purpose::Adopt),
            _ if kind == LeaseKind::Shared && dice < 80 => task(Purpose::Share),
            _ if kind == LeaseKind::Exclusive && exclusive > 1 && several && dice > 85 => {
                let also = (lease + self.rng.random_range(1..exclusive)) % exclusive;
                Task { purpose: Purpose::AcquireAll, lease, also: Some(also), session }
            }
            _ => task(Purpose::Acquire),
        }
    }

    /// One transaction, from the choice of a task to its outcome.
    fn transaction(&mut self, instructions: &Instructions) -> Result<()> {
        if !self.session_bound.is_empty() && self.rng.random_bool(0.06) {
            match self.unlock_session() {
                Err(Stop::Failed(error)) => return Err(error),
                Err(_) => {
                    self.hang_up();
                    return Ok(());
                }
                Ok(()) => {}
            }
        }
        let mut task = self.choose(instructions);
        task.session &= task.purpose.acquires() && task.purpose != Purpose::Adopt;
        let Task { purpose, lease, also, session } = task;
        self.count += 1;
        self.id = self.who.id(self.count);
        let held = self.held.get(&lease).or(self.lost.get(&lease)).copied();
        self.write(Event::Request {
            purpose,
            lease,
            also,
            first: held.map(|held| held.first),
            session,
        })?;
        self.committing = false;
        let outcome = match self.run_task(task, held) {
            Ok(outcome) => outcome,
            Err(Stop::Failed(error)) => return Err(error),
            Err(stop) => {
                let outcome = self.clean_up(&stop);
                if matches!(&outcome, Outcome::Lost) && !purpose.acquires()
                    || matches!(&outcome, Outcome::Refused(state) if state == "PF004")
                {
                    self.lose(lease);
                }
                let stale = |state: &String| state == "PF001" || state == "PF004";
                if LeaseKind::of(lease) == LeaseKind::Adopted
                    && matches!(&outcome, Outcome::Refused(state) if stale(state))
                {
                    // The grant was revoked, or the lock service has granted the lease to another meanwhile.
                    self.lose(lease);
                    self.service.release(lease)?;
                }
                outcome
            }
        };
        let taken = outcome == Outcome::Lost;
        self.write(Event::End(outcome))?;
        if taken {
            std::thread::sleep(Duration::from_millis(self.rng.random_range(5..40)));
        }
        Ok(())
    }

    /// The other lease that was acquired together with this one.
    fn acquired_with(&self, lease: i32) -> Option<i32> {
        let first = self.held.get(&lease)?.first;
        let mut others =
            self.held.iter().filter(|(other, held)| **other != lease && held.first == first);
        others.next().map(|(other, _)| *other)
    }

    /// Notes that the worker has lost the lease, and knows it.
    pub fn lose(&mut self, lease: i32) {
        if let Some(held) = self.held.remove(&lease) {
            self.lost.insert(lease, held);
        }
    }

    fn clean_up(&mut self, stop: &Stop) -> Outcome {
        let outcome = match stop {
            Stop::Lost => Outcome::Lost,
            // The detail of a deadlock says who waited for what.
            Stop::Fault(fault) if fault.sqlstate == "40P01" => {
                Outcome::Refused(format!("40P01: {}", fault.detail.as_deref().unwrap_or_default()))
            }
            Stop::Fault(fault) if !fault.is_disconnect() => {
                Outcome::Refused(fault.sqlstate.clone())
            }
            Stop::Fault(_) if self.committing => Outcome::Unknown,
            Stop::Fault(_) => Outcome::Broken,
            Stop::RolledBack | Stop::Failed(_) => Outcome::RolledBack,
        };
        let broken = matches!(outcome, Outcome::Unknown | Outcome::Broken);
        if broken || self.sql("ROLLBACK").is_err() {
            self.session = None;
        }
        outcome
    }

    /// Closes the connection.
    pub fn hang_up(&mut self) {
        self.session = None;
    }

    pub fn session(&mut self) -> &mut Session {
        self.session.as_mut().expect("a transaction begins with a session")
    }

    pub fn sql(&mut self, sql: &str) -> std::result::Result<Rows, Fault> {
        self.session().try_rows(sql)
    }

    /// Commits or prepares the transaction.
    pub fn end(&mut self, sql: &str) -> OrStop<()> {
        self.committing = true;
        self.sql(sql)?;
        Ok(())
    }

    /// Sleeps a little, sometimes; rarely for longer than a grant lasts.
    pub fn think(&mut self) {
        let ms = match self.rng.random_range(0..200) {
            0 => TTL_MS as u64 * 3 / 2,
            1..70 => self.rng.random_range(1..25),
            _ => 0,
        };
        std::thread::sleep(Duration::from_millis(ms));
    }

    /// Sleeps for longer than a grant lasts, with this probability.
    pub fn stall(&mut self, probability: f64) {
        if self.rng.random_bool(probability) {
            std::thread::sleep(Duration::from_millis(TTL_MS as u64 * 3 / 2));
        }
    }
}

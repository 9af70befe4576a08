//! A worker process: it takes leases, writes fenced rows, and writes down what it asked and saw.

use super::orders::{Mode, Orders};
use super::record::{now_us, Event, Log, Outcome, Record, What, TTL_MS};
use crate::client::{Conninfo, Rows, Session};
use crate::fault::Fault;
use anyhow::Result;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The database that a run works in.
pub const DATABASE: &str = "chaos";

/// Who a worker is.
#[derive(Debug, Clone, clap::Args)]
pub struct Identity {
    /// Its number
    pub worker: u32,
    /// How often it was started
    pub life: u32,
    /// Where its choices start from
    pub seed: u64,
    /// The directory of the run
    pub dir: PathBuf,
}

/// A grant that it believes in (or did).
#[derive(Clone, Copy)]
struct Held {
    token: i64,
    first: i64,
}

/// What stops a transaction.
enum Stop {
    Fault(Fault),
    /// NULL where a token was hoped for.
    Lost,
    RolledBack,
}

impl From<Fault> for Stop {
    fn from(fault: Fault) -> Stop {
        Stop::Fault(fault)
    }
}

type Step<T> = std::result::Result<T, Stop>;

struct Hand {
    who: Identity,
    log: Log,
    rng: StdRng,
    session: Option<Session>,
    era: u32,
    count: i64,
    id: i64,
    held: HashMap<i32, Held>,
    lost: HashMap<i32, Held>,
}

/// The worker's whole life.
pub fn work(who: Identity) -> Result<()> {
    let log = Log::create(&who.dir.join(format!("log/{}-{}", who.worker, who.life)))?;
    let seed = who.seed ^ (u64::from(who.worker) << 40) ^ (u64::from(who.life) << 20);
    let orders_file = orders_file(&who.dir);
    let (held, lost) = (HashMap::new(), HashMap::new());
    let rng = StdRng::seed_from_u64(seed);
    let mut hand = Hand { who, log, rng, session: None, era: 0, count: 0, id: 0, held, lost };
    loop {
        let orders = Orders::read(&orders_file)?;
        if orders.mode == Mode::Stop {
            return Ok(());
        }
        if hand.session.is_none() || hand.era != orders.era {
            hand.connect(&orders);
        }
        if hand.session.is_none() {
            std::thread::sleep(Duration::from_millis(30));
            continue;
        }
        hand.transaction(&orders)?;
    }
}

/// Where workers read their orders.
pub fn orders_file(dir: &Path) -> PathBuf {
    dir.join("orders")
}

impl Hand {
    fn connect(&mut self, orders: &Orders) {
        let name = format!("hand {}", self.who.worker);
        let conninfo =
            Conninfo::new(orders.port, DATABASE).application(&name).set("statement_timeout", "8s");
        self.session = Session::connect(&conninfo.to_string()).ok();
        self.era = orders.era;
    }

    fn write(&mut self, event: Event) -> Result<()> {
        let (at, worker, era, id) = (now_us(), self.who.worker, self.era, self.id);
        self.log.write(&Record { at, worker, era, id, event })
    }

    fn choose(&mut self, orders: &Orders) -> (What, i32) {
        let lease = self.rng.random_range(0..orders.leases);
        if orders.mode == Mode::Lazy {
            return (What::Lazy, lease);
        }
        let dice = self.rng.random_range(0..100);
        let what = match (self.held.contains_key(&lease), self.lost.contains_key(&lease)) {
            (true, _) => match dice {
                0..32 => What::Guarded,
                32..52 => What::Bound,
                52..70 => What::Free,
                70..87 => What::Renew,
                87..97 => What::Release,
                _ => What::Lazy,
            },
            // One that does not know that it has lost.
            (false, true) if dice < 12 => [What::Free, What::Bound, What::Guarded][dice % 3],
            _ => What::Acquire,
        };
        (what, lease)
    }

    /// One transaction, from the choice to the outcome.
    fn transaction(&mut self, orders: &Orders) -> Result<()> {
        let (what, lease) = self.choose(orders);
        self.count += 1;
        let (worker, life) = (i64::from(self.who.worker), i64::from(self.who.life));
        self.id = worker << 48 | life << 28 | self.count;
        let held = self.held.get(&lease).or(self.lost.get(&lease)).copied();
        self.write(Event::Ask { what, lease, first: held.map(|held| held.first) })?;
        let mut committing = false;
        let outcome = match self.body(what, lease, held, &mut committing)? {
            Ok(()) => Outcome::Committed,
            Err(stop) => {
                let outcome = self.clean_up(&stop, committing);
                if matches!(&outcome, Outcome::Lost) && what != What::Acquire
                    || matches!(&outcome, Outcome::Refused(state) if state == "PF004")
                {
                    if let Some(held) = self.held.remove(&lease) {
                        self.lost.insert(lease, held);
                    }
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

    fn clean_up(&mut self, stop: &Stop, committing: bool) -> Outcome {
        let outcome = match stop {
            Stop::Lost => Outcome::Lost,
            Stop::RolledBack => Outcome::RolledBack,
            Stop::Fault(fault) if !fault.is_disconnect() => {
                Outcome::Refused(fault.sqlstate.clone())
            }
            Stop::Fault(_) if committing => Outcome::Unknown,
            Stop::Fault(_) => Outcome::Broken,
        };
        let broken = matches!(outcome, Outcome::Unknown | Outcome::Broken);
        if broken || self.sql("ROLLBACK").is_err() {
            self.session = None;
        }
        outcome
    }

    fn sql(&mut self, sql: &str) -> std::result::Result<Rows, Fault> {
        match &mut self.session {
            Some(session) => session.try_rows(sql),
            None => unreachable!("a transaction begins with a session"),
        }
    }

    /// Sleeps a little, sometimes; rarely for longer than a grant lasts.
    fn think(&mut self) {
        let ms = match self.rng.random_range(0..200) {
            0 => TTL_MS as u64 * 3 / 2,
            1..70 => self.rng.random_range(1..25),
            _ => 0,
        };
        std::thread::sleep(Duration::from_millis(ms));
    }

    /// A token that was seen, or what NULL means.
    fn seen(&mut self, value: Option<String>) -> Result<Step<i64>> {
        let Some(token) = value.and_then(|text| text.parse().ok()) else {
            return Ok(Err(Stop::Lost));
        };
        self.write(Event::Token(token))?;
        Ok(Ok(token))
    }

    fn body(
        &mut self,
        what: What,
        lease: i32,
        held: Option<Held>,
        committing: &mut bool,
    ) -> Result<Step<()>> {
        macro_rules! tried {
            ($step:expr) => {
                match $step {
                    Ok(value) => value,
                    Err(stop) => return Ok(Err(Stop::from(stop))),
                }
            };
        }
        let (id, worker) = (self.id, self.who.worker);
        if what == What::Lazy {
            // A transaction each, so that no other commit writes the log for them.
            tried!(self.sql("SET synchronous_commit = off"));
            for _ in 0..4 {
                let rows = tried!(self.sql(&format!(
                    "SELECT lease_acquire('lazy:{worker}', ttl => '1 ms', reclaim => true, holder => 'me')"
                )));
                tried!(self.seen(rows[0][0].clone())?);
            }
            tried!(self.sql("RESET synchronous_commit"));
            return Ok(Ok(()));
        }
        tried!(self.sql("BEGIN"));
        self.think();
        let mut after = None;
        match (what, held) {
            (What::Acquire, _) => {
                let wait = [0, 0, 300, 1200][self.rng.random_range(0..4)];
                let reclaim = self.who.life > 0 && self.rng.random_bool(0.3);
                let rows = tried!(self.sql(&format!(
                    "SELECT clock_timestamp(), lease_acquire('job:{lease}', holder => 'hand {}',
                       ttl => '{TTL_MS} ms', wait => '{wait} ms', reclaim => {reclaim})",
                    self.who.worker
                )));
                let token = tried!(self.seen(rows[0][1].clone())?);
                tried!(self.note(lease, "acquire", token, token, &rows[0][0]));
                after = Some(Held { token, first: token });
            }
            (What::Renew, Some(held)) => {
                let rows = tried!(self.sql(&format!(
                    "SELECT clock_timestamp(), lease_renew('job:{lease}', {})",
                    held.token
                )));
                let token = tried!(self.seen(rows[0][1].clone())?);
                tried!(self.note(lease, "renew", token, held.first, &rows[0][0]));
                after = Some(Held { token, first: held.first });
            }
            (What::Release, Some(held)) => {
                let rows = tried!(self.sql(&format!(
                    "SELECT clock_timestamp(), lease_release('job:{lease}', {})",
                    held.token
                )));
                let token = tried!(self.seen(rows[0][1].clone())?);
                tried!(self.note(lease, "release", token, held.first, &rows[0][0]));
            }
            (What::Guarded, Some(held)) => {
                tried!(self.sql(&format!("SELECT lease_guard('job:{lease}', {})", held.token)));
                let rows =
                    tried!(self.sql(&format!("SELECT version FROM bound WHERE id = {lease}")));
                let read: i64 = rows[0][0].as_deref().unwrap_or("0").parse()?;
                self.think();
                let rows = tried!(self.sql(&format!(
                    "UPDATE bound SET version = {}, uid = {id}, fence = {} WHERE id = {lease}
                     RETURNING version, fence",
                    read + 1,
                    held.token
                )));
                tried!(self.wrote("bound", lease, &rows, held));
            }
            (What::Bound, Some(held)) => {
                let rows = tried!(self.sql(&format!(
                    "UPDATE bound SET version = version + 1, uid = {id}, fence = {} WHERE id = {lease}
                     RETURNING version, fence",
                    held.token
                )));
                tried!(self.wrote("bound", lease, &rows, held));
            }
            (What::Free, Some(held)) => {
                let by_setting = self.rng.random_bool(0.4);
                let column = if by_setting {
                    tried!(self.sql(&format!("SET LOCAL pg_fence.token = '{}'", held.token)));
                    String::new()
                } else {
                    format!(", fence = {}", held.token)
                };
                let rows = tried!(self.sql(&format!(
                    "UPDATE free SET version = version + 1, uid = {id}{column} WHERE id = {lease}
                     RETURNING version, fence"
                )));
                tried!(self.wrote("free", lease, &rows, held));
            }
            (_, None) | (What::Lazy, _) => return Ok(Err(Stop::RolledBack)),
        }
        if self.rng.random_bool(0.04) {
            return Ok(Err(Stop::RolledBack));
        }
        *committing = true;
        tried!(self.sql("COMMIT"));
        match after {
            Some(held) => {
                self.held.insert(lease, held);
                self.lost.remove(&lease);
            }
            None if what == What::Release => {
                if let Some(held) = self.held.remove(&lease) {
                    self.lost.insert(lease, held);
                }
            }
            None => {}
        }
        Ok(Ok(()))
    }

    /// Leaves a trace of a grant's token in the database, in the order in which the lease was locked.
    fn note(
        &mut self,
        lease: i32,
        what: &str,
        token: i64,
        first: i64,
        asked: &Option<String>,
    ) -> Step<()> {
        let asked = asked.as_deref().unwrap_or("now");
        self.think();
        self.sql(&format!(
            "WITH next AS (UPDATE line SET n = n + 1 WHERE lease = {lease} RETURNING n)
             INSERT INTO grants SELECT {lease}, n, '{what}', {token}, {first}, {}, '{asked}',
                    (SELECT expires_at FROM fence.leases WHERE name = 'job:{lease}')
               FROM next",
            self.id
        ))?;
        Ok(())
    }

    /// Leaves a trace of a write in the database, with the grant that is current at its end.
    fn wrote(&mut self, table: &str, lease: i32, rows: &Rows, held: Held) -> Step<()> {
        let value = |column: usize| rows.first().and_then(|row| row[column].clone());
        let (version, fence) = (value(0).unwrap_or_default(), value(1).unwrap_or_default());
        // Here a take-over would do the most harm: written, read by nobody, not yet committed.
        if self.rng.random_bool(0.04) {
            std::thread::sleep(Duration::from_millis(TTL_MS as u64 * 3 / 2));
        }
        self.think();
        self.sql(&format!(
            "INSERT INTO writes VALUES ('{table}', {lease}, {version}, {fence}, {}, {},
                (SELECT first FROM grants WHERE lease = {lease} AND what = 'acquire'
                  ORDER BY n DESC LIMIT 1))",
            held.first, self.id
        ))?;
        Ok(())
    }
}

//! One session of the crowd: what a worker does, and some things that it should not.

use super::{count, Shared, EXCLUSIVE};
use crate::client::Session;
use crate::fault::Fault;
use anyhow::{bail, Result};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::time::{Duration, Instant};

/// Longer than any call may take, its wait and the machine's other work included.
const STUCK: Duration = Duration::from_secs(45);

struct CrowdSession<'f> {
    shared: &'f Shared,
    session: Session,
    chance: StdRng,
    /// Until then at least its grant lives: counted from before it asked.
    safe_until: Instant,
}

/// Acquires and writes until the run stops; a session that was terminated connects again.
pub fn run(shared: &Shared, seed: u64) -> Result<()> {
    let mut session = CrowdSession {
        shared,
        session: arrive(shared)?,
        chance: StdRng::seed_from_u64(seed),
        safe_until: Instant::now(),
    };
    while shared.goes_on() {
        if let Err(fault) = session.turn() {
            session.get_over(fault)?;
        }
    }
    Ok(())
}

/// Connects. Disturbances strike those who are just arriving too: they try again.
fn arrive(shared: &Shared) -> Result<Session> {
    let conninfo = shared.conninfo.clone().application("crowd").to_string();
    let mut tries = 0;
    loop {
        tries += 1;
        match Session::connect(&conninfo) {
            Ok(session) => return Ok(session),
            Err(fault) if tries < 20 && is_a_disturbance(&fault) => {}
            Err(fault) => bail!("cannot connect: {fault}"),
        }
    }
}

/// The session was ended, or its statement cancelled.
fn is_a_disturbance(fault: &Fault) -> bool {
    fault.is_disconnect() || fault.sqlstate == "57014"
}

/// The row has a newer token, or the token speaks no longer.
fn is_lost(fault: &Fault) -> bool {
    matches!(&*fault.sqlstate, "PF001" | "PF004")
}

impl CrowdSession<'_> {
    fn turn(&mut self) -> Result<(), Fault> {
        match self.chance.random_range(0..100) {
            0..50 => self.exclusive(),
            50..70 => self.shared(),
            70..85 => self.one_of_three(),
            _ => self.several(),
        }
    }

    /// Recovers from a disturbance, which may happen again meanwhile.
    fn get_over(&mut self, fault: Fault) -> Result<()> {
        let mut last = Some(fault);
        while let Some(fault) = last.take() {
            if fault.is_disconnect() {
                self.session = arrive(self.shared)?;
            } else if is_a_disturbance(&fault) {
                last = self.session.try_rows("ROLLBACK").err();
            } else {
                bail!("{fault}");
            }
        }
        Ok(())
    }

    /// A call that returns a token or NULL.
    fn token(&mut self, sql: &str) -> Result<Option<i64>, Fault> {
        let started = Instant::now();
        let outcome = self.session.try_rows(sql);
        let took = started.elapsed();
        if took > STUCK {
            self.shared.wrong(format!("{took:?} for {sql}"));
        }
        let text = outcome?.pop().and_then(|row| row.into_iter().next().flatten());
        Ok(text.and_then(|text| text.parse().ok()))
    }

    fn acquire(&mut self, name: &str, ttl_ms: u64, more: &str) -> Result<Option<i64>, Fault> {
        self.safe_until = Instant::now() + Duration::from_millis(ttl_ms);
        let wait_ms = [0, 0, 50, 500, 2000, 5000][self.chance.random_range(0..6)];
        let token = self.token(&format!(
            "SELECT lease_acquire('{name}', ttl => '{ttl_ms} ms', wait => '{wait_ms} ms'{more})"
        ))?;
        let tally = &self.shared.tally;
        count(if token.is_some() { &tally.granted } else { &tally.in_vain });
        if token.is_none() {
            self.pause(30);
        }
        Ok(token)
    }

    /// Sleeps for so many milliseconds at most.
    fn pause(&mut self, most_ms: u64) {
        let ms = self.chance.random_range(0..=most_ms);
        std::thread::sleep(Duration::from_millis(ms));
    }

    fn one_in(&mut self, n: u32) -> bool {
        self.chance.random_range(0..n) == 0
    }

    /// Reads a counter, thinks, and writes what it read plus one: a lost update shows at the end.
    fn increment(&mut self, leases: &[usize], token: i64, think_ms: u64) -> Result<(), Fault> {
        let mut writes = String::from("BEGIN");
        for &i in leases {
            let lease = EXCLUSIVE[i];
            let n = self.token(&format!("SELECT n FROM counter WHERE lease = '{lease}'"))?;
            let n = n.unwrap_or_default() + 1;
            writes.push_str(&format!(
                "; UPDATE counter SET n = {n}, fence = {token} WHERE lease = '{lease}'"
            ));
        }
        self.pause(think_ms);
        let outcome = self.session.try_rows(&(writes + "; COMMIT"));
        let tally = &self.shared.tally;
        match outcome {
            Ok(_) => leases.iter().for_each(|&i| count(&tally.confirmed[i])),
            Err(fault) if is_lost(&fault) => return self.lost(&fault.message),
            Err(fault) => {
                if fault.is_disconnect() {
                    leases.iter().for_each(|&i| count(&tally.unknown[i]));
                }
                return Err(fault);
            }
        }
        Ok(())
    }

    fn exclusive(&mut self) -> Result<(), Fault> {
        let i = self.chance.random_range(0..EXCLUSIVE.len());
        let name = EXCLUSIVE[i];
        // Some think for longer than their lease lasts, some never release.
        let hasty = self.one_in(10);
        let ttl_ms = if hasty { 30 } else { 20_000 };
        if self.one_in(20) {
            return self.roll_back(name);
        }
        let Some(token) = self.acquire(name, ttl_ms, "")? else { return Ok(()) };
        let outcome = self.increment(&[i], token, if hasty { 60 } else { 4 });
        if self.one_in(8) {
            self.token(&format!("SELECT lease_renew('{name}', {token})"))?;
        }
        if !hasty {
            // A session that was cancelled while writing still gives back what it has.
            self.recover(&outcome)?;
            self.release(name, token)?;
        }
        outcome
    }

    /// Acquires in a transaction that comes to nothing, at once or back to a savepoint.
    fn roll_back(&mut self, name: &str) -> Result<(), Fault> {
        self.session.try_rows("BEGIN; SAVEPOINT s")?;
        self.acquire(name, 5_000, "")?;
        self.pause(5);
        self.session.try_rows("ROLLBACK TO s")?;
        self.pause(5);
        self.session.try_rows("ROLLBACK").map(drop)
    }

    /// A grant was lost; that may be by the clock only.
    fn lost(&mut self, how: &str) -> Result<(), Fault> {
        count(&self.shared.tally.lost);
        if Instant::now() < self.safe_until {
            self.shared.wrong(format!("lost before its time: {how}"));
        }
        self.session.try_rows("ROLLBACK").map(drop)
    }

    fn release(&mut self, name: &str, token: i64) -> Result<(), Fault> {
        self.end(&format!("SELECT lease_release('{name}', {token})"))
    }

    /// Releases, again where a cancel comes in between.
    fn end(&mut self, sql: &str) -> Result<(), Fault> {
        let closing = match self.token(sql) {
            Err(fault) if fault.sqlstate == "57014" => self.token(sql)?,
            outcome => outcome?,
        };
        match closing {
            Some(_) => Ok(()),
            None => self.lost(sql),
        }
    }

    /// After a cancel, out of the transaction.
    fn recover<T>(&mut self, outcome: &Result<T, Fault>) -> Result<(), Fault> {
        if outcome.as_ref().is_err_and(|fault| fault.sqlstate == "57014") {
            self.session.try_rows("ROLLBACK")?;
        }
        Ok(())
    }

    fn shared(&mut self) -> Result<(), Fault> {
        let writer = self.one_in(8);
        let more = if writer { "" } else { ", shared => true" };
        let Some(token) = self.acquire("read", 3_000, more)? else { return Ok(()) };
        self.see("read", if writer { "exclusive" } else { "shared" }, token)?;
        self.pause(10);
        self.release("read", token)
    }

    fn one_of_three(&mut self) -> Result<(), Fault> {
        let Some(token) = self.acquire("three", 3_000, ", slots => 3")? else { return Ok(()) };
        self.see("three", "slots", token)?;
        self.pause(10);
        self.release("three", token)
    }

    /// Guards its grant and looks at what lives beside it.
    fn see(&mut self, name: &str, mode: &str, token: i64) -> Result<(), Fault> {
        let sql = format!(
            "BEGIN; SELECT lease_guard('{name}', {token}); \
             SELECT string_agg(DISTINCT mode, '+'), count(*) FROM lease_info('{name}') \
             WHERE state = 'held'"
        );
        let rows = match self.session.try_rows(&sql) {
            Err(fault) if is_lost(&fault) => return self.lost(&fault.message),
            outcome => outcome?,
        };
        let row = rows.last().cloned().unwrap_or_default();
        let beside: usize = row.get(1).cloned().flatten().unwrap_or_default().parse().unwrap_or(0);
        let most = match mode {
            "exclusive" => 1,
            "slots" => 3,
            _ => usize::MAX,
        };
        // None, where the guarded grant has run out meanwhile.
        if beside > 0 && (row[0].as_deref() != Some(mode) || beside > most) {
            self.shared.wrong(format!("beside a {mode} grant of {name}: {row:?}"));
        }
        self.pause(5);
        let end = if self.one_in(4) { "ROLLBACK" } else { "COMMIT" };
        self.session.try_rows(end).map(drop)
    }

    fn several(&mut self) -> Result<(), Fault> {
        let lists: [&[usize]; 4] = [&[2, 1, 0], &[0, 2], &[1, 0], &[2, 1, 2]];
        let list = lists[self.chance.random_range(0..lists.len())];
        let names = list.iter().map(|&i| EXCLUSIVE[i]).collect::<Vec<_>>().join(", ");
        // It does not wait, and waiters come first: so it tries for a while.
        for _ in 0..10 {
            self.safe_until = Instant::now() + Duration::from_secs(20);
            let sql = format!("SELECT lease_acquire_all('{{{names}}}', ttl => '20 s')");
            if let Some(token) = self.token(&sql)? {
                count(&self.shared.tally.granted);
                let mut once = list.to_vec();
                once.sort_unstable();
                once.dedup();
                let outcome = self.increment(&once, token, 4);
                self.recover(&outcome)?;
                self.end(&format!("SELECT lease_release_all('{{{names}}}', {token})"))?;
                return outcome;
            }
            self.pause(20);
        }
        count(&self.shared.tally.in_vain);
        Ok(())
    }
}

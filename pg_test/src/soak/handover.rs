//! From the end of one holder's grant to the answer that the next one gets, and what that compares with.

use crate::client::{Conninfo, Session};
use crate::process::{wait_until, PATIENCE};
use anyhow::{ensure, Context, Result};
use postgres::fallible_iterator::FallibleIterator;
use std::fmt;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

/// One kind of hand-over, measured.
#[derive(Debug, Clone)]
pub struct Handover {
    /// What was handed over, and how.
    pub name: &'static str,
    sorted: Vec<Duration>,
}

impl Handover {
    /// What so many of a hundred did not exceed.
    pub fn percentile(&self, percent: usize) -> Duration {
        let last = self.sorted.len().saturating_sub(1);
        self.sorted.get((self.sorted.len() * percent / 100).min(last)).copied().unwrap_or_default()
    }
}

impl fmt::Display for Handover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |percent| self.percentile(percent).as_secs_f64() * 1000.0;
        write!(
            f,
            "{:<24} p50 {:>7.2} ms   p99 {:>7.2} ms   ({} times)",
            self.name,
            ms(50),
            ms(99),
            self.sorted.len()
        )
    }
}

/// What a waiter is told to do.
#[derive(Clone, Copy)]
enum Turn {
    Lease,
    Advisory,
    Notify,
    NotifyThenTry,
}

const TURNS: [(Turn, &str); 4] = [
    (Turn::Lease, "lease, waited for"),
    (Turn::Advisory, "blocking advisory lock"),
    (Turn::Notify, "LISTEN/NOTIFY alone"),
    (Turn::NotifyThenTry, "LISTEN/NOTIFY and a try"),
];

/// Measures all kinds, in turns, so that all have the same machine. The bench has those of other products.
pub fn measure(conninfo: &Conninfo, times: usize) -> Result<Vec<Handover>> {
    let mut holder = conninfo.connect()?;
    let mut probe = conninfo.connect()?;
    let waiter = conninfo.connect()?;
    let pid = waiter.pid();
    let (turns, inbox) = mpsc::channel();
    let (outbox, answers) = mpsc::channel();
    let thread = std::thread::spawn(move || wait_in_turns(waiter, &inbox, &outbox));
    let mut taken: Vec<Vec<Duration>> = vec![Vec::new(); TURNS.len()];
    for round in 0..times * TURNS.len() {
        let (turn, name) = TURNS[round % TURNS.len()];
        prepare(&mut holder, turn)?;
        turns.send(turn)?;
        let waits = match turn {
            // A listener sits idle.
            Turn::Notify | Turn::NotifyThenTry => format!(
                "SELECT count(*) FROM pg_stat_activity WHERE pid = {pid} AND state = 'idle' \
                 AND query = 'LISTEN handover'"
            ),
            _ => format!(
                "SELECT count(*) FROM pg_stat_activity WHERE pid = {pid} \
                 AND wait_event_type IN ('Lock', 'Extension') AND state = 'active'"
            ),
        };
        wait_until("the waiter waits", PATIENCE, || {
            probe.text(&waits).is_ok_and(|n| n.as_deref() == Some("1"))
        })?;
        let start = Instant::now();
        holder.run("COMMIT")?;
        let answer = answers.recv_timeout(PATIENCE).with_context(|| name)??;
        taken[round % TURNS.len()].push(answer.saturating_duration_since(start));
    }
    drop(turns);
    thread.join().expect("it does not panic");
    let finished = TURNS.iter().zip(taken).map(|((_, name), mut sorted)| {
        sorted.sort_unstable();
        Handover { name, sorted }
    });
    Ok(finished.collect())
}

/// A transaction whose commit ends the wait.
fn prepare(holder: &mut Session, turn: Turn) -> Result<()> {
    match turn {
        Turn::Lease | Turn::NotifyThenTry => {
            let token = holder
                .text("SELECT lease_acquire('handover', ttl => '1 h', wait => '10 s')")?
                .context("the lease is free")?;
            holder.run(&format!("BEGIN; SELECT lease_release('handover', {token})"))?;
            match turn {
                Turn::NotifyThenTry => holder.run("NOTIFY handover"),
                _ => Ok(()),
            }
        }
        Turn::Advisory => holder.run("BEGIN; SELECT pg_advisory_xact_lock(1)"),
        Turn::Notify => holder.run("BEGIN; NOTIFY handover"),
    }
}

/// The waiter's thread: it waits, notes the time of the answer, and clears up.
fn wait_in_turns(mut session: Session, turns: &Receiver<Turn>, answers: &Sender<Result<Instant>>) {
    for turn in turns {
        let answer = wait_once(&mut session, turn);
        if answers.send(answer).is_err() {
            return;
        }
    }
}

fn wait_once(session: &mut Session, turn: Turn) -> Result<Instant> {
    match turn {
        Turn::Lease => {
            let token =
                session.text("SELECT lease_acquire('handover', ttl => '1 h', wait => '1 min')")?;
            let at = Instant::now();
            let token = token.context("it was released")?;
            session.run(&format!("SELECT lease_release('handover', {token})"))?;
            Ok(at)
        }
        Turn::Advisory => {
            session.run("SELECT pg_advisory_lock(1)")?;
            let at = Instant::now();
            session.run("SELECT pg_advisory_unlock(1)")?;
            Ok(at)
        }
        Turn::Notify | Turn::NotifyThenTry => {
            session.run("LISTEN handover")?;
            let came = session.notifications().timeout_iter(PATIENCE).next()?;
            let mut at = Instant::now();
            ensure!(came.is_some(), "no notification came");
            if matches!(turn, Turn::NotifyThenTry) {
                // A notification is not yet a lease.
                let token = session.text("SELECT lease_acquire('handover', ttl => '1 h')")?;
                at = Instant::now();
                let token = token.context("it was released")?;
                session.run(&format!("SELECT lease_release('handover', {token})"))?;
            }
            session.run("UNLISTEN handover")?;
            Ok(at)
        }
    }
}

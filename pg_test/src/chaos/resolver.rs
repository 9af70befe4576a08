//! Finishes prepared transactions that workers have left, which would otherwise keep their leases forever.

use super::instructions::Instructions;
use super::record::{Event, Log, Outcome, Record, now_us};
use super::worker::DATABASE;
use crate::client::{Conninfo, Session};
use crate::process::PATIENCE;
use anyhow::{Context, Result, ensure};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The number of the worker in its records.
const NUMBER: u32 = u32::MAX;
const PREFIX: &str = "chaos ";

/// The global id of a prepared transaction.
pub fn gid_of(id: i64) -> String {
    format!("{PREFIX}{id}")
}

/// Commits a prepared transaction, or rolls it back.
pub fn finish(session: &mut Session, id: i64, commit: bool) -> Outcome {
    let (verb, done) = match commit {
        true => ("COMMIT", Outcome::Committed),
        false => ("ROLLBACK", Outcome::RolledBack),
    };
    match session.try_rows(&format!("{verb} PREPARED '{}'", gid_of(id))) {
        Ok(_) => done,
        // A cancelled statement may have been executed before.
        Err(fault) if fault.is_disconnect() || fault.sqlstate == "57014" => Outcome::Unknown,
        Err(fault) => Outcome::Refused(fault.sqlstate.clone()),
    }
}

/// A thread that finishes them throughout a run.
pub struct Resolver {
    thread: Option<JoinHandle<Result<()>>>,
    over: Arc<AtomicBool>,
}

impl Resolver {
    /// Starts the thread. It reads in the file `instructions` where the server is, and records its actions in `log`.
    pub fn start(instructions: PathBuf, log: &Path, seed: u64) -> Result<Resolver> {
        let over = Arc::new(AtomicBool::new(false));
        let mut round = Round {
            log: Log::create(log)?,
            rng: StdRng::seed_from_u64(seed),
            session: None,
            era: 0,
            due: HashMap::new(),
        };
        let is_over = over.clone();
        let work = move || {
            let mut end = None;
            loop {
                if end.is_none() && is_over.load(Ordering::Relaxed) {
                    end = Some(Instant::now() + PATIENCE);
                }
                let left = round.go(&Instructions::read(&instructions)?, end.is_some())?;
                if end.is_some() && left == Some(0) {
                    return Ok(());
                }
                ensure!(end.is_none_or(|end| Instant::now() < end), "left prepared: {left:?}");
                std::thread::sleep(Duration::from_millis(100));
            }
        };
        Ok(Resolver { thread: Some(std::thread::spawn(work)), over })
    }

    /// Waits until all remaining transactions are finished.
    pub fn end(&mut self) -> Result<()> {
        self.over.store(true, Ordering::Relaxed);
        let Some(thread) = self.thread.take() else { return Ok(()) };
        thread.join().ok().context("the resolver panicked")?
    }
}

impl Drop for Resolver {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

struct Round {
    log: Log,
    rng: StdRng,
    session: Option<Session>,
    era: u32,
    /// The time at which each found transaction is to be finished.
    due: HashMap<i64, Instant>,
}

impl Round {
    /// Finishes those that are due, or all; returns how many were found.
    fn go(&mut self, instructions: &Instructions, everything: bool) -> Result<Option<usize>> {
        if self.session.is_none() || self.era != instructions.era {
            let conninfo = Conninfo::new(instructions.port, DATABASE).application("resolver");
            let conninfo = conninfo.set("statement_timeout", "8s").to_string();
            self.session = Session::connect(&conninfo).ok();
            self.era = instructions.era;
        }
        let Some(session) = &mut self.session else { return Ok(None) };
        let Ok(rows) = session.try_rows("SELECT gid FROM pg_prepared_xacts") else {
            self.session = None;
            return Ok(None);
        };
        let id = |row: &Vec<Option<String>>| row[0].as_deref()?.strip_prefix(PREFIX)?.parse().ok();
        let found: Vec<i64> = rows.iter().filter_map(id).collect();
        self.due.retain(|id, _| found.contains(id));
        for &id in &found {
            let patience = Duration::from_millis(self.rng.random_range(200..2_000));
            let due = *self.due.entry(id).or_insert_with(|| Instant::now() + patience);
            if everything || due <= Instant::now() {
                self.finish(id)?;
            }
        }
        Ok(Some(found.len()))
    }

    fn finish(&mut self, id: i64) -> Result<()> {
        let Some(session) = &mut self.session else { return Ok(()) };
        let (worker, era) = (NUMBER, self.era);
        let record = |event| Record { at: now_us(), worker, era, id, event };
        let commit = self.rng.random_bool(0.6);
        self.log.write(&record(Event::Finish { commit }))?;
        let outcome = finish(session, id, commit);
        if outcome == Outcome::Unknown {
            self.session = None;
        }
        self.log.write(&record(Event::Finished(outcome)))
    }
}

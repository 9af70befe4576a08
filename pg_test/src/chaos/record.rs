//! The records of workers: before each step what they ask, after it what they saw.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// How long the grants of a run last, in milliseconds.
pub const TTL_MS: i64 = 1_000;

/// The time of this machine, in microseconds. It is the same for all processes of a run; only servers
/// are made to believe in another.
pub fn now_us() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_micros() as i64)
}

/// The purpose of a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum What {
    /// Acquire a lease, or a slot of it; or take it back after a restart.
    Acquire,
    /// Acquire a shared grant.
    Share,
    /// Acquire two leases at once.
    AcquireAll,
    Renew,
    Release,
    /// Guard it, read a bound row, write what follows from what was read.
    Guarded,
    /// Write a bound row; the fence guards the lease.
    Bound,
    /// Write the row that no lease guards.
    Free,
    /// Make known what a lock service has granted.
    Adopt,
    /// Claim rows that are leases, write them, give them up.
    Row,
    /// Draw a token without waiting for the disk.
    Lazy,
}

impl What {
    /// Whether it makes a grant.
    pub fn acquires(self) -> bool {
        matches!(self, What::Acquire | What::Share | What::AcquireAll | What::Adopt)
    }

    /// Whether it writes a fenced row.
    pub fn writes(self) -> bool {
        matches!(self, What::Guarded | What::Bound | What::Free)
    }
}

/// How a transaction ended, as far as its client knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// The commit was acknowledged.
    Committed,
    /// The client rolled it back.
    RolledBack,
    /// NULL: the lease was taken, or lost.
    Lost,
    /// The server refused a statement, with this SQLSTATE; a deadlock with its detail.
    Refused(String),
    /// The connection broke before the commit was sent.
    Broken,
    /// The connection broke while the commit was on its way.
    Unknown,
    /// It was prepared: how it ends, who finishes it writes down.
    Prepared,
}

/// One line of a worker's log.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// When, in microseconds of [`now_us`].
    pub at: i64,
    pub worker: u32,
    /// How many failovers the server had been through when the worker connected.
    pub era: u32,
    pub id: i64,
    pub event: Event,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// A transaction is about to begin.
    Ask {
        what: What,
        /// The lease, by its number.
        lease: i32,
        /// The other one, where two are acquired at once.
        also: Option<i32>,
        /// The first token of the grant that it relies on.
        first: Option<i64>,
        /// A grant that it makes is to end with its session.
        session: bool,
    },
    /// A token was seen, committed or not.
    Token(i64),
    /// A number of the lock service's was adopted, committed or not.
    Adopted(i64),
    /// The lease is guarded from here on.
    Guarded,
    /// The commit is about to be sent.
    Commit,
    /// It is about to be prepared.
    Prepare,
    Prepared,
    /// It is over, as far as the one that began it is concerned.
    End(Outcome),
    /// Somebody is about to commit (or to roll back) the prepared transaction.
    Finish {
        commit: bool,
    },
    /// The outcome.
    Finished(Outcome),
    /// The session is about to give back all the locks that it holds as a session.
    Unlock,
    /// The session has ended, or given back all its locks, with which these grants end (their first tokens).
    SessionEnded(Vec<i64>),
}

/// A worker's own log. Each line reaches the kernel before the worker goes on, so it outlives the worker.
pub struct Log(File);

impl Log {
    pub fn create(path: &Path) -> Result<Log> {
        let file = OpenOptions::new().create(true).append(true).open(path);
        Ok(Log(file.with_context(|| format!("cannot write {}", path.display()))?))
    }

    pub fn write(&mut self, record: &Record) -> Result<()> {
        let line = serde_json::to_string(record)? + "\n";
        self.0.write_all(line.as_bytes())?;
        Ok(())
    }
}

/// All that workers wrote into logs of this directory, in the order of time.
pub fn read_all(dir: &Path) -> Result<Vec<Record>> {
    let mut records = Vec::new();
    for entry in fs::read_dir(dir)? {
        let text = fs::read_to_string(entry?.path())?;
        // The last line of a killed worker may be cut.
        records.extend(text.lines().filter_map(|line| serde_json::from_str(line).ok()));
    }
    records.sort_by_key(|record: &Record| record.at);
    Ok(records)
}

//! The records of workers: their request before each step, and its answer after it.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// The lease number of a transaction on rows.
pub const NO_LEASE: i32 = -1;

/// A row, and a token that the worker got for it.
pub type Claimed = (i32, i64);

/// The ttl of the grants in a run, in milliseconds.
pub const TTL_MS: i64 = 1_000;

/// The time of this machine in microseconds. It is the same for all processes of a run; only servers use a stepped
/// clock.
pub fn now_us() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_micros() as i64)
}

/// The purpose of a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Purpose {
    /// Acquire a lease or a slot of it, or reclaim it after a restart.
    Acquire,
    /// Acquire a shared grant.
    Share,
    /// Acquire two leases at once.
    AcquireAll,
    Renew,
    Release,
    /// Guard the lease, read a bound row, and write what follows from it.
    Guarded,
    /// Write a bound row, whose fence guards the lease.
    Bound,
    /// Write a row that no lease guards.
    Free,
    /// Adopt a grant of a lock service.
    Adopt,
    /// Claim row leases, write them, give them up.
    Row,
    /// Draw a token without waiting for the disk.
    Lazy,
}

impl Purpose {
    /// Returns true if the transaction makes a grant.
    pub fn acquires(self) -> bool {
        matches!(self, Purpose::Acquire | Purpose::Share | Purpose::AcquireAll | Purpose::Adopt)
    }

    /// Returns true if the transaction writes a fenced row.
    pub fn writes(self) -> bool {
        matches!(self, Purpose::Guarded | Purpose::Bound | Purpose::Free)
    }
}

/// The outcome of a transaction, as far as its client knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// The commit was acknowledged.
    Committed,
    /// The client rolled it back.
    RolledBack,
    /// NULL was returned: the lease was taken, or lost.
    Lost,
    /// The server refused a statement with this SQLSTATE; a deadlock has its detail.
    Refused(String),
    /// The connection broke before the commit was sent.
    Broken,
    /// The connection broke after the commit was sent.
    Unknown,
    /// The transaction was prepared; whoever finishes it records the outcome.
    Prepared,
}

/// A line of a worker's log.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// The time in microseconds of [`now_us`].
    pub at: i64,
    pub worker: u32,
    /// The number of failovers when the worker connected.
    pub era: u32,
    pub id: i64,
    pub event: Event,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// A transaction is about to begin.
    Request {
        purpose: Purpose,
        /// The number of the lease.
        lease: i32,
        /// The second lease, if two are acquired at once.
        also: Option<i32>,
        /// The first token of the grant that it relies on.
        first: Option<i64>,
        /// True if a grant that it makes ends with its session.
        session: bool,
    },
    /// A token was returned, committed or not.
    Token(i64),
    /// A number of the lock service was adopted, committed or not.
    Adopted(i64),
    /// The lease is guarded from here on.
    Guarded,
    /// The commit is about to be sent.
    Commit,
    /// The transaction is about to be prepared.
    Prepare,
    Prepared,
    /// The transaction is over for the worker that began it.
    End(Outcome),
    /// A session is about to commit or roll back the prepared transaction.
    Finish {
        commit: bool,
    },
    /// The outcome.
    Finished(Outcome),
    /// The session is about to release all its session locks.
    Unlock,
    /// The session has ended or released its session locks, with which these grants end (their first tokens).
    SessionEnded(Vec<i64>),
}

/// A worker's log. Each line reaches the kernel before the worker continues, so it survives the worker's death.
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

/// All records in the logs of this directory, sorted by time.
pub fn read_all(dir: &Path) -> Result<Vec<Record>> {
    let mut records = Vec::new();
    for entry in fs::read_dir(dir)? {
        let text = fs::read_to_string(entry?.path())?;
        // The last line of a killed worker may be incomplete.
        records.extend(text.lines().filter_map(|line| serde_json::from_str(line).ok()));
    }
    records.sort_by_key(|record: &Record| record.at);
    Ok(records)
}

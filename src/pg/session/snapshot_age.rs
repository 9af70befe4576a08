//! Since when the snapshot of a transaction at REPEATABLE READ or above can have been taken.
//!
//! One of its own was taken after the transaction's start. One that another transaction exported, and this one
//! imported (`SET TRANSACTION SNAPSHOT`, `pg_dump --jobs`), may be older by any time, and nothing in the server tells
//! that a snapshot was imported. But an exported snapshot is a file for as long as it can be imported.

use crate::pg::session::xact;
use pg_fence_rules::Instant;
use pgrx::pg_sys;
use std::fs;
use std::io;
use std::time::{Duration, SystemTime};

/// Where exported snapshots are, in the data directory, which is the current one.
const EXPORTED: &str = "pg_snapshots";
/// By how much the time of a file may lag behind the clock: it is that of the kernel's last tick, 10 ms at most.
const TICKS: Duration = Duration::from_millis(20);
/// From 1970 to the epoch of the server's timestamps.
const EPOCH: Duration = Duration::from_secs(946_684_800);

/// A time at which the transaction's snapshot had certainly not been taken yet; None where it may have been
/// imported.
pub fn not_taken_before() -> Option<Instant> {
    let started = xact::started_at();
    let own = is_certainly_own(started);
    own.unwrap_or(false).then_some(started)
}

/// Whether no snapshot like the transaction's can have been imported since its start: those that are exported now
/// have been all the while, and all of them differ from it.
fn is_certainly_own(started: Instant) -> io::Result<bool> {
    let started = SystemTime::UNIX_EPOCH
        + EPOCH
        + Duration::from_micros(started.micros().max(0).unsigned_abs());
    let mine = Limits::of_transaction();
    for file in fs::read_dir(EXPORTED)? {
        if Limits::of_file(&fs::read_to_string(file?.path())?).is_none_or(|theirs| theirs == mine) {
            return Ok(false);
        }
    }
    // Last: what comes or goes from now on does not matter, and what did before shows.
    Ok(fs::metadata(EXPORTED)?.modified()? + TICKS < started)
}

/// Transactions before the first had ended when a snapshot was taken, those from the second on had not begun.
#[derive(PartialEq, Eq)]
struct Limits {
    xmin: u32,
    xmax: u32,
}

impl Limits {
    fn of_transaction() -> Self {
        // SAFETY: the snapshot that the transaction keeps, read at once.
        let snapshot = unsafe { &*pg_sys::GetTransactionSnapshot() };
        Limits { xmin: snapshot.xmin.into_inner(), xmax: snapshot.xmax.into_inner() }
    }

    /// None when it is not written as Postgres writes an exported snapshot.
    fn of_file(text: &str) -> Option<Self> {
        let number = |key: &str| text.lines().find_map(|l| l.strip_prefix(key)?.parse().ok());
        Some(Limits { xmin: number("xmin:")?, xmax: number("xmax:")? })
    }
}

//! The statistics: fence.stats and fence.refusals.
//!
//! A session counts in its own memory. At the end of its transaction, however that ends, it adds the counts to the
//! segment that all sessions of the database share (`segment`). Only a refused write is added at once, since it may be
//! all that is left of its transaction. The statistics never stop a write: without a segment nothing is counted, which
//! is logged once. `pg_fence.statistics` switches counting off.

mod counter;
mod known_segments;
mod refused_write;
mod ring;
mod segment;

pub use counter::Counter;
pub use refused_write::{RefusalFacts, RefusedWrite, refused};

use self::counter::COUNTERS;
use crate::pg::session::settings;
use pg_fence_rules::Instant;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// This session's counts that are not in the segment yet. A backend has one thread, so plain additions suffice.
static PENDING: [AtomicU64; COUNTERS] = [const { AtomicU64::new(0) }; COUNTERS];

thread_local! {
    /// When this session began to wait in a queue. It is static so that a session terminated there is counted, too.
    static WAITING: Cell<Option<std::time::Instant>> = const { Cell::new(None) };
}

/// Counts one event. The count reaches the segment at the end of the transaction.
pub fn count(counter: Counter) {
    add(counter, 1);
}

/// Counts `number` events.
pub fn add(counter: Counter, number: usize) {
    pend(counter, number as u64);
    prepare();
}

/// Counts a row that the fence checks. Its statement has called `prepare`.
pub fn checked_row() {
    pend(Counter::WritesChecked, 1);
}

fn pend(counter: Counter, number: u64) {
    let pending = &PENDING[counter as usize];
    pending.store(pending.load(Ordering::Relaxed).wrapping_add(number), Ordering::Relaxed);
}

/// Attaches or creates the segment, if possible: at the end of a transaction it is too late for that.
pub fn prepare() {
    if !segment::is_ready() {
        segment::open_to_count();
    }
}

/// The stay of a session in a queue; its length is counted on drop.
pub struct InQueue(());

/// Counts an acquire that begins to wait.
pub fn enter_queue() -> InQueue {
    count(Counter::Waits);
    WAITING.set(Some(std::time::Instant::now()));
    InQueue(())
}

impl Drop for InQueue {
    fn drop(&mut self) {
        leave_queue();
    }
}

fn leave_queue() {
    if let Some(since) = WAITING.take() {
        pend(Counter::WaitTime, u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX));
    }
}

/// Adds the pending counts to the segment. Called at the end of each transaction, when errors are no longer allowed.
pub fn flush() {
    leave_queue();
    if PENDING.iter().all(|pending| pending.load(Ordering::Relaxed) == 0) {
        return;
    }
    if settings::statistics() {
        // Without a segment the counts stay pending.
        segment::add(&PENDING);
    } else {
        PENDING.iter().for_each(|pending| pending.store(0, Ordering::Relaxed));
    }
}

/// The content of fence.stats.
#[derive(Default)]
pub struct Snapshot {
    /// The time since which events are counted; `None` if none are.
    pub reset_at: Option<Instant>,
    /// The counts, in the order of the counters.
    pub numbers: [u64; COUNTERS],
}

/// The counts of all sessions, including this one's transaction so far.
pub fn snapshot() -> Snapshot {
    segment::open(segment::IfMissing::Skip);
    flush();
    let taken = segment::with(|segment| {
        let numbers = segment.counters().each_ref().map(|n| n.load(Ordering::Relaxed));
        Snapshot { reset_at: Some(segment.reset_at()), numbers }
    });
    taken.unwrap_or_default()
}

/// The latest refused writes, newest first.
pub fn refusals() -> Vec<RefusedWrite> {
    segment::open(segment::IfMissing::Skip);
    let entries = segment::with(|segment| segment.ring().entries());
    entries
        .unwrap_or_default()
        .iter()
        .filter_map(|entry| serde_json::from_slice(entry).ok())
        .collect()
}

/// Sets all counts to zero.
pub fn reset() {
    segment::open(segment::IfMissing::Create);
    flush();
    segment::with(|segment| segment.reset());
}

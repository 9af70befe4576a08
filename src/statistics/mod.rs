//! The statistics: fence.stats and fence.refusals.
//!
//! A session counts in memory of its own, and adds that to the segment that all sessions of the database share
//! (`segment`) when its transaction ends, however it ends. Only a refused write is put there at once: it may be all
//! that is left of its transaction. Nothing here keeps anybody from writing: where there is no segment to be had, it
//! is not counted, and the log says so once. `pg_fence.statistics` switches it off.

mod counter;
mod known_segments;
mod refused_write;
mod ring;
mod segment;

pub use counter::Counter;
pub use refused_write::{refused, Known, RefusedWrite};

use self::counter::COUNTERS;
use crate::pg::session::settings;
use pg_fence_rules::Instant;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// This session's counts that are not yet added. (A backend has one thread: these are plain additions.)
static PENDING: [AtomicU64; COUNTERS] = [const { AtomicU64::new(0) }; COUNTERS];

thread_local! {
    /// Since when this session stands in the queue: a session that is terminated there has waited, too.
    static WAITING: Cell<Option<std::time::Instant>> = const { Cell::new(None) };
}

/// Counts one event; added to the shared counters when the transaction ends.
#[inline]
pub fn count(counter: Counter) {
    add(counter, 1);
}

/// Counts several events at once.
#[inline]
pub fn add(counter: Counter, number: usize) {
    pend(counter, number as u64);
    prepare();
}

/// Counts a row that the fence judges. Its statement has called `prepare`.
#[inline(always)]
pub fn judged_row() {
    pend(Counter::WritesChecked, 1);
}

#[inline(always)]
fn pend(counter: Counter, number: u64) {
    let pending = &PENDING[counter as usize];
    pending.store(pending.load(Ordering::Relaxed).wrapping_add(number), Ordering::Relaxed);
}

/// Sees to it that there is a segment to add to, if there can be one: at a transaction's end it is too late.
#[inline]
pub fn prepare() {
    if !segment::is_ready() {
        segment::make();
    }
}

/// A session that stands in the queue, counted when it leaves.
pub struct InQueue(());

/// Counts an acquire that begins to wait.
pub fn stands_in_queue() -> InQueue {
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

/// Adds what is pending to the segment; called at the end of each transaction, when nothing may fail any more.
pub fn flush() {
    leave_queue();
    if PENDING.iter().all(|pending| pending.load(Ordering::Relaxed) == 0) {
        return;
    }
    if settings::statistics() {
        // Without a segment they stay pending.
        segment::add(&PENDING);
    } else {
        PENDING.iter().for_each(|pending| pending.store(0, Ordering::Relaxed));
    }
}

/// The content of fence.stats.
#[derive(Default)]
pub struct Snapshot {
    /// Since when is counted; None where nothing is.
    pub reset_at: Option<Instant>,
    /// In the order of the counters.
    pub numbers: [u64; COUNTERS],
}

/// The counts of all sessions, and of this one in its transaction so far.
pub fn snapshot() -> Snapshot {
    segment::open(segment::Missing::IsLeft);
    flush();
    let taken = segment::with(|segment| {
        let numbers = segment.counters().each_ref().map(|n| n.load(Ordering::Relaxed));
        Snapshot { reset_at: Some(segment.reset_at()), numbers }
    });
    taken.unwrap_or_default()
}

/// The latest refused writes, newest first.
pub fn refusals() -> Vec<RefusedWrite> {
    segment::open(segment::Missing::IsLeft);
    let entries = segment::with(|segment| segment.ring().entries());
    entries
        .unwrap_or_default()
        .iter()
        .filter_map(|entry| serde_json::from_slice(entry).ok())
        .collect()
}

/// Counts from zero.
pub fn reset() {
    segment::open(segment::Missing::IsMade);
    flush();
    segment::with(|segment| segment.reset());
}

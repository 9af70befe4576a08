//! The shared memory segment of a database's statistics: its layout, and how a session finds or creates it.
//!
//! Its handle is the last value of an unlogged sequence, because that is set without a transaction and emptied by any
//! recovery. After a clean stop the handle is still there, and so it is in a copy of the database. Therefore the
//! segment itself records its database, its sequence (the extension may be dropped and created again) and the start of
//! the server.

use super::counter::COUNTERS;
use super::known_segments;
use super::ring::{Ring, CELL_WORDS};
use crate::errors;
use crate::pg::call::raise;
use crate::pg::locks::lock::LockTag;
use crate::pg::session::clock;
use crate::pg::session::server;
use crate::pg::session::settings;
use crate::pg::session::xact;
use crate::pg::shared_memory;
use crate::pg::state::relation::{self, state_oid};
use crate::pg::state::sequence;
use pg_fence_rules::locks::MAKE_STATISTICS;
use pg_fence_rules::Instant;
use pgrx::pg_sys::Oid;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

/// Identifies the segment and its layout; a new layout gets a new last byte.
const MAGIC: u64 = u64::from_le_bytes(*b"pgfence\x03");

/// The index of each word of the segment. The counters follow, then the ring.
#[derive(Clone, Copy)]
enum Word {
    Magic,
    Database,
    Sequence,
    ServerStart,
    /// The number of refused writes that the ring stores.
    Kept,
    /// The time since which events are counted.
    ResetAt,
    /// The number of refused writes, and the spin lock of the ring.
    Refusals,
    RefusalsLock,
}

/// The index of the first counter.
const FIRST_COUNTER: usize = 16;
/// The index of the ring.
const FIRST_CELL: usize = 64;

const _: () = assert!(Word::RefusalsLock as usize + 1 < FIRST_COUNTER);
const _: () = assert!(FIRST_COUNTER + COUNTERS <= FIRST_CELL);

/// Time until the next attempt after the server had no memory or no room for a segment.
const RETRY_AFTER_US: i64 = 60_000_000;
/// Number of 1 ms retries while another session creates the segment.
const LOOKS: u32 = 100;

/// Catalog-change counter at which the attached segment was last validated.
static FOUND_AT: AtomicU64 = AtomicU64::new(NEVER);
/// The value of `FOUND_AT` if no segment is attached.
const NEVER: u64 = u64::MAX;
/// The time before which no further attempt is made, in microseconds of the server's clock.
static RETRY_AT: AtomicI64 = AtomicI64::new(i64::MIN);

/// What to do if the segment is missing.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// Nothing: no event has been counted then.
    IsLeft,
    /// Create the segment.
    IsMade,
}

/// Returns true if a segment is attached and no name in the catalog has changed since it was validated.
#[inline]
pub fn is_ready() -> bool {
    FOUND_AT.load(Ordering::Relaxed) == relation::name_changes()
}

/// Attaches or creates the segment, if statistics are switched on.
#[cold]
pub fn make() {
    if settings::statistics() {
        open(Missing::IsMade);
    }
}

/// Detaches the segment, which is the wrong one, and returns its handle.
fn leave() -> Option<u32> {
    FOUND_AT.store(NEVER, Ordering::Relaxed);
    shared_memory::leave()
}

/// Runs `work` on the attached segment; `None` if there is none.
#[inline]
pub fn with<T>(work: impl FnOnce(Segment) -> T) -> Option<T> {
    shared_memory::with(|words| work(Segment(words)))
}

/// Moves the pending counts into the attached segment, if there is one.
pub fn add(pending: &[AtomicU64; COUNTERS]) {
    with(|segment| {
        for (shared, pending) in segment.counters().iter().zip(pending) {
            // Only this session's thread changes the pending counts.
            let number = pending.load(Ordering::Relaxed);
            if number != 0 {
                shared.fetch_add(number, Ordering::Relaxed);
                pending.store(0, Ordering::Relaxed);
            }
        }
    });
}

/// The segment of this database, attached to this session.
#[derive(Clone, Copy)]
pub struct Segment<'a>(&'a [AtomicU64]);

impl<'a> Segment<'a> {
    fn word(&self, word: Word) -> &'a AtomicU64 {
        &self.0[word as usize]
    }

    fn read(&self, word: Word) -> u64 {
        self.word(word).load(Ordering::Relaxed)
    }

    /// The counters, in the order of `Counter`.
    #[inline]
    pub fn counters(&self) -> &'a [AtomicU64; COUNTERS] {
        // This cannot fail, because `is_of` has checked the length.
        self.0[FIRST_COUNTER..].first_chunk().expect("a segment has its counters")
    }

    /// The time since which events are counted.
    pub fn reset_at(&self) -> Instant {
        Instant::from_micros(self.read(Word::ResetAt) as i64)
    }

    /// The ring of refused writes. Each is owned by the writer's role.
    pub fn ring(&self) -> Ring<'a> {
        let cells = self.read(Word::Kept) as usize * CELL_WORDS;
        let cells = &self.0[FIRST_CELL..FIRST_CELL + cells];
        Ring { lock: self.word(Word::RefusalsLock), count: self.word(Word::Refusals), cells }
    }

    /// Sets all counts to zero.
    pub fn reset(&self) {
        self.ring().clear();
        for counter in self.counters() {
            counter.store(0, Ordering::Relaxed);
        }
        self.word(Word::ResetAt).store(clock::now().micros() as u64, Ordering::Relaxed);
    }

    /// Returns true if the segment belongs to this sequence and this start of the server.
    fn is_of(&self, sequence: Oid) -> bool {
        self.0.len() >= FIRST_CELL
            && identity(sequence).iter().all(|(word, value)| self.read(*word) == *value)
            && self.0.len() >= FIRST_CELL + self.read(Word::Kept) as usize * CELL_WORDS
    }
}

/// The words that identify the segment of this sequence.
fn identity(sequence: Oid) -> [(Word, u64); 4] {
    [
        (Word::Magic, MAGIC),
        (Word::Database, server::database().into()),
        (Word::Sequence, sequence.to_u32().into()),
        (Word::ServerStart, server::started_at().micros() as u64),
    ]
}

/// Attaches or creates the segment of this database, and releases those of dropped databases. If that fails, the
/// session continues without statistics.
#[cold]
pub fn open(missing: Missing) {
    // On a standby nothing is counted.
    if server::in_recovery() || !server::has_dynamic_memory() {
        return;
    }
    attach_or_make(missing);
    if known_segments::may_be_over() && xact::may_begin_savepoint() {
        alone(known_segments::forget_those_that_are_over);
    }
}

fn attach_or_make(missing: Missing) {
    let changes = relation::name_changes();
    let Ok(sequence) = state_oid(c"stats_memory_seq") else { return };
    if with(|segment| segment.is_of(sequence)) == Some(true) {
        FOUND_AT.store(changes, Ordering::Relaxed);
        return;
    }
    // The attached segment is that of a dropped extension.
    leave();
    if clock::now().micros() < RETRY_AT.load(Ordering::Relaxed) {
        return;
    }
    let outcome = match attach(sequence) {
        Found::Missing if missing == Missing::IsMade && settings::statistics() => {
            make_one(sequence)
        }
        outcome => outcome,
    };
    match outcome {
        Found::Attached => FOUND_AT.store(changes, Ordering::Relaxed),
        Found::Impossible(why) => {
            RETRY_AT.store(clock::now().micros() + RETRY_AFTER_US, Ordering::Relaxed);
            if xact::may_begin_savepoint() && alone(known_segments::is_to_be_told) == Some(true) {
                raise::log(errors::not_counted(&server::database_name(), &why));
            }
        }
        Found::Missing | Found::NotNow => {}
    }
}

/// The outcome of the search for the segment.
enum Found {
    Attached,
    /// There is no segment yet.
    Missing,
    /// The sequence is locked, or another session is creating the segment.
    NotNow,
    /// The segment cannot be attached or created, for this reason.
    Impossible(String),
}

/// Attaches the segment whose handle is in the sequence.
fn attach(sequence: Oid) -> Found {
    let Some(found) = sequence::try_read_unlogged(sequence) else { return Found::NotNow };
    let last = found.and_then(|unlogged| unlogged.last);
    let Some(handle) = last.and_then(|last| u32::try_from(last).ok()) else {
        return Found::Missing;
    };
    match shared_memory::attach(handle, |words| Segment(words).is_of(sequence)) {
        Ok(true) => Found::Attached,
        Ok(false) => Found::Missing,
        Err(why) => Found::Impossible(why),
    }
}

/// Creates the segment, in one session at a time. Waits for other sessions for at most a tenth of a second.
fn make_one(sequence: Oid) -> Found {
    if !xact::may_begin_savepoint() {
        return Found::NotNow;
    }
    for _ in 0..LOOKS {
        // Another session may have created the segment first.
        let found = alone(|| match attach(sequence) {
            Found::Missing => make_alone(sequence),
            found => found,
        });
        if let Some(found) = found {
            return found;
        }
        std::thread::sleep(Duration::from_millis(1));
        if let found @ (Found::Attached | Found::Impossible(_)) = attach(sequence) {
            return found;
        }
    }
    Found::NotNow
}

/// Runs `work` under the lock of the server's segments; `None` if another session holds it.
fn alone<T>(work: impl FnOnce() -> T) -> Option<T> {
    let lock = LockTag::statistics();
    if !lock.take_quietly(MAKE_STATISTICS.mode) {
        return None;
    }
    let done = work();
    lock.give_quietly(MAKE_STATISTICS.mode);
    Some(done)
}

fn make_alone(sequence: Oid) -> Found {
    if !sequence::try_lock(sequence) {
        return Found::NotNow;
    }
    let kept = settings::refusals_kept();
    known_segments::forget_those_that_are_over();
    known_segments::forget_own();
    // The server raises an error if memory is short, which must not end the statement that is counted.
    let made = xact::try_in_savepoint(|| {
        if sequence::read_unlogged(sequence).is_none() {
            return Err("fence.stats_memory_seq is not as it was made");
        }
        let handle = shared_memory::create(FIRST_CELL + kept * CELL_WORDS, |words| {
            let segment = Segment(words);
            segment.word(Word::Kept).store(kept as u64, Ordering::Relaxed);
            segment.reset();
            for (word, value) in identity(sequence) {
                segment.word(word).store(value, Ordering::Relaxed);
            }
        });
        let handle = handle.ok_or("too many dynamic shared memory segments")?;
        sequence::set(sequence, handle.into());
        Ok(handle)
    });
    let why = match made {
        Ok(Ok(handle)) => {
            known_segments::add(handle);
            return Found::Attached;
        }
        Ok(Err(why)) => why.to_owned(),
        Err(why) => why,
    };
    if let Some(handle) = leave() {
        // No session would ever find the segment.
        xact::in_savepoint(|| shared_memory::let_go(handle));
    }
    Found::Impossible(why)
}

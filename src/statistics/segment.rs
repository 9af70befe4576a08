//! The shared memory segment of a database's statistics: its layout, and how a session finds or creates it.
//!
//! The server's list of segments (`known_segments`) says which segment is that of this database. The segment records the
//! extension to which it belongs, which may be dropped and created again.

use super::counter::COUNTERS;
use super::known_segments;
use super::ring::{CELL_WORDS, Ring};
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
use pg_fence_rules::Instant;
use pg_fence_rules::locks::MAKE_STATISTICS;
use pgrx::pg_sys::Oid;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

/// The index of each word of the segment. The counters follow, then the ring.
#[derive(Clone, Copy)]
enum Word {
    /// The oid of the extension's token sequence.
    Extension,
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
/// Number of 1 ms retries while another session creates a segment.
const ATTEMPTS: u32 = 100;

/// Catalog-change counter at which the attached segment was last validated.
static FOUND_AT: AtomicU64 = AtomicU64::new(NEVER);
/// The value of `FOUND_AT` if no segment is attached.
const NEVER: u64 = u64::MAX;
/// The time before which no further attempt is made, in microseconds of the server's clock.
static RETRY_AT: AtomicI64 = AtomicI64::new(i64::MIN);

/// What to do if the segment is missing.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum IfMissing {
    /// Nothing: no event has been counted then.
    Skip,
    /// Create the segment.
    Create,
}

/// Returns true if a segment is attached and no name in the catalog has changed since it was validated.
pub fn is_ready() -> bool {
    FOUND_AT.load(Ordering::Relaxed) == relation::name_changes()
}

/// Attaches or creates the segment, if statistics are switched on.
pub fn open_to_count() {
    if settings::statistics() {
        open(IfMissing::Create);
    }
}

/// Detaches the segment, which is the wrong one.
fn detach() {
    FOUND_AT.store(NEVER, Ordering::Relaxed);
    shared_memory::detach();
}

/// Runs `work` on the attached segment; `None` if there is none.
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
    pub fn counters(&self) -> &'a [AtomicU64; COUNTERS] {
        // This cannot fail: `create` has given the segment this length.
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

    /// Returns true if the segment belongs to the extension with this token sequence.
    fn is_of(&self, sequence: Oid) -> bool {
        self.read(Word::Extension) == u64::from(sequence.to_u32())
    }
}

/// Attaches or creates the segment of this database, and releases those of dropped databases. If that fails, the
/// session continues without statistics.
pub fn open(if_missing: IfMissing) {
    // On a standby nothing is counted. In a parallel query no savepoint can be begun.
    if server::in_recovery() || !server::has_dynamic_memory() || xact::is_parallel() {
        return;
    }
    attach_or_create(if_missing);
    if known_segments::may_have_dropped() {
        under_lock(known_segments::release_dropped);
    }
}

fn attach_or_create(if_missing: IfMissing) {
    let changes = relation::name_changes();
    let Ok(sequence) = state_oid(c"token_seq") else { return };
    let is_listed = || known_segments::own() == shared_memory::handle();
    if with(|segment| segment.is_of(sequence) && is_listed()) == Some(true) {
        FOUND_AT.store(changes, Ordering::Relaxed);
        return;
    }
    // The attached segment is that of a dropped extension.
    detach();
    if clock::now().micros() < RETRY_AT.load(Ordering::Relaxed) {
        return;
    }
    // A rollback would drop an extension that this transaction has created, and the older one would count on.
    let may_create = || settings::statistics() && !sequence::is_created_here(sequence);
    let found = match attach(sequence) {
        Ok(false) if if_missing == IfMissing::Create && may_create() => create_once(sequence),
        found => found,
    };
    match found {
        Ok(true) => FOUND_AT.store(changes, Ordering::Relaxed),
        Ok(false) => {}
        Err(why) => {
            RETRY_AT.store(clock::now().micros() + RETRY_AFTER_US, Ordering::Relaxed);
            if under_lock(known_segments::is_first_to_report) == Some(true) {
                raise::log(errors::not_counted(&server::database_name(), &why));
            }
        }
    }
}

/// Attaches the segment of this database. Returns false if there is none yet; the error says why it cannot be attached.
fn attach(sequence: Oid) -> Result<bool, String> {
    if !known_segments::find_list() {
        return Err("no shared memory for the list of segments".into());
    }
    let Some(handle) = known_segments::own() else { return Ok(false) };
    shared_memory::attach(handle, |words| Segment(words).is_of(sequence))
}

/// Creates the segment, in one session at a time. Waits for other sessions for at most a tenth of a second.
fn create_once(sequence: Oid) -> Result<bool, String> {
    for attempt in 0..ATTEMPTS {
        if attempt > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        // Another session may have created the segment first.
        let found = under_lock(|| match attach(sequence) {
            Ok(false) => create(sequence),
            found => found,
        });
        if let Some(found) = found {
            return found;
        }
    }
    attach(sequence)
}

fn create(sequence: Oid) -> Result<bool, String> {
    let kept = settings::refusals_kept();
    known_segments::release_dropped();
    known_segments::release_own();
    if !known_segments::has_room() {
        return Err("too many databases count already".into());
    }
    // The server raises an error if memory is short, which must not end the statement that is counted.
    let created = xact::try_in_savepoint(|| {
        shared_memory::create(FIRST_CELL + kept * CELL_WORDS, |words| {
            let segment = Segment(words);
            segment.word(Word::Kept).store(kept as u64, Ordering::Relaxed);
            segment.word(Word::Extension).store(sequence.to_u32().into(), Ordering::Relaxed);
            segment.reset();
        })
    });
    let handle = created?.ok_or("too many dynamic shared memory segments")?;
    known_segments::add(handle);
    Ok(true)
}

/// Runs `work` under the lock of the server's segments; `None` if another session holds it.
fn under_lock<T>(work: impl FnOnce() -> T) -> Option<T> {
    let lock = LockTag::statistics();
    if !lock.try_take(MAKE_STATISTICS.mode) {
        return None;
    }
    let done = work();
    lock.release_quietly(MAKE_STATISTICS.mode);
    Some(done)
}

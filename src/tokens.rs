//! The token sequence: drawing tokens, advancing the sequence, and what a backend knows of both.

use crate::errors::{self, Report};
use crate::pg::locks::lock::LockTag;
use crate::pg::locks::wait;
use crate::pg::session::clock;
use crate::pg::session::server;
use crate::pg::session::xact;
use crate::pg::state::relation::{self, state_oid};
use crate::pg::state::sequence::{self, PageState};
use crate::statistics::{self, Counter};
use pg_fence_rules::epochs::{self, Due, Recorded};
use pg_fence_rules::locks::ADVANCE;
use pg_fence_rules::{Epoch, Token};
use pgrx::pg_sys::Oid;
use std::cell::Cell;

/// What this backend has read of the token sequence and its epoch.
///
/// It determines the epoch once, because no backend survives a recovery: the start of the server and the identity of
/// the database stay the same. (A session of a standby survives the promotion, but has remembered nothing before.) A
/// dump may still be loaded, which changes `dumped`.
#[derive(Clone, Copy)]
struct SequenceCache {
    /// The sequence that has advanced since the server started, as far as is known; INVALID if that is not known yet.
    advanced_for: Oid,
    /// The sequence to which the two numbers belong: a restore may replace it.
    sequence: Oid,
    /// The greatest token that the sequence is known to have reached.
    high_water: Token,
    /// The number in a dump made when this epoch was determined. Another number shows that the sequence was advanced
    /// since, or that a dump was loaded.
    dumped: Token,
    /// The epoch, and the state of the page of `dumped` before the epoch was read. Each new epoch and each loaded dump
    /// changes that page, so an unchanged page means an unchanged epoch.
    epoch: Option<(PageState, Epoch)>,
}

thread_local! {
    static CACHE: Cell<SequenceCache> = const {
        Cell::new(SequenceCache::empty(Oid::INVALID))
    };
}

impl SequenceCache {
    /// The cache before anything was read of the sequence.
    const fn empty(sequence: Oid) -> SequenceCache {
        SequenceCache {
            advanced_for: Oid::INVALID,
            sequence,
            high_water: Token::BEFORE_ALL,
            dumped: Token::BEFORE_ALL,
            epoch: None,
        }
    }

    /// The cache of this sequence.
    fn of(sequence: Oid) -> SequenceCache {
        let cache = CACHE.get();
        if cache.sequence == sequence {
            return cache;
        }
        SequenceCache::empty(sequence)
    }

    fn has_advanced(&self) -> bool {
        self.advanced_for == self.sequence
    }
}

/// Draws a token. The caller holds the lock of the lease.
///
/// The token need not be on disk when it is returned, because the start after a crash advances the sequence beyond it.
///
/// `above` is the greatest token known of the lease. If the sequence is not above that, and above what this backend
/// drew before, it was set back by hand: a new epoch begins. Errors: 55000 if the sequence is altered or exhausted, and
/// 2200H from Postgres.
pub fn draw(above: Token) -> Result<Token, Report> {
    let oid = sequence()?;
    check_fit(oid)?;
    loop {
        xact::serve_interrupts();
        let cache = current_cache(oid)?;
        let above = above.max(cache.high_water);
        let token = Token::from_bigint(sequence::next(oid));
        // Drawing locks the sequence, so earlier changes of it are visible now, and none can follow.
        check_fit(oid)?;
        if token > above {
            CACHE.set(SequenceCache { high_water: token, ..cache });
            if epochs::dump_lags(cache.dumped, token) {
                set_dumped(token)?;
            }
            return Ok(token);
        }
        CACHE.set(SequenceCache { advanced_for: Oid::INVALID, high_water: above, ..cache });
    }
}

/// The last token drawn, 0 if there is none. Writes nothing: right after a start of the server, it is the last token
/// that reached the disk before. `None` on a standby, where the value runs ahead of the primary's.
pub fn last() -> Result<Option<Token>, Report> {
    if server::in_recovery() {
        return Ok(None);
    }
    Ok(Some(last_of(sequence()?)))
}

fn last_of(oid: Oid) -> Token {
    token_of(&sequence::read(oid))
}

fn token_of(page: &sequence::Page) -> Token {
    page.last.map_or(Token::BEFORE_ALL, Token::from_bigint)
}

/// The sequence from which tokens are drawn.
pub fn sequence() -> Result<Oid, Report> {
    state_oid(c"token_seq")
}

/// Returns true if this token was ever drawn from that sequence. Tokens lost in a crash count as drawn, so the sequence
/// must have advanced since.
#[inline]
pub fn issued(oid: Oid, token: Token) -> bool {
    let cache = CACHE.get();
    token > Token::BEFORE_ALL
        && ((cache.sequence == oid && token <= cache.high_water) || issued_by_now(oid, token))
}

#[cold]
fn issued_by_now(oid: Oid, token: Token) -> bool {
    // A sequence that was altered has issued nothing.
    let Ok(cache) = current_cache(oid) else { return false };
    let last = last_of(oid);
    CACHE.set(SequenceCache { high_water: cache.high_water.max(last), ..cache });
    token <= last
}

/// The present epoch: a grant speaks only if its latest token is above the number to which the sequence advanced then.
/// Begins a new epoch first if this is another database than the one that drew last, or a dump of one was loaded.
/// Errors: 55000.
pub fn epoch() -> Result<Epoch, Report> {
    let oid = sequence()?;
    if let Some(epoch) = cached_epoch(oid)? {
        return Ok(epoch);
    }
    advance_if_due(oid)?;
    recorded_epoch()
}

/// As `epoch`, but writes nothing: if a new epoch is due, no token speaks.
pub fn epoch_seen() -> Result<Epoch, Report> {
    // A standby has the epoch that it has replayed. The new one begins after its promotion.
    if server::in_recovery() {
        return recorded_epoch();
    }
    let oid = sequence()?;
    if let Some(epoch) = cached_epoch(oid)? {
        return Ok(epoch);
    }
    match what_is_due(oid)? {
        (Due::NewEpoch, _) => return Ok(Epoch::TO_BEGIN),
        // Remembered, so that a session that only checks tokens need not find it out each time.
        (Due::Nothing, seen) => CACHE.set(SequenceCache { advanced_for: oid, ..seen }),
        (Due::Advance, _) => (),
    }
    recorded_epoch()
}

/// The epoch, if it has been determined and no dump was loaded since; otherwise `None`.
fn cached_epoch(oid: Oid) -> Result<Option<Epoch>, Report> {
    let cache = SequenceCache::of(oid);
    // The page is read before the epoch. A new epoch is written before the page, so a stored epoch cannot be older than
    // the stored page state.
    let page = sequence::read(state_oid(c"dumped_token_seq")?);
    if !cache.has_advanced() || cache.dumped != token_of(&page) {
        return Ok(None);
    }
    if let Some((_, epoch)) = cache.epoch.filter(|(state, _)| page.state == Some(*state)) {
        return Ok(Some(epoch));
    }
    let epoch = recorded_epoch()?;
    CACHE.set(SequenceCache { epoch: page.state.map(|state| (state, epoch)), ..cache });
    Ok(Some(epoch))
}

/// The number of epochs begun since the extension was created (`jumps` of `fence_status`).
pub fn epochs_begun() -> Result<i64, Report> {
    Ok(sequence::read(state_oid(c"jump_count_seq")?).last.unwrap_or(0))
}

fn recorded_epoch() -> Result<Epoch, Report> {
    Ok(Epoch::at(last_of(state_oid(c"jump_token_seq")?)))
}

/// Errors with 55000 unless the sequence's values are fit to be tokens. Checks its definition once, and again after a
/// definition in the catalog has changed.
fn check_fit(oid: Oid) -> Result<(), Report> {
    thread_local! {
        static FIT: Cell<(Oid, u64)> = const { Cell::new((Oid::INVALID, 0)) };
    }
    if FIT.get() == (oid, relation::generation()) {
        return Ok(());
    }
    if let Some(what) = sequence::fault(oid) {
        return Err(errors::sequence_altered(what));
    }
    FIT.set((oid, relation::generation()));
    Ok(())
}

/// The cache, after an advance if one is due, and after the epoch is determined anew if a dump was loaded since. Called
/// before each draw and decision, so that sessions older than a dump are as safe as newer ones.
fn current_cache(oid: Oid) -> Result<SequenceCache, Report> {
    let cache = SequenceCache::of(oid);
    if !cache.has_advanced() || cache.dumped != dumped()? {
        advance_if_due(oid)?;
    }
    Ok(SequenceCache::of(oid))
}

/// The number that a dump contains, which is not far behind the last token. Dumps do not contain the sequence itself,
/// so loading one does not set it back.
fn dumped() -> Result<Token, Report> {
    Ok(last_of(state_oid(c"dumped_token_seq")?))
}

fn set_dumped(token: Token) -> Result<(), Report> {
    sequence::set(state_oid(c"dumped_token_seq")?, token.bigint());
    CACHE.set(SequenceCache { dumped: token, ..CACHE.get() });
    Ok(())
}

/// Ensures that the sequence is beyond all tokens that this database may have drawn before a start, a failover, a
/// restore or a copy. The advance is durable before any token is drawn or checked; concurrent sessions make it once.
#[inline]
pub fn ensure_advanced(oid: Oid) -> Result<(), Report> {
    if CACHE.get().advanced_for == oid {
        return Ok(());
    }
    advance_if_due(oid)
}

#[cold]
fn advance_if_due(oid: Oid) -> Result<(), Report> {
    let (due, seen) = what_is_due(oid)?;
    let mut has_new_epoch = false;
    let cache = match due {
        Due::Nothing => seen,
        _ => under_advance_lock(|| match what_is_due(oid)? {
            (Due::Nothing, seen) => Ok(seen),
            (Due::Advance, _) => advance_and_record(oid, set_dumped),
            (Due::NewEpoch, _) => {
                has_new_epoch = true;
                begin_epoch(oid)
            }
        })?,
    };
    CACHE.set(SequenceCache { advanced_for: oid, ..cache });
    if has_new_epoch {
        statistics::count(Counter::Jumps);
    }
    Ok(())
}

/// Runs `work` under the lock of the advance. The lock is released at once, so that no open transaction delays an
/// advance.
fn under_advance_lock<T>(work: impl FnOnce() -> Result<T, Report>) -> Result<T, Report> {
    let lock = LockTag::token_advance();
    lock.take(ADVANCE.mode, ADVANCE.waits)?;
    let result = work();
    lock.release(ADVANCE.mode);
    result
}

/// The advance that is due, and the state of the sequence when that was decided.
fn what_is_due(oid: Oid) -> Result<(Due, SequenceCache), Report> {
    let cache = SequenceCache::of(oid);
    // Read before the sequence. Every advance sets the sequence first, so it is behind this number only if a dump was
    // loaded.
    let dumped = dumped()?;
    let start = sequence::read_unlogged(state_oid(c"server_start_seq")?);
    let recorded = Recorded {
        identity: sequence::read(state_oid(c"database_identity_seq")?).last,
        start: start.and_then(|s| s.last),
        dumped,
        last: last_of(oid),
    };
    let expected = start.map(|s| server::start(oid, s.file));
    let due =
        epochs::due(&recorded, || server::identity(oid), expected.as_ref(), cache.high_water)?;
    Ok((due, SequenceCache { high_water: recorded.last.max(cache.high_water), dumped, ..cache }))
}

/// Begins a new epoch on request, and returns the number to which the sequence advanced. Errors: 55000.
pub fn new_epoch() -> Result<Token, Report> {
    let oid = sequence()?;
    let cache = under_advance_lock(|| begin_epoch(oid))?;
    CACHE.set(SequenceCache { advanced_for: oid, ..cache });
    statistics::count(Counter::Jumps);
    Ok(cache.high_water)
}

/// Called once, when the extension is created. No grant is older, so no token becomes invalid. But grants that a
/// restore loads are older, and stay invalid until the restore has loaded the rest.
pub fn record_creation() -> Result<(), Report> {
    advance_and_record(sequence()?, set_epoch).map(drop)
}

fn begin_epoch(oid: Oid) -> Result<SequenceCache, Report> {
    advance_and_record(oid, |target| {
        set_epoch(target)?;
        // Set rather than drawn: nextval logs a value 32 ahead, which would appear after a crash.
        sequence::set_durably(state_oid(c"jump_count_seq")?, epochs_begun()? + 1);
        Ok(())
    })
}

/// Begins an epoch: no grant without a greater token speaks from now on. The number in dumps is set right after, which
/// shows other sessions that their stored epoch is outdated.
fn set_epoch(target: Token) -> Result<(), Report> {
    sequence::set_durably(state_oid(c"jump_token_seq")?, target.bigint());
    set_dumped(target)
}

fn advance_sequence(oid: Oid) -> Result<Token, Report> {
    check_fit(oid)?;
    let last = last_of(oid).max(SequenceCache::of(oid).high_water).max(dumped()?);
    // Waits once only: if the clock does not advance, the last value decides.
    wait::pause(epochs::wait_for_clock(last, clock::now()));
    let target = epochs::target(last, clock::now()).ok_or_else(errors::tokens_exhausted)?;
    sequence::set_durably(oid, target.bigint());
    Ok(target)
}

/// Advances the sequence, calls `then` with the number that it has reached, and records the identity and the start, once
/// everything else is on disk. After an earlier crash the sequence advances once more, never once too few. The hash of the
/// start is set last, because with it the other values are believed.
fn advance_and_record(
    oid: Oid,
    then: impl FnOnce(Token) -> Result<(), Report>,
) -> Result<SequenceCache, Report> {
    let identity = server::identity(oid)?;
    let reached = advance_sequence(oid)?;
    then(reached)?;
    sequence::set_durably(state_oid(c"database_identity_seq")?, identity.fingerprint());
    let start = state_oid(c"server_start_seq")?;
    if let Some(found) = sequence::read_unlogged(start) {
        sequence::set(start, server::start(oid, found.file).fingerprint(identity.fingerprint()));
    }
    Ok(SequenceCache {
        high_water: reached,
        dumped: reached,
        epoch: None,
        ..SequenceCache::of(oid)
    })
}

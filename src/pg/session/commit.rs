//! Asynchronous commits, for transactions whose loss in a crash is safe.
//!
//! The rules say which work may be lost (`durability`). The transaction must not write anything else.

use crate::pg::session::scope::Ending;
use crate::pg::session::xact;
use pgrx::pg_sys;
use std::cell::Cell;

/// The state before a commit was made asynchronous.
#[derive(Clone, Copy)]
struct Relaxed {
    /// The value of `synchronous_commit`.
    setting: i32,
    /// The number of WAL records that this session had written.
    records: i64,
}

thread_local! {
    /// The end of this transaction's WAL while all of it may be lost in a crash; otherwise 0.
    static ONLY_LOSABLE: Cell<u64> = const { Cell::new(0) };
    static RELAXED: Cell<Option<Relaxed>> = const { Cell::new(None) };
    /// True if this transaction's commit must wait as the session's settings say.
    static AS_ASKED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work`, which returns its result and whether it may be lost in a crash. If the transaction writes nothing else,
/// its commit is asynchronous. (No token is drawn twice: the start after a crash advances the sequence.)
pub fn losable<R, E>(work: impl FnOnce() -> Result<(R, bool), E>) -> Result<R, E> {
    // SAFETY: reads the end of this transaction's last WAL record; 0 if there is none.
    let end = || unsafe { pg_sys::XactLastRecEnd };
    // A commit never waits for records without a transaction id, such as that of pruning a page during a read.
    let alone = !xact::has_written() || end() == ONLY_LOSABLE.get();
    let outcome = work();
    let is_losable = matches!(outcome, Ok((_, true)));
    ONLY_LOSABLE.set(if alone && is_losable { end() } else { 0 });
    outcome.map(|(result, _)| result)
}

/// Makes this transaction's commit wait for the disk, whatever `synchronous_commit` says, and for synchronous standbys
/// if it says so.
pub fn force() {
    AS_ASKED.set(true);
    // SAFETY: sets a flag of this transaction.
    unsafe { pg_sys::ForceSyncCommit() };
}

/// The number of WAL records that this session has written.
fn records() -> i64 {
    // SAFETY: a counter of this process.
    unsafe { pg_sys::pgWalUsage.wal_records }
}

/// Returns true if the session waits for synchronous standbys. Then a grant waits for them, too: a primary that was cut
/// off must not go on granting. (A lost release leaves the lease taken, so it need not wait.)
pub fn waits_for_standbys() -> bool {
    // SAFETY: settings, read on this thread; the names are NULL or NUL-terminated.
    unsafe {
        let names = pg_sys::SyncRepStandbyNames;
        pg_sys::synchronous_commit > pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_LOCAL_FLUSH as i32
            && !names.is_null()
            && *names != 0
    }
}

/// Makes the commit asynchronous if all of it may be lost. Called before the commit record is written.
pub fn relax() {
    let only = ONLY_LOSABLE.take();
    // SAFETY: an int that the commit reads on this thread; `restore` puts it back, whatever the outcome.
    unsafe {
        if only != 0 && only == pg_sys::XactLastRecEnd && !AS_ASKED.get() {
            let setting = pg_sys::synchronous_commit;
            RELAXED.set(Some(Relaxed { setting, records: records() }));
            pg_sys::synchronous_commit = pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_OFF as i32;
        }
    }
}

/// Restores the setting when the transaction is over. If another extension has written something after `relax`, there
/// are more records than that of the commit, and the session waits for the disk now.
pub fn restore(ending: Ending) {
    ONLY_LOSABLE.set(0);
    AS_ASKED.set(false);
    let Some(before) = RELAXED.take() else { return };
    // SAFETY: as above; this session has written the commit record.
    unsafe {
        pg_sys::synchronous_commit = before.setting;
        let off = pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_OFF as i32;
        if ending == Ending::Committed && before.setting > off && records() > before.records + 1 {
            let commit = pg_sys::XactLastCommitEnd;
            pg_sys::XLogFlush(commit);
            pg_sys::SyncRepWaitForLSN(commit, true);
        }
    }
}

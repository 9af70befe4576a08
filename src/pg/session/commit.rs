//! The commit of a transaction whose work a crash may lose without harm: it need not wait for the disk.
//!
//! Which work that is, the rules say (`durability`). All that the transaction writes must be such work.

use crate::pg::session::scope::Ending;
use crate::pg::session::xact;
use pgrx::pg_sys;
use std::cell::Cell;

/// The changes made for a commit that need not wait.
#[derive(Clone, Copy)]
struct Relaxed {
    /// `synchronous_commit` as it was.
    setting: i32,
    /// How many WAL records this session had written by then.
    records: i64,
}

thread_local! {
    /// End of the WAL that this transaction has written, as long as a crash may lose all of it.
    static ONLY_LOSABLE: Cell<u64> = const { Cell::new(0) };
    static RELAXED: Cell<Option<Relaxed>> = const { Cell::new(None) };
    /// Whether this transaction's commit is to wait as its session asked.
    static AS_ASKED: Cell<bool> = const { Cell::new(false) };
}

/// Does work, and is told with its result whether a crash may lose it: then the commit need not wait for the disk where
/// the transaction writes nothing else. (No token is drawn again: the start moves the sequence on.)
pub fn losable<R, E>(work: impl FnOnce() -> Result<(R, bool), E>) -> Result<R, E> {
    // SAFETY: reads where this transaction's last WAL record ends; 0 when there is none.
    let end = || unsafe { pg_sys::XactLastRecEnd };
    // No commit waits for a record without a transaction id, such as that of a page pruned while it was read.
    let alone = !xact::has_written() || end() == ONLY_LOSABLE.get();
    let outcome = work();
    let is_losable = matches!(outcome, Ok((_, true)));
    ONLY_LOSABLE.set(if alone && is_losable { end() } else { 0 });
    outcome.map(|(result, _)| result)
}

/// Lets the commit of this transaction wait for the disk, whatever `synchronous_commit` says; and for synchronous standbys
/// where that says so.
pub fn force() {
    AS_ASKED.set(true);
    // SAFETY: sets a flag of this transaction.
    unsafe { pg_sys::ForceSyncCommit() };
}

/// How many WAL records this session has written.
fn records() -> i64 {
    // SAFETY: a counter of this process.
    unsafe { pg_sys::pgWalUsage.wal_records }
}

/// Does the session wait for synchronous standbys? Then so does a grant: a primary that was cut off must not go on
/// answering. (A release that is lost leaves the lease taken, so it need not wait for them.)
pub fn waits_for_standbys() -> bool {
    // SAFETY: settings, read on this thread; the names are NULL or NUL-terminated.
    unsafe {
        let names = pg_sys::SyncRepStandbyNames;
        pg_sys::synchronous_commit > pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_LOCAL_FLUSH as i32
            && !names.is_null()
            && *names != 0
    }
}

/// Called before the commit record is written: lets a commit of losable work alone not wait.
pub fn relax() {
    let only = ONLY_LOSABLE.take();
    // SAFETY: an int that the commit reads on this thread; put back by `restore`, whatever comes of the commit.
    unsafe {
        if only != 0 && only == pg_sys::XactLastRecEnd && !AS_ASKED.get() {
            let setting = pg_sys::synchronous_commit;
            RELAXED.set(Some(Relaxed { setting, records: records() }));
            pg_sys::synchronous_commit = pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_OFF as i32;
        }
    }
}

/// Puts the setting back when the transaction is over. Another extension may have written something in the same
/// commit, after `relax`: then there is more than the commit's own record, and it is waited for now.
pub fn restore(ending: Ending) {
    ONLY_LOSABLE.set(0);
    AS_ASKED.set(false);
    let Some(before) = RELAXED.take() else { return };
    // SAFETY: as above; the commit's record is one that this session has written.
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

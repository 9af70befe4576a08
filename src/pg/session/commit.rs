//! The commit of a transaction that has done nothing but release leases: it need not wait for the disk.

use pgrx::pg_sys;
use std::cell::Cell;

/// What was changed for a commit that need not wait.
#[derive(Clone, Copy)]
struct Relaxed {
    /// `synchronous_commit` as it was.
    setting: i32,
    /// How many WAL records this session had written by then.
    records: i64,
}

thread_local! {
    /// End of the WAL that this transaction has written, as long as it has written nothing but releases.
    static ONLY_RELEASES: Cell<u64> = const { Cell::new(0) };
    static RELAXED: Cell<Option<Relaxed>> = const { Cell::new(None) };
    /// Whether this transaction's commit is to wait, come what may.
    static FORCED: Cell<bool> = const { Cell::new(false) };
}

/// Does a release, whose commit need not wait for the disk where the transaction writes nothing else: WAL
/// is in order, so whoever acquires next makes it durable too, and losing it in a crash only leaves the lease
/// taken until its deadline. (The closing token is not drawn again: the start moves the sequence on.)
pub fn release<R>(work: impl FnOnce() -> R) -> R {
    // SAFETY: reads where this transaction's last WAL record ends; 0 when there is none.
    let end = || unsafe { pg_sys::XactLastRecEnd };
    let alone = end() == 0 || end() == ONLY_RELEASES.get();
    let result = work();
    ONLY_RELEASES.set(if alone && !FORCED.get() { end() } else { 0 });
    result
}

/// Lets the commit of this transaction wait for the disk, whatever `synchronous_commit` says; and for synchronous standbys
/// where that says so, also if it has done nothing but release.
pub fn force() {
    FORCED.set(true);
    // SAFETY: sets a flag of this transaction.
    unsafe { pg_sys::ForceSyncCommit() };
}

/// How many WAL records this session has written.
fn records() -> i64 {
    // SAFETY: a counter of this process.
    unsafe { pg_sys::pgWalUsage.wal_records }
}

/// Called before the commit record is written: lets a commit of releases alone not wait.
pub(in crate::pg) fn relax() {
    let only = ONLY_RELEASES.take();
    // SAFETY: an int that the commit reads on this thread; put back by `restore`, whatever comes of the commit.
    unsafe {
        if only != 0 && only == pg_sys::XactLastRecEnd {
            let setting = pg_sys::synchronous_commit;
            RELAXED.set(Some(Relaxed { setting, records: records() }));
            pg_sys::synchronous_commit = pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_OFF as i32;
        }
    }
}

/// Puts the setting back when the transaction is over. Another extension may have written something in the same
/// commit, after `relax`: then there is more than the commit's own record, and it is waited for now.
pub(in crate::pg) fn restore(committed: bool) {
    ONLY_RELEASES.set(0);
    FORCED.set(false);
    let Some(before) = RELAXED.take() else { return };
    // SAFETY: as above; the commit's record is one that this session has written.
    unsafe {
        pg_sys::synchronous_commit = before.setting;
        let off = pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_OFF as i32;
        if committed && before.setting > off && records() > before.records + 1 {
            let commit = pg_sys::XactLastCommitEnd;
            pg_sys::XLogFlush(commit);
            pg_sys::SyncRepWaitForLSN(commit, true);
        }
    }
}

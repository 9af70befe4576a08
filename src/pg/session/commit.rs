//! The commit of a transaction that has done nothing but release leases: it need not wait for the disk.

use pgrx::pg_sys;
use std::cell::Cell;

thread_local! {
    /// End of the WAL that this transaction has written, as long as it has written nothing but releases.
    static ONLY_RELEASES: Cell<u64> = const { Cell::new(0) };
    /// The setting to be put back after a commit that did not wait for the disk.
    static AWAITED: Cell<Option<i32>> = const { Cell::new(None) };
}

/// Does a release, whose commit need not wait for the disk where the transaction writes nothing else: WAL
/// is in order, so whoever acquires next makes it durable too, and losing it in a crash only leaves the lease
/// taken until its deadline. (The closing token is not drawn again: the start moves the sequence on.)
pub fn release<R>(work: impl FnOnce() -> R) -> R {
    // SAFETY: reads where this transaction's last WAL record ends; 0 when there is none.
    let end = || unsafe { pg_sys::XactLastRecEnd };
    let alone = end() == 0 || end() == ONLY_RELEASES.get();
    let result = work();
    ONLY_RELEASES.set(if alone { end() } else { 0 });
    result
}

/// Called right before the commit record is written: lets a commit of releases alone not wait.
pub(in crate::pg) fn relax() {
    let only = ONLY_RELEASES.take();
    // SAFETY: an int that the commit reads next on this thread; put back by `restore`, whatever comes of the
    // commit.
    unsafe {
        if only != 0 && only == pg_sys::XactLastRecEnd {
            AWAITED.set(Some(pg_sys::synchronous_commit));
            pg_sys::synchronous_commit = pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_OFF as i32;
        }
    }
}

/// Puts the setting back when the transaction is over.
pub(in crate::pg) fn restore() {
    ONLY_RELEASES.set(0);
    if let Some(before) = AWAITED.take() {
        // SAFETY: as above.
        unsafe { pg_sys::synchronous_commit = before };
    }
}

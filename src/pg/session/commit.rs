//! Asynchronous commits, for transactions whose loss in a crash is safe.
//!
//! The rules say which work may be lost (`durability`). The transaction must not write anything else.

use crate::pg::session::scope::Ending;
use crate::pg::session::xact;
use pgrx::pg_sys;
use std::cell::Cell;

/// How the commit of this transaction waits for the disk.
#[derive(Clone, Copy, Default)]
struct Commit {
    /// The end of the transaction's WAL when all of it might be lost in a crash; 0 if it never might.
    may_be_lost_up_to: u64,
    /// True if the commit must wait as the session's settings say.
    must_flush: bool,
    /// The value of `synchronous_commit` before the commit was made asynchronous, and the number of WAL records that
    /// this session had written by then.
    to_restore: Option<(i32, i64)>,
}

thread_local! {
    static COMMIT: Cell<Commit> = Cell::default();
}

/// What one call writes. The commit may skip the wait for the disk only if everything that the transaction writes may
/// be lost in a crash: this part, what came before it and what follows. (No token is drawn twice all the same: the start
/// after a crash advances the sequence.)
pub struct WalSpan {
    /// True if all that the transaction wrote before may be lost.
    may_earlier_be_lost: bool,
}

impl WalSpan {
    /// The part that begins now.
    pub fn begin() -> Self {
        // A commit never waits for records without a transaction id, such as that of pruning a page during a read.
        let may_be_lost_up_to = COMMIT.get().may_be_lost_up_to;
        WalSpan { may_earlier_be_lost: !xact::has_written() || wal_end() == may_be_lost_up_to }
    }

    /// Notes that a crash may lose this part, which ends now.
    pub fn may_be_lost(self) {
        if self.may_earlier_be_lost {
            COMMIT.set(Commit { may_be_lost_up_to: wal_end(), ..COMMIT.get() });
        }
    }
}

/// The end of this transaction's last WAL record; 0 if there is none.
fn wal_end() -> u64 {
    // SAFETY: a variable of this process.
    unsafe { pg_sys::XactLastRecEnd }
}

/// Makes this transaction's commit wait for the disk, whatever `synchronous_commit` says, and for synchronous standbys
/// if it says so.
pub fn flush_at_commit() {
    COMMIT.set(Commit { must_flush: true, ..COMMIT.get() });
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
pub fn allow_asynchronous() {
    let commit = COMMIT.get();
    if commit.may_be_lost_up_to == 0 || commit.may_be_lost_up_to != wal_end() || commit.must_flush {
        return;
    }
    // SAFETY: an int that the commit reads on this thread; `restore` puts it back, whatever the outcome.
    unsafe {
        COMMIT.set(Commit { to_restore: Some((pg_sys::synchronous_commit, records())), ..commit });
        pg_sys::synchronous_commit = pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_OFF as i32;
    }
}

/// Restores the setting when the transaction is over. If another extension has written something since
/// `allow_asynchronous`, the session has written more WAL records than that of the commit, and waits for the disk now.
pub fn restore(ending: Ending) {
    let Some((setting, records_before)) = COMMIT.take().to_restore else { return };
    // SAFETY: as above; this session has written the commit record.
    unsafe {
        pg_sys::synchronous_commit = setting;
        let off = pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_OFF as i32;
        if ending == Ending::Committed && setting > off && records() > records_before + 1 {
            let commit = pg_sys::XactLastCommitEnd;
            pg_sys::XLogFlush(commit);
            pg_sys::SyncRepWaitForLSN(commit, true);
        }
    }
}

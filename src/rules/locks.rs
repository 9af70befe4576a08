//! The locks that protect a lease: their objects, their conflicts, and which step takes which.
//!
//! A decision about a lease reads its rows without a lock, locks, reads the rows again, reads the clock and decides.
//! Then it draws a token and writes, or it releases the locks and wakes the waiters. Without the second read, two
//! callers could both find the lease free. With a clock read before the lock, a caller that waited could use a grant
//! that has expired meanwhile.
//!
//! The modes are PostgreSQL's, chosen by their conflicts (`storage/lockdefs.h`, and `LockConflicts` in
//! `storage/lmgr/lock.c`). A transaction never conflicts with itself.

/// What is locked, in the order in which a call takes its locks, so that no two calls wait for each other. Locks that
/// are not waited for may be taken in any order. One step is out of this order: a guard of several leases may wait for
/// an adoption ([`AWAIT_ADOPTION`]) with grants locked, and the deadlock detector finds a circle.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Lock {
    /// The queue of a lease. The session that holds this lock is the head, and the only one of the queue that tries to
    /// acquire. An adopted lease has no such queue: there a transaction announces by this lock that it adopts the lease.
    Queue,
    /// The turn of a shared or slot acquire, from its choice of a slot until it has written its row. It is released when
    /// the call ends.
    Turn,
    /// A grant: the name of a lease and a slot. Guards, changes and take-overs conflict here.
    Grant,
    /// The advance of the token sequence: one lock for the database, released at once.
    Advance,
    /// The creation of a database's statistics segment: one lock for the server, released at once.
    Statistics,
}

/// PostgreSQL's lock modes with its numbers (`storage/lockdefs.h`), without RowShare and ShareRowExclusive, which no step
/// takes. The steps below say what each mode is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[allow(missing_docs)]
pub enum LockMode {
    AccessShare = 1,
    RowExclusive = 3,
    ShareUpdateExclusive = 4,
    Share = 5,
    Exclusive = 7,
    AccessExclusive = 8,
}

impl LockMode {
    /// PostgreSQL's number of the mode.
    pub const fn number(self) -> i32 {
        self as i32
    }

    /// Returns true if a lock in this mode excludes another transaction's in mode `other`.
    pub const fn conflicts_with(self, other: LockMode) -> bool {
        /// `LockConflicts` of `storage/lmgr/lock.c`, a bit for each mode's number.
        const CONFLICTS: [i32; 9] = [
            0,
            1 << 8,
            1 << 7 | 1 << 8,
            1 << 5 | 1 << 6 | 1 << 7 | 1 << 8,
            1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8,
            1 << 3 | 1 << 4 | 1 << 6 | 1 << 7 | 1 << 8,
            1 << 3 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8,
            1 << 2 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8,
            1 << 1 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8,
        ];
        CONFLICTS[self.number() as usize] & 1 << other.number() != 0
    }
}

/// A lock that a step of a call takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LockStep {
    /// The locked object.
    pub lock: Lock,
    /// The mode, which decides what the lock excludes.
    pub mode: LockMode,
    /// True if the step always waits for a lock that is held. Otherwise it fails, except for an adoption with `wait`.
    pub waits: bool,
}

const fn waiting(lock: Lock, mode: LockMode) -> LockStep {
    LockStep { lock, mode, waits: true }
}

const fn at_once(lock: Lock, mode: LockMode) -> LockStep {
    LockStep { lock, mode, waits: false }
}

/// A waiting session becomes the head of the queue, until it stops waiting.
pub const HEAD_OF_QUEUE: LockStep = waiting(Lock::Queue, LockMode::AccessExclusive);
/// A try checks whether any session waits, which its head shows by a conflicting lock. Never taken.
pub const SOMEBODY_WAITS: LockStep = at_once(Lock::Queue, LockMode::Share);
/// An exclusive acquire takes slot 0, then every other slot with a grant that is not closed, until the transaction ends.
/// A grant whose end is committed needs only a check that nobody holds a conflicting lock: guards and changes of it do
/// not begin anew.
pub const ACQUIRE_EXCLUSIVE: LockStep = at_once(Lock::Grant, LockMode::AccessExclusive);
/// Shared and slot acquires of one lease take turns, so that each sees the rows of the ones before it.
pub const TAKE_TURN: LockStep = waiting(Lock::Turn, LockMode::AccessExclusive);
/// A shared or slot acquire first excludes exclusive ones by a lock of slot 0.
pub const BLOCK_EXCLUSIVE: LockStep = at_once(Lock::Grant, LockMode::AccessShare);
/// A shared or slot acquire takes the chosen slot, and the slots of the grants that it ends. Before it chooses, it asks
/// whether another session has a conflicting lock on a slot whose grant is over: that one guards or changes the grant.
pub const TAKE_SLOT: LockStep = at_once(Lock::Grant, LockMode::Exclusive);
/// A renewal, release or revocation holds this lock until the transaction ends.
pub const CHANGE: LockStep = waiting(Lock::Grant, LockMode::ShareUpdateExclusive);
/// A heartbeat takes the same lock as a renewal, but waits for none.
pub const KEEP: LockStep = at_once(CHANGE.lock, CHANGE.mode);
/// A guard takes this lock before it decides, and holds it until the transaction ends, so that every acquire notices
/// it.
pub const GUARD: LockStep = waiting(Lock::Grant, LockMode::RowExclusive);
/// An adoption excludes all others, at once or after a wait: then nobody relies on a grant of an older token, and later
/// guards queue behind it.
pub const ADOPT: LockStep = at_once(Lock::Grant, LockMode::AccessExclusive);
/// An adoption announces itself before it waits, and until its transaction ends if it waited in vain.
pub const ANNOUNCE_ADOPTION: LockStep = at_once(Lock::Queue, LockMode::RowExclusive);
/// A guard of an adopted lease waits for the end of an announced adoption, which may have ended the grant.
pub const AWAIT_ADOPTION: LockStep = waiting(Lock::Queue, LockMode::Share);
/// An adoption that cannot replace a guarded grant ends it, unless another transaction is already changing it.
pub const END_OLDER: LockStep = at_once(Lock::Grant, LockMode::ShareUpdateExclusive);
/// A prune locks one row's grant at a time and releases it at once.
pub const PRUNE: LockStep = at_once(Lock::Grant, LockMode::AccessExclusive);
/// The token sequence advances.
pub const ADVANCE: LockStep = waiting(Lock::Advance, LockMode::AccessExclusive);
/// The first session that counts creates the statistics segment.
pub const MAKE_STATISTICS: LockStep = at_once(Lock::Statistics, LockMode::AccessExclusive);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conflicts_are_mutual() {
        use LockMode::*;
        let all =
            [AccessShare, RowExclusive, ShareUpdateExclusive, Share, Exclusive, AccessExclusive];
        for one in all {
            for other in all {
                assert_eq!(one.conflicts_with(other), other.conflicts_with(one));
            }
        }
    }

    #[test]
    fn who_excludes_whom() {
        for (line, (one, others, excludes)) in [
            // A take-over conflicts with guards and changes, which do not conflict with each other.
            (ACQUIRE_EXCLUSIVE, &[GUARD, CHANGE][..], true),
            (TAKE_SLOT, &[GUARD, CHANGE, TAKE_SLOT], true),
            (PRUNE, &[GUARD, CHANGE], true),
            (CHANGE, &[CHANGE], true),
            (GUARD, &[GUARD, CHANGE], false),
            // Grants of different kinds exclude each other while they are made.
            (BLOCK_EXCLUSIVE, &[ACQUIRE_EXCLUSIVE], true),
            (BLOCK_EXCLUSIVE, &[TAKE_SLOT, CHANGE], false),
            (TAKE_TURN, &[TAKE_TURN], true),
            // A check conflicts with what it checks for, but not with another check.
            (SOMEBODY_WAITS, &[HEAD_OF_QUEUE], true),
            (SOMEBODY_WAITS, &[SOMEBODY_WAITS], false),
            (AWAIT_ADOPTION, &[ANNOUNCE_ADOPTION], true),
            (AWAIT_ADOPTION, &[AWAIT_ADOPTION], false),
            (ANNOUNCE_ADOPTION, &[ANNOUNCE_ADOPTION], false),
        ]
        .into_iter()
        .enumerate()
        {
            for other in others {
                assert_eq!(one.lock, other.lock, "line {line}");
                assert_eq!(one.mode.conflicts_with(other.mode), excludes, "line {line}: {other:?}");
            }
        }
    }

    #[test]
    fn what_a_call_waits_for_it_takes_in_one_order() {
        let wait = [HEAD_OF_QUEUE, TAKE_TURN, GUARD, ADVANCE];
        assert!(wait.iter().all(|w| w.waits));
        assert!(wait.windows(2).all(|two| two[0].lock < two[1].lock));
        assert!(HEAD_OF_QUEUE.lock < CHANGE.lock && CHANGE.lock < ADVANCE.lock);
        // An acquire waits in the queue and for its turn only; a prune waits for nothing.
        let at_once = [SOMEBODY_WAITS, ACQUIRE_EXCLUSIVE, BLOCK_EXCLUSIVE, TAKE_SLOT, PRUNE];
        assert!(at_once.iter().all(|w| !w.waits));
    }
}

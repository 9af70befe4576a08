//! The locks that protect a lease: what each is on, what conflicts with what, who takes which in which order.
//!
//! A decision about a lease is made like this: look at its rows without a lock, lock, read the rows again, read the
//! clock, decide, then draw a token and write, or give the locks back and wake the waiters. Without the second
//! look two callers could both find the lease free; without the clock after the lock a caller that waited could
//! use a grant that has expired meanwhile.
//!
//! The modes are PostgreSQL's own, chosen by what they conflict with (`storage/lockdefs.h`, `LockConflicts` in
//! `storage/lmgr/lock.c`). A transaction never conflicts with itself.

/// The objects of locks, in the order in which one call takes them, so that no two calls wait for each other; what is
/// taken without waiting may come at any point.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Lock {
    /// The queue of those who wait for a lease: its holder is the head of the queue, the only one that looks.
    Queue,
    /// A grant: a lease's name and a slot. Guards, changes and take-overs meet here.
    Grant,
    /// That a grant is guarded, and nothing else. A session that asks for that must not be misled by a renewal, which
    /// locks the grant, too.
    Guarded,
    /// Whether the grants that a lease is getting are shared or slots: two transactions that cannot see each
    /// other's rows must not add one of each.
    SharedOrSlots,
    /// The move of the token sequence: one for the database, given back at once.
    Move,
    /// Making the shared memory in which a database counts: one for the server, given back at once.
    Statistics,
}

/// How a lock is held: PostgreSQL's modes by its numbers (`storage/lockdefs.h`), but for the one that nothing here takes.
/// The steps below say what each is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[allow(missing_docs)]
pub enum LockMode {
    AccessShare = 1,
    RowShare = 2,
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

    /// Does this mode keep another transaction from having `other` on the same lock?
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

/// A lock that a step takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LockStep {
    /// The object of the lock.
    pub lock: Lock,
    /// The mode, which decides whom it excludes.
    pub mode: LockMode,
    /// Whether the step waits for the one that is in the way; else it is given up.
    pub waits: bool,
}

const fn waiting(lock: Lock, mode: LockMode) -> LockStep {
    LockStep { lock, mode, waits: true }
}

const fn at_once(lock: Lock, mode: LockMode) -> LockStep {
    LockStep { lock, mode, waits: false }
}

/// A session that waits for a lease becomes the head of its queue, until it stops waiting.
pub const HEAD_OF_QUEUE: LockStep = waiting(Lock::Queue, LockMode::AccessExclusive);
/// A try asks whether somebody has a lock that is in the way of this one: who waits has a head. It takes nothing.
pub const SOMEBODY_WAITS: LockStep = at_once(Lock::Queue, LockMode::Share);
/// An exclusive acquire takes slot 0 and then every other slot that has a row, until the transaction ends.
pub const ACQUIRE_ALONE: LockStep = at_once(Lock::Grant, LockMode::AccessExclusive);
/// A shared or slot acquire first excludes exclusive ones, on slot 0.
pub const EXCLUDE_ALONE: LockStep = at_once(Lock::Grant, LockMode::AccessShare);
/// A shared acquire excludes those that ask for slots.
pub const EXCLUDE_SLOTS: LockStep = at_once(Lock::SharedOrSlots, LockMode::Share);
/// An acquire of slots excludes those that ask to share.
pub const EXCLUDE_SHARED: LockStep = at_once(Lock::SharedOrSlots, LockMode::RowExclusive);
/// Then it takes the slot that it found, and those of the grants that it ends.
pub const TAKE_SLOT: LockStep = at_once(Lock::Grant, LockMode::Exclusive);
/// Never taken: a session that conflicts with it is putting a grant into the slot.
pub const SLOT_IS_BEING_TAKEN: LockStep = at_once(Lock::Grant, LockMode::RowShare);
/// Renew, release and revoke, until the transaction ends.
pub const CHANGE: LockStep = waiting(Lock::Grant, LockMode::ShareUpdateExclusive);
/// A heartbeat of many leases takes each as a renewal does, but waits for none.
pub const KEEP: LockStep = at_once(CHANGE.lock, CHANGE.mode);
/// A guard, until the transaction ends; taken before it decides, so that nobody overlooks it from then on.
pub const GUARD: LockStep = waiting(Lock::Grant, LockMode::RowExclusive);
/// The guard of a shared or slot grant takes this lock too. An acquire that looks for a free slot tests it
/// (`IS_GUARDED`); a renewal does not take it. The guard of an exclusive grant does not need it: an acquire that wants
/// its slot takes `TAKE_SLOT`, which conflicts with `GUARD`.
pub const GUARD_BESIDE_OTHERS: LockStep = waiting(Lock::Guarded, LockMode::RowExclusive);
/// An acquire that finds a shared grant, or one of several slots, over asks whether an open transaction still relies on it.
pub const IS_GUARDED: LockStep = at_once(Lock::Guarded, LockMode::Share);
/// An adoption takes the lease alone, at once or after a wait: nobody relies on a grant of an older token then, and who
/// would rely on one waits behind it.
pub const ADOPT: LockStep = at_once(Lock::Grant, LockMode::AccessExclusive);
/// An adoption that has to leave a guarded grant in its slot ends it; who is already changing it goes first.
pub const END_OLDER: LockStep = at_once(Lock::Grant, LockMode::ShareUpdateExclusive);
/// A prune takes each row alone, and gives it back at once.
pub const PRUNE: LockStep = at_once(Lock::Grant, LockMode::AccessExclusive);
/// The token sequence moves on.
pub const MOVE_ON: LockStep = waiting(Lock::Move, LockMode::AccessExclusive);
/// The first session that counts makes the shared memory for it.
pub const MAKE_STATISTICS: LockStep = at_once(Lock::Statistics, LockMode::AccessExclusive);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conflicts_are_mutual() {
        use LockMode::*;
        let all = [
            AccessShare,
            RowShare,
            RowExclusive,
            ShareUpdateExclusive,
            Share,
            Exclusive,
            AccessExclusive,
        ];
        for one in all {
            for other in all {
                assert_eq!(one.conflicts_with(other), other.conflicts_with(one));
            }
        }
    }

    #[test]
    fn who_excludes_whom() {
        for (line, (one, others, excludes)) in [
            // A take-over meets guards and changes, but these do not meet each other.
            (ACQUIRE_ALONE, &[GUARD, CHANGE][..], true),
            (TAKE_SLOT, &[GUARD, CHANGE, TAKE_SLOT], true),
            (PRUNE, &[GUARD, CHANGE], true),
            (CHANGE, &[CHANGE], true),
            (GUARD, &[GUARD, CHANGE], false),
            // Kinds of grants exclude each other while they are made.
            (EXCLUDE_ALONE, &[ACQUIRE_ALONE], true),
            (EXCLUDE_ALONE, &[TAKE_SLOT, CHANGE], false),
            (EXCLUDE_SLOTS, &[EXCLUDE_SHARED], true),
            (EXCLUDE_SLOTS, &[EXCLUDE_SLOTS], false),
            (EXCLUDE_SHARED, &[EXCLUDE_SHARED], false),
            // A session that takes a slot is told from one that guards or changes its grant.
            (SLOT_IS_BEING_TAKEN, &[TAKE_SLOT, ACQUIRE_ALONE], true),
            (SLOT_IS_BEING_TAKEN, &[GUARD, CHANGE, EXCLUDE_ALONE], false),
            // A session that asks sees the one that it asks for, and not another that asks.
            (SOMEBODY_WAITS, &[HEAD_OF_QUEUE], true),
            (SOMEBODY_WAITS, &[SOMEBODY_WAITS], false),
            (IS_GUARDED, &[GUARD_BESIDE_OTHERS], true),
            (IS_GUARDED, &[IS_GUARDED], false),
        ]
        .into_iter()
        .enumerate()
        {
            for other in others {
                assert_eq!(one.lock, other.lock, "line {line}");
                assert_eq!(one.mode.conflicts_with(other.mode), excludes, "line {line}: {other:?}");
            }
        }
        // A renewal does not lock what tells of guards.
        assert_ne!(IS_GUARDED.lock, CHANGE.lock);
    }

    #[test]
    fn what_a_call_waits_for_it_takes_in_one_order() {
        let wait = [HEAD_OF_QUEUE, GUARD, GUARD_BESIDE_OTHERS, MOVE_ON];
        assert!(wait.iter().all(|w| w.waits));
        assert!(wait.windows(2).all(|two| two[0].lock < two[1].lock));
        assert!(HEAD_OF_QUEUE.lock < CHANGE.lock && CHANGE.lock < MOVE_ON.lock);
        // An acquire waits in the queue only, so a try never waits; nor does a prune.
        let acquire = [SOMEBODY_WAITS, ACQUIRE_ALONE, EXCLUDE_ALONE, EXCLUDE_SLOTS, EXCLUDE_SHARED];
        assert!(acquire.iter().chain([&TAKE_SLOT, &IS_GUARDED, &PRUNE]).all(|w| !w.waits));
    }
}

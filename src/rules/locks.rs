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

/// How a lock is held: PostgreSQL's modes, but for the one that nothing here takes. The steps below say what each is
/// for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[allow(missing_docs)]
pub enum LockMode {
    AccessShare,
    RowShare,
    RowExclusive,
    ShareUpdateExclusive,
    Share,
    Exclusive,
    AccessExclusive,
}

impl LockMode {
    /// All of them, from the weakest to the strongest.
    pub const ALL: [LockMode; 7] = [
        LockMode::AccessShare,
        LockMode::RowShare,
        LockMode::RowExclusive,
        LockMode::ShareUpdateExclusive,
        LockMode::Share,
        LockMode::Exclusive,
        LockMode::AccessExclusive,
    ];

    /// PostgreSQL's number of the mode (`storage/lockdefs.h`).
    pub const fn number(self) -> i32 {
        match self {
            LockMode::AccessShare => 1,
            LockMode::RowShare => 2,
            LockMode::RowExclusive => 3,
            LockMode::ShareUpdateExclusive => 4,
            LockMode::Share => 5,
            LockMode::Exclusive => 7,
            LockMode::AccessExclusive => 8,
        }
    }

    /// Does this mode keep another transaction from having `other` on the same lock?
    pub const fn conflicts_with(self, other: LockMode) -> bool {
        use LockMode::*;
        match (self, other) {
            (AccessExclusive, _) | (_, AccessExclusive) => true,
            (AccessShare, _) | (_, AccessShare) => false,
            (Exclusive, _) | (_, Exclusive) => true,
            (RowShare, _) | (_, RowShare) => false,
            (Share, Share) => false,
            (Share, _) | (_, Share) => true,
            (RowExclusive, _) | (_, RowExclusive) => false,
            (ShareUpdateExclusive, ShareUpdateExclusive) => true,
        }
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
    use LockMode::*;

    /// `LockConflicts` of `storage/lmgr/lock.c`, a bit for each mode's number.
    const POSTGRES: [i32; 9] = [
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

    #[test]
    fn the_table_of_conflicts_is_postgres_s() {
        for one in LockMode::ALL {
            for other in LockMode::ALL {
                let theirs = POSTGRES[one.number() as usize] & 1 << other.number() != 0;
                assert_eq!(one.conflicts_with(other), theirs, "{one:?} and {other:?}");
            }
        }
    }

    #[test]
    fn a_take_over_meets_guards_and_changes_but_these_do_not_meet_each_other() {
        for take_over in [ACQUIRE_ALONE, TAKE_SLOT, PRUNE] {
            assert!(take_over.mode.conflicts_with(GUARD.mode));
            assert!(take_over.mode.conflicts_with(CHANGE.mode));
            assert_eq!((take_over.lock, take_over.waits), (GUARD.lock, false));
        }
        assert!(!CHANGE.mode.conflicts_with(GUARD.mode));
        assert!(!GUARD.mode.conflicts_with(GUARD.mode));
        assert!(CHANGE.mode.conflicts_with(CHANGE.mode));
    }

    #[test]
    fn kinds_of_grants_exclude_each_other_while_they_are_made() {
        assert!(EXCLUDE_ALONE.mode.conflicts_with(ACQUIRE_ALONE.mode));
        assert!(!EXCLUDE_ALONE.mode.conflicts_with(TAKE_SLOT.mode));
        assert!(!EXCLUDE_ALONE.mode.conflicts_with(CHANGE.mode));
        assert!(EXCLUDE_SLOTS.mode.conflicts_with(EXCLUDE_SHARED.mode));
        assert!(!EXCLUDE_SLOTS.mode.conflicts_with(EXCLUDE_SLOTS.mode));
        assert!(!EXCLUDE_SHARED.mode.conflicts_with(EXCLUDE_SHARED.mode));
        assert!(TAKE_SLOT.mode.conflicts_with(TAKE_SLOT.mode));
    }

    #[test]
    fn who_takes_a_slot_is_told_from_who_guards_or_changes_its_grant() {
        let asks = SLOT_IS_BEING_TAKEN;
        for takes in [TAKE_SLOT, ACQUIRE_ALONE] {
            assert!(asks.lock == takes.lock && asks.mode.conflicts_with(takes.mode));
        }
        for other in [GUARD, CHANGE, EXCLUDE_ALONE] {
            assert!(asks.lock == other.lock && !asks.mode.conflicts_with(other.mode));
        }
    }

    #[test]
    fn who_asks_sees_the_one_that_it_asks_for_and_not_another_that_asks() {
        for (asks, found) in [(SOMEBODY_WAITS, HEAD_OF_QUEUE), (IS_GUARDED, GUARD_BESIDE_OTHERS)] {
            assert_eq!(asks.lock, found.lock);
            assert!(asks.mode.conflicts_with(found.mode));
            assert!(!asks.mode.conflicts_with(asks.mode));
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
        // An acquire waits in the queue only, so a try never waits.
        let acquire = [SOMEBODY_WAITS, ACQUIRE_ALONE, EXCLUDE_ALONE, EXCLUDE_SLOTS, EXCLUDE_SHARED];
        assert!(acquire.iter().chain([&TAKE_SLOT, &IS_GUARDED]).all(|w| !w.waits));
    }

    #[test]
    fn conflicts_are_mutual_and_a_stronger_mode_is_stronger() {
        for one in LockMode::ALL {
            assert!(one.conflicts_with(AccessExclusive) && AccessExclusive.conflicts_with(one));
            for other in LockMode::ALL {
                assert_eq!(one.conflicts_with(other), other.conflicts_with(one));
            }
        }
    }
}

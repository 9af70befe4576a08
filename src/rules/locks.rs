//! The locks that protect a lease: what each is on, what conflicts with what, who takes which in which order.
//!
//! A decision about a lease is made like this: look at its rows without a lock, lock, read the rows again, read the
//! clock, decide, then draw a token and write, or give the locks back and wake whoever waits. Without the second
//! look two callers could both find the lease free; without the clock after the lock a caller that waited could
//! use a grant that has expired meanwhile.
//!
//! The modes are PostgreSQL's own, chosen by what they conflict with (`storage/lockdefs.h`, `LockConflicts` in
//! `storage/lmgr/lock.c`). A transaction never conflicts with itself.

/// What a lock is on. In the order in which one call takes them, so that no two calls wait for each other; what is
/// taken without waiting may come at any point.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Lock {
    /// The line of those who wait for a lease: whoever holds it is the head of the line, the only one that looks.
    Line,
    /// A grant: a lease's name and a slot. Guards, changes and take-overs meet here.
    Grant,
    /// That a grant is guarded, and nothing else. Who asks whether it is must not be misled by a renewal, which
    /// locks the grant, too.
    Guarded,
    /// Whether the grants that a lease is getting are shared or slots: two transactions that cannot see each
    /// other's rows must not add one of each.
    SharedOrSlots,
    /// The move of the token sequence: one for the database, given back at once.
    Jump,
    /// Making the shared memory in which a database counts: one for the server, given back at once.
    Statistics,
}

/// How a lock is held.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum LockMode {
    /// AccessShare, on slot 0: a shared or slot grant is being added somewhere, so nobody may be granted the lease
    /// alone.
    Join,
    /// RowShare, never taken: asking who conflicts with it tells who is putting a grant there.
    SeeReplacers,
    /// RowExclusive: an open transaction relies on the grant.
    Guard,
    /// ShareUpdateExclusive: the grant is being renewed or closed.
    Change,
    /// Share: is it guarded, does somebody wait? Two that ask at once do not take each other for the answer.
    Probe,
    /// Exclusive: another grant is put in this slot.
    Replace,
    /// AccessExclusive: the lease is granted to one alone, its row is deleted, its line is headed.
    Own,
}

impl LockMode {
    /// All of them, from the weakest to the strongest.
    pub const ALL: [LockMode; 7] = [
        LockMode::Join,
        LockMode::SeeReplacers,
        LockMode::Guard,
        LockMode::Change,
        LockMode::Probe,
        LockMode::Replace,
        LockMode::Own,
    ];

    /// PostgreSQL's number of the mode (`storage/lockdefs.h`).
    pub const fn number(self) -> i32 {
        match self {
            LockMode::Join => 1,
            LockMode::SeeReplacers => 2,
            LockMode::Guard => 3,
            LockMode::Change => 4,
            LockMode::Probe => 5,
            LockMode::Replace => 7,
            LockMode::Own => 8,
        }
    }

    /// Does this mode keep another transaction from having `other` on the same lock?
    pub const fn conflicts_with(self, other: LockMode) -> bool {
        use LockMode::*;
        match (self, other) {
            (Own, _) | (_, Own) => true,
            (Join, _) | (_, Join) => false,
            (Replace, _) | (_, Replace) => true,
            (SeeReplacers, _) | (_, SeeReplacers) => false,
            (Probe, Probe) => false,
            (Probe, _) | (_, Probe) => true,
            (Guard, _) | (_, Guard) => false,
            (Change, Change) => true,
        }
    }
}

/// A lock that a step takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LockStep {
    /// What the lock is on.
    pub lock: Lock,
    /// The mode, which decides whom it excludes.
    pub mode: LockMode,
    /// Whether the step waits for whoever is in the way; else it is given up.
    pub waits: bool,
}

const fn waiting(lock: Lock, mode: LockMode) -> LockStep {
    LockStep { lock, mode, waits: true }
}

const fn at_once(lock: Lock, mode: LockMode) -> LockStep {
    LockStep { lock, mode, waits: false }
}

/// Who waits for a lease becomes the head of its line, until it stops waiting.
pub const HEAD_OF_LINE: LockStep = waiting(Lock::Line, LockMode::Own);
/// A try asks whether somebody has a lock that is in the way of this one: who waits has a head. It takes nothing.
pub const SOMEBODY_WAITS: LockStep = at_once(Lock::Line, LockMode::Probe);
/// An exclusive acquire takes slot 0 and then every other slot that has a row, until the transaction ends.
pub const ACQUIRE_ALONE: LockStep = at_once(Lock::Grant, LockMode::Own);
/// A shared or slot acquire first excludes exclusive ones, on slot 0.
pub const EXCLUDE_ALONE: LockStep = at_once(Lock::Grant, LockMode::Join);
/// A shared acquire excludes those that ask for slots.
pub const EXCLUDE_SLOTS: LockStep = at_once(Lock::SharedOrSlots, LockMode::Probe);
/// An acquire of slots excludes those that ask to share.
pub const EXCLUDE_SHARED: LockStep = at_once(Lock::SharedOrSlots, LockMode::Guard);
/// Then it takes the slot that it found, and those of the grants that it ends.
pub const TAKE_SLOT: LockStep = at_once(Lock::Grant, LockMode::Replace);
/// Renew, release and revoke, until the transaction ends.
pub const CHANGE: LockStep = waiting(Lock::Grant, LockMode::Change);
/// A guard, until the transaction ends; taken before it decides, so that nobody overlooks it from then on.
pub const GUARD: LockStep = waiting(Lock::Grant, LockMode::Guard);
/// The same, of a grant that others may live beside. They look for a place of their own and must not be misled by a
/// renewal of this one. A grant that was given to one alone needs none: whoever would live beside it once it is over
/// takes its slot first (`TAKE_SLOT`), and meets the guard there.
pub const GUARD_BESIDE_OTHERS: LockStep = waiting(Lock::Guarded, LockMode::Guard);
/// Whoever finds a shared grant, or one of several slots, over asks whether an open transaction still relies on it.
pub const IS_GUARDED: LockStep = at_once(Lock::Guarded, LockMode::Probe);
/// A prune takes each row alone, and gives it back at once.
pub const PRUNE: LockStep = at_once(Lock::Grant, LockMode::Own);
/// The token sequence moves on.
pub const MOVE_ON: LockStep = waiting(Lock::Jump, LockMode::Own);
/// The first session that counts makes the shared memory for it.
pub const MAKE_STATISTICS: LockStep = at_once(Lock::Statistics, LockMode::Own);

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
    fn who_asks_sees_the_one_that_it_asks_for_and_not_another_that_asks() {
        for (asks, found) in [(SOMEBODY_WAITS, HEAD_OF_LINE), (IS_GUARDED, GUARD_BESIDE_OTHERS)] {
            assert_eq!(asks.lock, found.lock);
            assert!(asks.mode.conflicts_with(found.mode));
            assert!(!asks.mode.conflicts_with(asks.mode));
        }
        // A renewal does not lock what tells of guards.
        assert_ne!(IS_GUARDED.lock, CHANGE.lock);
    }

    #[test]
    fn what_a_call_waits_for_it_takes_in_one_order() {
        let wait = [HEAD_OF_LINE, GUARD, GUARD_BESIDE_OTHERS, MOVE_ON];
        assert!(wait.iter().all(|w| w.waits));
        assert!(wait.windows(2).all(|two| two[0].lock < two[1].lock));
        assert!(HEAD_OF_LINE.lock < CHANGE.lock && CHANGE.lock < MOVE_ON.lock);
        // An acquire waits in the line only, so a try never waits.
        let acquire = [SOMEBODY_WAITS, ACQUIRE_ALONE, EXCLUDE_ALONE, EXCLUDE_SLOTS, EXCLUDE_SHARED];
        assert!(acquire.iter().chain([&TAKE_SLOT, &IS_GUARDED]).all(|w| !w.waits));
    }

    #[test]
    fn conflicts_are_mutual_and_a_stronger_mode_is_stronger() {
        for one in LockMode::ALL {
            assert!(one.conflicts_with(Own) && Own.conflicts_with(one));
            for other in LockMode::ALL {
                assert_eq!(one.conflicts_with(other), other.conflicts_with(one));
            }
        }
    }
}

//! At REPEATABLE READ and above: may a transaction rely on a grant, although it reads the world of its snapshot?
//!
//! It may where the snapshot shows the grant: the holder before has then committed all of its guarded work
//! before that snapshot. For a grant is made under a lock that every guard of the predecessor excludes until its
//! transaction has ended and its work is visible, and a snapshot that shows the grant was taken later still. It is the
//! grant that must be shown, not its latest token: a renewal is no new grant.
//!
//! At any level: may a statement claim a lease because of what it has read of the work? It may where the last grant had
//! ended before its snapshot: what that holder did to the work is then in what the statement has read.

use crate::Instant;

/// A grant, as a transaction's snapshot has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InSnapshot {
    /// The snapshot shows it: the transaction may rely on it.
    Shown,
    /// It was committed after the snapshot. A retry has a newer one.
    Later,
    /// The transaction has made it itself, so its snapshot never shows it, and no retry helps.
    Own,
}

/// How the grant stands to the transaction. `shown`: its snapshot shows the grant; `committed`: the rows committed now
/// do. Both without the transaction's own writes: so its own renewal, or release, hides nothing.
pub fn in_snapshot(shown: bool, committed: impl FnOnce() -> bool) -> InSnapshot {
    if shown {
        InSnapshot::Shown
    } else if committed() {
        InSnapshot::Later
    } else {
        InSnapshot::Own
    }
}

/// A lease's last grant, which is over, as seen by the session that claims the lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LastGrant {
    /// The statement's snapshot shows its row as it is now.
    pub shown: bool,
    /// Its deadline, where nothing else has ended it: no row tells of that.
    pub ended_by_clock: Option<Instant>,
}

/// Had it ended when the statement's snapshot was taken, which was not before `taken_after`? (When a session ended, and
/// with it a grant, nobody has written down: such a grant counts by its row.)
pub fn had_ended(last: &LastGrant, taken_after: Instant) -> bool {
    last.shown && last.ended_by_clock.is_none_or(|at| at <= taken_after)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ended_after_the_snapshot_is_not_claimed() {
        let at = Instant::from_micros;
        let ended = |shown, by_clock: Option<i64>| {
            had_ended(&LastGrant { shown, ended_by_clock: by_clock.map(at) }, at(100))
        };
        // Closed, or abandoned: its row tells.
        assert!(ended(true, None) && !ended(false, None));
        // Over by the clock alone: so does the clock.
        assert!(ended(true, Some(99)) && ended(true, Some(100)) && !ended(true, Some(101)));
        assert!(!ended(false, Some(99)), "it was renewed after the snapshot, and is over by now");
    }
}

//! At REPEATABLE READ and above: may a transaction rely on a grant, although it reads the world of its snapshot?
//!
//! It may where the snapshot shows the grant: the holder before has then committed all of its guarded work
//! before that snapshot. For a grant is made under a lock that every guard of the predecessor excludes until its
//! transaction has ended and its work is visible, and a snapshot that shows the grant was taken later still. It is the
//! grant that must be shown, not its latest token: a renewal is no new grant.

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

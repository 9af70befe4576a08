//! At REPEATABLE READ and above: may a transaction rely on a grant, although it reads the world of its snapshot?
//!
//! It may where the snapshot shows the grant: the holder before has then committed all of its guarded work
//! before that snapshot. For a grant is made under a lock that every guard of the predecessor excludes until its
//! transaction has ended and its work is visible, and a snapshot that shows the grant was taken later still. It is the
//! grant that must be shown, not its latest token: a renewal is no new grant.

/// A grant, as a transaction's snapshot has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Age {
    /// The snapshot shows it: the transaction may rely on it.
    Shown,
    /// It was committed after the snapshot. A retry has a newer one.
    Later,
    /// The transaction has made it itself, so its snapshot never shows it, and no retry helps.
    Own,
}

/// What the grant is to the transaction. `shown`: its snapshot shows the grant; `committed`: what is committed now does.
/// Both without what the transaction has written: so its own renewal, or release, hides nothing.
pub fn age(shown: bool, committed: impl FnOnce() -> bool) -> Age {
    if shown {
        Age::Shown
    } else if committed() {
        Age::Later
    } else {
        Age::Own
    }
}

//! Whether a transaction at REPEATABLE READ and above may rely on a grant, although its snapshot is older than the
//! present.
//!
//! It may if the snapshot shows the grant: then it also shows all guarded work of the previous holder. A grant is made
//! under a lock that conflicts with every guard of its predecessor, so those transactions had ended before the grant,
//! and the snapshot is later still. The snapshot must show the grant, not its latest token, because a renewal is no new
//! grant.

/// Whether a transaction's snapshot shows a grant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InSnapshot {
    /// The snapshot shows the grant, so the transaction may rely on it.
    Visible,
    /// The grant was committed after the snapshot. A retry has a newer snapshot.
    Later,
    /// The transaction itself made the grant, so its snapshot never shows it and no retry helps.
    Own,
}

/// Compares a grant with the snapshot. `visible` is true if the transaction's snapshot shows the grant, and `committed`
/// returns true if the rows committed now do. Both ignore the transaction's own writes, so that its own renewal or
/// release hides nothing.
pub fn in_snapshot(visible: bool, committed: impl FnOnce() -> bool) -> InSnapshot {
    if visible {
        InSnapshot::Visible
    } else if committed() {
        InSnapshot::Later
    } else {
        InSnapshot::Own
    }
}

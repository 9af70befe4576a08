//! Which commits need not wait for the disk.
//!
//! The WAL is written in order, so whatever is on disk has all earlier records before it. A commit may be flushed later
//! if losing it in a crash revives no older grant that somebody was told is over.
//!
//! * A release: if it is lost, the lease stays taken until its deadline, and the next acquire waits.
//! * A grant that ends with its session: a crash ends it anyway, and rows that its holder writes come later in the WAL.
//!   But losing it must not revive the grant before it.

/// An earlier grant of the lease, as seen by the session that is now granted the lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Predecessor {
    /// True if the grant ends with its session, so that a crash has ended it.
    pub ends_with_session: bool,
    /// True if the grant is current.
    pub live: bool,
    /// True if the row in its present version, with the end of the grant, is known to be on disk.
    pub on_disk: bool,
}

/// Returns true if a crash may bring this grant back, so that the new grant must be on disk before anybody is told of
/// it.
pub fn may_come_back(predecessor: &Predecessor) -> bool {
    !predecessor.ends_with_session && (predecessor.live || !predecessor.on_disk)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lasting_grant_comes_back_unless_its_end_is_on_disk() {
        for (ends_with_session, live, on_disk, expected) in [
            (false, true, true, true),
            (false, true, false, true),
            (false, false, false, true),
            (false, false, true, false),
            (true, true, true, false),
            (true, false, false, false),
        ] {
            let predecessor = Predecessor { ends_with_session, live, on_disk };
            assert_eq!(may_come_back(&predecessor), expected, "{predecessor:?}");
        }
    }
}

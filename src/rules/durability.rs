//! Which commits need not wait for the disk.
//!
//! The log is in order: what is on disk has all before it. So work may be left to a later flush where a crash that loses
//! it leaves no older grant alive that somebody was told is over.
//!
//! * A release: its loss leaves the lease taken until its deadline, and the next holder's acquire waits.
//! * A grant that ends with its session: a crash ends it anyway, and a row that its holder writes is behind it in the log.
//!   But the loss must not bring back the grant before it.

/// An earlier grant of the lease, as seen by the session that is now granted it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Predecessor {
    /// It ends with its session, so a crash has ended it.
    pub ends_with_session: bool,
    /// It is current.
    pub live: bool,
    /// Its row is known to be on disk as it is now, which includes its end.
    pub on_disk: bool,
}

/// May a crash bring this grant back, so that the new one must be on disk before anybody is told of it?
pub fn may_come_back(predecessor: &Predecessor) -> bool {
    !predecessor.ends_with_session && (predecessor.live || !predecessor.on_disk)
}

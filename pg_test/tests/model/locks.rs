//! The lock modes that the extension uses on a grant's place, and which of them bear each other.

/// Of Postgres's lock modes those in use.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Lock {
    /// Access Share: a shared acquire holds off exclusive ones.
    Anchor,
    /// Row Exclusive: a guard.
    Guard,
    /// Share Update Exclusive: renew, release, revoke.
    Change,
    /// Share: is it guarded or being changed?
    Probe,
    /// Exclusive: a new grant goes into this place.
    Replace,
    /// Access Exclusive: an exclusive acquire.
    Own,
}

impl Lock {
    /// May another transaction have `other` at the same time?
    pub fn bears(self, other: Lock) -> bool {
        use Lock::*;
        match (self, other) {
            (Own, _) | (_, Own) => false,
            (Anchor, _) | (_, Anchor) => true,
            (Replace, _) | (_, Replace) => false,
            (Probe, Probe) => true,
            (Probe, _) | (_, Probe) => false,
            (Guard, _) | (_, Guard) => true,
            (Change, Change) => false,
        }
    }
}

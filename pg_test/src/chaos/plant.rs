//! Known bugs that can be built into the extension, to show that a run catches them.

use super::nemesis::{Fault, Weights, ALL};

/// A bug, and what brings it to light soonest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Plant {
    /// The token is drawn before the lease is locked
    TokenBeforeLock,
    /// The time is that of the transaction's start
    Now,
    /// A token is returned before it is on disk
    NoFlush,
    /// A promoted standby draws on where it stood
    NoJump,
    /// A guard takes no lock
    NoGuardLock,
}

impl Plant {
    /// The cargo feature that plants it.
    pub fn feature(self) -> &'static str {
        match self {
            Plant::TokenBeforeLock => "plant_token_before_lock",
            Plant::Now => "plant_now",
            Plant::NoFlush => "plant_no_flush",
            Plant::NoJump => "plant_no_jump",
            Plant::NoGuardLock => "plant_no_guard_lock",
        }
    }

    /// The faults that it takes.
    pub(super) fn weights(self) -> Weights {
        match self {
            Plant::TokenBeforeLock => &[(Fault::FreezeBackend, 1)],
            Plant::Now => ALL,
            Plant::NoFlush => &[(Fault::KillServer, 1)],
            Plant::NoJump => &[(Fault::FailOver, 1)],
            Plant::NoGuardLock => &[(Fault::FreezeWorker, 1)],
        }
    }

    /// How many leases there are to be fought for.
    pub(super) fn leases(self) -> i32 {
        match self {
            Plant::TokenBeforeLock => 1,
            _ => 3,
        }
    }
}

//! The counters, in the order of the columns of fence.stats (a test compares them). What each is for is said to users by
//! the column's COMMENT (`sql/2_statistics.sql`). The segment has them in this order, too.

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Counter {
    Grants,
    TriesLost,
    Waits,
    /// In microseconds; shown in milliseconds.
    WaitTime,
    Renewals,
    RenewalsLost,
    Releases,
    Revocations,
    TakeOvers,
    Guards,
    WritesChecked,
    RefusedPf001,
    RefusedPf002,
    RefusedPf003,
    RefusedPf004,
    RefusedPf005,
    RefusedPf006,
    RowClaims,
    RowTakeOvers,
    Jumps,
}

/// How many there are.
pub const COUNTERS: usize = Counter::Jumps as usize + 1;

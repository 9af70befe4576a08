//! The counters, in the order of the columns of fence.stats (a test compares them) and of the words in the segment. The
//! COMMENT of each column describes it to users (`sql/2_statistics.sql`).

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Counter {
    Grants,
    TriesLost,
    Waits,
    /// Counted in microseconds, shown in milliseconds.
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

/// The number of counters.
pub const COUNTERS: usize = Counter::Jumps as usize + 1;

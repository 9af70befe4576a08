//! The counters, each with its column of fence.stats. This list is the only one: the columns are filled
//! by their names, and what each is for is said to users by its COMMENT (`sql/2_statistics.sql`).

macro_rules! counters {
    ($($(#[$what:meta])* $name:ident = $column:literal,)*) => {
        /// In the order in which the segment has them.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum Counter {
            $($(#[$what])* $name,)*
        }

        impl Counter {
            /// All of them, in their order.
            pub const ALL: &[Counter] = &[$(Counter::$name,)*];

            /// Its column of fence.stats.
            pub const fn column(self) -> &'static str {
                match self {
                    $(Counter::$name => $column,)*
                }
            }
        }
    };
}

counters! {
    Grants = "grants",
    TriesLost = "tries_lost",
    Waits = "waits",
    /// In microseconds; shown in milliseconds.
    WaitTime = "wait_time",
    Renewals = "renewals",
    RenewalsLost = "renewals_lost",
    Releases = "releases",
    Revocations = "revocations",
    TakeOvers = "take_overs",
    Guards = "guards",
    WritesChecked = "writes_checked",
    RefusedPf001 = "refused_pf001",
    RefusedPf002 = "refused_pf002",
    RefusedPf003 = "refused_pf003",
    RefusedPf004 = "refused_pf004",
    RefusedPf005 = "refused_pf005",
    Jumps = "jumps",
}

impl Counter {
    /// The one with this column.
    pub fn of_column(column: &str) -> Option<Counter> {
        Counter::ALL.iter().copied().find(|counter| counter.column() == column)
    }
}

/// How many there are.
pub const COUNTERS: usize = Counter::ALL.len();

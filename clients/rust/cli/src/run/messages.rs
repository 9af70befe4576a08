//! What the two processes of a run tell each other: JSON, a line each.

use crate::clock::Moment;
use serde::{Deserialize, Serialize};

/// The keeper, on its standard output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Told {
    /// It waits in line: who has the lease, for how long still, and which place is ours, where that can be seen.
    Waiting {
        holder: String,
        remaining_ms: u64,
        place: Option<i64>,
    },
    /// The lease is ours. One that was adopted has no deadline.
    Granted {
        token: i64,
        deadline: Option<Moment>,
    },
    Renewed {
        deadline: Moment,
    },
    /// The lease is ours no more.
    Lost,
    /// There will be no lease, for this reason.
    Failed {
        status: u8,
        message: String,
    },
}

/// The supervisor, on the keeper's standard input. The end of that input, without a word, says that the supervisor
/// is dead.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// The command runs in this process group.
    Started { group: i32 },
    /// The command has ended, with all that it started: give the lease back, or leave the line.
    Release,
    /// Something could not be ended: leave the lease to its ttl.
    Leave,
}

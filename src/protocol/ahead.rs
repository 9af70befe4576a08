//! When a drawn token is durable.
//!
//! Postgres logs a sequence some values ahead: the log record says the last value of that stretch, and a
//! crash goes on behind it. So a token is durable once *some* record that covers it is on disk. A record
//! written while the one before still covers a few draws is on disk, by anybody's commit, before it is
//! needed: then no draw waits for the disk on its own account.

use super::Token;

/// A log record of the sequence that is on disk.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Logged {
    /// The last token that it covers.
    pub up_to: Token,
    /// Its position in the log.
    pub at: u64,
}

impl Logged {
    /// Does a crash go on behind this token, because of this record? Only if recovery reads it: it starts
    /// at `redo`, where the last checkpoint began. (The first draw after that is logged anew.)
    pub fn covers(&self, token: Token, redo: u64) -> bool {
        token <= self.up_to && self.is_read(redo)
    }

    /// Does recovery read it? What was drawn by a record that it does not read, as a checkpoint began, may be
    /// in neither.
    pub fn is_read(&self, redo: u64) -> bool {
        self.at > redo
    }

    /// What is known after this record was found on disk, too. One may be read twice, the second time
    /// after a draw was told to be logged: it covers what it did.
    pub fn and(self, found: Logged) -> Logged {
        if self.at == found.at && self.up_to > found.up_to {
            self
        } else {
            found
        }
    }
}

/// Is the next draw to be logged, though the last record covers `left` more? From half of what Postgres
/// logs ahead.
pub fn log_early(left: i64, ahead: i64) -> bool {
    0 < left && left <= ahead / 2
}

//! When and how far the token sequence jumps.
//!
//! A copy of a database (promoted standby, restored dump, template) may have forgotten tokens that clients
//! have seen. It cannot know how many, so it outruns them all: it jumps to a number made from the clock,
//! which is ahead of anything drawn one by one (2^20 tokens a second would be needed to catch up).

use super::{Micros, Token};

/// Tokens per second of the clock, and the grid that every jump lands on.
pub const STRIDE: i64 = 1 << 20;

/// 2024-01-01 00:00 UTC in microseconds of the Postgres epoch (2000-01-01).
pub const CLOCK_ZERO: Micros = 757_382_400_000_000;

/// What tells one life of a database from another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// WAL timeline; a promotion or a point-in-time recovery changes it.
    pub timeline: u32,
    /// Of the cluster; `initdb` and `pg_upgrade` change it.
    pub system_identifier: u64,
    /// `CREATE DATABASE … TEMPLATE` changes it.
    pub database: u32,
    /// Oid of `fence.token_seq`; restoring a dump changes it.
    pub sequence: u32,
}

impl Identity {
    /// A positive 63-bit mark of this identity (FNV-1a), fit to be kept as a sequence's value.
    pub fn mark(&self) -> i64 {
        let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
        let bytes = self
            .timeline
            .to_le_bytes()
            .into_iter()
            .chain(self.system_identifier.to_le_bytes())
            .chain(self.database.to_le_bytes())
            .chain(self.sequence.to_le_bytes());
        for byte in bytes {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        ((hash >> 1) as i64).max(1)
    }
}

/// What the recorded mark says of the identity found now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Epoch {
    /// The database is the one that drew last.
    Same,
    /// Tokens may be forgotten: jump first.
    Changed,
}

/// Compares the mark kept at the last draw, or at the extension's creation, with the identity now.
pub fn compare(kept: Option<i64>, now: &Identity) -> Epoch {
    if kept == Some(now.mark()) {
        Epoch::Same
    } else {
        Epoch::Changed
    }
}

/// Where the sequence jumps to: the greater of its next multiple of 2^20 and the clock's seconds × 2^20.
/// None when that would leave the positive bigints.
pub fn jump_target(last: Token, now: Micros) -> Option<Token> {
    let next = (last.max(0) / STRIDE).checked_add(1)?.checked_mul(STRIDE)?;
    let seconds = now.saturating_sub(CLOCK_ZERO).max(0) / 1_000_000;
    Some(next.max(seconds.checked_mul(STRIDE)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jump_outruns_the_last_token_and_the_clock() {
        assert_eq!(jump_target(0, 0), Some(STRIDE));
        assert_eq!(jump_target(STRIDE, 0), Some(2 * STRIDE));
        assert_eq!(jump_target(STRIDE - 1, 0), Some(STRIDE));
        let hour = CLOCK_ZERO + 3_600_000_000;
        assert_eq!(jump_target(5, hour), Some(3600 * STRIDE));
        assert_eq!(jump_target(3600 * STRIDE, hour), Some(3601 * STRIDE));
        assert_eq!(jump_target(i64::MAX, hour), None);
    }

    #[test]
    fn each_part_of_the_identity_counts() {
        let a = Identity { timeline: 1, system_identifier: 7, database: 5, sequence: 9 };
        assert_eq!(compare(None, &a), Epoch::Changed);
        assert_eq!(compare(Some(a.mark()), &a), Epoch::Same);
        for b in [
            Identity { timeline: 2, ..a },
            Identity { system_identifier: 8, ..a },
            Identity { database: 6, ..a },
            Identity { sequence: 10, ..a },
        ] {
            assert_eq!(compare(Some(a.mark()), &b), Epoch::Changed);
        }
    }
}

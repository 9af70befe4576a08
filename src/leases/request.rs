//! What an acquire asks for, and how it ends.

use crate::errors::{self, Refusal};
use crate::pg::session::role;
use crate::pg::state::row::Row;
use pg_fence_rules::grant::{self, Acquire, Ask, ExistingGrant, Mode};
use pg_fence_rules::{Instant, Span};

/// Who asks for what.
pub struct Request {
    /// The lease, in the database's encoding.
    pub name: Vec<u8>,
    /// Who asks, where it names itself.
    pub holder: Option<Vec<u8>>,
    /// How long the grant is to live.
    pub ttl: Span,
    /// What the caller wishes to be shown with the lease: a jsonb.
    pub metadata: Option<pgrx::pg_sys::Datum>,
    /// The grant is to end with this session, too.
    pub session: bool,
    /// In which mode, and whether the caller takes back its own.
    pub ask: Ask,
}

/// How a try ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tried<T> {
    /// Granted, or to be had.
    Won(T),
    /// Taken; the clock alone can change that at this time, or never.
    Lost {
        /// When to look again at the latest.
        until: Option<Instant>,
    },
}

impl<T> Tried<T> {
    /// Only something that committed since we looked, or an open transaction, can be in the way.
    pub const BY_ANOTHER: Tried<T> = Tried::Lost { until: None };

    /// With what was won made into something else.
    pub fn map<U>(self, make: impl FnOnce(T) -> U) -> Tried<U> {
        match self {
            Tried::Won(won) => Tried::Won(make(won)),
            Tried::Lost { until } => Tried::Lost { until },
        }
    }
}

impl Request {
    /// The rows of the lease as the rules see them. `guarded` tells of a slot whether an open transaction relies on
    /// the grant there.
    pub fn existing(&self, rows: &[Row], guarded: impl Fn(i32) -> bool) -> Vec<ExistingGrant> {
        let role = self.ask.reclaim.then(role::current);
        let is_mine = |row: &Row| {
            role.as_deref()
                .is_some_and(|role| self.holder.as_deref() == row.holder() && row.role() == role)
        };
        let existing = |row: &Row| ExistingGrant {
            grant: row.grant,
            mine: is_mine(row),
            guarded: guarded(row.grant.slot),
        };
        rows.iter().map(existing).collect()
    }

    /// Which slot the rules give to the request beside the grants that are there. Errors: 22023, 55000.
    pub fn admit(&self, existing: &[ExistingGrant], now: Instant) -> Result<Tried<i32>, Refusal> {
        match grant::admit(existing, &self.ask, now) {
            Acquire::Grant { slot } => Ok(Tried::Won(slot)),
            Acquire::Taken { until } => Ok(Tried::Lost { until }),
            Acquire::SlotsDiffer { live } => Err(self.slots_differ(live)),
            Acquire::Adopted => Err(errors::adopted_name(&self.name)),
        }
    }

    /// The refusal where another number of slots is in force.
    pub fn slots_differ(&self, live: i32) -> Refusal {
        let asked = match self.ask.mode {
            Mode::Slots(n) => n,
            _ => 1,
        };
        errors::slots_differ(&self.name, live, asked)
    }
}

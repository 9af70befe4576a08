//! The request of an acquire, and how it ends.

use crate::errors::{self, Refusal};
use pg_fence_rules::grant::{Ask, Mode};
use pg_fence_rules::{Instant, Span};

/// One acquire's request.
#[derive(Clone)]
pub struct Request {
    /// The lease, in the database's encoding.
    pub name: Vec<u8>,
    /// The holder, where it names itself.
    pub holder: Option<Vec<u8>>,
    /// How long the grant is to live.
    pub ttl: Span,
    /// A jsonb that the caller wishes to be shown with the lease.
    pub metadata: Option<pgrx::pg_sys::Datum>,
    /// The grant is to end with this session, too.
    pub session: bool,
    /// In which mode, and whether the caller takes back its own.
    pub ask: Ask,
}

/// Why a try is granted nothing.
pub enum NotGranted {
    /// The lease is taken; the clock alone can change that at this time, or never.
    Taken {
        /// When to look again at the latest.
        until: Option<Instant>,
    },
    /// The call is refused.
    Refused(Refusal),
}

/// Only something that committed since we looked, or an open transaction, can be in the way.
pub const BY_ANOTHER: NotGranted = NotGranted::Taken { until: None };

impl From<Refusal> for NotGranted {
    fn from(refusal: Refusal) -> Self {
        NotGranted::Refused(refusal)
    }
}

/// The outcome of a try that was not refused: what it has got, or until when that is taken.
pub fn unless_refused<T>(
    tried: Result<T, NotGranted>,
) -> Result<Result<T, Option<Instant>>, Refusal> {
    match tried {
        Ok(got) => Ok(Ok(got)),
        Err(NotGranted::Taken { until }) => Ok(Err(until)),
        Err(NotGranted::Refused(refusal)) => Err(refusal),
    }
}

impl Request {
    /// The refusal where another number of slots is in force.
    pub fn slots_differ(&self, live: i32) -> Refusal {
        let asked = match self.ask.mode {
            Mode::Slots(n) => n,
            _ => 1,
        };
        errors::slots_differ(&self.name, live, asked)
    }
}

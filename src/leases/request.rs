//! The request of an acquire, and its outcome.

use crate::errors::Report;
use pg_fence_rules::grant::AcquireRequest;
use pg_fence_rules::{Instant, Span};

/// The request for one lease.
#[derive(Clone)]
pub struct Request {
    /// The lease, in the database's encoding.
    pub name: Vec<u8>,
    /// The holder's name, if the caller gave one.
    pub holder: Option<Vec<u8>>,
    /// The life that is requested for the grant.
    pub ttl: Span,
    /// A jsonb value that the caller wants shown with the lease.
    pub metadata: Option<pgrx::pg_sys::Datum>,
    /// True if the grant is also to end with this session.
    pub session: bool,
    /// The mode, and whether the caller reclaims its own grant.
    pub acquire: AcquireRequest,
}

/// Why an attempt was granted nothing.
pub enum NotGranted {
    /// The lease is taken. Without a change by others it becomes free at this time, or never.
    Taken {
        /// The latest time to try again.
        until: Option<Instant>,
    },
    /// The call fails with this error.
    Refused(Report),
}

/// The lease is taken by an open transaction, or by one that committed since the rows were read.
pub const BY_ANOTHER: NotGranted = NotGranted::Taken { until: None };

impl From<Report> for NotGranted {
    fn from(report: Report) -> Self {
        NotGranted::Refused(report)
    }
}

/// Separates an error from the two other outcomes: the granted value, or the time until which the lease is taken.
pub fn unless_refused<T>(
    tried: Result<T, NotGranted>,
) -> Result<Result<T, Option<Instant>>, Report> {
    match tried {
        Ok(got) => Ok(Ok(got)),
        Err(NotGranted::Taken { until }) => Ok(Err(until)),
        Err(NotGranted::Refused(report)) => Err(report),
    }
}

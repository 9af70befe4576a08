//! The rules of leases and fences, and nothing else: state, event and time in; a decision out.
//!
//! Nothing here reads a clock, takes a lock, draws a token or knows that Postgres exists, so the same code
//! is called by the extension, by property tests and by the model checker. It is a crate of its own so that the
//! compiler sees to that: it depends on nothing. Time is always an argument.
//!
//! The ring that the latest refused writes are kept in (`ring`) is here for the same reason: tests run it without a server.
#![forbid(unsafe_code)]

pub mod epoch;
pub mod fence;
pub mod grant;
pub mod locks;
pub mod ring;
pub mod template;
mod time;

pub use time::{Instant, Span};

/// A fencing token: a positive number from `fence.token_seq`.
pub type Token = i64;

/// Where the latest jump of the token sequence went to. A grant whose latest token is not above it may have been
/// replaced in what the database has lost: no token of it speaks until its holder has renewed it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Floor(pub Token);

impl Floor {
    /// No jump has been.
    pub const NONE: Floor = Floor(0);

    /// Was the latest token of a grant drawn after the jump?
    #[inline]
    pub const fn is_below(self, latest: Token) -> bool {
        latest > self.0
    }
}

/// The longest name of a lease, in bytes of the database's encoding.
pub const NAME_MAX: usize = 512;

//! The rules of leases and fences, and nothing else: state, event and time in; a decision out.
//!
//! Nothing here reads a clock, takes a lock, draws a token or knows that Postgres exists, so the same code
//! is called by the extension, by property tests and by the model checker. It is a crate of its own so that the
//! compiler sees to that: it depends on nothing. Time is always an argument.
#![forbid(unsafe_code)]

pub mod durability;
pub mod fence;
pub mod grant;
pub mod keep;
pub mod locks;
pub mod moves;
pub mod names;
pub mod row_lease;
pub mod shares;
pub mod snapshot;
pub mod template;
mod time;
mod token;
pub mod trigger_arguments;

pub use time::{Instant, Span};
pub use token::{Floor, Token};

/// The longest ttl of a lease that does not end with its session, and the furthest that a row's deadline may be ahead.
pub const TTL_MAX: Span = Span::from_secs(366 * 86_400);

/// The longest name of a lease, in bytes of the database's encoding.
pub const NAME_MAX: usize = 512;

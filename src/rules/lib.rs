//! The rules of leases and fences, and nothing else: state, event and time in; a decision out.
//!
//! Nothing here reads a clock, takes a lock, draws a token or knows that Postgres exists, so the same code
//! is called by the extension, by property tests and by the model checker. It is a crate of its own so that the
//! compiler sees to that: it depends on nothing. Time is microseconds and is always an argument.
#![forbid(unsafe_code)]

pub mod epoch;
pub mod fence;
pub mod grant;
pub mod locks;
pub mod template;

/// A fencing token: a positive number from `fence.token_seq`.
pub type Token = i64;

/// A point in time, or a span of it, in microseconds (points count from the server's epoch).
pub type Micros = i64;

/// The longest name of a lease, in bytes of the database's encoding.
pub const NAME_MAX: usize = 512;

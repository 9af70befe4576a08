//! The rules of leases and fences as pure functions: state, event and time in, a decision out.
//!
//! The crate reads no clock, takes no lock, draws no token and does not know Postgres, so the extension, the property
//! tests and the model checker call the same code. It is a crate without dependencies, so that the compiler ensures
//! this. Time is always an argument.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod durability;
pub mod epochs;
pub mod fence;
pub mod grant;
pub mod keep;
pub mod locks;
pub mod names;
pub mod row_lease;
pub mod shares;
pub mod snapshot;
pub mod template;
mod time;
mod token;
pub mod trigger_arguments;

pub use time::{Instant, Span};
pub use token::{Epoch, Token};

/// The longest ttl of a lease that does not end with its session, and the furthest that a row's deadline may lie ahead.
pub const TTL_MAX: Span = Span::from_secs(366 * 86_400);

/// The longest name of a lease, in bytes of the database's encoding.
pub const NAME_MAX: usize = 512;

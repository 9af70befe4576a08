//! Leases with fencing tokens of the PostgreSQL extension pg_fence, on tokio-postgres.
//!
//! ```no_run
//! # async fn work() -> Result<(), pg_fence_client::Error> {
//! # use pg_fence_client::{Fence, connect};
//! # use tokio_postgres::NoTls;
//! let url = "postgresql://localhost/shop";
//! let fence = Fence::new(url)?;
//! let lease = fence.lease("order:7").acquire().await?;
//! let mut client = connect(url, NoTls).await?;
//! let order = lease.guard(&mut client).await?;
//! order.execute("UPDATE orders SET status = 'paid' WHERE id = 7", &[]).await?;
//! order.commit().await?;
//! lease.release().await?;
//! # Ok(())
//! # }
//! ```
//!
//! The README of the project's directory `clients` describes each verb and its SQL for all
//! languages.

#![warn(missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "blocking")]
pub mod blocking;
mod clock;
mod connection;
mod errors;
mod fence;
mod heartbeat;
mod lease_state;
#[cfg(feature = "sqlx")]
mod sqlx;
mod statements;
mod transaction;

pub use connection::{Connected, Tls, connect, open};
pub use errors::{BoxError, Error, Refused, classify};
pub use fence::{Adopted, Fence, Lease, LeaseRequest, Names, options};
pub use heartbeat::Event;
pub use lease_state::{BEATS_PER_TTL, EventKind, Reason, WaitsFor};
pub use transaction::{Guard, Guardable, Guarded, Guards};

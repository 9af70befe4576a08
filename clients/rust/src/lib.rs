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
//! The promise of each verb, and its SQL, are said once for the clients of all languages, in the README of the
//! project's directory `clients`.

#![warn(missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod asked;
#[cfg(feature = "blocking")]
pub mod blocking;
mod clock;
mod connected;
mod error;
mod fence;
mod guard;
mod keeper;
mod lease;
mod open;
#[cfg(feature = "sqlx")]
mod sqlx;

pub use asked::Names;
pub use connected::{Connected, Tls};
pub use error::{Error, Reason, Refused, classify};
pub use fence::{Adopted, BoxError, Fence, Lease, LeaseRequest, options};
pub use guard::{Guard, Guardable, Guarded, Guards};
pub use lease::{Event, EventKind};
pub use open::{connect, open};

//! Leases with fencing tokens of the PostgreSQL extension pg_fence, on tokio-postgres.
//!
//! ```no_run
//! # async fn work() -> Result<(), pg_fence_client::Error> {
//! # use pg_fence_client::{Error, Fence, connect};
//! # use std::time::Duration;
//! # use tokio_postgres::NoTls;
//! let url = "postgresql://localhost/shop";
//! let fence = Fence::new(url)?;
//! let lease = fence.lease("order:7").ttl(Duration::from_secs(30)).acquire().await?;
//! let mut client = connect(url, NoTls).await?;
//! let order = lease.guard(&mut client).await?;
//! order.execute("UPDATE orders SET status = 'paid' WHERE id = 7", &[]).await?;
//! order.commit().await?;
//! lease.release().await?;
//! # Ok(())
//! # }
//! ```
//!
//! What the verbs promise, and each one's SQL, is said once for the clients of all languages, in the README of the
//! project's directory `clients`.

#![warn(missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod adopted;
mod calls;
mod claim;
mod clock;
mod connected;
mod error;
mod fence;
mod guarded;
mod holding;
mod keeper;
mod keeping;
mod lead;
mod lease;
mod names;
mod observe;
mod open;
mod options;
mod own;
mod request;
#[cfg(feature = "sqlx")]
mod sqlx;
mod state;
mod telemetry;
#[cfg(feature = "rustls")]
pub mod tls;
mod waiting;

#[doc(hidden)]
pub mod hooks;

pub use adopted::{AdoptRequest, Adopted};
pub use claim::{ClaimRequest, Claimed};
#[doc(hidden)]
pub use clock::Moment;
pub use connected::{Connected, Tls, connect};
pub use error::{
    AcquireTimeout, Error, LeaseLost, LeaseTaken, NotConnected, NotInstalled, Reason, Refusal,
    TransactionLost, classify,
};
pub use fence::Fence;
pub use guarded::{Guardable, Guarded, guard_all};
pub use lease::Lease;
pub use names::Names;
pub use observe::{Leader, Observer};
#[doc(hidden)]
pub use open::open;
pub use options::options;
pub use request::LeaseRequest;
#[cfg(feature = "sqlx")]
pub use sqlx::SqlxGuarded;

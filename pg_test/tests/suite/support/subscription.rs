//! A server that subscribes to another one.

use pg_test::client::literal;
use pg_test::process::{PATIENCE, wait_until};
use pg_test::{Cluster, Result, Session};

/// Waits until the query returns true.
pub fn becomes_true(session: &mut Session, query: &str) -> Result<()> {
    wait_until(query, PATIENCE, || session.one(query, &[]).unwrap_or(false))
}

/// Subscribes to the publication `p` and waits until the existing rows are copied: only from then on does the apply
/// worker receive changes, count its errors and skip changes.
pub fn subscribe(publisher: &Cluster, subscriber: &mut Session) -> Result<()> {
    let from = literal(&publisher.conninfo("postgres").to_string());
    subscriber.run(&format!("CREATE SUBSCRIPTION s CONNECTION {from} PUBLICATION p"))?;
    becomes_true(
        subscriber,
        "SELECT NOT EXISTS (SELECT FROM pg_subscription_rel WHERE srsubstate NOT IN ('r', 's'))",
    )
}

//! Logical replication, upstream and downstream of the fence.
//!
//! An apply worker fires no ordinary trigger, so a subscriber accepts what the publisher's fence has accepted. A
//! trigger that is enabled ALWAYS checks the order there too, and stalls the worker at a change that is out of order.

use crate::support::history::{History, epochs_begun};
use crate::support::subscription::{becomes_true, subscribe};
use pg_test::process::{PATIENCE, wait_until};
use pg_test::{Calls, Cluster, Context, Harness, Result, Session, bail, ensure, harness_test};

const TABLE: &str = "CREATE TABLE orders (id int PRIMARY KEY, total int, fence bigint)";

/// Leaves out the finding on each table that is monotonic and bound.
const OTHERS: &str = "WHERE finding NOT LIKE 'monotonic: a%'";

/// Starts a publisher and a subscriber, both with the extension and the table `orders`.
fn pair(harness: &Harness) -> Result<(Cluster, Cluster)> {
    let start = || -> Result<Cluster> {
        let cluster = harness.builder().set("wal_level", "logical").start()?;
        cluster.connect("postgres")?.run(&format!("CREATE EXTENSION pg_fence; {TABLE}"))?;
        Ok(cluster)
    };
    Ok((start()?, start()?))
}

/// Publishes and subscribes. Existing rows are copied.
fn publish(publisher: &Cluster, downstream: &mut Session, what: &str) -> Result<()> {
    publisher.connect("postgres")?.run(&format!("CREATE PUBLICATION p FOR {what}"))?;
    subscribe(publisher, downstream)
}

fn order_is(session: &mut Session, total: i32, fence: i64) -> Result<()> {
    let query = format!("SELECT (total, fence) = ({total}, {fence}) FROM orders WHERE id = 7");
    becomes_true(session, &query)
}

#[harness_test]
fn a_subscriber_takes_what_the_publisher_s_fence_let_pass(harness: &Harness) -> Result<()> {
    let (publisher, subscriber) = pair(harness)?;
    let mut upstream = publisher.connect("postgres")?;
    let mut downstream = subscriber.connect("postgres")?;
    upstream.run(
        "INSERT INTO orders VALUES (7, 0); SELECT fence_protect('orders', lease => 'order:{id}')",
    )?;
    // The subscriber knows no token and no lease of the publisher.
    let drawn = downstream.last_token()?;
    downstream.run("SELECT fence_protect('orders', lease => 'order:{id}', always => true)")?;
    publish(&publisher, &mut downstream, "TABLE orders")?;
    ensure!(downstream.granted("SELECT count(*) FROM orders")? == 1, "it was not copied");

    let old: i64 = upstream.one("SELECT lease_acquire('order:7')", &[])?;
    upstream.run(&format!("UPDATE orders SET total = 1, fence = {old}"))?;
    upstream.run("SELECT lease_revoke('order:7')")?;
    let new: i64 = upstream.one("SELECT lease_acquire('order:7')", &[])?;
    upstream.refused(&format!("UPDATE orders SET total = 2, fence = {old}"), "PF004")?;
    upstream.run(&format!("UPDATE orders SET total = 3, fence = {new}"))?;
    upstream.run(&format!("UPDATE orders SET total = 4, fence = {new}"))?;
    order_is(&mut downstream, 4, new)?;
    upstream.run(&format!(
        "SET pg_fence.token = {new}; DELETE FROM orders; INSERT INTO orders VALUES (7, 5, {new})"
    ))?;
    order_is(&mut downstream, 5, new)?;
    ensure!(downstream.last_token()? == drawn, "the apply worker moved the sequence on");
    // A writer at the subscriber is checked in full.
    downstream.refused("UPDATE orders SET total = 6", "PF002")?;
    downstream.refused(
        &format!("UPDATE orders SET total = 6, fence = {}", new.max(drawn) + 1),
        "PF003",
    )?;
    Ok(())
}

#[harness_test]
fn an_ordinary_trigger_does_not_see_an_apply_worker(harness: &Harness) -> Result<()> {
    let (publisher, subscriber) = pair(harness)?;
    let mut upstream = publisher.connect("postgres")?;
    let mut downstream = subscriber.connect("postgres")?;
    // The publisher has no fence at all, so it writes anything.
    upstream.run("INSERT INTO orders VALUES (7, 0, 34)")?;
    downstream.run("SELECT fence_protect('orders')")?;
    publish(&publisher, &mut downstream, "TABLE orders")?;
    order_is(&mut downstream, 0, 34)?;
    upstream.run("UPDATE orders SET total = 1, fence = 33")?;
    order_is(&mut downstream, 1, 33)?;
    // The audit reports it, and how to repair it.
    let findings = downstream.rows(
        "SELECT remedy FROM fence_audit('orders') WHERE finding LIKE '%subscription%' AND remedy LIKE '%ALWAYS%'",
    )?;
    ensure!(!findings.is_empty(), "the audit does not tell");
    Ok(())
}

/// The publisher draws the tokens, and its sequence may always be ahead of the subscriber's.
#[harness_test]
fn the_audit_calls_fences_that_a_subscription_brought_no_bypass(harness: &Harness) -> Result<()> {
    let (publisher, subscriber) = pair(harness)?;
    let mut upstream = publisher.connect("postgres")?;
    let mut downstream = subscriber.connect("postgres")?;
    let protect = "SELECT fence_protect('orders', lease => 'order:{id}', always => true)";
    upstream.run(&format!("INSERT INTO orders VALUES (7, 0); {protect}"))?;
    downstream.run(protect)?;
    publish(&publisher, &mut downstream, "TABLE orders")?;
    upstream.run("SELECT fence_new_epoch()")?;
    let token: i64 = upstream.one("SELECT lease_acquire('order:7')", &[])?;
    upstream.run(&format!("UPDATE orders SET total = 1, fence = {token}"))?;
    order_is(&mut downstream, 1, token)?;
    let last = downstream.last_token()?;
    ensure!(last < token, "{token} is not above {last}");

    let above = format!("rows hold fences up to {token}, above the last token drawn here, {last}");
    for what in ["'orders'", ""] {
        let rows = downstream
            .rows(&format!("SELECT severity, finding, remedy FROM fence_audit({what}) {OTHERS}"))?;
        let [row] = &rows[..] else { bail!("not one row: {rows:?}") };
        let finding = format!(
            "{above} (the publisher's: all is well, until this server takes over; then call fence_new_epoch())"
        );
        ensure!(*row == [Some("notice".into()), Some(finding), None], "{rows:?}");
    }
    // Without the subscription no other server draws tokens.
    downstream.run("DROP SUBSCRIPTION s")?;
    let rows = downstream
        .rows(&format!("SELECT severity, finding, remedy FROM fence_audit('orders') {OTHERS}"))?;
    let [row] = &rows[..] else { bail!("not one row: {rows:?}") };
    ensure!(row[..2] == [Some("hole".into()), Some(above)], "{rows:?}");
    downstream.run(row[2].as_deref().context("no remedy")?)?;
    ensure!(downstream.rows(&format!("SELECT * FROM fence_audit('orders') {OTHERS}"))?.is_empty());
    Ok(())
}

#[harness_test]
fn a_trigger_enabled_always_stalls_what_is_out_of_order(harness: &Harness) -> Result<()> {
    let (publisher, subscriber) = pair(harness)?;
    let mut upstream = publisher.connect("postgres")?;
    let mut downstream = subscriber.connect("postgres")?;
    upstream.run("INSERT INTO orders VALUES (7, 0, 34)")?;
    downstream.run("SELECT fence_protect('orders', always => true)")?;
    publish(&publisher, &mut downstream, "TABLE orders")?;
    order_is(&mut downstream, 0, 34)?;
    upstream.run("UPDATE orders SET total = 1, fence = 33")?;
    becomes_true(&mut downstream, "SELECT apply_error_count > 0 FROM pg_stat_subscription_stats")?;
    wait_until("the log tells", PATIENCE, || {
        subscriber.log().is_ok_and(|log| log.contains("stale fencing token"))
    })?;
    order_is(&mut downstream, 0, 34)?;
    // An administrator can let the change pass.
    downstream.run("ALTER TABLE orders DISABLE TRIGGER fenced")?;
    order_is(&mut downstream, 1, 33)?;
    downstream.run("ALTER TABLE orders ENABLE ALWAYS TRIGGER fenced")
}

#[harness_test]
fn a_subscriber_that_takes_over_goes_on_above_all_that_was_seen(harness: &Harness) -> Result<()> {
    let start = || harness.builder().set("wal_level", "logical").start();
    let (publisher, subscriber) = (start()?, start()?);
    let mut upstream = publisher.connect("postgres")?;
    let mut history = History::begin(&mut upstream)?;
    let mut downstream = subscriber.connect("postgres")?;
    History::begin(&mut downstream)?;
    downstream.run(
        "SELECT fence_unprotect('orders'), fence_unprotect('parcels'); TRUNCATE orders, parcels;
         SELECT lease_revoke('order:7'), lease_revoke('parcel:7'), lease_prune('0')",
    )?;
    // Leases are rows and are replicated. The sequence is not a row and is not replicated.
    publish(&publisher, &mut downstream, "ALL TABLES")?;
    let drawn = downstream.last_token()?;
    history.draw_more(&mut upstream, 60)?;
    becomes_true(&mut downstream, "SELECT count(*) = 62 FROM fence.leases")?;
    becomes_true(
        &mut downstream,
        "SELECT (SELECT count(*) FROM orders) = 1 AND (SELECT count(*) FROM parcels) = 1",
    )?;
    ensure!(downstream.last_token()? == drawn, "the sequence went along");
    publisher.kill9()?;
    downstream.run(
        "ALTER SUBSCRIPTION s DISABLE; ALTER SUBSCRIPTION s SET (slot_name = NONE); DROP SUBSCRIPTION s;
         SELECT fence_protect('orders', lease => 'order:{id}'), fence_protect('parcels');
         SELECT fence_new_epoch()",
    )?;
    history.goes_on(&mut downstream)?;
    ensure!(epochs_begun(&mut downstream)? == 1);
    Ok(())
}

/// A subscription writes the publisher's last number into the sequence, which may be lower.
#[harness_test(from = 19)]
fn a_subscription_to_sequences_gives_no_token_twice(harness: &Harness) -> Result<()> {
    // The server that starts first has the lower tokens.
    let (one, other) = pair(harness)?;
    for (publisher, subscriber) in [(&one, &other), (&other, &one)] {
        let mut downstream = subscriber.connect("postgres")?;
        let mut seen: i64 = downstream.granted("SELECT lease_acquire('before', ttl => '1 h')")?;
        // A token that is in no row.
        let gone = downstream.acquire("gone", "1 h")?;
        seen = seen.max(downstream.release("gone", gone)?.context("held")?);
        downstream.granted("SELECT lease_prune('0')")?;
        publish(publisher, &mut downstream, "ALL SEQUENCES")?;
        let is_ready =
            "SELECT count(*) > 0 AND bool_and(srsubstate = 'r') FROM pg_subscription_rel";
        becomes_true(&mut downstream, is_ready)?;
        let mut upstream = publisher.connect("postgres")?;
        for _ in 0..2 {
            // Tokens are drawn by a session that has drawn before, and by a new one.
            for mut session in [None, Some(subscriber.connect("postgres")?)] {
                let session = session.as_mut().unwrap_or(&mut downstream);
                let token =
                    session.granted("SELECT lease_acquire('job', 'me', '1 h', reclaim => true)")?;
                ensure!(token > seen, "{token} comes after {seen}");
                seen = token;
            }
            upstream.granted("SELECT lease_acquire('job', 'me', '1 h', reclaim => true)")?;
            downstream.run("ALTER SUBSCRIPTION s REFRESH SEQUENCES")?;
            becomes_true(&mut downstream, is_ready)?;
        }
        downstream.run("DROP SUBSCRIPTION s")?;
        upstream.run("DROP PUBLICATION p")?;
    }
    Ok(())
}

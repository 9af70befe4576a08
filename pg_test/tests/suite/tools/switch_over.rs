//! A fenced database that moves to another major version by logical replication.

use crate::support::history::History;
use crate::support::subscription::{becomes_true, subscribe};
use pg_test::cluster::Builder;
use pg_test::install_dir::InstallDir;
use pg_test::{Calls, Context, Harness, Result, Session, ensure, harness_test, majors};
use std::sync::Arc;

/// Waits until the subscriber has all that the publisher has committed.
fn catch_up(upstream: &mut Session) -> Result<()> {
    becomes_true(
        upstream,
        "SELECT coalesce(bool_and(replay_lsn >= pg_current_wal_lsn()), false) FROM pg_stat_replication",
    )
}

#[harness_test(slow)]
fn a_fenced_database_moves_to_a_newer_major_version(harness: &Harness) -> Result<()> {
    let publisher = harness.builder().set("wal_level", "logical").start()?;
    let mut upstream = publisher.connect("postgres")?;
    let mut history = History::begin(&mut upstream)?;
    upstream.run("CREATE PUBLICATION p FOR TABLE orders, parcels")?;

    let newest = *majors::ALL.last().context("there are some")?;
    let install_dir = Arc::new(InstallDir::of_major(harness.rundir().clone(), newest)?);
    let subscriber = Builder::new(install_dir).start()?;
    let mut downstream = subscriber.connect("postgres")?;
    downstream.run(
        "CREATE EXTENSION pg_fence;
         CREATE TABLE orders (id int PRIMARY KEY, total int, fence bigint);
         CREATE TABLE parcels (id int PRIMARY KEY, total int, fence bigint);
         SELECT fence_protect('orders', lease => 'order:{id}'), fence_protect('parcels')",
    )?;
    subscribe(&publisher, &mut downstream)?;
    becomes_true(
        &mut downstream,
        "SELECT (SELECT count(*) FROM orders) + (SELECT count(*) FROM parcels) = 2",
    )?;

    // Work continues meanwhile. Then writing is forbidden, and running transactions are ended.
    history.draw_more(&mut upstream, 50)?;
    let last: i64 = upstream.one("SELECT lease_renew('order:7', $1)", &[&history.token])?;
    history.see(last);
    upstream.run(&format!("UPDATE orders SET total = 10, fence = {last}"))?;
    let mut late = publisher.connect("postgres")?;
    late.run("BEGIN")?;
    late.run(&format!("UPDATE orders SET total = 11, fence = {last}"))?;
    upstream.run(
        "ALTER DATABASE postgres SET default_transaction_read_only = on;
         SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
          WHERE backend_type = 'client backend' AND datname = current_database() AND pid <> pg_backend_pid()",
    )?;
    ensure!(late.try_rows("COMMIT").is_err(), "an open transaction went on");
    publisher
        .connect("postgres")?
        .refused(&format!("SELECT lease_renew('order:7', {last})"), "25006")?;
    catch_up(&mut upstream)?;
    becomes_true(&mut downstream, "SELECT total = 10 FROM orders")?;
    downstream.run("DROP SUBSCRIPTION s")?;
    downstream.run("SELECT fence_new_epoch()")?;

    // The new database has the rows and their fences. Leases must be acquired again, with greater tokens.
    ensure!(downstream.one::<i64>("SELECT last_token FROM fence_status()", &[])? > history.seen);
    let bypasses = downstream.rows(
        "SELECT finding FROM fence_audit() WHERE severity = 'hole' AND finding LIKE '%above%'",
    )?;
    ensure!(bypasses.is_empty(), "{bypasses:?}");
    let stale = format!("UPDATE orders SET total = 12, fence = {last}");
    ensure!(downstream.try_rows(&stale).is_err(), "a worker of the old database writes on");
    let token = downstream.acquire("order:7", "1 h")?;
    ensure!(token > history.seen);
    downstream.run(&format!("UPDATE orders SET total = 13, fence = {token}"))?;
    downstream.refused(&stale, "PF001")?;
    let stale = format!("UPDATE parcels SET total = 12, fence = {}", history.written);
    downstream.refused(&stale, "PF001").map(drop)
}

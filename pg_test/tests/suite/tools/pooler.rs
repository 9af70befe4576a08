//! PgBouncer in transaction mode: active clients, and clients that are killed. The rest is in pooler.script.

use crate::support::concurrency::nothing_is_left;
use pg_test::pooler::Pooler;
use pg_test::process::{PATIENCE, wait_until};
use pg_test::{Calls, Harness, Result, Session, ensure, harness_test};
use std::time::Instant;

#[harness_test]
fn many_clients_on_few_connections_exclude_each_other(harness: &Harness) -> Result<()> {
    const CLIENTS: usize = 8;
    const TURNS: i64 = 3;
    let (db, pooler) = (harness.database()?, Pooler::start(harness, harness.cluster(), 3)?);
    let mut admin = db.connect()?;
    admin.run("CREATE TABLE counter (n bigint, fence bigint); INSERT INTO counter VALUES (0)")?;
    admin.run("SELECT fence_protect('counter', lease => 'job')")?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..CLIENTS)
            .map(|_| {
                let mut session = pooler.conninfo(db.name()).connect()?;
                Ok(scope.spawn(move || (0..TURNS).try_for_each(|_| one_turn(&mut session))))
            })
            .collect::<Result<_>>()?;
        threads.into_iter().try_for_each(|thread| thread.join().expect("it does not panic"))
    })?;
    let n = admin.granted("SELECT n FROM counter")?;
    ensure!(n == CLIENTS as i64 * TURNS, "{n}: an increment was lost");
    let used = admin.granted(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
         AND application_name = 'pooled'",
    )?;
    ensure!((1..=3).contains(&used), "{used} connections to the server");
    ensure!(!admin.is_taken("job")?);
    nothing_is_left(&mut admin)
}

/// Acquires, reads in one transaction and writes in another, renews, and releases.
fn one_turn(session: &mut Session) -> Result<()> {
    let started = Instant::now();
    let token = loop {
        // The wait is short: it occupies one of the few connections, which the holder needs to release the lease.
        let call = "SELECT lease_acquire('job', ttl => '5 min', wait => '200 ms')";
        if let Some(token) = session.token(call)? {
            break token;
        }
        ensure!(started.elapsed() < PATIENCE, "the line is stuck");
    };
    let n = session.granted("SELECT n FROM counter")?;
    let renewed = session.renew("job", token)?.expect("held");
    session.run(&format!(
        "BEGIN; SET LOCAL pg_fence.token = '{renewed}'; UPDATE counter SET n = {n} + 1; COMMIT"
    ))?;
    ensure!(session.release("job", token)?.is_some(), "lost before its end");
    Ok(())
}

#[harness_test]
fn a_client_that_goes_away_leaves_neither_guard_nor_place_in_the_queue(
    harness: &Harness,
) -> Result<()> {
    let (db, pooler) = (harness.database()?, Pooler::start(harness, harness.cluster(), 3)?);
    let mut direct = db.connect()?;
    let token = direct.acquire("job", "1 h")?;
    let mut guard = harness.worker("guard", &pooler.conninfo(db.name()))?;
    guard.rows(&format!("BEGIN; SELECT lease_guard('job', {token})"))?;
    let mut waiter = harness.worker("waiter", &pooler.conninfo(db.name()).application("pooled"))?;
    waiter.send("SELECT lease_acquire('job', 'dead', '1 h', '5 min')")?;
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                 AND wait_event_type = 'Extension'";
    wait_until("it waits", PATIENCE, || direct.granted(waits).unwrap_or(0) == 1)?;
    direct.release("job", token)?.expect("held");
    direct.nothing("SELECT lease_acquire('job')")?;
    // Both clients die; the pooler closes their connections.
    waiter.kill()?;
    wait_until("the waiter is gone", PATIENCE, || direct.granted(waits).unwrap_or(1) == 0)?;
    guard.kill()?;
    nothing_is_left(&mut direct)?;
    let next = direct.acquire("job", "1 h")?;
    ensure!(next == token + 2, "{next}: somebody was granted the lease in between");
    Ok(())
}

/// Once the server has been away for a moment, PgBouncer asks it again only after `server_login_retry`, and all clients
/// wait until then: heartbeats, too, for longer than a short lease lives.
#[harness_test]
fn a_pooler_keeps_heartbeats_from_a_server_that_is_back_until_its_retry(
    harness: &Harness,
) -> Result<()> {
    for (seconds, comes_through) in [(3600, false), (1, true)] {
        let cluster = harness.builder().start()?;
        cluster.connect("postgres")?.run("CREATE EXTENSION pg_fence")?;
        let settings = format!(
            "pool_mode = transaction\nserver_login_retry = {seconds}\nquery_wait_timeout = 2\n"
        );
        let pooler = Pooler::start_set(harness, &cluster, &settings)?;
        let heartbeat = |token: i64| pooler.conninfo("postgres").connect()?.renew("job", token);
        let token = pooler.conninfo("postgres").connect()?.acquire("job", "1 h")?;
        ensure!(heartbeat(token)?.is_some());
        cluster.stop()?;
        ensure!(heartbeat(token).is_err(), "a server that is away answers");
        cluster.start()?;
        let renewed = cluster.connect("postgres")?.renew("job", token)?;
        ensure!(renewed.is_some(), "it is held, and the server is back");
        if comes_through {
            wait_until("heartbeats come through", PATIENCE, || heartbeat(token).is_ok())?;
        } else {
            ensure!(heartbeat(token).is_err(), "the pooler has asked again");
        }
    }
    Ok(())
}

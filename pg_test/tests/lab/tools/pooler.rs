//! Behind PgBouncer in transaction mode, with fewer connections to the server than clients.

use crate::support::concurrency::nothing_is_left;
use pg_test::pooler::Pooler;
use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Calls, Database, Lab, Result, Session};
use std::time::{Duration, Instant};

/// A database, and a pooler with so many connections to it.
fn pooled(lab: &Lab, connections: usize) -> Result<(Database, Pooler)> {
    let db = lab.database()?;
    let pooler = Pooler::start(lab, lab.cluster(), connections)?;
    Ok((db, pooler))
}

fn client(pooler: &Pooler, db: &Database) -> Result<Session> {
    pooler.conninfo(db.name()).connect()
}

#[lab_test]
fn many_clients_on_few_connections_exclude_each_other(lab: &Lab) -> Result<()> {
    const CLIENTS: usize = 8;
    const TURNS: i64 = 3;
    let (db, pooler) = pooled(lab, 3)?;
    let mut admin = db.connect()?;
    admin.run("CREATE TABLE counter (n bigint, fence bigint); INSERT INTO counter VALUES (0)")?;
    admin.run("SELECT fence_protect('counter', lease => 'job')")?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..CLIENTS)
            .map(|_| {
                let mut session = client(&pooler, &db)?;
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
        // A short wait: it holds one of the few connections, which the holder needs in order to release.
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

#[lab_test]
fn a_lease_belongs_to_its_token_and_not_to_a_connection(lab: &Lab) -> Result<()> {
    let (db, pooler) = pooled(lab, 1)?;
    // All on one connection, one after the other.
    let (mut a, mut b) = (client(&pooler, &db)?, client(&pooler, &db)?);
    let pids = [&mut a, &mut b].map(|s| s.granted("SELECT pg_backend_pid()").unwrap_or(0));
    ensure!(pids[0] == pids[1], "they should share a connection: {pids:?}");
    let token = a.acquire("job", "1 h")?;
    b.nothing("SELECT lease_acquire('job')")?;
    b.nothing("SELECT lease_acquire('job', 'b', reclaim => true)")?;
    b.nothing("SELECT lease_acquire('job', wait => '100 ms')")?;
    ensure!(a.speaks("job", token)?);
    // And on another one.
    let mut elsewhere = db.connect()?;
    let renewed = elsewhere.renew("job", token)?.expect("held");
    ensure!(a.release("job", renewed)?.is_some());
    let next = b.acquire("job", "1 h")?;
    ensure!(a.release("job", token)?.is_none() && b.speaks("job", next)?);
    Ok(())
}

#[lab_test]
fn the_next_client_of_a_connection_inherits_no_guard(lab: &Lab) -> Result<()> {
    let (db, pooler) = pooled(lab, 1)?;
    let (mut a, mut b) = (client(&pooler, &db)?, client(&pooler, &db)?);
    a.run("CREATE TABLE t (n int, fence bigint); INSERT INTO t VALUES (0)")?;
    a.run("SELECT fence_protect('t', lease => 'job')")?;
    let token = a.acquire("job", "1 h")?;
    a.run(&format!("BEGIN; SELECT lease_guard('job', {token}); UPDATE t SET n = 1; COMMIT"))?;
    b.refused("UPDATE t SET n = 2", "PF002")?;
    a.run(&format!("BEGIN; UPDATE t SET n = 3, fence = {token}; COMMIT"))?;
    b.refused("UPDATE t SET n = 4", "PF002")?;
    // Nor after a transaction that failed.
    a.run(&format!("BEGIN; SELECT lease_guard('job', {token})"))?;
    a.refused("SELECT 1/0", "22012")?;
    a.run("ROLLBACK")?;
    b.refused("UPDATE t SET n = 5", "PF002")?;
    ensure!(b.granted("SELECT n FROM t")? == 3);
    Ok(())
}

#[lab_test]
fn set_local_is_the_transaction_s_own(lab: &Lab) -> Result<()> {
    let (db, pooler) = pooled(lab, 1)?;
    let (mut a, mut b) = (client(&pooler, &db)?, client(&pooler, &db)?);
    a.run("CREATE TABLE t (n int, fence bigint); INSERT INTO t VALUES (0)")?;
    a.run("SELECT fence_protect('t')")?;
    for n in 1..=3 {
        let token = a.acquire(&format!("job{n}"), "1 h")?;
        a.run("BEGIN")?;
        a.run(&format!("SET LOCAL pg_fence.token = '{token}'"))?;
        a.run(&format!("UPDATE t SET n = {n}"))?;
        a.run("COMMIT")?;
        b.refused("UPDATE t SET n = -1", "PF002")?;
        let stamped = b.granted("SELECT fence FROM t")?;
        ensure!(stamped == token, "{stamped} was stamped, not {token}");
    }
    Ok(())
}

#[lab_test]
fn a_session_level_set_leaks_to_other_clients(lab: &Lab) -> Result<()> {
    let (db, pooler) = pooled(lab, 1)?;
    let (mut a, mut b) = (client(&pooler, &db)?, client(&pooler, &db)?);
    a.run("CREATE TABLE t (n int, fence bigint); INSERT INTO t VALUES (0)")?;
    a.run("SELECT fence_protect('t')")?;
    let token = a.acquire("job", "1 h")?;
    // As the documentation warns: PgBouncer resets nothing between transactions.
    a.run(&format!("SET pg_fence.token = '{token}'"))?;
    let leaked = b.granted("SHOW pg_fence.token")?;
    ensure!(leaked == token, "{leaked}");
    b.run("UPDATE t SET n = 1")?;
    ensure!(b.granted("SELECT fence FROM t")? == token, "written under another client's token");
    for end in ["RESET pg_fence.token", "DISCARD ALL"] {
        b.run(&format!("SET pg_fence.token = '{token}'"))?;
        b.run(end)?;
        b.refused("UPDATE t SET n = 2", "PF002")?;
    }
    Ok(())
}

#[lab_test]
fn a_waiting_client_holds_a_connection(lab: &Lab) -> Result<()> {
    let (db, pooler) = pooled(lab, 1)?;
    let mut direct = db.connect()?;
    let token = direct.acquire("job", "1 h")?;
    let mut waiter = client(&pooler, &db)?;
    let mut other = client(&pooler, &db)?;
    std::thread::scope(|scope| {
        let waiting = scope.spawn(move || {
            waiter.token("SELECT lease_acquire('job', ttl => '1 h', wait => '5 min')")
        });
        in_line(&mut direct, 1)?;
        let (sender, answers) = std::sync::mpsc::channel();
        scope.spawn(move || sender.send(other.granted("SELECT 1")));
        let early = answers.recv_timeout(Duration::from_millis(700));
        // Another connection, or the holder's own, ends the wait; and with it the other client's.
        direct.release("job", token)?.expect("held");
        ensure!(early.is_err(), "the connection was free while a client waited: {early:?}");
        ensure!(waiting.join().expect("it does not panic")?.is_some());
        ensure!(answers.recv_timeout(PATIENCE)?? == 1);
        Ok(())
    })
}

/// Waits until so many pooled connections wait.
fn in_line(direct: &mut Session, count: i64) -> Result<()> {
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
               AND application_name = 'pooled' \
               AND (wait_event_type IN ('Lock', 'Extension') OR wait_event = 'PgSleep')";
    wait_until("they wait in the queue", PATIENCE, || direct.granted(sql).unwrap_or(-1) == count)
}

#[lab_test]
fn a_cancelled_wait_gives_the_connection_back(lab: &Lab) -> Result<()> {
    let (db, pooler) = pooled(lab, 1)?;
    let mut direct = db.connect()?;
    direct.acquire("job", "1 h")?;
    let mut waiter = client(&pooler, &db)?;
    std::thread::scope(|scope| {
        let waiting = scope.spawn(move || {
            let fault = waiter.refused("SELECT lease_acquire('job', wait => '5 min')", "57014");
            fault.and_then(|_| waiter.granted("SELECT 1"))
        });
        in_line(&mut direct, 1)?;
        // By the server: PgBouncer 1.18.0 itself dies of a cancelling client that hangs up early.
        direct.run(
            "SELECT pg_cancel_backend(pid) FROM pg_stat_activity \
             WHERE datname = current_database() AND application_name = 'pooled' AND state = 'active'",
        )?;
        ensure!(waiting.join().expect("it does not panic")? == 1);
        ensure!(client(&pooler, &db)?.granted("SELECT 2")? == 2);
        nothing_is_left(&mut direct)
    })
}

#[lab_test]
fn a_client_that_goes_away_leaves_neither_guard_nor_place_in_the_queue(lab: &Lab) -> Result<()> {
    let (db, pooler) = pooled(lab, 3)?;
    let mut direct = db.connect()?;
    let token = direct.acquire("job", "1 h")?;
    let mut guard = lab.worker("guard", &pooler.conninfo(db.name()))?;
    guard.rows(&format!("BEGIN; SELECT lease_guard('job', {token})"))?;
    let mut waiter = lab.worker("waiter", &pooler.conninfo(db.name()).application("pooled"))?;
    waiter.send("SELECT lease_acquire('job', 'dead', '1 h', '5 min')")?;
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                 AND wait_event_type = 'Extension'";
    wait_until("it waits", PATIENCE, || direct.granted(waits).unwrap_or(0) == 1)?;
    direct.release("job", token)?.expect("held");
    direct.nothing("SELECT lease_acquire('job')")?;
    // Both die; the pooler closes what they were on.
    waiter.kill()?;
    wait_until("the waiter is gone", PATIENCE, || direct.granted(waits).unwrap_or(1) == 0)?;
    guard.kill()?;
    nothing_is_left(&mut direct)?;
    let next = direct.acquire("job", "1 h")?;
    ensure!(next == token + 2, "{next}: somebody was granted the lease in between");
    Ok(())
}

//! Waiting in the queue: who is served when, and what the queue looks like from outside. (Reclaims, and the transaction
//! after a wait: order.script.)

use crate::support::concurrency::{
    gets_nothing, nothing_is_left, sleeps, still_wait, token_of, undisturbed_server, waiting,
    waiting_at_most, with_time_enough, WAIT,
};
use nix::sys::signal::Signal;
use pg_test::process::{self, wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Background, Calls, Database, Lab, Result};
use std::time::{Duration, Instant};

#[lab_test]
fn waiters_are_served_in_the_order_they_came(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut holder = db.connect()?;
    let mut token = holder.acquire("job", "1 h")?;
    let mut queue: Vec<Background> =
        (0..5).map(|_| waiting(&db, WAIT)).collect::<Result<Vec<_>>>()?;
    while !queue.is_empty() {
        ensure!(holder.release("job", token)?.is_some());
        let mut first = queue.remove(0);
        let next = token_of(&mut first)?;
        ensure!(next > token);
        token = next;
        still_wait(&mut queue)?;
    }
    ensure!(holder.speaks("job", token)?);
    nothing_is_left(&mut holder)
}

#[lab_test]
fn nobody_overtakes_a_waiter_though_the_lease_is_free(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut holder, mut other) = (db.connect()?, db.connect()?);
    let token = holder.acquire("job", "1 h")?;
    let mut head = waiting(&db, WAIT)?;
    let mut second = waiting(&db, WAIT)?;
    // Frozen, the head cannot take what becomes free.
    process::signal(head.pid(), Signal::SIGSTOP)?;
    let frozen = wait_until("frozen", PATIENCE, || process::is_stopped(head.pid()));
    let overtaken = frozen.and_then(|()| {
        holder.release("job", token)?;
        for call in [
            "lease_acquire('job')",
            "lease_acquire('job', shared => true)",
            "lease_acquire('job', slots => 3)",
            "lease_acquire_all('{job, free}')",
            "(SELECT max(token) FROM lease_acquire_any('{job}'))",
            "lease_acquire('job', wait => '300 ms')",
            "lease_acquire('job', wait => '1 us')",
        ] {
            let rows = other.rows(&format!("SELECT {call}"))?;
            ensure!(rows.iter().all(|row| row[0].is_none()), "{call} overtook the queue: {rows:?}");
        }
        let third = waiting(&db, WAIT)?;
        still_wait([&mut head, &mut second])?;
        ensure!(other.text("SELECT state FROM lease_info('job')")?.as_deref() == Some("free"));
        Ok(third)
    });
    process::signal(head.pid(), Signal::SIGCONT)?;
    let mut third = overtaken?;
    let first = token_of(&mut head)?;
    still_wait([&mut second, &mut third])?;
    holder.release("job", first)?;
    let next = token_of(&mut second)?;
    still_wait([&mut third])?;
    holder.release("job", next)?;
    token_of(&mut third)?;
    Ok(())
}

#[lab_test]
fn queues_of_different_leases_do_not_disturb_each_other(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut holder = db.connect()?;
    holder.acquire("job", "1 h")?;
    let token = holder.acquire("other", "1 h")?;
    let mut queue = [waiting(&db, WAIT)?, waiting(&db, WAIT)?];
    let mut other = waiting(&db, "SELECT lease_acquire('other', wait => '10 min')")?;
    db.connect()?.acquire("third", "1 h")?;
    holder.release("other", token)?;
    token_of(&mut other)?;
    still_wait(&mut queue)?;
    // The same name in another database is another lease.
    let elsewhere = lab.database()?;
    elsewhere.connect()?.acquire("job", "1 h")?;
    Ok(())
}

#[lab_test]
fn an_administrator_sees_the_queue(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut admin = db.connect()?;
    admin.acquire("job", "1 h")?;
    let queue: Vec<Background> = (0..4).map(|_| waiting(&db, WAIT)).collect::<Result<Vec<_>>>()?;
    let pids: Vec<String> = queue.iter().map(|w| w.pid().to_string()).collect();
    // Waiters behind the head wait for a lock, in the order they came.
    let behind = admin.rows(
        "SELECT l.pid FROM pg_locks l JOIN pg_stat_activity a USING (pid) \
         WHERE a.datname = current_database() AND NOT l.granted AND l.locktype = 'advisory' \
         AND a.wait_event_type = 'Lock' AND a.wait_event = 'advisory' ORDER BY l.waitstart",
    )?;
    let behind: Vec<String> = behind.into_iter().filter_map(|row| row[0].clone()).collect();
    ensure!(behind == pids[1..], "{behind:?} of {pids:?}");
    // The head has the lock that they wait for, and waits in the extension.
    let blockers: Vec<i32> = admin.one("SELECT pg_blocking_pids($1)", &[&queue[1].pid()])?;
    ensure!(blockers == [queue[0].pid()], "{blockers:?}");
    // But for the moments in which it looks.
    let sleeps = format!(
        "SELECT wait_event_type IS NOT DISTINCT FROM 'Extension' FROM pg_stat_activity \
         WHERE state = 'active' AND pid = {}",
        pids[0]
    );
    wait_until("the head waits in the extension", PATIENCE, || {
        admin.truth(&sleeps).unwrap_or(false)
    })
}

#[lab_test]
fn at_most_one_of_a_queue_looks(lab: &Lab) -> Result<()> {
    let server = undisturbed_server(lab)?;
    let db = Database::with_extension(server.conninfo("postgres"))?;
    let mut holder = db.connect()?;
    let token = holder.acquire("job", "1 h")?;
    let mut queue: Vec<Background> =
        (0..10).map(|_| waiting(&db, WAIT)).collect::<Result<Vec<_>>>()?;
    let not_locked = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                      AND query LIKE 'SELECT lease_acquire%' AND state = 'active' \
                      AND wait_event_type IS DISTINCT FROM 'Lock'";
    let until = Instant::now() + Duration::from_millis(2500);
    let mut renewed = token;
    while Instant::now() < until {
        let looking = holder.granted(not_locked)?;
        ensure!(looking <= 1, "{looking} look at once");
        // The holder's calls wake no crowd either.
        renewed = holder.renew("job", renewed)?.expect("held");
    }
    still_wait(&mut queue)
}

#[lab_test]
fn waiters_sleep(lab: &Lab) -> Result<()> {
    let server = undisturbed_server(lab)?;
    let db = Database::with_extension(server.conninfo("postgres"))?;
    let (mut holder, mut guard) = (db.connect()?, db.connect()?);
    holder.acquire("held", "1 h")?;
    holder.granted("SELECT lease_acquire('slots', slots => 2, ttl => '1 h')")?;
    holder.granted("SELECT lease_acquire('read', shared => true, ttl => '1 h')")?;
    guard.run("BEGIN")?;
    for (name, more) in [("guarded", ""), ("slots", ", slots => 2"), ("shared", ", shared => true")]
    {
        let call = format!("SELECT lease_acquire('{name}', ttl => '2 s'{more})");
        let token = holder.granted(&call)?;
        guard.run(&format!("SELECT lease_guard('{name}', {token})"))?;
        // The rest of the grant runs out; the guard keeps the place.
        holder.granted(&format!("SELECT lease_renew('{name}', {token}, '1 us')"))?;
    }
    let mut queue = Vec::new();
    for (name, more) in [
        ("held", ""),
        ("held", ", shared => true"),
        ("guarded", ""),
        ("guarded", ""),
        ("slots", ", slots => 2"),
        ("slots", ", slots => 2"),
        ("shared", ""),
        ("read", ""),
    ] {
        let call = format!("SELECT lease_acquire('{name}', wait => '10 min'{more})");
        queue.push(waiting(&db, &call)?);
    }
    let count =
        |queue: &[Background]| queue.iter().map(|w| sleeps(w.pid())).collect::<Result<Vec<_>>>();
    let (before, start) = (count(&queue)?, Instant::now());
    std::thread::sleep(Duration::from_secs(3));
    let (after, took) = (count(&queue)?, start.elapsed());
    still_wait(&mut queue)?;
    // The head looks once a second; a poll every 50 ms would be 20 times a second.
    let woken: Vec<u64> = after.iter().zip(&before).map(|(a, b)| a - b).collect();
    let most = 5 + 2 * took.as_secs();
    ensure!(woken.iter().all(|&n| n <= most), "woken so often in {took:?}: {woken:?}");
    Ok(())
}

#[lab_test]
fn the_ttl_starts_at_the_grant(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut holder = db.connect()?;
    let token = holder.acquire("job", "1 h")?;
    // All three wait for longer than they will hold.
    let call = "BEGIN; SELECT lease_acquire('job', ttl => '2 s', wait => '10 min')";
    let queue = [waiting(&db, call)?, waiting(&db, call)?, waiting(&db, call)?];
    std::thread::sleep(Duration::from_millis(2200));
    let mut free_since = holder.text("SELECT clock_timestamp()")?.expect("a time");
    holder.release("job", token)?;
    for mut waiter in queue {
        let token = token_of(&mut waiter)?;
        // Its transaction is open, so that the next one cannot have it yet, however slow this machine is.
        waiter.send(&format!(
            "SELECT expires_at, expires_at - acquired_at = '2 s' AND acquired_at >= '{free_since}' \
             AND token = {token}, i FROM lease_info('job') AS i; COMMIT"
        ))?;
        let rows = waiter.rows()?;
        ensure!(rows[0][1].as_deref() == Some("t"), "{rows:?}");
        // This one runs out.
        free_since = rows[0][0].clone().expect("a time");
    }
    Ok(())
}

#[lab_test]
fn a_wait_that_elapses_ends_with_null(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut holder = db.connect()?;
    let token = holder.acquire("job", "1 h")?;
    let drawn = holder.last_token()?;
    let (mut queue, started, unit) = with_time_enough(|seconds| {
        let (started, unit) = (Instant::now(), 500 * u64::from(seconds));
        let mut queue = Vec::new();
        for wait in [5 * unit, 3 * unit, 4 * unit, 600_000] {
            let mut waiter = Background::connect(&db.conninfo())?;
            waiter.send(&format!("SELECT lease_acquire('job', wait => '{wait} ms')"))?;
            waiter.blocks_or_ends()?;
            queue.push(waiter);
        }
        let all_wait = !queue.iter_mut().any(Background::is_finished);
        Ok(all_wait.then_some((queue, started, unit)))
    })?;
    // The second, then the third, then the head.
    for (place, least) in [(1, 3 * unit), (2, 4 * unit), (0, 5 * unit)] {
        gets_nothing(&mut queue[place])?;
        let waited = started.elapsed();
        ensure!(waited >= Duration::from_millis(least), "{waited:?}, not {least} ms");
    }
    let mut last = queue.remove(3);
    still_wait([&mut last])?;
    ensure!(holder.last_token()? == drawn, "a wait in vain drew a token");
    holder.release("job", token)?;
    token_of(&mut last)?;
    nothing_is_left(&mut holder)
}

#[lab_test]
fn a_circle_of_waits_ends_with_the_first_wait_to_elapse(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut holder = Background::connect(&db.conninfo())?;
    holder.run("CREATE TABLE t AS SELECT 1 AS id, 0 AS n")?;
    let token = holder.run("SELECT lease_acquire('job', ttl => '1 h')")?[0][0].clone();
    let token = token.expect("free");
    let mut head = waiting(&db, WAIT)?;
    // It has the row that the holder will want, and stands in the holder's queue.
    let mut waiter = waiting_at_most(&db, |seconds| {
        let wait = 2 * seconds;
        format!("BEGIN; UPDATE t SET n = n + 1; SELECT lease_acquire('job', wait => '{wait} s')")
    })?;
    holder.send(&format!("UPDATE t SET n = n + 10; SELECT lease_release('job', {token})"))?;
    holder.wait_until_blocked()?;
    gets_nothing(&mut waiter)?;
    ensure!(!holder.is_finished());
    waiter.run("COMMIT")?;
    token_of(&mut holder)?;
    token_of(&mut head)?;
    let n: i32 = db.connect()?.one("SELECT n FROM t", &[])?;
    ensure!(n == 11, "{n}");
    Ok(())
}

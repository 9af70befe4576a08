//! The server's cost of one more call, worker, lease or waiter, and the number of leases that it can carry.

use crate::plot::Better::Higher;
use crate::race::{self, Contender, WARM_UP, in_turns};
use crate::report::{Cell, Section, row};
use crate::spread::Spread;
use crate::workbench::Workbench;
use anyhow::{Context, Result, ensure};
use pg_test::process;
use std::fs;
use std::thread;
use std::time::Duration;

const UPDATE: &str = "update of a plain row";
const HEARTBEAT: &str = "heartbeat: lease_renew";
const REFUSED: &str = "refused write";
const HEARTBEATS: &str = "heartbeat of 100 leases in one statement, each";
const HELD: &str = "capacity held";
/// The number of leases renewed by one statement.
const BATCH: usize = 100;

/// Calls with their statements, each called many times. `TOKEN` belongs to a lease that the session holds throughout;
/// `STALE` belonged to an earlier holder.
const CALLS: &[(&str, &[&str])] = &[
    ("SELECT 1", &["SELECT 1"]),
    (UPDATE, &["UPDATE capacity_plain SET v = v + 1 WHERE id = 1"]),
    (HEARTBEAT, &["SELECT lease_renew('capacity held', TOKEN)"]),
    (
        "acquire + release",
        &[
            "SELECT set_config('capacity.token', lease_acquire('capacity', 'bench')::text, false)",
            RELEASE,
        ],
    ),
    (
        "the same with session => true",
        &[
            "SELECT set_config('capacity.token', lease_acquire('capacity', 'bench', session => true)::text, false)",
            RELEASE,
        ],
    ),
    ("losing try", &["SELECT lease_acquire('capacity held', 'another')"]),
    (
        "guarded write: BEGIN, guard, update of a bound row, COMMIT",
        &[
            "BEGIN",
            "SELECT lease_guard('capacity held', TOKEN)",
            "UPDATE capacity_bound SET v = v + 1, fence = TOKEN WHERE id = 1",
            "COMMIT",
        ],
    ),
    (REFUSED, &["UPDATE capacity_bound SET v = v + 1, fence = STALE WHERE id = 1"]),
];

const RELEASE: &str = "SELECT lease_release('capacity', current_setting('capacity.token')::bigint)";

pub fn measure(bench: &Workbench) -> Result<Section> {
    let mut section = Section::new(
        "Capacity",
        "What one more of each costs the server, one client at a time. Work is the time that all processes of the server \
         were on a processor; WAL is what they wrote of it.",
    );
    let mut session = bench.connect()?;
    let stale: i64 = session.one("SELECT lease_acquire($1, 'before')", &[&HELD])?;
    session.run(&format!("SELECT lease_release('{HELD}', {stale})"))?;
    let token: i64 = session.one("SELECT lease_acquire($1, 'bench', '1 day')", &[&HELD])?;
    session.run(
        "CREATE TABLE capacity_plain (id int PRIMARY KEY, v bigint NOT NULL) WITH (fillfactor = 50);
         CREATE TABLE capacity_bound (id int PRIMARY KEY, v bigint NOT NULL, fence bigint) WITH (fillfactor = 50);
         INSERT INTO capacity_plain VALUES (1, 0); INSERT INTO capacity_bound VALUES (1, 0, 0)",
    )?;
    session.run(&format!("SELECT fence_protect('capacity_bound', lease => '{HELD}')"))?;
    calls(bench, &mut section, token, stale)?;
    waiters(bench, &mut section)?;
    locks(bench, &mut section, token)?;
    carried(bench, &mut section)?;
    session.run(&format!("SELECT lease_release('{HELD}', {token})"))?;
    Ok(section)
}

/// The CPU time of a process in nanoseconds, which excludes other work of the machine.
pub fn work_of(pid: i32) -> Result<f64> {
    let path = format!("/proc/{pid}/schedstat");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    Ok(text.split_whitespace().next().with_context(|| path.clone())?.parse()?)
}

/// The CPU time of all server processes except this one.
fn work(bench: &Workbench, but: i32) -> Result<f64> {
    let pids = process::children_of(bench.cluster().pid()?);
    pids.into_iter().filter(|pid| *pid != but).map(work_of).sum()
}

fn calls(bench: &Workbench, section: &mut Section, token: i64, stale: i64) -> Result<()> {
    let (rounds, times) = (bench.options.rounds(), bench.options.pick(20, 1_000));
    bench.progress(&format!("capacity: {times} of each call, {rounds} times"));
    let mut looks = bench.connect()?;
    let tokens =
        |sql: &&str| sql.replace("TOKEN", &token.to_string()).replace("STALE", &stale.to_string());
    let spent = in_turns(CALLS.len(), (0, rounds), |index| {
        let ((name, sql), mut session) = (CALLS[index], bench.connect()?);
        let statements: Vec<String> = sql.iter().map(tokens).collect();
        let prepared =
            statements.iter().map(|sql| session.prepare(sql)).collect::<Result<Vec<_>, _>>()?;
        let mut once = || -> Result<()> {
            for statement in &prepared {
                let refused = session.execute(statement, &[]).is_err();
                ensure!(refused == (name == REFUSED), "{name}: refused: {refused}");
            }
            Ok(())
        };
        let mut done = || -> Result<[f64; 2]> {
            let wal = "SELECT (pg_current_wal_insert_lsn() - '0/0')::float8";
            let wal = looks.one(wal, &[])?;
            Ok([work(bench, looks.pid())? / 1e3, wal])
        };
        (0..WARM_UP).try_for_each(|_| once())?;
        let before = done()?;
        (0..times).try_for_each(|_| once())?;
        let after = done()?;
        Ok([0, 1].map(|figure| (after[figure] - before[figure]) / times as f64))
    })?;
    let of =
        |name| CALLS.iter().position(|call| call.0 == name).map_or(&[][..], |at| &spent[at][0]);
    let update = of(UPDATE);
    let head = ["", "µs of the server's work", "over an update", "bytes of WAL"];
    let rows = CALLS.iter().zip(&spent).map(|((name, _), [micros, wal])| {
        row![*name, (micros, 0), (Spread::of_ratios(micros, update), 2), (wal, 0)]
    });
    section.table("one more call", &head, rows);
    let ratio = Spread::of_ratios(of(HEARTBEAT), update);
    section.at_most("a heartbeat's work over an update's", ratio, 1.2);
    Ok(())
}

/// The cost of sessions that wait for a lease that is never released.
fn waiters(bench: &Workbench, section: &mut Section) -> Result<()> {
    let (number, seconds) = (bench.options.pick(4, 50), bench.options.pick(1, 20));
    bench.progress(&format!("capacity: {number} waiters for {seconds} s"));
    let waiting = bench.conninfo().application("capacity waiter");
    let mut sessions = (0..number).map(|_| waiting.connect()).collect::<Result<Vec<_>>>()?;
    let threads = sessions.drain(..).map(|mut session| {
        let wait = format!("SELECT lease_acquire('{HELD}', 'waiter', wait => '1 h')");
        // Ended from outside.
        thread::spawn(move || session.run(&wait).is_err())
    });
    let threads: Vec<thread::JoinHandle<bool>> = threads.collect();
    let mut looks = bench.connect()?;
    let count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'capacity waiter'
                  AND state = 'active' AND wait_event IS NOT NULL";
    process::wait_until("they wait", Duration::from_secs(60), || {
        looks.one::<i64>(count, &[]).is_ok_and(|waiting| waiting == number)
    })?;
    let of_waiters = "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
                       WHERE application_name = 'capacity waiter' AND locktype <> 'virtualxid'";
    let locks: i64 = looks.one(of_waiters, &[])?;
    let before = work(bench, looks.pid())?;
    thread::sleep(Duration::from_secs(seconds));
    let spent = work(bench, looks.pid())? - before;
    looks.run(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'capacity waiter'",
    )?;
    for thread in threads {
        thread.join().ok().context("a waiter panicked")?;
    }
    let share = spent / 1e9 / seconds as f64 / number as f64;
    let rows = [
        row!["µs of the server's work, a second of waiting", (share * 1e6, 0)],
        row!["entries of the lock table", (locks as f64 / number as f64, 1)],
    ];
    section.table(format!("one more waiter, of {number} in one queue"), &["", "a waiter"], rows);
    section.at_most("a waiter's share of a processor", Spread::of(&[share]), 0.001);
    Ok(())
}

/// The number of lock table entries while the lease is in use.
fn locks(bench: &Workbench, section: &mut Section, token: i64) -> Result<()> {
    let mut looks = bench.connect()?;
    let mut rows = Vec::new();
    for (what, sql) in [
        ("a lease that is held, no transaction open", "SELECT lease_acquire('capacity lock', 'lasting')".to_owned()),
        (
            "a lease of a session, no transaction open",
            "SELECT lease_acquire('capacity lock', 'session', session => true)".to_owned(),
        ),
        (
            "ten leases of one session",
            "SELECT lease_acquire('capacity lock ' || i, 'session', session => true) FROM generate_series(1, 10) i".to_owned(),
        ),
        ("a transaction with a guard", format!("BEGIN; SELECT lease_guard('{HELD}', {token})")),
    ] {
        let mut session = bench.connect()?;
        session.run(&sql)?;
        let entries: i64 = looks.one(
            "SELECT count(*) FROM pg_locks WHERE pid = $1 AND locktype <> 'virtualxid'",
            &[&session.pid()],
        )?;
        rows.push(row![what, (entries as f64, 0)]);
        session.run("ROLLBACK; SELECT lease_revoke(name) FROM fence.leases WHERE name LIKE 'capacity lock%'")?;
    }
    section.table("entries of the lock table", &["", "entries"], rows);
    Ok(())
}

/// The number of leases that can be renewed in time, from the rate at which eight clients renew, with one commit per
/// renewal or per hundred renewals.
fn carried(bench: &Workbench, section: &mut Section) -> Result<()> {
    let clients = bench.options.pick(2, 8);
    bench.progress("capacity: heartbeats");
    let contenders = [renewing(bench, HEARTBEAT, 1), renewing(bench, HEARTBEATS, BATCH)];
    let tracks = race::run(&contenders, bench.options.rules(clients))?;
    let (mut rows, mut bars) = (Vec::new(), Vec::new());
    for (track, batch) in tracks.iter().zip([1, BATCH]) {
        let rate = track.spread().times(batch as f64);
        let leases = |ttl: f64| rate.times(ttl / 3.0 / 2.0);
        let mut row = row![&*track.name, (rate, 0)];
        row.extend([10.0, 30.0, 60.0].map(|ttl| Cell::Number(leases(ttl).median, 0)));
        rows.push(row);
        bars.push((format!("{}, ttl 30 s", track.name), leases(30.0)));
    }
    let title = format!(
        "leases that half of the machine keeps alive, {clients} clients, a heartbeat each third of the ttl"
    );
    section.table(title, &["", "heartbeats/s", "ttl 10 s", "ttl 30 s", "ttl 60 s"], rows);
    section.bars(Higher, "capacity", "leases that half of the machine keeps alive", bars);
    Ok(())
}

/// Renews this number of leases per statement.
fn renewing<'a>(bench: &'a Workbench, name: &'static str, batch: usize) -> Contender<'a> {
    Contender::new(name, move |client| {
        let mut session = bench.connect()?;
        let names: Vec<String> = (0..batch).map(|i| format!("beat {client} {i:03}")).collect();
        let tokens: Vec<i64> = session
            .query("SELECT lease_acquire(name, 'bench', '1 h', reclaim => true) FROM unnest($1::text[]) name", &[&names])?
            .iter()
            .map(|row| row.get(0))
            .collect();
        let renew = session.prepare(
            "SELECT count(lease_renew(name, token)) FROM unnest($1::text[], $2::bigint[]) AS l(name, token)",
        )?;
        Ok(move || {
            let renewed: i64 = session.query_one(&renew, &[&names, &tokens])?.get(0);
            ensure!(renewed == names.len() as i64, "{renewed} of {} were renewed", names.len());
            Ok(())
        })
    })
}

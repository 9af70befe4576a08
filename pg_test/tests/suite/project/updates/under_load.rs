//! The update while workers are active. Some workers keep their connections, and so the earlier library; others open
//! new ones. They exclude each other as if they had the same version, with the earlier SQL objects and then with the
//! new ones.

use super::EarlierVersion;
use pg_test::process::PATIENCE;
use pg_test::{Calls, Cluster, Conninfo, Context, Harness, Result, Session, ensure, harness_test};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The path of an earlier version's library for the old sessions. Without it they have another copy of the present one.
const EARLIER_LIBRARY: &str = "PG_FENCE_EARLIER_LIBRARY";

const WORKERS: usize = 6;
const ROWS: i64 = 2;

/// What a worker has seen: its tokens by row, in the order of its increments.
#[derive(Default)]
struct Seen {
    done: BTreeMap<i64, i64>,
    tokens: Vec<(i64, i64)>,
}

/// Makes one increment under a lease (unless it is revoked before it is guarded), and a stale write that must be
/// refused.
fn one_turn(session: &mut Session, row: i64, seen: &mut Seen) -> Result<()> {
    let ends_with_session: bool = rand::random();
    let call = format!(
        "SELECT lease_acquire('row:{row}', ttl => '5 min', wait => '1 s', session => {ends_with_session})"
    );
    let Some(token) = session.token(&call)? else { return Ok(()) };
    seen.tokens.push((row, token));
    session.run("BEGIN")?;
    if let Err(fault) = session.try_rows(&format!("SELECT lease_guard('row:{row}', {token})")) {
        ensure!(fault.sqlstate == "PF004", "{fault}");
        return session.run("ROLLBACK");
    }
    let n: i64 =
        session.granted(&format!("SELECT n FROM load, pg_sleep(0.005) WHERE id = {row}"))?;
    session.run(&format!("UPDATE load SET n = {} WHERE id = {row}", n + 1))?;
    session.run("COMMIT")?;
    *seen.done.entry(row).or_default() += 1;
    session.renew(&format!("row:{row}"), token)?;
    session.release(&format!("row:{row}"), token)?;
    let stale = format!("UPDATE load SET n = -1, fence = {token} WHERE id = {row}");
    let fault = session.try_rows(&stale).err().context("a stale write landed")?;
    ensure!(["PF001", "PF004"].contains(&fault.sqlstate.as_str()), "{fault}");
    Ok(())
}

fn work(conninfo: &Conninfo, number: usize, stop: &AtomicBool) -> Result<Seen> {
    let (mut seen, mut mine) = (Seen::default(), session(conninfo)?);
    while !stop.load(Ordering::Relaxed) {
        // Every other worker keeps its first library.
        if number.is_multiple_of(2) {
            mine = session(conninfo)?;
        }
        one_turn(&mut mine, rand::random_range(0..ROWS), &mut seen)?;
    }
    Ok(seen)
}

/// Opens a session with the library that is installed now.
fn session(conninfo: &Conninfo) -> Result<Session> {
    let mut session = conninfo.connect()?;
    session.run("SET client_min_messages = error; LOAD 'pg_fence'")?;
    Ok(session)
}

/// Returns true if the file of the session's library has been replaced.
fn is_from_before(session: &Session) -> Result<bool> {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", session.pid()))?;
    let ours = |line: &&str| line.contains("/pg_fence.so");
    ensure!(maps.lines().any(|line| ours(&line)), "it has no library");
    Ok(maps.lines().filter(ours).all(|line| line.ends_with("(deleted)")))
}

#[harness_test]
fn no_increment_and_no_token_is_lost_by_an_update_under_load(harness: &Harness) -> Result<()> {
    for earlier in EarlierVersion::all(harness) {
        let server = earlier.server(harness)?;
        if let Some(library) = std::env::var_os(EARLIER_LIBRARY) {
            server.install_dir().install(&earlier.files.clone().with_library(library.into()))?;
        }
        let conninfo = server.conninfo("postgres");
        let mut admin = session(&conninfo)?;
        earlier.create(&mut admin)?;
        admin.run(&format!(
            "CREATE TABLE load (id bigint PRIMARY KEY, n bigint NOT NULL, fence bigint);
             INSERT INTO load SELECT g, 0 FROM generate_series(0, {ROWS} - 1) g;
             SELECT fence_protect('load', lease => 'row:{{id}}')"
        ))?;
        let stop = AtomicBool::new(false);
        let seen: Vec<Seen> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..WORKERS)
                .map(|number| {
                    let (conninfo, stop) = (&conninfo, &stop);
                    scope.spawn(move || {
                        let seen = work(conninfo, number, stop);
                        // A worker that fails also ends the others.
                        stop.store(true, Ordering::Relaxed);
                        seen
                    })
                })
                .collect();
            let update = update_amid(&earlier, &server, &mut admin, &stop);
            stop.store(true, Ordering::Relaxed);
            let seen = workers.into_iter().map(|worker| worker.join().expect("it does not panic"));
            let seen = seen.collect::<Result<Vec<_>>>();
            update.and(seen)
        })
        .with_context(|| server.log_end(20))?;
        let done = |row: i64| -> i64 { seen.iter().filter_map(|seen| seen.done.get(&row)).sum() };
        for row in 0..ROWS {
            let n = admin.granted(&format!("SELECT n FROM load WHERE id = {row}"))?;
            ensure!(n == done(row) && n > 10, "row {row}: {n} of {} increments", done(row));
        }
        let mut tokens: Vec<_> = seen.iter().flat_map(|seen| &seen.tokens).collect();
        let drawn = tokens.len();
        tokens.sort_by_key(|(_, token)| *token);
        tokens.dedup_by_key(|(_, token)| *token);
        ensure!(tokens.len() == drawn, "{} tokens were handed out twice", drawn - tokens.len());
    }
    Ok(())
}

/// Replaces the files and updates the extension, with workers active before, between and after the steps.
fn update_amid(
    earlier: &EarlierVersion,
    server: &Cluster,
    admin: &mut Session,
    stop: &AtomicBool,
) -> Result<()> {
    let rounds = |admin: &mut Session, more: i64| -> Result<()> {
        let n = "SELECT sum(n)::bigint FROM load";
        let (from, begun) = (admin.granted(n)?, Instant::now());
        while admin.granted(n)? < from + more && !stop.load(Ordering::Relaxed) {
            ensure!(begun.elapsed() < PATIENCE, "the workers stand still");
            // The other workers are excluded by a guard nevertheless.
            admin.run("SELECT lease_revoke('row:' || id) FROM load")?;
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    };
    rounds(admin, 30)?;
    server.install_dir().install(&earlier.files)?;
    let mut new = session(&server.conninfo("postgres"))?;
    ensure!(is_from_before(admin)? && !is_from_before(&new)?, "they have the same library");
    rounds(admin, 30)?;
    new.run("ALTER EXTENSION pg_fence UPDATE")?;
    rounds(admin, 60)
}

//! Claiming from a list of names: the first that are to be had, and nobody waited for.

use crate::support::concurrency::{at_once, rounds, sessions};
use pg_test::{ensure, lab_test, Background, Calls, Context, Lab, Result, Session};
use rand::seq::SliceRandom;
use rand::RngExt;

/// What was claimed, as `b 2, d 4`: names and places, in the order of the rows.
fn claim(session: &mut Session, arguments: &str) -> Result<String> {
    // A call that waits is an error.
    session.run("SET lock_timeout = '10 s'")?;
    let rows = session.rows(&format!(
        "SELECT name || ' ' || place, lease_check(name, token) FROM lease_acquire_any({arguments})"
    ))?;
    ensure!(rows.iter().all(|row| row[1].as_deref() == Some("t")), "a token is silent: {rows:?}");
    Ok(rows.into_iter().filter_map(|mut row| row.remove(0)).collect::<Vec<_>>().join(", "))
}

#[lab_test]
fn it_gives_the_first_n_in_their_order(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    for (arguments, wanted) in [
        ("'{d, b, a, c}'", "d 1"),
        ("'{d, b, a, c}', 2", "b 2, a 3"),
        ("'{d, b, a, c}', 5", "c 4"),
        ("'{d, b, a, c}'", ""),
        ("'{e, e, f, f, g}', 2", "e 1, f 3"),
        ("'{{e, g}, {h, e}}', 3", "g 2, h 3"),
        ("'{}'", ""),
        ("'{z}', n => NULL, holder => NULL, ttl => NULL, metadata => NULL, session => NULL", "z 1"),
    ] {
        let claimed = claim(&mut session, arguments)?;
        ensure!(claimed == wanted, "{arguments}: {claimed}");
    }
    let drawn = session.last_token()?;
    let rows = session.rows(
        "SELECT a.token, l.mode, l.holder, l.first_token = a.token, l.metadata, l.expires_at - l.acquired_at
           FROM lease_acquire_any('{x, y}', 2, 'me', '1 h', '[7]') a, lease_info(a.name, a.token) l",
    )?;
    let wanted = |n: i64| {
        let token = (drawn + n).to_string();
        [&token, "exclusive", "me", "t", "[7]", "01:00:00"]
            .map(|text| Some(text.to_owned()))
            .to_vec()
    };
    ensure!(rows == [wanted(1), wanted(2)], "{rows:?} after {drawn}");
    Ok(())
}

#[lab_test]
fn what_lease_acquire_would_not_grant_is_passed_over(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut other, mut third) = (db.connect()?, db.connect()?, db.connect()?);
    third.acquire("held", "1 h")?;
    third.granted("SELECT lease_acquire('shared', ttl => '1 h', shared => true)")?;
    third.granted("SELECT lease_acquire('slots', ttl => '1 h', slots => 2)")?;
    third.run("SELECT lease_adopt('adopted', 7)")?;
    let guarded = third.acquire("guarded", "1 h")?;
    other.run(&format!(
        "BEGIN; SELECT lease_guard('guarded', {guarded}); SELECT lease_acquire('open')"
    ))?;
    third.expire_now("guarded", guarded)?;
    third.acquire_expired("expired")?;
    let names = "'{held, shared, slots, adopted, guarded, open, expired, new}', 9";
    let claimed = claim(&mut session, names)?;
    ensure!(claimed == "expired 7, new 8", "{claimed}");
    other.run("COMMIT")?;
    let claimed = claim(&mut session, "'{held, guarded, open}', 9")?;
    ensure!(claimed == "guarded 2", "{claimed}");
    // Maintenance that holds the table is not waited for.
    other.run("BEGIN; LOCK TABLE fence.lease")?;
    ensure!(claim(&mut session, "'{another}'")?.is_empty());
    other.run("COMMIT")?;
    ensure!(claim(&mut session, "'{another}'")? == "another 1");
    Ok(())
}

/// Claims `job` in a statement whose snapshot is older than what `meanwhile` does.
fn claimed_after(lab: &Lab, before: &str, meanwhile: &[&str]) -> Result<bool> {
    let db = lab.database()?;
    let (mut admin, mut claims) = (db.connect()?, Background::connect(&db.conninfo())?);
    admin.run("CREATE TABLE job AS SELECT lease_acquire('job', ttl => '1 h') AS t")?;
    admin.run(before)?;
    admin.run("SELECT pg_advisory_lock(1)")?;
    claims.send(
        "SELECT name FROM lease_acquire_any(ARRAY['job' || pg_advisory_xact_lock_shared(1)::text])",
    )?;
    claims.wait_until_blocked()?;
    for sql in meanwhile {
        admin.run(sql)?;
    }
    admin.run("SELECT pg_advisory_unlock(1)")?;
    let claimed = !claims.rows()?.is_empty();
    // Another statement, with a later snapshot, claims it where it is free.
    let mut later = db.connect()?;
    let free = claim(&mut later, "'{job}'")? == "job 1";
    ensure!(free != claimed, "claimed: {claimed}, but free afterwards: {free}");
    Ok(claimed)
}

#[lab_test]
fn what_ended_after_the_statement_s_snapshot_is_passed_over(lab: &Lab) -> Result<()> {
    const RELEASE: &str = "SELECT lease_release('job', t) FROM job";
    const SHORT: &str = "SELECT lease_renew('job', t, '1 us') FROM job";
    for (before, meanwhile, claimed) in [
        ("SELECT", &[RELEASE] as &[&str], false),
        ("SELECT", &["SELECT lease_revoke('job')"], false),
        ("SELECT", &[SHORT], false),
        ("SELECT lease_renew('job', t, '2 s') FROM job", &["SELECT pg_sleep(2.1)"], false),
        // The row that told of it is gone.
        ("SELECT", &[RELEASE, "SELECT lease_prune('0')"], false),
        // Another one has had it meanwhile.
        (RELEASE, &["SELECT lease_release('job', lease_acquire('job'))"], false),
        (
            "SELECT lease_release('job', t) FROM job; SELECT lease_prune('0')",
            &["SELECT lease_release('job', lease_acquire('job'))"],
            false,
        ),
        // It had ended before.
        (RELEASE, &[], true),
        (SHORT, &[], true),
        ("SELECT lease_release('job', t) FROM job; SELECT lease_prune('0')", &[], true),
        (RELEASE, &["BEGIN; SELECT lease_release('job', lease_acquire('job')); ROLLBACK"], true),
        (RELEASE, &["SELECT lease_release('other', lease_acquire('other'))"], true),
    ] {
        let was = claimed_after(lab, before, meanwhile)?;
        ensure!(was == claimed, "claimed: {was} after {before:?}, then {meanwhile:?}");
    }
    Ok(())
}

#[lab_test]
fn the_snapshot_of_a_transaction_counts_where_it_is_kept(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut other) = (db.connect()?, db.connect()?);
    let token = other.acquire("job", "1 h")?;
    session.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")?;
    other.release("job", token)?.expect("held");
    ensure!(claim(&mut session, "'{job, new}'")? == "new 2");
    ensure!(session.notices().iter().any(|n| n.sqlstate == "01000"), "no warning of older reads");
    session.run("COMMIT")?;
    ensure!(claim(&mut session, "'{job}'")? == "job 1");
    // What this transaction has released itself it may claim again, in another statement.
    session.run("BEGIN; SELECT lease_revoke('job')")?;
    ensure!(claim(&mut session, "'{job}'")? == "job 1");
    session.run("COMMIT")?;
    Ok(())
}

#[lab_test]
fn a_statement_that_reads_its_row_anew_claims_once(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut other) = (db.connect()?, Background::connect(&db.conninfo())?);
    session.run("CREATE TABLE runs (id int PRIMARY KEY, v int, token bigint); INSERT INTO runs VALUES (1, 0), (2, 0)")?;
    session.run("BEGIN; UPDATE runs SET v = 1 WHERE id = 1")?;
    other.send(
        "UPDATE runs SET token = a.token FROM lease_acquire_any(ARRAY['run:1', 'run:2']) a
          WHERE 'run:' || runs.id = a.name RETURNING a.name, a.token",
    )?;
    other.wait_until_blocked()?;
    session.run("COMMIT")?;
    let rows = other.rows()?;
    let token = rows[0][1].clone().context("claimed")?;
    ensure!(rows.len() == 1 && rows[0][0].as_deref() == Some("run:1"), "{rows:?}");
    let held = session.rows("SELECT name, token FROM fence.leases")?;
    ensure!(held == [vec![Some("run:1".to_owned()), Some(token)]], "{held:?}");
    Ok(())
}

#[lab_test]
fn a_losing_call_leaves_no_trace(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut other) = (db.connect()?, db.connect()?);
    other.run("BEGIN")?;
    other.acquire("open", "1 h")?;
    let drawn = other.last_token()?;
    session.run("BEGIN")?;
    ensure!(claim(&mut session, "'{open}', 3")?.is_empty());
    ensure!(session.text("SELECT pg_current_xact_id_if_assigned()")?.is_none(), "an id was taken");
    let locks =
        "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'";
    ensure!(session.granted(locks)? == 0 && session.last_token()? == drawn);
    session.run("COMMIT")?;
    other.run("ROLLBACK; SELECT fence_stats_reset()")?;
    // As many as there are, and fewer than asked for: one try lost.
    claim(&mut session, "'{open, b}', 2")?;
    claim(&mut session, "'{open, b, c}', 2")?;
    let counted = session.rows("SELECT grants, tries_lost FROM fence.stats")?;
    ensure!(counted == [[Some("3".to_owned()), Some("1".to_owned())]], "{counted:?}");
    Ok(())
}

#[lab_test]
fn rights_and_input_are_judged_for_all_names_first(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let role = db.role("worker")?;
    let mut admin = db.connect()?;
    admin.run(&format!("SELECT fence_grant('{role}', prefix => 'mine:')"))?;
    let mut session = db.connect_as(&role)?;
    session.refused("SELECT lease_acquire_any('{mine:1, theirs:1}')", "42501")?;
    let many = "(SELECT array_agg('mine:1'::text) FROM generate_series(1, 10001))";
    for (arguments, sqlstate) in [
        ("NULL", "22004"),
        ("'{mine:1, NULL}'", "22004"),
        ("'{mine:1, \"\"}'", "22023"),
        ("ARRAY['mine:1', repeat('x', 513)]", "22023"),
        ("'{mine:1}', 0", "22023"),
        ("'{mine:1}', -1", "22023"),
        ("'{mine:1}', 1001", "22023"),
        ("'{mine:1}', ttl => '0'", "22023"),
        ("'{mine:1}', ttl => '367 days'", "22023"),
        ("'{mine:1}', holder => repeat('x', 513)", "22023"),
        ("'{mine:1}', metadata => to_jsonb(repeat('x', 70000))", "22023"),
        (many, "22023"),
    ] {
        let fault =
            session.refused(&format!("SELECT * FROM lease_acquire_any({arguments})"), sqlstate)?;
        ensure!(sqlstate == "22004" || fault.hint.is_some(), "no hint: {fault}");
    }
    ensure!(admin.granted("SELECT count(*) FROM fence.leases")? == 0);
    ensure!(claim(&mut session, &many.replace("10001", "10000"))? == "mine:1 1");
    Ok(())
}

/// Sessions that each want one of the names, all at the same moment; of those that get one some roll back.
#[lab_test]
fn everybody_gets_one_where_there_are_enough(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut sessions = sessions(&db, 64)?;
    let mut random = rand::rng();
    for round in 0..rounds(12) {
        let free: usize = match round % 4 {
            0 => random.random_range(1..=64),
            1 => 64,
            2 => random.random_range(64..=200),
            _ => 1_000,
        };
        let callers = random.random_range(1..=free.min(64));
        let statements: Vec<String> = (0..callers)
            .map(|_| {
                let mut names: Vec<String> = (0..free).map(|n| format!("r{round}-{n}")).collect();
                // Mostly all read the same list.
                if random.random_bool(0.3) {
                    names.shuffle(&mut random);
                }
                let end = if random.random_bool(0.3) { "ROLLBACK" } else { "COMMIT" };
                format!(
                    "BEGIN; SELECT name || ' ' || token FROM lease_acquire_any('{{{}}}', ttl => '1 h'); {end}",
                    names.join(",")
                )
            })
            .collect();
        let outcomes = at_once(&mut sessions[..callers], |n| statements[n].clone());
        let mut kept = Vec::new();
        for (outcome, statement) in outcomes.into_iter().zip(&statements) {
            let rows = outcome?;
            ensure!(
                rows.len() == 1,
                "{callers} wanted one of {free}, and one of them got {rows:?}"
            );
            if statement.ends_with("COMMIT") {
                kept.extend(rows[0][0].clone());
            }
        }
        kept.sort_unstable();
        let held = format!(
            "SELECT name || ' ' || token FROM fence.leases WHERE name LIKE 'r{round}-%' AND state = 'held'"
        );
        let mut held: Vec<_> =
            sessions[0].rows(&held)?.into_iter().filter_map(|mut r| r.remove(0)).collect();
        held.sort_unstable();
        ensure!(held == kept, "{held:?} are held, not {kept:?}");
    }
    Ok(())
}

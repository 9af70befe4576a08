//! Acquires that are not committed yet, where leases are shown.

use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Calls, Lab, Result, Session};

/// What is shown of a lease: holder, state and whom it keeps out.
fn shown(session: &mut Session, name: &str) -> Result<Vec<(String, String, String)>> {
    let sql = format!(
        "SELECT coalesce(holder, '-'), state, blocking_pids FROM fence.leases WHERE name = '{name}' ORDER BY 2, 1"
    );
    let rows = session.rows(&sql)?;
    let by_call = session.rows(&sql.replace(
        &format!("fence.leases WHERE name = '{name}'"),
        &format!("lease_info('{name}')"),
    ))?;
    ensure!(rows == by_call, "{rows:?} {by_call:?}");
    let texts = |row: Vec<Option<String>>| row.into_iter().map(Option::unwrap_or_default);
    let three = |row| {
        let mut texts = texts(row);
        let mut next = || texts.next().unwrap_or_default();
        (next(), next(), next())
    };
    Ok(rows.into_iter().map(three).collect())
}

fn line(holder: &str, state: &str, pids: &[i32]) -> (String, String, String) {
    let pids: Vec<String> = pids.iter().map(i32::to_string).collect();
    (holder.to_owned(), state.to_owned(), format!("{{{}}}", pids.join(",")))
}

const KINDS: [&str; 3] = ["shared => false", "shared => true", "slots => 3"];

#[lab_test]
fn an_open_acquire_is_shown_to_others_and_is_held_to_itself(lab: &Lab) -> Result<()> {
    for kind in KINDS {
        let db = lab.database()?;
        let (mut open, mut other) = (db.connect()?, db.connect()?);
        let pid = open.pid();
        let acquire = format!("SELECT lease_acquire('job', 'me', '1 h', {kind})");
        for end in ["ROLLBACK", "COMMIT"] {
            open.run("BEGIN")?;
            let token = open.granted(&acquire)?;
            ensure!(shown(&mut other, "job")? == [line("me", "uncommitted", &[pid])], "{kind}");
            let row = "SELECT first_token = $1 AND token = $1 AND expires_at > clock_timestamp() AND role = current_user \
                       FROM lease_info('job')";
            ensure!(other.one::<bool>(row, &[&token])?, "{kind}");
            ensure!(shown(&mut open, "job")? == [line("me", "held", &[])], "{kind}");
            open.run(end)?;
            let wanted = if end == "COMMIT" { vec![line("me", "held", &[])] } else { vec![] };
            ensure!(shown(&mut other, "job")? == wanted, "{kind} {end}");
        }
    }
    Ok(())
}

#[lab_test]
fn what_it_will_replace_stays_listed(lab: &Lab) -> Result<()> {
    for kind in KINDS {
        let db = lab.database()?;
        let (mut open, mut other) = (db.connect()?, db.connect()?);
        let pid = open.pid();
        other.granted(&format!("SELECT lease_acquire('expired', 'old', '1 us', {kind})"))?;
        other.wait_expired("expired")?;
        let token =
            other.granted(&format!("SELECT lease_acquire('freed', 'old', '1 h', {kind})"))?;
        other.release("freed", token)?.expect("held");
        other.granted(&format!("SELECT lease_acquire('again', 'me', '1 h', {kind})"))?;
        open.run("BEGIN")?;
        for (name, before) in [("expired", "expired"), ("freed", "free"), ("again", "held")] {
            let reclaim = name == "again";
            open.granted(&format!(
                "SELECT lease_acquire('{name}', 'me', '1 h', {kind}, reclaim => {reclaim})"
            ))?;
            let beneath = line(if reclaim { "me" } else { "old" }, before, &[pid]);
            let wanted = [beneath, line("me", "uncommitted", &[pid])];
            ensure!(
                shown(&mut other, name)? == wanted,
                "{kind} {name}: {:?}",
                shown(&mut other, name)?
            );
            ensure!(shown(&mut open, name)? == [line("me", "held", &[])], "{kind} {name}");
        }
        open.run("COMMIT")?;
        for name in ["expired", "freed", "again"] {
            ensure!(shown(&mut other, name)? == [line("me", "held", &[])], "{kind} {name}");
        }
    }
    Ok(())
}

#[lab_test]
fn a_change_of_a_grant_is_no_acquire(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut open, mut other) = (db.connect()?, db.connect()?);
    for change in ["lease_renew('job', $)", "lease_release('job', $)", "lease_revoke('job')"] {
        let token = open.granted("SELECT lease_acquire('job', 'me', '1 h')")?.to_string();
        open.run(&format!("BEGIN; SELECT {}", change.replace('$', &token)))?;
        // So that somebody is granted something.
        open.acquire("beside", "1 h")?;
        let states: Vec<_> = shown(&mut other, "job")?.into_iter().map(|row| row.1).collect();
        ensure!(states == ["held"], "{change}: {states:?}");
        open.run("ROLLBACK; SELECT lease_revoke('job')")?;
    }
    Ok(())
}

#[lab_test]
fn only_the_latest_of_what_an_open_transaction_wrote_is_shown(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut open, mut other) = (db.connect()?, db.connect()?);
    let pid = open.pid();
    let token = "SELECT token FROM fence.leases WHERE name = 'job'";
    open.run("BEGIN")?;
    let first = open.granted("SELECT lease_acquire('job', 'me', '1 h')")?;
    let renewed = open.renew("job", first)?.expect("held");
    open.run("SAVEPOINT s")?;
    let later = open.renew("job", renewed)?.expect("held");
    ensure!(shown(&mut other, "job")? == [line("me", "uncommitted", &[pid])]);
    ensure!(other.granted(token)? == later);
    open.run("ROLLBACK TO s")?;
    ensure!(shown(&mut other, "job")? == [line("me", "uncommitted", &[pid])]);
    ensure!(other.granted(token)? == renewed);
    open.run("SAVEPOINT t; SELECT lease_acquire('gone'); ROLLBACK TO t")?;
    ensure!(shown(&mut other, "gone")?.is_empty());
    open.run("ROLLBACK")?;
    ensure!(shown(&mut other, "job")?.is_empty());
    Ok(())
}

#[lab_test]
fn one_of_several_leases_taken_at_once_is_shown(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut open, mut other) = (db.connect()?, db.connect()?);
    let pid = open.pid();
    open.run("BEGIN; SELECT lease_acquire_all('{a,b,c}', 'me')")?;
    for name in ["a", "b", "c"] {
        ensure!(shown(&mut other, name)? == [line("me", "uncommitted", &[pid])], "{name}");
    }
    // Another database has leases of its own.
    let elsewhere = lab.database()?;
    ensure!(shown(&mut elsewhere.connect()?, "a")?.is_empty());
    open.run("COMMIT")
}

#[lab_test]
fn a_prepared_transaction_s_acquire_is_shown(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut open, mut other) = (db.connect()?, db.connect()?);
    open.run("BEGIN; SELECT lease_acquire('job', 'me', '1 h')")?;
    open.run("PREPARE TRANSACTION 'uncommitted acquire'")?;
    for session in [&mut open, &mut other] {
        ensure!(shown(session, "job")? == [line("me", "uncommitted", &[0])]);
    }
    open.run("COMMIT PREPARED 'uncommitted acquire'")?;
    ensure!(shown(&mut other, "job")? == [line("me", "held", &[])]);
    Ok(())
}

#[lab_test]
fn only_those_who_may_see_leases_see_it(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut open = db.connect()?;
    let roles = [db.role("worker")?, db.role("stranger")?];
    open.run(&format!("SELECT fence_grant('{}')", roles[0]))?;
    open.run("BEGIN; SELECT lease_acquire('job', 'me', '1 h')")?;
    let mut worker = db.connect_as(&roles[0])?;
    ensure!(shown(&mut worker, "job")? == [line("me", "uncommitted", &[open.pid()])]);
    let mut stranger = db.connect_as(&roles[1])?;
    for sql in ["SELECT * FROM fence.leases", "SELECT * FROM fence.uncommitted_grants()"] {
        stranger.refused(sql, "42501")?;
    }
    open.run("ROLLBACK")
}

#[lab_test]
fn a_standby_does_not_show_it(lab: &Lab) -> Result<()> {
    let primary = lab.builder().start()?;
    let mut open = primary.connect("postgres")?;
    open.run("CREATE EXTENSION pg_fence; SELECT lease_acquire('job', 'old', '1 us')")?;
    let standby = lab.builder().standby_of(&primary)?;
    standby.start()?;
    open.run("BEGIN; SELECT lease_acquire('job', 'me', '1 h')")?;
    primary.connect("postgres")?.run("SELECT lease_acquire('after', 'they', '1 h')")?;
    let mut reader = standby.connect("postgres")?;
    wait_until("the standby has what came after", PATIENCE, || {
        shown(&mut reader, "after").is_ok_and(|rows| rows == [line("they", "held", &[])])
    })?;
    ensure!(shown(&mut reader, "job")? == [line("old", "expired", &[])]);
    open.run("COMMIT")
}

#[lab_test]
fn a_parallel_query_beside_an_open_acquire_is_answered(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut open, mut other) = (db.connect()?, db.connect()?);
    other.run(
        "CREATE TABLE big AS SELECT g AS n FROM generate_series(1, 50000) AS g; ANALYZE big;
         SET min_parallel_table_scan_size = 0; SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0",
    )?;
    // So that it would be a parallel query without leases.
    let plan = other.rows("EXPLAIN SELECT count(*) FROM big")?;
    ensure!(plan.iter().flatten().flatten().any(|line| line.contains("Gather")), "{plan:?}");
    open.run("BEGIN; SELECT lease_acquire('job', 'me')")?;
    for leases in ["fence.leases", "lease_info('job')"] {
        let sql = format!("SELECT (SELECT count(*) FROM big), state FROM {leases}");
        let rows = other.rows(&sql)?;
        ensure!(rows[0][1].as_deref() == Some("uncommitted"), "{leases}: {rows:?}");
        other.granted(&format!("SELECT count(*) FROM big, {leases} AS l"))?;
    }
    Ok(())
}

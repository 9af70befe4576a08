//! Renew, release and revoke wait for an open transaction that has changed the lease; how waits end;
//! and what a rollback undoes.

use pg_test::calls::within_ttl;
use pg_test::process::PATIENCE;
use pg_test::{ensure, lab_test, Background, Calls, Database, Lab, Result, Session};

fn trio(lab: &Lab) -> Result<(Database, Session, Background)> {
    let db = lab.database()?;
    let (first, second) = (db.connect()?, Background::connect(&db.conninfo())?);
    Ok((db, first, second))
}

/// The one value of the waiter's statement.
fn answer(waiter: &mut Background) -> Result<Option<i64>> {
    let rows = waiter.rows()?;
    Ok(rows[0][0].as_deref().map(str::parse).transpose()?)
}

#[lab_test]
fn a_renewal_waits_for_an_open_renewal(lab: &Lab) -> Result<()> {
    let (_db, mut first, mut second) = trio(lab)?;
    let token = first.acquire("job", "1 h")?;
    for end in ["COMMIT", "ROLLBACK"] {
        first.run("BEGIN")?;
        let renewed = first.renew("job", token)?.expect("held");
        second.send(&format!("SELECT lease_renew('job', {token})"))?;
        second.wait_until_blocked()?;
        ensure!(second.blocked_by()? == [first.pid()]);
        first.run(end)?;
        let later = answer(&mut second)?.expect("held");
        ensure!(later > renewed, "{end}: {later} was drawn before {renewed} was decided");
        ensure!(first.speaks("job", renewed)? == (end == "COMMIT"));
        ensure!(first.speaks("job", later)? && first.speaks("job", token)?);
    }
    Ok(())
}

#[lab_test]
fn a_release_waits_for_an_open_change(lab: &Lab) -> Result<()> {
    let (_db, mut first, mut second) = trio(lab)?;
    let token = first.acquire("job", "1 h")?;
    first.run("BEGIN")?;
    let renewed = first.renew("job", token)?.expect("held");
    second.send(&format!("SELECT lease_release('job', {token})"))?;
    second.wait_until_blocked()?;
    first.run("COMMIT")?;
    ensure!(answer(&mut second)?.expect("held") > renewed);
    // Two releases: the second finds it released.
    let token = first.acquire("job", "1 h")?;
    first.run("BEGIN")?;
    ensure!(first.release("job", token)?.is_some());
    second.send(&format!("SELECT lease_release('job', {token})"))?;
    second.wait_until_blocked()?;
    first.run("COMMIT")?;
    ensure!(answer(&mut second)?.is_none(), "the closing token is the other transaction's");
    Ok(())
}

#[lab_test]
fn a_revocation_waits_for_an_open_change(lab: &Lab) -> Result<()> {
    let (_db, mut first, mut second) = trio(lab)?;
    // What is open, how it ends, whether there is something to revoke then.
    let cases = [
        ("lease_renew('job', $)", "COMMIT", true),
        ("lease_renew('job', $, '1 us')", "ROLLBACK", true),
        ("lease_release('job', $)", "ROLLBACK", true),
        ("lease_release('job', $)", "COMMIT", false),
        ("lease_revoke('job')", "ROLLBACK", true),
        ("lease_revoke('job')", "COMMIT", false),
        ("lease_acquire('other')", "COMMIT", true),
        ("lease_acquire('other', ttl => '1 h')", "ROLLBACK", false),
    ];
    for (call, end, something) in cases {
        let token = first.acquire("job", "1 h")?;
        let name = if call.contains("other") { "other" } else { "job" };
        let call = call.replace('$', &token.to_string());
        first.run("BEGIN")?;
        first.granted(&format!("SELECT {call}"))?;
        second.send(&format!("SELECT lease_revoke('{name}')"))?;
        second.wait_until_blocked()?;
        first.run(end)?;
        let closing = answer(&mut second)?;
        ensure!(closing.is_some() == something, "{call}, {end}: {closing:?}");
        let held = "SELECT count(*) > 0 FROM fence.leases WHERE state = 'held' AND name = ";
        ensure!(!first.truth(&format!("{held} '{name}'"))?, "{call}, {end}: still held");
        first.token("SELECT lease_revoke('job')")?;
    }
    Ok(())
}

#[lab_test]
fn a_token_of_an_open_grant_is_waited_for(lab: &Lab) -> Result<()> {
    let (_db, mut first, mut second) = trio(lab)?;
    // The name is new; then its row is a predecessor's.
    for end in ["ROLLBACK", "COMMIT"] {
        for call in ["lease_renew", "lease_release"] {
            first.run("BEGIN")?;
            let token = first.acquire("job", "1 h")?;
            second.send(&format!("SELECT {call}('job', {token})"))?;
            second.wait_until_blocked()?;
            ensure!(second.blocked_by()? == [first.pid()]);
            first.run(end)?;
            let answer = answer(&mut second)?;
            ensure!(answer.is_some() == (end == "COMMIT"), "{call} after {end}: {answer:?}");
            first.token("SELECT lease_revoke('job')")?;
        }
    }
    // And the token of an open renewal.
    let token = first.acquire("job", "1 h")?;
    for end in ["ROLLBACK", "COMMIT"] {
        first.run("BEGIN")?;
        let renewed = first.renew("job", token)?.expect("held");
        second.send(&format!("SELECT lease_renew('job', {renewed})"))?;
        second.wait_until_blocked()?;
        first.run(end)?;
        ensure!(answer(&mut second)?.is_some() == (end == "COMMIT"), "renewal, {end}");
    }
    Ok(())
}

#[lab_test]
fn a_lease_that_expires_during_the_wait_is_lost(lab: &Lab) -> Result<()> {
    let (db, mut first, mut second) = trio(lab)?;
    let mut looker = db.connect()?;
    for call in ["lease_renew", "lease_release"] {
        let token = within_ttl(|ttl| {
            let token = first.acquire("job", ttl)?;
            first.run("BEGIN; SET LOCAL statement_timeout = 0")?;
            match first.renew("job", token)? {
                Some(_) => Ok(Some(token)),
                None => first.run("ROLLBACK").map(|()| None),
            }
        })?;
        second.send(&format!("SELECT {call}('job', {token})"))?;
        second.wait_until_blocked()?;
        looker.wait_expired("job")?;
        first.run("ROLLBACK")?;
        ensure!(answer(&mut second)?.is_none(), "{call} judged by the time before its wait");
    }
    Ok(())
}

#[lab_test]
fn a_lease_that_changes_hands_during_the_wait_is_lost(lab: &Lab) -> Result<()> {
    let (db, mut first, mut second) = trio(lab)?;
    let mut admin = db.connect()?;
    for call in ["lease_renew", "lease_release"] {
        let token = admin.acquire("job", "1 h")?;
        // Revoked and granted again in one transaction.
        first.run("BEGIN")?;
        first.granted("SELECT lease_revoke('job')")?;
        let next = first.acquire("job", "1 h")?;
        second.send(&format!("SELECT {call}('job', {token})"))?;
        second.wait_until_blocked()?;
        first.run("COMMIT")?;
        ensure!(answer(&mut second)?.is_none(), "{call} ended or renewed another's grant");
        ensure!(admin.speaks("job", next)?);
        admin.release("job", next)?;
    }
    Ok(())
}

#[lab_test]
fn other_leases_are_not_waited_for(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut first = db.connect()?;
    let mut second = db.conninfo().set("lock_timeout", "10s").connect()?;
    let mine = second.acquire("mine", "1 h")?;
    first.run("BEGIN; SELECT lease_acquire('n' || g) FROM generate_series(1, 500) AS g")?;
    ensure!(second.renew("mine", mine)?.is_some());
    second.acquire("another", "1 h")?;
    second.granted("SELECT lease_revoke('another')")?;
    ensure!(second.release("mine", mine)?.is_some());
    // A token that is nobody's is not waited for either.
    ensure!(second.renew("n1", 1_000_000)?.is_none());
    first.run("COMMIT")
}

#[lab_test]
fn a_blocked_renewal_obeys_timeouts_and_cancel(lab: &Lab) -> Result<()> {
    let (db, mut first, mut second) = trio(lab)?;
    let token = first.acquire("job", "1 h")?;
    first.run("BEGIN")?;
    let renewed = first.renew("job", token)?.expect("held");
    for call in [
        format!("lease_renew('job', {token})"),
        format!("lease_release('job', {token})"),
        "lease_revoke('job')".to_owned(),
    ] {
        let last = first.last_token()?;
        let mut hasty = db.connect()?;
        hasty.run("SET lock_timeout = '50 ms'")?;
        hasty.refused(&format!("SELECT {call}"), "55P03")?;
        hasty.run("SET lock_timeout = 0; SET statement_timeout = '50 ms'")?;
        hasty.refused(&format!("SELECT {call}"), "57014")?;
        second.send(&format!("SELECT {call}"))?;
        second.wait_until_blocked()?;
        second.cancel()?;
        second.refused("57014")?;
        ensure!(first.last_token()? == last, "{call} drew a token and gave up");
    }
    first.run("COMMIT")?;
    ensure!(first.speaks("job", renewed)?);
    second.send(&format!("SELECT lease_renew('job', {token})"))?;
    ensure!(answer(&mut second)?.is_some(), "a wait that was given up left something behind");
    ensure!(first.release("job", token)?.is_some() && !first.is_taken("job")?);
    Ok(())
}

#[lab_test]
fn renewals_in_opposite_orders_are_a_deadlock_that_ends(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut setup = db.connect()?;
    let (a, b) = (setup.acquire("a", "1 h")?, setup.acquire("b", "1 h")?);
    let mut one = Background::connect(&db.conninfo().set("deadlock_timeout", "100ms"))?;
    let mut two = Background::connect(&db.conninfo().set("deadlock_timeout", "60s"))?;
    one.run(&format!("BEGIN; SELECT lease_renew('a', {a})"))?;
    two.run(&format!("BEGIN; SELECT lease_renew('b', {b})"))?;
    two.send(&format!("SELECT lease_renew('a', {a})"))?;
    two.wait_until_blocked()?;
    one.send(&format!("SELECT lease_renew('b', {b})"))?;
    one.refused("40P01")?;
    ensure!(answer(&mut two)?.is_some());
    two.run("COMMIT")?;
    Ok(())
}

#[lab_test]
fn a_grant_that_is_rolled_back_is_free_at_once(lab: &Lab) -> Result<()> {
    let (db, mut first, _) = trio(lab)?;
    let mut other = db.connect()?;
    // A new name, and one whose predecessor's row is there.
    for _ in 0..2 {
        first.run("BEGIN")?;
        let token = first.acquire("job", "1 h")?;
        ensure!(first.speaks("job", token)? && !other.speaks("job", token)?, "not committed yet");
        first.run("ROLLBACK")?;
        ensure!(!other.speaks("job", token)? && !other.is_taken("job")?);
        ensure!(first.renew("job", token)?.is_none() && first.release("job", token)?.is_none());
        other.acquire_expired("job")?;
    }
    // An error is a rollback.
    first.run("BEGIN; SELECT lease_acquire('job')")?;
    first.refused("SELECT 1/0", "22012")?;
    // The error is told before the server has rolled back; what comes next, after it.
    first.refused("SELECT 1", "25P02")?;
    ensure!(!other.is_taken("job")?, "free as soon as the transaction has failed");
    first.run("ROLLBACK")
}

#[lab_test]
fn a_grant_in_a_savepoint_is_rolled_back_with_it(lab: &Lab) -> Result<()> {
    let (db, mut first, _) = trio(lab)?;
    let mut other = db.connect()?;
    first.run("BEGIN; SAVEPOINT s")?;
    let token = first.acquire("job", "1 h")?;
    ensure!(other.is_taken("job")?);
    first.run("ROLLBACK TO s")?;
    ensure!(!other.is_taken("job")?, "free while the transaction goes on");
    ensure!(!first.speaks("job", token)?);
    let again = first.acquire("job", "1 h")?;
    first.run("SAVEPOINT t")?;
    let renewed = first.renew("job", again)?.expect("held");
    first.run("ROLLBACK TO t")?;
    ensure!(!first.speaks("job", renewed)? && first.speaks("job", again)?);
    first.run("RELEASE s; COMMIT")?;
    ensure!(other.is_taken("job")? && other.speaks("job", again)?);
    ensure!(!other.speaks("job", renewed)?);
    Ok(())
}

#[lab_test]
fn an_exception_handler_undoes_what_its_block_did(lab: &Lab) -> Result<()> {
    let (db, mut first, _) = trio(lab)?;
    first.run(
        "BEGIN;
         DO $$BEGIN
             PERFORM lease_acquire('job');
             RAISE division_by_zero;
         EXCEPTION WHEN division_by_zero THEN
             NULL;
         END$$",
    )?;
    ensure!(!db.connect()?.is_taken("job")?);
    first.acquire("job", "1 h")?;
    first.run("COMMIT")?;
    ensure!(db.connect()?.is_taken("job")?);
    Ok(())
}

#[lab_test]
fn a_dead_session_s_open_grant_is_free(lab: &Lab) -> Result<()> {
    let (db, mut first, mut second) = trio(lab)?;
    let token = first.acquire("job", "1 h")?;
    second.run(&format!("BEGIN; SELECT lease_renew('job', {token}), lease_acquire('new')"))?;
    ensure!(db.connect()?.is_taken("new")?);
    second.terminate()?;
    // The renewal waits for the session's end, so afterwards all of it is undone.
    ensure!(first.renew("job", token)?.is_some());
    let mut other = db.connect()?;
    pg_test::process::wait_until("the grant is free", PATIENCE, || {
        matches!(other.is_taken("new"), Ok(false))
    })
}

#[lab_test]
fn a_change_of_a_prepared_transaction_is_waited_for(lab: &Lab) -> Result<()> {
    let (db, mut first, mut second) = trio(lab)?;
    let gid = format!("{}_wait", db.name());
    let token = first.acquire("job", "1 h")?;
    for end in ["ROLLBACK", "COMMIT"] {
        first.run(&format!(
            "BEGIN; SELECT lease_release('job', {token}); PREPARE TRANSACTION '{gid}'"
        ))?;
        second.send(&format!("SELECT lease_renew('job', {token})"))?;
        second.wait_until_blocked()?;
        first.run(&format!("{end} PREPARED '{gid}'"))?;
        ensure!(answer(&mut second)?.is_some() == (end == "ROLLBACK"), "after {end} PREPARED");
    }
    Ok(())
}

//! Guarded transactions: what `lease_guard` and a write to a bound table promise to their transaction.

automod::dir!(pub "tests/lab/guards");

use crate::support::test_database::{bound, granted, shows, TestDatabase, ROW};
use pg_test::{ensure, lab_test, Background, Calls, Lab, Result, Session};

/// Makes a lease expire, as time would.
fn expire(db: &mut TestDatabase, name: &str) -> Result<()> {
    db.run(&format!(
        "UPDATE fence.lease SET acquired_at = acquired_at - interval '2 h', \
         expires_at = expires_at - interval '2 h' WHERE name = '{name}'"
    ))
}

#[lab_test]
fn a_guard_answers_with_its_token_and_sets_it_until_the_transaction_ends(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "mode => 'monotonic'")?;
    let (before, token) = (db.token()?, db.grant("order:1")?);
    db.run(&format!("SET pg_fence.token = '{before}'"))?;
    for end in ["COMMIT", "ROLLBACK"] {
        db.run("BEGIN")?;
        shows(&mut db, &format!("SELECT lease_guard('order:1', {token})"), &token.to_string())?;
        shows(&mut db, "SHOW pg_fence.token", &token.to_string())?;
        db.run("UPDATE orders SET v = 7")?;
        shows(&mut db, ROW, &format!("7|{token}"))?;
        db.run(end)?;
        shows(&mut db, "SHOW pg_fence.token", &before.to_string())?;
    }
    // A rolled-back savepoint takes the setting back too.
    db.run(&format!("BEGIN; SAVEPOINT s; SELECT lease_guard('order:1', {token}); ROLLBACK TO s"))?;
    shows(&mut db, "SHOW pg_fence.token", &before.to_string())?;
    db.run("COMMIT")?;
    // Alone it is a transaction of its own, and over.
    db.run(&format!("SELECT lease_guard('order:1', {token})"))?;
    shows(&mut db, "SHOW pg_fence.token", &before.to_string())?;
    db.run(&format!("RESET pg_fence.token; SELECT lease_release('order:1', {token})"))?;
    ensure!(granted(&mut db.another()?, "order:1")?);
    Ok(())
}

#[lab_test]
fn a_guard_inside_a_function_holds_for_the_transaction(lab: &Lab) -> Result<()> {
    let mut db = bound(lab)?;
    db.run(
        "CREATE FUNCTION begin_work(t bigint) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER \
         SET search_path = public AS $$ BEGIN RETURN lease_guard('order:1', t); END $$",
    )?;
    let token = db.grant("order:1")?;
    db.run(&format!("BEGIN; SELECT begin_work({token})"))?;
    shows(&mut db, "SHOW pg_fence.token", &token.to_string())?;
    db.run("UPDATE orders SET v = 7")?;
    let mut other = db.another()?;
    other.run("SELECT lease_revoke('order:1')")?;
    ensure!(!granted(&mut other, "order:1")?, "the guard ended with the function");
    db.run("COMMIT")?;
    ensure!(granted(&mut other, "order:1")?);
    shows(&mut db, ROW, &format!("7|{token}"))
}

#[lab_test]
fn a_token_that_does_not_speak_is_pf004(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    let foreign = db.token()?;
    let released = db.grant("a")?;
    let closing: i64 = db.one("SELECT lease_release('a', $1)", &[&released])?;
    let revoked = db.grant("a")?;
    db.run("SELECT lease_revoke('a')")?;
    let expired = db.grant("a")?;
    expire(&mut db, "a")?;
    for token in [foreign, released, closing, revoked, expired, expired + 100, i64::MAX] {
        for name in ["a", "A", "never"] {
            db.refused(&format!("SELECT lease_guard('{name}', {token})"), "PF004")?;
        }
    }
    let held = db.grant("a")?;
    for token in [foreign, released, closing, revoked, expired, held + 100] {
        db.refused(&format!("SELECT lease_guard('a', {token})"), "PF004")?;
    }
    let renewed: i64 = db.one("SELECT lease_renew('a', $1)", &[&held])?;
    for token in [held, renewed] {
        db.run(&format!("SELECT lease_guard('a', {token})"))?;
    }
    Ok(())
}

#[lab_test]
fn another_role_s_token_is_42501(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    let [holder, member, stranger] =
        ["holder", "member", "stranger"].map(|r| db.database().role(r));
    let (holder, member, stranger) = (holder?, member?, stranger?);
    db.run(&format!(
        "SELECT fence_grant('{holder}'), fence_grant('{member}'), fence_grant('{stranger}'); \
         GRANT {holder} TO {member}"
    ))?;
    let token: i64 =
        db.database().connect_as(&holder)?.one("SELECT lease_acquire('a', ttl => '1 h')", &[])?;
    let guard = format!("SELECT lease_guard('a', {token})");
    let mut session = db.database().connect_as(&stranger)?;
    session.run("BEGIN; SAVEPOINT s")?;
    session.refused(&guard, "42501")?;
    session.run("ROLLBACK TO s")?;
    db.database().connect_as(&member)?.run(&guard)?;
    db.run(&guard)?;
    // The refusal has not left a lock that keeps the next holder out.
    db.run(&format!("SELECT lease_release('a', {token})"))?;
    ensure!(granted(&mut db, "a")?);
    Ok(())
}

#[lab_test]
fn two_guards_keep_their_tokens_apart(lab: &Lab) -> Result<()> {
    let mut db = bound(lab)?;
    db.run(
        "CREATE TABLE bills (id int PRIMARY KEY, v int, fence bigint); INSERT INTO bills VALUES (1, 0); \
         SELECT fence_protect('bills', lease => 'bill:{id}'); \
         CREATE TABLE plain (v int, fence bigint); INSERT INTO plain VALUES (0); SELECT fence_protect('plain')",
    )?;
    let (order, bill) = (db.grant("order:1")?, db.grant("bill:1")?);
    let all = "SELECT o.fence, b.fence, p.fence FROM orders o, bills b, plain p";
    let writes = "UPDATE orders SET v = 7; UPDATE bills SET v = 7; UPDATE plain SET v = 7";
    for (first, second, latest) in [
        (
            format!("lease_guard('order:1', {order})"),
            format!("lease_guard('bill:1', {bill})"),
            bill,
        ),
        (
            format!("lease_guard('bill:1', {bill})"),
            format!("lease_guard('order:1', {order})"),
            order,
        ),
    ] {
        let sql = format!("SELECT {first}; SELECT {second}; {writes}");
        db.comes_to(&sql, all, &format!("{order}|{bill}|{latest}"))?;
        let mixed = format!(
            "SELECT {first}; UPDATE orders SET v = 7, fence = {order}; SELECT {second}; {writes}"
        );
        db.comes_to(&mixed, all, &format!("{order}|{bill}|{latest}"))?;
    }
    // Both are locked until the end, and one's token is nothing to the other.
    db.run(&format!(
        "BEGIN; SELECT lease_guard('order:1', {order}), lease_guard('bill:1', {bill})"
    ))?;
    let mut other = db.another()?;
    other.run("SELECT lease_revoke('order:1'), lease_revoke('bill:1')")?;
    ensure!(!granted(&mut other, "order:1")? && !granted(&mut other, "bill:1")?);
    db.refused(&format!("UPDATE orders SET v = 7, fence = {bill}"), "PF004")?;
    db.run("ROLLBACK")?;
    ensure!(granted(&mut other, "order:1")? && granted(&mut other, "bill:1")?);
    Ok(())
}

#[lab_test]
fn a_guard_comes_before_the_session_s_token(lab: &Lab) -> Result<()> {
    let mut db = bound(lab)?;
    let (token, foreign) = (db.grant("order:1")?, db.token()?);
    let landed = format!("7|{token}");
    let guard = format!("SELECT lease_guard('order:1', {token})");
    let set = format!("SET LOCAL pg_fence.token = '{foreign}'");
    db.comes_to(&format!("{guard}; {set}; UPDATE orders SET v = 7"), ROW, &landed)?;
    db.comes_to(&format!("{set}; {guard}; UPDATE orders SET v = 7"), ROW, &landed)?;
    db.comes_to(&format!("{set}; UPDATE orders SET v = 7"), ROW, "PF004")?;
    // A first write guards as well.
    let first = format!("UPDATE orders SET v = 6, fence = {token}");
    db.comes_to(&format!("{set}; {first}; UPDATE orders SET v = 7"), ROW, &landed)?;
    db.comes_to(&format!("{first}; DELETE FROM orders"), ROW, "")?;
    db.comes_to(&format!("{first}; UPDATE orders SET v = 7"), ROW, &landed)
}

#[lab_test]
fn a_guard_waits_for_a_grant_in_the_making_and_is_judged_by_it(lab: &Lab) -> Result<()> {
    for (end, still) in [("COMMIT", false), ("ROLLBACK", true)] {
        let mut db = bound(lab)?;
        let old: i64 = db.one("SELECT lease_acquire('order:1', 'me', '1 h')", &[])?;
        db.run("BEGIN")?;
        db.one::<i64>("SELECT lease_acquire('order:1', 'me', '1 h', reclaim => true)", &[])?;
        let mut stale_workers = Vec::new();
        for sql in [
            format!("SELECT lease_guard('order:1', {old})"),
            format!("UPDATE orders SET v = 7, fence = {old}"),
        ] {
            let mut stale_worker = Background::connect(&db.database().conninfo())?;
            stale_worker.send(&sql)?;
            stale_worker.wait_until_blocked()?;
            ensure!(stale_worker.blocked_by()? == [db.pid()]);
            stale_workers.push(stale_worker);
        }
        db.run(end)?;
        for mut stale_worker in stale_workers {
            if still {
                stale_worker.rows()?;
            } else {
                stale_worker.refused("PF004")?;
            }
        }
    }
    Ok(())
}

#[lab_test]
fn a_guard_does_not_wait_for_a_renewal_in_the_making(lab: &Lab) -> Result<()> {
    let mut db = bound(lab)?;
    let token = db.grant("order:1")?;
    db.run("SET lock_timeout = '2 s'")?;
    for call in
        ["lease_renew('order:1', $)", "lease_release('order:1', $)", "lease_revoke('order:1')"]
    {
        let mut heartbeat = db.another()?;
        let call = call.replace('$', &token.to_string());
        heartbeat.run(&format!("BEGIN; SELECT {call}"))?;
        db.run(&format!("UPDATE orders SET v = v + 1, fence = {token}; BEGIN"))?;
        db.run(&format!("SELECT lease_guard('order:1', {token}); COMMIT"))?;
        heartbeat.run("ROLLBACK")?;
    }
    shows(&mut db, ROW, &format!("3|{token}"))
}

/// The warnings since the last call.
fn warnings(session: &mut Session) -> Vec<pg_test::Fault> {
    session.notices().into_iter().filter(|notice| notice.severity == "WARNING").collect()
}

#[lab_test]
fn a_guard_that_ends_with_its_statement_is_warned_of(lab: &Lab) -> Result<()> {
    let database = lab.database()?;
    let mut session = database.connect()?;
    let token = session.acquire("job", "1 h")?;
    let guard = format!("SELECT lease_guard('job', {token})");
    let in_function = format!("DO $$ BEGIN PERFORM lease_guard('job', {token}); END $$");
    for sql in [&guard, &in_function] {
        warnings(&mut session);
        session.run(sql)?;
        let warned = warnings(&mut session);
        ensure!(warned.len() == 1 && warned[0].sqlstate == "25P01", "{sql}: {warned:?}");
        ensure!(warned[0].json()?["lease"] == "job", "{}", warned[0]);
        ensure!(warned[0].hint.as_deref().is_some_and(|h| h.contains("BEGIN")), "{}", warned[0]);
    }
    // By the extended protocol, too.
    session.one::<i64>("SELECT lease_guard('job', $1)", &[&token])?;
    ensure!(warnings(&mut session).len() == 1);
    // One that is refused guards nothing either, but says so.
    session.refused("SELECT lease_guard('job', 1000000000)", "PF004")?;
    session.run("SELECT 1")?;
    ensure!(warnings(&mut session).is_empty());
    Ok(())
}

#[lab_test]
fn a_guard_that_guards_something_is_not_warned_of(lab: &Lab) -> Result<()> {
    let database = lab.database()?;
    let mut session = database.connect()?;
    session.run("CREATE TABLE t (n int)")?;
    let token = session.acquire("job", "1 h")?;
    let guard = format!("lease_guard('job', {token})");
    warnings(&mut session);
    session.run(&format!("BEGIN; SELECT {guard}; COMMIT"))?;
    for statement in ["BEGIN", &format!("SELECT {guard}"), "SELECT count(*) FROM t", "COMMIT"] {
        session.run(statement)?;
    }
    // Several statements sent at once are one transaction.
    session.run(&format!("SELECT {guard}; SELECT count(*) FROM t"))?;
    session.run(&format!("SELECT {guard}; INSERT INTO t VALUES (1)"))?;
    // One that guards and writes.
    session.run(&format!("INSERT INTO t SELECT 1 FROM {guard}"))?;
    session.run(&format!("DO $$ BEGIN PERFORM {guard}; INSERT INTO t VALUES (1); END $$"))?;
    let mut transaction = session.transaction()?;
    transaction.query_one("SELECT lease_guard('job', $1)", &[&token])?;
    transaction.query_one("SELECT count(*) FROM t", &[])?;
    transaction.commit()?;
    let warned = warnings(&mut session);
    ensure!(warned.is_empty(), "{warned:?}");
    Ok(())
}

//! Guarded transactions: what `lease_guard` and a write to a bound table promise to their transaction.

use crate::support::bed::{bound, granted, shows, Bed, ROW};
use pg_test::{ensure, lab_test, Background, Calls, Lab, Result, Session};

/// Makes a lease expire, as time would.
fn expire(bed: &mut Bed, name: &str) -> Result<()> {
    bed.run(&format!(
        "UPDATE fence.lease SET acquired_at = acquired_at - interval '2 h', \
         expires_at = expires_at - interval '2 h' WHERE name = '{name}'"
    ))
}

#[lab_test]
fn a_guard_answers_with_its_token_and_sets_it_until_the_transaction_ends(lab: &Lab) -> Result<()> {
    let mut bed = Bed::orders(lab, "mode => 'monotonic'")?;
    let (before, token) = (bed.token()?, bed.grant("order:1")?);
    bed.run(&format!("SET pg_fence.token = '{before}'"))?;
    for end in ["COMMIT", "ROLLBACK"] {
        bed.run("BEGIN")?;
        shows(&mut bed, &format!("SELECT lease_guard('order:1', {token})"), &token.to_string())?;
        shows(&mut bed, "SHOW pg_fence.token", &token.to_string())?;
        bed.run("UPDATE orders SET v = 7")?;
        shows(&mut bed, ROW, &format!("7|{token}"))?;
        bed.run(end)?;
        shows(&mut bed, "SHOW pg_fence.token", &before.to_string())?;
    }
    // A rolled-back savepoint takes the setting back too.
    bed.run(&format!("BEGIN; SAVEPOINT s; SELECT lease_guard('order:1', {token}); ROLLBACK TO s"))?;
    shows(&mut bed, "SHOW pg_fence.token", &before.to_string())?;
    bed.run("COMMIT")?;
    // Alone it is a transaction of its own, and over.
    bed.run(&format!("SELECT lease_guard('order:1', {token})"))?;
    shows(&mut bed, "SHOW pg_fence.token", &before.to_string())?;
    bed.run(&format!("RESET pg_fence.token; SELECT lease_release('order:1', {token})"))?;
    ensure!(granted(&mut bed.another()?, "order:1")?);
    Ok(())
}

#[lab_test]
fn a_guard_inside_a_function_holds_for_the_transaction(lab: &Lab) -> Result<()> {
    let mut bed = bound(lab)?;
    bed.run(
        "CREATE FUNCTION begin_work(t bigint) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER \
         SET search_path = public AS $$ BEGIN RETURN lease_guard('order:1', t); END $$",
    )?;
    let token = bed.grant("order:1")?;
    bed.run(&format!("BEGIN; SELECT begin_work({token})"))?;
    shows(&mut bed, "SHOW pg_fence.token", &token.to_string())?;
    bed.run("UPDATE orders SET v = 7")?;
    let mut other = bed.another()?;
    other.run("SELECT lease_revoke('order:1')")?;
    ensure!(!granted(&mut other, "order:1")?, "the guard ended with the function");
    bed.run("COMMIT")?;
    ensure!(granted(&mut other, "order:1")?);
    shows(&mut bed, ROW, &format!("7|{token}"))
}

#[lab_test]
fn a_token_that_does_not_speak_is_pf004(lab: &Lab) -> Result<()> {
    let mut bed = Bed::new(lab)?;
    let foreign = bed.token()?;
    let released = bed.grant("a")?;
    let closing: i64 = bed.one("SELECT lease_release('a', $1)", &[&released])?;
    let revoked = bed.grant("a")?;
    bed.run("SELECT lease_revoke('a')")?;
    let expired = bed.grant("a")?;
    expire(&mut bed, "a")?;
    for token in [foreign, released, closing, revoked, expired, expired + 100, i64::MAX] {
        for name in ["a", "A", "never"] {
            bed.refused(&format!("SELECT lease_guard('{name}', {token})"), "PF004")?;
        }
    }
    let held = bed.grant("a")?;
    for token in [foreign, released, closing, revoked, expired, held + 100] {
        bed.refused(&format!("SELECT lease_guard('a', {token})"), "PF004")?;
    }
    let renewed: i64 = bed.one("SELECT lease_renew('a', $1)", &[&held])?;
    for token in [held, renewed] {
        bed.run(&format!("SELECT lease_guard('a', {token})"))?;
    }
    Ok(())
}

#[lab_test]
fn a_refused_guard_leaves_nothing_behind(lab: &Lab) -> Result<()> {
    let mut bed = Bed::new(lab)?;
    let old = bed.grant("a")?;
    expire(&mut bed, "a")?;
    bed.run("BEGIN; SAVEPOINT s")?;
    bed.refused(&format!("SELECT lease_guard('a', {old})"), "PF004")?;
    bed.run("ROLLBACK TO s")?;
    shows(&mut bed, "SELECT coalesce(current_setting('pg_fence.token'), '')", "")?;
    let mut other = bed.another()?;
    ensure!(granted(&mut other, "a")?, "a refused guard locks others out");
    bed.refused(&format!("SELECT lease_guard('a', {old})"), "PF004").map(drop)
}

#[lab_test]
fn bad_arguments_are_refused(lab: &Lab) -> Result<()> {
    let mut bed = Bed::new(lab)?;
    let token = bed.grant("a")?;
    for (arguments, sqlstate) in [
        (format!("NULL, {token}"), "22004"),
        ("'a', NULL".to_owned(), "22004"),
        (format!("'', {token}"), "22023"),
        (format!("repeat('x', 513), {token}"), "22023"),
        ("'a', 0".to_owned(), "22023"),
        ("'a', -1".to_owned(), "22023"),
    ] {
        let fault = bed.refused(&format!("SELECT lease_guard({arguments})"), sqlstate)?;
        ensure!(fault.hint.is_some(), "{fault}");
    }
    bed.run("BEGIN READ ONLY")?;
    bed.refused(&format!("SELECT lease_guard('a', {token})"), "25006")?;
    bed.run("ROLLBACK")
}

#[lab_test]
fn another_role_s_token_is_42501(lab: &Lab) -> Result<()> {
    let mut bed = Bed::new(lab)?;
    let [holder, member, stranger] = ["holder", "member", "stranger"].map(|r| bed.db().role(r));
    let (holder, member, stranger) = (holder?, member?, stranger?);
    bed.run(&format!(
        "SELECT fence_grant('{holder}'), fence_grant('{member}'), fence_grant('{stranger}'); \
         GRANT {holder} TO {member}"
    ))?;
    let token: i64 =
        bed.db().connect_as(&holder)?.one("SELECT lease_acquire('a', ttl => '1 h')", &[])?;
    let guard = format!("SELECT lease_guard('a', {token})");
    let mut session = bed.db().connect_as(&stranger)?;
    session.run("BEGIN; SAVEPOINT s")?;
    session.refused(&guard, "42501")?;
    session.run("ROLLBACK TO s")?;
    bed.db().connect_as(&member)?.run(&guard)?;
    bed.run(&guard)?;
    // The refusal has not left a lock that keeps the next holder out.
    bed.run(&format!("SELECT lease_release('a', {token})"))?;
    ensure!(granted(&mut bed, "a")?);
    Ok(())
}

#[lab_test]
fn two_guards_keep_their_tokens_apart(lab: &Lab) -> Result<()> {
    let mut bed = bound(lab)?;
    bed.run(
        "CREATE TABLE bills (id int PRIMARY KEY, v int, fence bigint); INSERT INTO bills VALUES (1, 0); \
         SELECT fence_protect('bills', lease => 'bill:{id}'); \
         CREATE TABLE plain (v int, fence bigint); INSERT INTO plain VALUES (0); SELECT fence_protect('plain')",
    )?;
    let (order, bill) = (bed.grant("order:1")?, bed.grant("bill:1")?);
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
        bed.comes_to(&sql, all, &format!("{order}|{bill}|{latest}"))?;
        let mixed = format!(
            "SELECT {first}; UPDATE orders SET v = 7, fence = {order}; SELECT {second}; {writes}"
        );
        bed.comes_to(&mixed, all, &format!("{order}|{bill}|{latest}"))?;
    }
    // Both are locked until the end, and one's token is nothing to the other.
    bed.run(&format!(
        "BEGIN; SELECT lease_guard('order:1', {order}), lease_guard('bill:1', {bill})"
    ))?;
    let mut other = bed.another()?;
    other.run("SELECT lease_revoke('order:1'), lease_revoke('bill:1')")?;
    ensure!(!granted(&mut other, "order:1")? && !granted(&mut other, "bill:1")?);
    bed.refused(&format!("UPDATE orders SET v = 7, fence = {bill}"), "PF004")?;
    bed.run("ROLLBACK")?;
    ensure!(granted(&mut other, "order:1")? && granted(&mut other, "bill:1")?);
    Ok(())
}

#[lab_test]
fn a_guard_comes_before_the_session_s_token(lab: &Lab) -> Result<()> {
    let mut bed = bound(lab)?;
    let (token, foreign) = (bed.grant("order:1")?, bed.token()?);
    let landed = format!("7|{token}");
    let guard = format!("SELECT lease_guard('order:1', {token})");
    let set = format!("SET LOCAL pg_fence.token = '{foreign}'");
    bed.comes_to(&format!("{guard}; {set}; UPDATE orders SET v = 7"), ROW, &landed)?;
    bed.comes_to(&format!("{set}; {guard}; UPDATE orders SET v = 7"), ROW, &landed)?;
    bed.comes_to(&format!("{set}; UPDATE orders SET v = 7"), ROW, "PF004")?;
    // A first write guards as well.
    let first = format!("UPDATE orders SET v = 6, fence = {token}");
    bed.comes_to(&format!("{set}; {first}; UPDATE orders SET v = 7"), ROW, &landed)?;
    bed.comes_to(&format!("{first}; DELETE FROM orders"), ROW, "")?;
    bed.comes_to(&format!("{first}; UPDATE orders SET v = 7"), ROW, &landed)
}

#[lab_test]
fn a_guard_waits_for_a_grant_in_the_making_and_is_judged_by_it(lab: &Lab) -> Result<()> {
    for (end, still) in [("COMMIT", false), ("ROLLBACK", true)] {
        let mut bed = bound(lab)?;
        let old: i64 = bed.one("SELECT lease_acquire('order:1', 'me', '1 h')", &[])?;
        bed.run("BEGIN")?;
        bed.one::<i64>("SELECT lease_acquire('order:1', 'me', '1 h', reclaim => true)", &[])?;
        let mut zombies = Vec::new();
        for sql in [
            format!("SELECT lease_guard('order:1', {old})"),
            format!("UPDATE orders SET v = 7, fence = {old}"),
        ] {
            let mut zombie = Background::connect(&bed.db().conninfo())?;
            zombie.send(&sql)?;
            zombie.wait_until_blocked()?;
            ensure!(zombie.blocked_by()? == [bed.pid()]);
            zombies.push(zombie);
        }
        bed.run(end)?;
        for mut zombie in zombies {
            if still {
                zombie.rows()?;
            } else {
                zombie.refused("PF004")?;
            }
        }
    }
    Ok(())
}

#[lab_test]
fn a_guard_does_not_wait_for_a_renewal_in_the_making(lab: &Lab) -> Result<()> {
    let mut bed = bound(lab)?;
    let token = bed.grant("order:1")?;
    bed.run("SET lock_timeout = '2 s'")?;
    for call in ["lease_renew", "lease_release"] {
        let mut heartbeat = bed.another()?;
        heartbeat.run(&format!("BEGIN; SELECT {call}('order:1', {token})"))?;
        bed.run(&format!("UPDATE orders SET v = v + 1, fence = {token}; BEGIN"))?;
        bed.run(&format!("SELECT lease_guard('order:1', {token}); COMMIT"))?;
        heartbeat.run("ROLLBACK")?;
    }
    shows(&mut bed, ROW, &format!("2|{token}"))
}

#[lab_test]
fn a_guard_older_than_its_snapshot_allows_is_40001(lab: &Lab) -> Result<()> {
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        let mut bed = bound(lab)?;
        bed.grant("order:1")?;
        let mut worker = bed.another()?;
        let snapshot = format!("BEGIN ISOLATION LEVEL {level}; SELECT * FROM orders");
        worker.run(&snapshot)?;
        let new = bed.take_over("order:1")?;
        for sql in [
            format!("SELECT lease_guard('order:1', {new})"),
            format!("UPDATE orders SET v = 7, fence = {new}"),
        ] {
            worker.run("SAVEPOINT s")?;
            worker.refused(&sql, "40001")?;
            worker.run("ROLLBACK TO s")?;
        }
        // Once more, as after any serialization failure, and it works: the renewal's token too.
        worker.run("ROLLBACK")?;
        worker.run(&snapshot)?;
        let renewed: i64 = bed.one("SELECT lease_renew('order:1', $1)", &[&new])?;
        worker.run(&format!("UPDATE orders SET v = 7, fence = {renewed}; COMMIT"))?;
        shows(&mut bed, ROW, &format!("7|{renewed}"))?;
    }
    Ok(())
}

/// The warnings since the last call.
fn warnings(session: &mut Session) -> Vec<pg_test::Fault> {
    session.notices().into_iter().filter(|notice| notice.severity == "WARNING").collect()
}

#[lab_test]
fn a_guard_that_ends_with_its_statement_is_warned_of(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
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
    let db = lab.database()?;
    let mut session = db.connect()?;
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

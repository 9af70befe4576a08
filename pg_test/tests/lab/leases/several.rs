//! Several leases under one token: all or none, in any order, and never a deadlock.

use crate::support::concurrency::{at_once, nothing_is_left, sessions, tokens};
use pg_test::{ensure, lab_test, Background, Calls, Lab, Result, Session};

const ALL: &str = "SELECT lease_acquire_all('{a, b, c}', 'me', '1 h')";

/// Whether all of these are held, or none.
fn held(session: &mut Session, names: &str) -> Result<i64> {
    session.granted(&format!(
        "SELECT count(*) FROM fence.leases WHERE state = 'held' AND name = ANY('{names}')"
    ))
}

#[lab_test]
fn one_token_speaks_for_all_of_them(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let before = session.last_token()?;
    let token =
        session.granted("SELECT lease_acquire_all('{a, b, c}', 'me', '1 h', '{\"batch\": 7}')")?;
    ensure!(session.last_token()? == token, "more than one token was drawn after {before}");
    for name in ["a", "b", "c"] {
        ensure!(session.speaks(name, token)? && session.is_taken(name)?);
        session.run(&format!("BEGIN; SELECT lease_guard('{name}', {token}); COMMIT"))?;
    }
    let rows = session.rows(
        "SELECT DISTINCT mode, holder, token, first_token, metadata, expires_at - acquired_at \
         FROM fence.leases",
    )?;
    let token = token.to_string();
    let wanted = ["exclusive", "me", &token, &token, "{\"batch\": 7}", "01:00:00"]
        .map(|t| Some(t.to_owned()));
    ensure!(rows == [wanted.to_vec()], "{rows:?}");
    Ok(())
}

#[lab_test]
fn all_or_none_whichever_is_in_the_way(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut other) = (db.connect()?, db.connect()?);
    session.run("SET lock_timeout = '10 s'")?;
    for name in ["a", "b", "c"] {
        // Held; shared; in the making; over but guarded; waited for.
        let token = other.acquire(name, "1 h")?;
        session.nothing(ALL)?;
        other.run(&format!("BEGIN; SELECT lease_guard('{name}', {token})"))?;
        session.granted(&format!("SELECT lease_revoke('{name}')"))?;
        session.nothing(ALL)?;
        other.run("COMMIT; BEGIN")?;
        other.acquire(name, "1 h")?;
        session.nothing(ALL)?;
        ensure!(held(&mut session, "{a, b, c}")? == 0);
        other.run("ROLLBACK")?;
        let token = other
            .granted(&format!("SELECT lease_acquire('{name}', ttl => '1 h', shared => true)"))?;
        session.nothing(ALL)?;
        let mut queue = Background::connect(&db.conninfo())?;
        queue.send(&format!("SELECT lease_acquire('{name}', ttl => '1 h', wait => '10 min')"))?;
        queue.wait_until_blocked()?;
        other.release(name, token)?.expect("held");
        let next = queue.rows()?[0][0].clone().expect("granted");
        session.nothing(ALL)?;
        ensure!(held(&mut session, "{a, b, c}")? == 1, "some, though not all were to be had");
        other.granted(&format!("SELECT lease_release('{name}', {next})"))?;
        // Over by the clock, it is in nobody's way.
        other.acquire_expired(name)?;
        let all = session.granted(ALL)?;
        session.granted(&format!("SELECT lease_release_all('{{a, b, c}}', {all})"))?;
    }
    // Slots that live are in the way as any grant is.
    let slot = other.granted("SELECT lease_acquire('b', slots => 2)")?;
    match session.try_rows(ALL) {
        Ok(rows) => ensure!(rows[0][0].is_none(), "{rows:?}"),
        Err(fault) => drop(fault.expect("22023")?),
    }
    other.release("b", slot)?.expect("held");
    session.granted(ALL)?;
    Ok(())
}

#[lab_test]
fn a_losing_call_leaves_no_trace(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut other, mut third) = (db.connect()?, db.connect()?, db.connect()?);
    other.acquire("c", "1 h")?;
    let drawn = other.last_token()?;
    let rows = other.rows("SELECT ctid, xmax, * FROM fence.lease")?;
    session.run("BEGIN; SET LOCAL lock_timeout = '10 s'")?;
    session.nothing(ALL)?;
    let xid = session.text("SELECT pg_current_xact_id_if_assigned()")?;
    ensure!(xid.is_none(), "a losing call took a transaction id");
    // It holds up nobody while its transaction is open.
    third.run("SET lock_timeout = '10 s'")?;
    for name in ["a", "b"] {
        ensure!(!third.is_taken(name)?, "{name} is kept by a call that lost");
    }
    session.run("COMMIT")?;
    other.run("BEGIN")?;
    other.acquire("b", "1 h")?;
    let after_b = other.last_token()?;
    session.run("BEGIN")?;
    session.nothing("SELECT lease_acquire_all('{a, b}')")?;
    ensure!(!third.is_taken("a")?, "a is kept by a call that lost b");
    session.run("COMMIT")?;
    ensure!(other.last_token()? >= after_b);
    other.run("ROLLBACK")?;
    ensure!(drawn < after_b && other.rows("SELECT ctid, xmax, * FROM fence.lease")? == rows);
    Ok(())
}

#[lab_test]
fn names_may_come_in_any_order_and_twice(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    for names in ["{c, a, b}", "{b, b, a, c, b}", "{a, b, c, a}", "{{a, b}, {c, a}}"] {
        let token = session.granted(&format!("SELECT lease_acquire_all('{names}')"))?;
        ensure!(held(&mut session, "{a, b, c}")? == 3);
        let other = "{c, c, b, a}";
        let renewed = session.granted(&format!("SELECT lease_renew_all('{other}', {token})"))?;
        ensure!(renewed == token + 1, "one token for all, not {renewed} after {token}");
        let closing = session.granted(&format!("SELECT lease_release_all('{names}', {token})"))?;
        ensure!(closing == renewed + 1, "one token for all, not {closing} after {renewed}");
        ensure!(held(&mut session, "{a, b, c}")? == 0);
    }
    Ok(())
}

#[lab_test]
fn bad_lists_are_refused(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let long = "ARRAY['a', repeat('x', 513)]";
    for (names, sqlstate) in [
        ("'{}'", "22023"),
        ("NULL", "22004"),
        ("'{a, NULL, b}'", "22004"),
        ("'{a, \"\"}'", "22023"),
        (long, "22023"),
    ] {
        for call in ["lease_acquire_all($)", "lease_renew_all($, 1)", "lease_release_all($, 1)"] {
            let fault =
                session.refused(&format!("SELECT {}", call.replace('$', names)), sqlstate)?;
            ensure!(sqlstate != "22023" || fault.hint.is_some(), "no hint: {fault}");
        }
    }
    for more in ["ttl => '0'", "ttl => '367 days'", "ttl => '-1 s'"] {
        session.refused(&format!("SELECT lease_acquire_all('{{a}}', {more})"), "22023")?;
    }
    for call in ["lease_renew_all", "lease_release_all"] {
        session.refused(&format!("SELECT {call}('{{a}}', 0)"), "22023")?;
        session.refused(&format!("SELECT {call}('{{a}}', NULL)"), "22004")?;
    }
    ensure!(session.rows("SELECT 1 FROM fence.leases")?.is_empty());
    // NULL means the default.
    session.granted("SELECT lease_acquire_all('{a}', ttl => NULL)").map(drop)
}

#[lab_test]
fn a_thousand_names_are_taken_and_one_more_is_not(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let names = |n| format!("(SELECT array_agg('n' || g) FROM generate_series(1, {n}) g)");
    session.refused(&format!("SELECT lease_acquire_all({})", names(1001)), "22023")?;
    let all = names(1000);
    let token = session.granted(&format!("SELECT lease_acquire_all({all}, ttl => '1 h')"))?;
    let rows =
        session.granted(&format!("SELECT count(*) FROM fence.leases WHERE token = {token}"))?;
    ensure!(rows == 1000, "{rows}");
    let renewed = session.granted(&format!("SELECT lease_renew_all({all}, {token})"))?;
    session.granted(&format!("SELECT lease_release_all({all}, {renewed})"))?;
    session.granted(&format!("SELECT lease_acquire_all({all})"))?;
    Ok(())
}

#[lab_test]
fn renewing_all_is_all_or_none(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let token = session.granted(ALL)?;
    let renewed =
        session.granted(&format!("SELECT lease_renew_all('{{a, b, c}}', {token}, '2 h')"))?;
    ensure!(renewed == token + 1);
    let rows = session.granted(&format!(
        "SELECT count(*) FROM fence.leases WHERE token = {renewed} AND first_token = {token} \
         AND renewals = 1 AND expires_at - renewed_at = '2 h'"
    ))?;
    ensure!(rows == 3, "{:?}", session.rows("SELECT * FROM fence.leases")?);
    // One is lost: nothing is renewed and nothing drawn, and the rest may be renewed without it.
    session.granted("SELECT lease_revoke('b')")?;
    let drawn = session.last_token()?;
    session.nothing(&format!("SELECT lease_renew_all('{{a, b, c}}', {token})"))?;
    session.nothing(&format!("SELECT lease_renew_all('{{a, unheard of}}', {token})"))?;
    ensure!(session.last_token()? == drawn && session.speaks("a", renewed)?);
    let again = session.granted(&format!("SELECT lease_renew_all('{{c, a}}', {token})"))?;
    ensure!(session.speaks("a", again)? && session.speaks("c", again)?);
    Ok(())
}

#[lab_test]
fn releasing_all_is_all_or_none(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let token = session.granted(ALL)?;
    let foreign = session.acquire("d", "1 h")?;
    session.nothing(&format!("SELECT lease_release_all('{{a, b, d}}', {token})"))?;
    session.nothing(&format!("SELECT lease_release_all('{{a, b, d}}', {foreign})"))?;
    ensure!(held(&mut session, "{a, b, c, d}")? == 4);
    // In one transaction it may be asked for again.
    session.run("BEGIN")?;
    let sql = format!("SELECT lease_release_all('{{a, b}}', {token})");
    let closing = session.granted(&sql)?;
    ensure!(session.granted(&sql)? == closing && session.speaks("a", closing)?);
    session.run("COMMIT")?;
    ensure!(!session.speaks("a", closing)? && session.speaks("c", token)?);
    session.nothing(&sql)?;
    session.release("c", token)?.expect("held");
    ensure!(held(&mut session, "{a, b, c, d}")? == 1);
    Ok(())
}

#[lab_test]
fn releasing_all_closes_what_was_released_one_by_one_under_its_token(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run(
        "CREATE TABLE parts (name text PRIMARY KEY, v int, fence bigint);
         INSERT INTO parts VALUES ('m1', 0), ('m2', 0);
         SELECT fence_protect('parts', lease => '{name}')",
    )?;
    for before in [&["m1"][..], &["m2"], &["m1", "m2"]] {
        let token = session.granted("SELECT lease_acquire_all('{m1, m2}', ttl => '1 h')")?;
        session.run("BEGIN")?;
        let mut last = token;
        for name in before {
            last = session.release(name, token)?.expect("held");
        }
        let sql = format!("SELECT lease_release_all('{{m1, m2}}', {token})");
        let closing = session.granted(&sql)?;
        ensure!(closing > last, "{closing} after {last}, {before:?} released before");
        for name in ["m1", "m2"] {
            ensure!(session.speaks(name, closing)?, "not for {name}, {before:?} released before");
        }
        ensure!(session.granted(&sql)? == closing, "asked for again, it is another");
        session.run(&format!("UPDATE parts SET v = v + 1, fence = {closing}"))?;
        session.run("COMMIT")?;
        let written = format!("SELECT count(*) FROM parts WHERE fence = {closing}");
        ensure!(session.granted(&written)? == 2 && held(&mut session, "{m1, m2}")? == 0);
    }
    Ok(())
}

#[lab_test]
fn a_renewed_token_works_for_one_as_for_all(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let token = session.granted(ALL)?;
    let b = session.renew("b", token)?.expect("held");
    ensure!(session.speaks("b", token)? && session.speaks("b", b)? && !session.speaks("a", b)?);
    let all = session.granted(&format!("SELECT lease_renew_all('{{a, b, c}}', {token})"))?;
    session.nothing(&format!("SELECT lease_renew_all('{{a, b, c}}', {b})"))?;
    session.release("b", all)?.expect("held");
    ensure!(held(&mut session, "{a, b, c}")? == 2 && session.speaks("a", all)?);
    session.granted(&format!("SELECT lease_release_all('{{c, a}}', {all})"))?;
    Ok(())
}

#[lab_test]
fn crossing_callers_never_deadlock(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut admin = db.connect()?;
    let mut crowd = sessions(&db, 8)?;
    let orders = ["{a, b, c, d}", "{d, c, b, a}", "{b, d}", "{c, a, b}"];
    let mut won = 0;
    for round in 0..30 {
        let outcomes = at_once(&mut crowd, |i| {
            let names = orders[(i + round) % orders.len()];
            format!(
                "BEGIN; SELECT lease_acquire_all('{names}', ttl => '1 h'); \
                 SELECT lease_acquire('e', ttl => '1 h'); COMMIT"
            )
        });
        // Each lease has one holder, and who has one of his list has all of it.
        for outcome in outcomes {
            won += outcome?.first().is_some_and(|row| row[0].is_some()) as usize;
        }
        let split = admin.granted(
            "SELECT count(*) FROM (SELECT token, string_agg(name, ',' ORDER BY name) AS names \
               FROM fence.leases WHERE state = 'held' AND name <> 'e' GROUP BY token) s \
             WHERE names NOT IN ('a,b,c,d', 'b,d', 'a,b,c')",
        )?;
        ensure!(split == 0, "{:?}", admin.rows("SELECT name, token FROM fence.leases")?);
        admin.run("SELECT lease_revoke(name) FROM fence.leases WHERE state = 'held'")?;
    }
    ensure!(won > 0, "nobody ever won");
    nothing_is_left(&mut admin)
}

#[lab_test]
fn crossing_renewals_and_releases_never_deadlock(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut admin = db.connect()?;
    let mut crowd = sessions(&db, 6)?;
    for _ in 0..15 {
        let token = admin.granted(ALL)?;
        let got = tokens(at_once(&mut crowd, |i| {
            let names = ["{a, b, c}", "{c, b, a}", "{b, c, a}"][i % 3];
            match i {
                5 => format!("SELECT lease_release_all('{names}', {token})"),
                _ => format!("SELECT lease_renew_all('{names}', {token})"),
            }
        }))?;
        let mut renewed: Vec<i64> = got[..5].iter().copied().flatten().collect();
        renewed.sort_unstable();
        renewed.dedup();
        let closing = got[5].expect("the token spoke until then");
        ensure!(renewed.len() == got[..5].iter().flatten().count(), "a token twice: {got:?}");
        ensure!(renewed.iter().all(|t| *t < closing), "renewed after the release: {got:?}");
        ensure!(held(&mut admin, "{a, b, c}")? == 0);
    }
    nothing_is_left(&mut admin)
}

#[lab_test]
fn a_rollback_gives_all_of_them_back(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut other) = (db.connect()?, db.connect()?);
    session.run("BEGIN; SAVEPOINT s")?;
    let never = session.granted(ALL)?;
    other.nothing(ALL)?;
    session.run("ROLLBACK TO s")?;
    let token = other.granted(ALL)?;
    ensure!(token > never);
    session.run("COMMIT")?;
    session.run(&format!("BEGIN; SELECT lease_release_all('{{a, b, c}}', {token}); ROLLBACK"))?;
    session.run(&format!("BEGIN; SELECT lease_renew_all('{{a, b, c}}', {token}); ROLLBACK"))?;
    ensure!(held(&mut other, "{a, b, c}")? == 3 && other.speaks("b", token)?);
    Ok(())
}

#[lab_test]
fn only_the_role_that_was_granted_them_renews_and_releases(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (one, two) = (db.role("one")?, db.role("two")?);
    db.connect()?.run(&format!("SELECT fence_grant('{one}'), fence_grant('{two}')"))?;
    let (mut a, mut b) = (db.connect_as(&one)?, db.connect_as(&two)?);
    let token = a.granted(ALL)?;
    b.refused(&format!("SELECT lease_renew_all('{{a, b, c}}', {token})"), "42501")?;
    b.refused(&format!("SELECT lease_release_all('{{a, b, c}}', {token})"), "42501")?;
    ensure!(held(&mut a, "{a, b, c}")? == 3);
    a.granted(&format!("SELECT lease_release_all('{{a, b, c}}', {token})"))?;
    Ok(())
}

#[lab_test]
fn a_guard_of_several_keeps_each_of_them_until_the_transaction_ends(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut other) = (db.connect()?, db.connect()?);
    let token = session.granted("SELECT lease_acquire_all('{a, b, c}', ttl => '1 h')")?;
    let foreign = other.acquire("d", "1 h")?;
    for names in ["{a, d}", "{b, never}", "{d, a, b, c}"] {
        let fault =
            session.refused(&format!("SELECT lease_guard_all('{names}', {token})"), "PF004")?;
        ensure!(fault.json()?["presented"] == token, "{fault}");
    }
    session.refused(&format!("SELECT lease_guard_all('{{a}}', {foreign})"), "PF004")?;
    session.refused("SELECT lease_guard_all('{}', 1)", "22023")?;
    session.refused("SELECT lease_guard_all('{a}', NULL)", "22004")?;
    session.run("BEGIN")?;
    ensure!(
        session.granted(&format!("SELECT lease_guard_all('{{c, a, b, a}}', {token})"))? == token
    );
    ensure!(session.text("SHOW pg_fence.token")? == Some(token.to_string()));
    other.run("SELECT lease_revoke('a'), lease_revoke('b'), lease_revoke('c')")?;
    for name in ["a", "b", "c"] {
        ensure!(other.is_taken(name)?, "{name} was granted beside a guard");
    }
    session.run("COMMIT")?;
    other.granted("SELECT lease_acquire_all('{a, b, c}')").map(drop)
}

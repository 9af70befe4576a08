//! Adopted leases between sessions: guards, releases, forgetting, waiting, many fellows at once.

use super::adopted::table;
use crate::support::concurrency::waiting;
use pg_test::process::PATIENCE;
use pg_test::{ensure, lab_test, Background, Calls, Database, Lab, Result, Session};

fn adopt(session: &mut Session, token: i64) -> Result<Option<i64>> {
    super::adopted::adopt(session, "job", token)
}

fn adopted(session: &mut Session, token: i64) -> Result<()> {
    super::adopted::adopted(session, "job", token)
}

/// A number that was given back, and its row is being deleted by a transaction that is open.
fn being_forgotten(db: &Database) -> Result<Session> {
    let mut session = db.connect()?;
    adopted(&mut session, 33)?;
    session.release("job", 33)?;
    session.run("BEGIN")?;
    ensure!(session.one::<i64>("SELECT lease_forget('job')", &[])? == 1);
    Ok(session)
}

#[lab_test]
fn an_adoption_waits_for_what_is_being_forgotten_no_longer_than_it_was_told(
    lab: &Lab,
) -> Result<()> {
    for end in ["COMMIT", "ROLLBACK"] {
        let db = lab.database()?;
        let mut forgets = being_forgotten(&db)?;
        let mut tries = db.connect()?;
        tries.run("SET statement_timeout = '1 min'")?;
        ensure!(adopt(&mut tries, 40)?.is_none(), "the row may come back");
        let sql = "SELECT lease_adopt('job', 40, wait => '10 min')";
        let mut waits = waiting(&db, sql)?;
        // It is not in the way of the one that it waits for.
        if end == "COMMIT" {
            forgets.run(
                "SAVEPOINT s; SELECT lease_adopt('job', 3, wait => '10 min'); ROLLBACK TO s",
            )?;
        }
        forgets.run(end)?;
        ensure!(waits.rows()? == [[Some("40".to_owned())]]);
        ensure!(tries.speaks("job", 40)?);
    }
    Ok(())
}

#[lab_test]
fn after_a_jump_the_first_fellow_makes_it_known_for_all(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut first, mut third) = (db.connect()?, db.connect()?);
    adopted(&mut first, 7)?;
    first.run("SELECT fence_new_epoch()")?;
    first.run("BEGIN; SELECT lease_guard('job', lease_adopt('job', 7))")?;
    let mut second = Background::connect(&db.conninfo())?;
    second.run("BEGIN")?;
    second.send("SELECT lease_guard('job', lease_adopt('job', 7))")?;
    second.wait_until_blocked()?;
    first.run("COMMIT")?;
    second.rows()?;
    // It has written nothing and holds up nobody: the pool is not put in line.
    let written = second.run("SELECT pg_current_xact_id_if_assigned()")?;
    ensure!(written == [[None]], "{written:?}");
    third.run("SET lock_timeout = '10 s'")?;
    adopted(&mut third, 7)?;
    ensure!(third.release("job", 7)? == Some(7));
    Ok(())
}

#[lab_test]
fn a_transaction_does_not_adopt_over_its_own_guard(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    table(&db)?;
    let (mut session, mut other) = (db.connect()?, db.connect()?);
    adopted(&mut session, 33)?;
    session.run("BEGIN; UPDATE t SET v = 1, fence = 33")?;
    for wait in ["0", "10 min"] {
        let answer: Option<i64> =
            session.one(&format!("SELECT lease_adopt('job', 34, wait => '{wait}')"), &[])?;
        ensure!(answer.is_none(), "adopted while this very transaction relies on 33");
    }
    session.run("UPDATE t SET v = 2, fence = 33; COMMIT")?;
    // It has ended all the same.
    other.refused("SELECT lease_guard('job', 33)", "PF004")?;
    adopted(&mut session, 34)?;
    // With the savepoint the guard goes.
    session.run("BEGIN; SAVEPOINT s; SELECT lease_guard('job', 34); ROLLBACK TO s")?;
    adopted(&mut session, 35)?;
    session.run("COMMIT")
}

#[lab_test]
fn who_loses_the_prefix_while_it_waits_adopts_nothing(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let role = db.role("adopter")?;
    let mut admin = db.connect()?;
    admin
        .run(&format!("SELECT fence_grant('{role}', 'adopter', 'job'), lease_adopt('job', 33)"))?;
    admin.run("BEGIN; SELECT lease_guard('job', 33)")?;
    let mut waits = Background::connect(&db.conninfo().user(&role))?;
    waits.send("SELECT lease_adopt('job', 34, wait => '10 min')")?;
    waits.wait_until_blocked()?;
    let mut other = db.connect()?;
    other.run(&format!(
        "SELECT fence_grant('{role}', 'adopter', 'other:'), fence_revoke('{role}', 'job')"
    ))?;
    admin.run("COMMIT")?;
    waits.refused("42501")?;
    ensure!(other.speaks("job", 33)?);
    Ok(())
}

#[lab_test]
fn a_holder_that_releases_and_a_waiting_adopter_do_not_hang(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    table(&db)?;
    let (mut old, mut new) = (Background::connect(&db.conninfo())?, db.connect()?);
    adopted(&mut new, 33)?;
    old.run("BEGIN")?;
    old.run("UPDATE t SET v = 1, fence = 33")?;
    // The adopter has ended the older grant, not committed that, and waits: each waits for the other.
    new.run("BEGIN")?;
    ensure!(adopt(&mut new, 34)?.is_none());
    old.send("SELECT lease_release('job', 33)")?;
    old.wait_until_blocked()?;
    // For the grant, which the adopter keeps locked; not only for its row.
    let waits = format!("SELECT locktype FROM pg_locks WHERE pid = {} AND NOT granted", old.pid());
    ensure!(db.connect()?.text(&waits)?.as_deref() == Some("advisory"));
    let waits = new.try_rows("SELECT lease_adopt('job', 34, wait => '10 min')");
    match waits {
        Err(fault) => {
            ensure!(fault.sqlstate == "40P01", "{fault}");
            new.run("ROLLBACK")?;
            old.rows()?;
            old.run("COMMIT")?;
            adopted(&mut new, 34)?;
        }
        Ok(rows) => {
            ensure!(rows == [[Some("34".to_owned())]]);
            old.refused("40P01")?;
            new.run("COMMIT")?;
        }
    }
    db.connect()?.refused("SELECT lease_adopt('job', 33)", "PF001").map(drop)
}

#[lab_test]
fn what_is_prepared_relies_on_its_number_and_adopts_it_too(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    table(&db)?;
    let (mut old, mut new) = (db.connect()?, db.connect()?);
    let prepared = |what: &str| format!("{} {what}", db.name());
    adopted(&mut old, 33)?;
    old.run(&format!(
        "BEGIN; UPDATE t SET v = 1, fence = 33; PREPARE TRANSACTION '{}'",
        prepared("write")
    ))?;
    ensure!(adopt(&mut new, 34)?.is_none());
    old.refused("SELECT lease_guard('job', 33)", "PF004")?;
    old.run(&format!("COMMIT PREPARED '{}'", prepared("write")))?;
    new.run(&format!(
        "BEGIN; SELECT 1 / (lease_adopt('job', 34) = 34)::int; PREPARE TRANSACTION '{}'",
        prepared("adoption")
    ))?;
    ensure!(adopt(&mut old, 35)?.is_none());
    ensure!(!old.speaks("job", 34)?);
    new.run(&format!("COMMIT PREPARED '{}'", prepared("adoption")))?;
    ensure!(old.speaks("job", 34)?);
    old.refused("SELECT lease_adopt('job', 33)", "PF001").map(drop)
}

#[lab_test]
fn an_adopter_that_is_cancelled_or_killed_leaves_nothing(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    table(&db)?;
    let (mut old, mut admin) = (db.connect()?, db.connect()?);
    adopted(&mut old, 33)?;
    let sql = "SELECT lease_adopt('job', 34, wait => '10 min')";
    for (setting, sqlstate) in
        [("SET lock_timeout = '100 ms'", "55P03"), ("SET statement_timeout = '100 ms'", "57014")]
    {
        old.run("BEGIN; UPDATE t SET v = v + 1, fence = 33")?;
        admin.run(setting)?;
        admin.refused(sql, sqlstate)?;
        admin.run("RESET lock_timeout; RESET statement_timeout")?;
        // The next one does not wait behind it.
        admin.run("SELECT lease_guard('job', 33)")?;
        old.run("COMMIT")?;
    }
    old.run("BEGIN; UPDATE t SET v = v + 1, fence = 33")?;
    let mut killed = waiting(&db, sql)?;
    killed.terminate()?;
    ensure!(killed.outcome(PATIENCE)?.is_err());
    admin.run("SELECT lease_guard('job', 33)")?;
    old.run("COMMIT; UPDATE t SET v = v + 1, fence = 33")
}

#[lab_test]
fn a_last_write_with_the_number_that_the_row_shows_already(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    table(&db)?;
    let mut session = db.connect()?;
    adopted(&mut session, 33)?;
    session.run("UPDATE t SET v = 1, fence = 33")?;
    session.run("UPDATE t SET v = 2, fence = lease_release('job', 33)")?;
    ensure!(session.one::<i32>("SELECT v FROM t", &[])? == 2);
    session.refused("UPDATE t SET v = 3, fence = lease_release('job', 33)", "PF002")?;
    Ok(())
}

#[lab_test]
fn tables_of_each_mode_take_adopted_numbers(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run(
        "CREATE TABLE strict (id int PRIMARY KEY, v int) PARTITION BY LIST (id);
         CREATE TABLE strict_1 PARTITION OF strict FOR VALUES IN (1);
         CREATE TABLE strict_2 PARTITION OF strict FOR VALUES IN (2);
         CREATE TABLE mono (LIKE strict) PARTITION BY LIST (id);
         CREATE TABLE mono_1 PARTITION OF mono FOR VALUES IN (1);
         CREATE TABLE mono_2 PARTITION OF mono FOR VALUES IN (2);
         CREATE TABLE managed (LIKE strict);
         INSERT INTO strict VALUES (1, 0); INSERT INTO mono VALUES (1, 0); INSERT INTO managed VALUES (1, 0);
         SELECT fence_protect('strict', mode => 'strict', lease => 'job'),
                fence_protect('mono', lease => 'job', verify => true),
                fence_protect('managed', mode => 'managed', lease => 'job')",
    )?;
    // Rows of the time when the lease was granted here: their tokens are greater than the numbers that follow.
    let drawn = session.acquire("job", "1 h")?;
    session.run(&format!("UPDATE mono SET fence = {drawn}"))?;
    session.run(&format!(
        "BEGIN; SELECT lease_guard('job', {drawn}); UPDATE managed SET v = 1; COMMIT"
    ))?;
    session.run("SELECT lease_release('job', $1)".replace("$1", &drawn.to_string()).as_str())?;
    session.run("SELECT lease_prune('0')")?;
    for token in [33, 34] {
        session.run(&format!("BEGIN; SELECT lease_guard('job', lease_adopt('job', {token}))"))?;
        session.run(&format!("UPDATE strict SET v = 1, fence = {token}"))?;
        session.run(&format!("UPDATE mono SET id = 3 - id, v = v + 1, fence = {token}"))?;
        session.run("UPDATE mono SET v = v + 1; UPDATE managed SET v = v + 1, fence = NULL")?;
        session.run("COMMIT")?;
        session.refused(&format!("UPDATE strict SET v = 2, fence = {token}"), "PF001")?;
        for table in ["strict", "mono", "managed"] {
            session.refused(&format!("TRUNCATE {table}"), "PF005")?;
        }
    }
    let fences = session.rows(
        "SELECT fence, v, id FROM strict UNION ALL SELECT fence, v, id FROM mono
         UNION ALL SELECT fence, v, id FROM managed",
    )?;
    let shown = |fence: i64, v: i32, id: i32| {
        [Some(fence.to_string()), Some(v.to_string()), Some(id.to_string())]
    };
    let wanted = [shown(34, 1, 1), shown(drawn, 4, 1), shown(drawn, 3, 1)];
    ensure!(fences == wanted, "{fences:?}");
    // What came before is refused everywhere.
    for table in ["strict", "mono"] {
        session.refused(&format!("UPDATE {table} SET fence = 33"), "PF001")?;
    }
    session.refused("SET LOCAL pg_fence.token = 33; UPDATE managed SET v = 0", "PF001")?;
    Ok(())
}

#[lab_test]
fn who_adopts_through_a_function_of_another_role_adopts_for_that_role(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (owner, caller) = (db.role("owner")?, db.role("caller")?);
    let mut admin = db.connect()?;
    admin.run(&format!(
        "SELECT fence_grant('{owner}', 'adopter', 'job'), fence_grant('{caller}', 'worker', 'job');
         GRANT CREATE ON SCHEMA public TO {owner}; SET ROLE {owner};
         CREATE FUNCTION adopts(t bigint) RETURNS bigint LANGUAGE sql SECURITY DEFINER
           SET search_path = pg_catalog, public, pg_temp AS 'SELECT lease_adopt(''job'', t)'"
    ))?;
    let mut caller = db.connect_as(&caller)?;
    ensure!(caller.one::<i64>("SELECT adopts(33)", &[])? == 33);
    caller.refused("SELECT lease_adopt('job', 33)", "42501")?;
    caller.refused("SELECT lease_adopt('job', 34)", "42501")?;
    caller.refused("SELECT lease_guard('job', 33)", "42501")?;
    caller.refused("SELECT lease_release('job', 33)", "42501")?;
    Ok(())
}

#[lab_test]
fn a_table_of_one_s_own_does_not_tell_which_leases_are_adopted(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (adopter, stranger) = (db.role("adopter")?, db.role("stranger")?);
    let mut admin = db.connect()?;
    admin.run(&format!(
        "SELECT fence_grant('{adopter}', 'adopter', 'job');
         GRANT CREATE ON SCHEMA public TO {stranger}"
    ))?;
    let never = admin.last_token()? + 1_000_000_000_000;
    let mut holder = db.connect_as(&adopter)?;
    adopted(&mut holder, never)?;
    let mut stranger = db.connect_as(&stranger)?;
    stranger.run("CREATE TABLE mine (lease text); INSERT INTO mine VALUES ('job'), ('none')")?;
    stranger.run("SELECT fence_protect('mine', lease => '{lease}')")?;
    for lease in ["job", "none"] {
        for token in [7, never - 1, never, never + 1] {
            let write = format!("UPDATE mine SET fence = {token} WHERE lease = '{lease}'");
            let fault = stranger.refused(&write, "PF004")?;
            ensure!(fault.json()?["holder"].is_null(), "{fault}");
        }
    }
    Ok(())
}

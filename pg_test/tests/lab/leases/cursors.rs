//! Calls within a cursor: their locks are the transaction's, or the savepoint's, as what they write is.

use crate::support::concurrency::{token_of, waiting};
use pg_test::{ensure, lab_test, Calls, Lab, Result, Session};

/// Fetches once, then fails in a savepoint and rolls it back.
fn fetch_and_fail(session: &mut Session, cursor: &str, sqlstate: &str) -> Result<()> {
    session.run(&format!("BEGIN; DECLARE c CURSOR FOR {cursor}; FETCH 1 FROM c; SAVEPOINT s"))?;
    session.refused("FETCH 1 FROM c", sqlstate)?;
    session.run("ROLLBACK TO s")
}

/// The grant has run out, and yet nobody else can have the lease before the transaction ends.
fn still_guards(inside: &mut Session, outside: &mut Session, token: i64) -> Result<()> {
    outside.expire_now("job", token)?;
    outside.nothing("SELECT lease_acquire('job')")?;
    inside.run("COMMIT")?;
    outside.granted("SELECT lease_acquire('job')").map(drop)
}

#[lab_test]
fn a_guard_outlives_the_cursor_that_failed_in_a_savepoint(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut inside, mut outside) = (db.connect()?, db.connect()?);
    let token = inside.acquire("job", "1 h")?;
    let cursor = format!("SELECT lease_guard(n, {token}) FROM (VALUES ('job'), ('gone')) v (n)");
    fetch_and_fail(&mut inside, &cursor, "PF004")?;
    still_guards(&mut inside, &mut outside, token)
}

#[lab_test]
fn a_guard_outlives_the_loop_that_caught_an_error(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut inside, mut outside) = (db.connect()?, db.connect()?);
    let token = inside.acquire("job", "1 h")?;
    inside.run("BEGIN")?;
    inside.run(&format!(
        "DO $$DECLARE
             c CURSOR FOR SELECT lease_guard(n, {token}) FROM unnest(ARRAY['job', 'gone']) n;
             guarded bigint;
         BEGIN
             OPEN c;
             FOR i IN 1..2 LOOP
                 BEGIN FETCH c INTO guarded; EXCEPTION WHEN SQLSTATE 'PF004' THEN NULL; END;
             END LOOP;
         END$$"
    ))?;
    still_guards(&mut inside, &mut outside, token)
}

#[lab_test]
fn a_write_s_guard_outlives_the_cursor_that_failed_in_a_savepoint(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut inside, mut outside) = (db.connect()?, db.connect()?);
    inside.run(
        "CREATE TABLE t (id int PRIMARY KEY); SELECT fence_protect('t', lease => 'job');
         CREATE FUNCTION add(id int, token bigint) RETURNS int LANGUAGE sql
             BEGIN ATOMIC INSERT INTO t VALUES (add.id, add.token) RETURNING 1; END",
    )?;
    let token = inside.acquire("job", "1 h")?;
    let cursor = format!("SELECT add(id, {token}) FROM (VALUES (1), (1)) v (id)");
    fetch_and_fail(&mut inside, &cursor, "23505")?;
    still_guards(&mut inside, &mut outside, token)
}

#[lab_test]
fn a_grant_stays_locked_when_its_cursor_fails(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut inside, mut outside) = (db.connect()?, db.connect()?);
    outside.run("SET statement_timeout = '10 s'")?;
    let cursor = "SELECT lease_acquire('job', ttl => ttl::interval)
                    FROM (VALUES ('1 h'), ('-1 s')) v (ttl)";
    fetch_and_fail(&mut inside, cursor, "22023")?;
    outside.nothing("SELECT lease_acquire('job')")?;
    inside.run("COMMIT")?;
    outside.nothing("SELECT lease_acquire('job')")
}

#[lab_test]
fn a_renewal_stays_locked_when_its_cursor_fails(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut inside = db.connect()?;
    let token = inside.acquire("job", "1 h")?;
    let cursor = format!("SELECT lease_renew('job', t) FROM (VALUES ({token}), (-1)) v (t)");
    fetch_and_fail(&mut inside, &cursor, "22023")?;
    let mut outside = waiting(&db, &format!("SELECT lease_renew('job', {token})"))?;
    inside.run("COMMIT")?;
    let renewed = token_of(&mut outside)?;
    ensure!(inside.speaks("job", renewed)?);
    Ok(())
}

#[lab_test]
fn what_a_cursor_did_in_a_savepoint_goes_with_it(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut inside, mut outside) = (db.connect()?, db.connect()?);
    let token = inside.acquire("job", "1 h")?;
    inside.run(&format!(
        "BEGIN; DECLARE c CURSOR FOR SELECT lease_guard('job', {token}), lease_acquire('other');
         SAVEPOINT s; FETCH 1 FROM c; ROLLBACK TO s"
    ))?;
    outside.expire_now("job", token)?;
    outside.granted("SELECT lease_acquire('job')")?;
    outside.granted("SELECT lease_acquire('other')")?;
    inside.run("COMMIT")
}

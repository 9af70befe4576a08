//! Leases that somebody else grants: their numbers are made known by `lease_adopt`, and fence as our own do.

use pg_test::{ensure, lab_test, Background, Calls, Database, Lab, Result, Session};

/// As an index of ZooKeeper, a revision of etcd and a generation of an object store may be.
const ZXID: i64 = 4_294_967_300;
const GENERATION: i64 = 1_763_900_000_000_000;

pub fn adopt(session: &mut Session, name: &str, token: i64) -> Result<Option<i64>> {
    session.one("SELECT lease_adopt($1, $2)", &[&name, &token])
}

pub fn adopted(session: &mut Session, name: &str, token: i64) -> Result<()> {
    ensure!(adopt(session, name, token)? == Some(token), "{token} was not adopted");
    Ok(())
}

/// A table bound to the lease `job`, with one row.
pub fn table(db: &Database) -> Result<()> {
    db.connect()?.run(
        "CREATE TABLE t (id int PRIMARY KEY, v int);
         INSERT INTO t VALUES (1, 0);
         SELECT fence_protect('t', lease => 'job')",
    )
}

fn write(token: i64) -> String {
    format!("UPDATE t SET v = v + 1, fence = {token}")
}

#[lab_test]
fn a_greater_number_replaces_a_smaller_one_for_good(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    table(&db)?;
    let mut session = db.connect()?;
    let drawn = session.last_token()?;
    for token in [1, 7, ZXID, GENERATION, i64::MAX] {
        adopted(&mut session, "job", token)?;
        adopted(&mut session, "job", token)?;
        ensure!(session.speaks("job", token)?);
        session.run(&write(token))?;
        if token > 1 {
            let fault =
                session.refused(&format!("SELECT lease_adopt('job', {})", token - 1), "PF001")?;
            let detail = fault.json()?;
            ensure!(detail["stored"] == token && detail["presented"] == token - 1, "{fault}");
            session.refused(&write(token - 1), "PF001")?;
            session.refused(&format!("SELECT lease_guard('job', {})", token - 1), "PF004")?;
        }
    }
    ensure!(session.last_token()? == drawn, "a number was drawn, or reached the sequence");
    let row = session.rows(
        "SELECT state, adopted::text, remaining::text, expires_at::text FROM lease_info('job')",
    )?;
    ensure!(
        row == [["held", "true", "", "infinity"]
            .map(|text| Some(text.to_owned()).filter(|t| !t.is_empty()))],
        "{row:?}"
    );
    Ok(())
}

#[lab_test]
fn adopting_what_is_current_writes_nothing(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    adopted(&mut session, "job", 7)?;
    session.run("BEGIN; SELECT lease_guard('job', lease_adopt('job', 7))")?;
    let written: Option<String> =
        session.one("SELECT pg_current_xact_id_if_assigned()::text", &[])?;
    ensure!(written.is_none(), "a transaction id was taken");
    // Others of the holder's sessions are not held up.
    let mut other = db.connect()?;
    other.run("SET lock_timeout = '1 ms'; BEGIN; SELECT lease_guard('job', lease_adopt('job', 7)); COMMIT")?;
    session.run("COMMIT")
}

#[lab_test]
fn a_release_answers_the_number_itself_which_never_comes_back(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    table(&db)?;
    let mut session = db.connect()?;
    let drawn = session.last_token()?;
    adopted(&mut session, "job", GENERATION)?;
    // A last write and a release in one; releasing again in the same transaction answers the same.
    session.run(&format!(
        "BEGIN; UPDATE t SET v = 9, fence = lease_release('job', {GENERATION});
         SELECT 1 / (lease_release('job', {GENERATION}) = {GENERATION})::int; COMMIT"
    ))?;
    ensure!(session.release("job", GENERATION)?.is_none());
    session.refused(&write(GENERATION), "PF004")?;
    session.refused(&format!("SELECT lease_adopt('job', {GENERATION})"), "PF001")?;
    adopted(&mut session, "job", GENERATION + 1)?;
    let revoked: i64 = session.one("SELECT lease_revoke('job')", &[])?;
    ensure!(revoked == GENERATION + 1);
    ensure!(session.one::<Option<i64>>("SELECT lease_revoke('job')", &[])?.is_none());
    session.refused(&format!("SELECT lease_adopt('job', {})", GENERATION + 1), "PF001")?;
    ensure!(session.last_token()? == drawn);
    Ok(())
}

#[lab_test]
fn a_name_is_granted_here_or_adopted(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    adopted(&mut session, "theirs", 7)?;
    adopted(&mut session, "also", 7)?;
    let drawn = session.acquire("ours", "1 h")?;
    for call in [
        "lease_acquire('theirs')",
        "lease_acquire('theirs', shared => true)",
        "lease_acquire('theirs', slots => 3)",
        "lease_acquire('theirs', wait => '1 h')",
        "lease_acquire('theirs', holder => 'me', reclaim => true)",
        "lease_acquire_all('{a, theirs}')",
        "lease_renew('theirs', 7)",
        "lease_renew('theirs', 8)",
        "lease_renew_all('{theirs}', 7)",
        "lease_release_all('{theirs, also}', 7)",
        "lease_adopt('ours', 7)",
        "lease_adopt('ours', 9000000000000000000)",
        "lease_forget('ours')",
    ] {
        session.refused(&format!("SELECT {call}"), "55000")?;
    }
    ensure!(session.speaks("theirs", 7)? && session.speaks("ours", drawn)?);
    session.run("SELECT lease_revoke('theirs'), lease_revoke('ours')")?;
    for call in ["lease_acquire('theirs')", "lease_adopt('ours', 7)"] {
        session.refused(&format!("SELECT {call}"), "55000")?;
    }
    session.refused("SELECT lease_adopt('job', NULL)", "22004")?;
    session.refused("SELECT lease_adopt('job', 0)", "22023")?;
    ensure!(session.one::<i64>("SELECT count(*) FROM fence.lease WHERE name = 'a'", &[])? == 0);
    Ok(())
}

#[lab_test]
fn what_is_forgotten_may_be_adopted_or_granted_anew(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    adopted(&mut session, "job", GENERATION)?;
    let forgotten = "SELECT lease_forget('job')";
    ensure!(session.one::<i64>(forgotten, &[])? == 0, "it is held");
    session.run("SELECT lease_revoke('job')")?;
    ensure!(
        session.one::<i64>("SELECT lease_prune('0')", &[])? == 0,
        "it is the memory of what is stale"
    );
    ensure!(session.one::<i64>("SELECT lease_forget_older('1 day')", &[])? == 0);
    ensure!(session.one::<i64>(forgotten, &[])? == 1);
    adopted(&mut session, "job", 3)?;
    session.run("SELECT lease_revoke('job'); SELECT lease_forget_older('0')")?;
    session.acquire("job", "1 h")?;
    session.refused("SELECT lease_forget_older(NULL)", "22004")?;
    Ok(())
}

#[lab_test]
fn an_adoption_waits_for_those_who_rely_on_the_older_grant(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    table(&db)?;
    let (mut old, mut new) = (db.connect()?, Background::connect(&db.conninfo())?);
    adopted(&mut old, "job", 33)?;
    old.run(&format!("BEGIN; {}", write(33)))?;
    new.send("SELECT lease_adopt('job', 34, wait => '10 min')")?;
    new.wait_until_blocked()?;
    // Who would rely on the older one meanwhile waits behind it.
    let mut late = Background::connect(&db.conninfo())?;
    late.send("BEGIN; SELECT lease_guard('job', 33)")?;
    late.wait_until_blocked()?;
    // The holder itself goes on, and may give the lease back.
    old.run(&write(33))?;
    ensure!(old.release("job", 33)? == Some(33));
    ensure!(!new.is_finished() && !late.is_finished());
    old.run("COMMIT")?;
    ensure!(new.rows()? == [[Some("34".to_owned())]]);
    late.refused("PF004")?;
    old.refused(&write(33), "PF004")?;
    ensure!(db.connect()?.one::<i32>("SELECT v FROM t", &[])? == 2);
    Ok(())
}

#[lab_test]
fn a_try_that_loses_ends_the_older_grant_all_the_same(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    table(&db)?;
    let (mut old, mut new, mut late) = (db.connect()?, db.connect()?, db.connect()?);
    adopted(&mut old, "job", 33)?;
    old.run(&format!("BEGIN; {}", write(33)))?;
    ensure!(
        adopt(&mut new, "job", 35)?.is_none(),
        "adopted beside a transaction that relies on 33"
    );
    ensure!(!new.speaks("job", 35)? && !new.speaks("job", 33)?);
    // So overlapping guards have an end.
    late.refused("SELECT lease_guard('job', 33)", "PF004")?;
    late.refused("SELECT lease_adopt('job', 34)", "PF001")?;
    ensure!(adopt(&mut new, "job", 35)?.is_none());
    old.run(&format!("{}; COMMIT", write(33)))?;
    adopted(&mut new, "job", 35)?;
    old.refused("SELECT lease_adopt('job', 33)", "PF001")?;
    Ok(())
}

#[lab_test]
fn an_adopted_lease_belongs_to_the_role_that_adopted_it(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (a, b, worker) = (db.role("a")?, db.role("b")?, db.role("worker")?);
    db.connect()?.run(&format!(
        "SELECT fence_grant('{a}', 'adopter', 'x:'), fence_grant('{b}', 'adopter', 'x:'), fence_grant('{worker}')"
    ))?;
    let (mut a, mut b) = (db.connect_as(&a)?, db.connect_as(&b)?);
    adopted(&mut a, "x:job", 33)?;
    b.refused("SELECT lease_adopt('x:job', 33)", "42501")?;
    b.refused("SELECT lease_guard('x:job', 33)", "42501")?;
    b.refused("SELECT lease_adopt('y:job', 33)", "42501")?;
    db.connect_as(&worker)?.refused("SELECT lease_adopt('x:job', 34)", "42501")?;
    adopted(&mut b, "x:job", 34)?;
    a.refused("SELECT lease_adopt('x:job', 33)", "PF001").map(drop)
}

#[lab_test]
fn after_a_jump_a_token_speaks_once_it_was_adopted_again(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    table(&db)?;
    let mut session = db.connect()?;
    adopted(&mut session, "job", GENERATION)?;
    session.run("SELECT fence_new_epoch()")?;
    ensure!(!session.speaks("job", GENERATION)?);
    let fault = session.refused(&write(GENERATION), "PF004")?;
    ensure!(fault.json()?["renew_first"] == true, "{fault}");
    adopted(&mut session, "job", GENERATION)?;
    session.run(&write(GENERATION))?;
    session.refused(&format!("SELECT lease_adopt('job', {})", GENERATION - 1), "PF001").map(drop)
}

#[lab_test]
fn bound_tables_know_never_issued_from_adopted(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    table(&db)?;
    let mut session = db.connect()?;
    let never = session.last_token()? + 1_000_000_000;
    session.refused(&write(never), "PF003")?;
    adopted(&mut session, "job", 5)?;
    session.refused(&write(never), "PF004")?;
    session.run(&write(5))?;
    session.refused(&write(4), "PF001")?;
    adopted(&mut session, "job", never)?;
    session.run(&write(never))?;
    // Where no lease is, an adopted number is one like any other.
    session.run("CREATE TABLE u (id int); INSERT INTO u VALUES (1); SELECT fence_protect('u')")?;
    session.refused(&format!("UPDATE u SET fence = {never}"), "PF003")?;
    session.run("SELECT lease_revoke('job'); SELECT lease_forget('job')")?;
    session.refused(&write(never + 1), "PF003").map(drop)
}

/// A number beyond the sequence in a row is none of the audit's business while it is adopted.
#[lab_test]
fn the_audit_knows_rows_ahead_of_the_sequence_from_adopted_ones(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    table(&db)?;
    let mut session = db.connect()?;
    let never = session.last_token()? + 1_000_000_000;
    adopted(&mut session, "job", never)?;
    session.run(&write(never))?;
    ensure!(session.rows("SELECT * FROM fence_audit('t')")?.is_empty());
    session.run("SELECT lease_revoke('job'); SELECT lease_forget('job')")?;
    let told =
        session.rows("SELECT finding FROM fence_audit('t') WHERE finding LIKE 'rows hold%'")?;
    ensure!(told.len() == 1, "{told:?}");
    Ok(())
}

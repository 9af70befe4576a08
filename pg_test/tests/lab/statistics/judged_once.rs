//! Each judgement on a row is counted: not the check behind it, nor the halves of a move.

use super::{counted, expect};
use pg_test::{ensure, lab_test, Background, Calls, Lab, Result, Session};

fn table(session: &mut Session, columns: &str, protect: &str) -> Result<i64> {
    session.run(&format!("CREATE TABLE t (id int, v int, fence bigint, {columns}; {protect}"))?;
    let token = session.acquire("a", "1 h")?;
    counted(session)?;
    Ok(token)
}

#[lab_test]
fn by_the_check_behind_the_other_triggers(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let protect = "SELECT fence_protect('t', lease => 'a', verify => true)";
    let token = table(&mut session, "PRIMARY KEY (id))", protect)?;
    session.run(&format!("INSERT INTO t VALUES (1, 1, {token}), (2, 1, {token})"))?;
    session.run(&format!("UPDATE t SET v = 2, fence = {token}"))?;
    expect(&mut session, "verify", "guards 2, writes_checked 4")?;
    // What the second check refuses the first has counted.
    session.run(
        "CREATE FUNCTION lower() RETURNS trigger LANGUAGE plpgsql AS \
             'BEGIN NEW.fence := 1; RETURN NEW; END';
         CREATE TRIGGER zz BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION lower()",
    )?;
    session.refused(&format!("UPDATE t SET v = 3, fence = {token} WHERE id = 1"), "PF001")?;
    expect(&mut session, "refused behind", "guards 1, refused_pf001 1, writes_checked 1")
}

#[lab_test]
fn when_it_moves_to_another_partition(lab: &Lab) -> Result<()> {
    for options in ["", ", lease => 'a'", ", mode => 'managed'", ", lease => 'a', verify => true"] {
        let db = lab.database()?;
        let mut session = db.connect()?;
        let protect = format!(
            "CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1); \
             CREATE TABLE t2 PARTITION OF t FOR VALUES IN (2); \
             SELECT fence_protect('t'{options}, events => 'insert,update,delete,truncate')"
        );
        let token = table(&mut session, "p int) PARTITION BY LIST (p)", &protect)?;
        session.run(&format!("SET pg_fence.token = {token}"))?;
        session.run("INSERT INTO t SELECT n, 0, NULL, 1 FROM generate_series(1, 3) n")?;
        let counts = counted(&mut session)?;
        ensure!(counts.ends_with("writes_checked 3"), "{options}: {counts}");
        let newer = session.granted(&format!("SELECT lease_renew('a', {token})"))?;
        session.run(&format!("SET pg_fence.token = {newer}; UPDATE t SET p = 2"))?;
        let counts = counted(&mut session)?;
        ensure!(counts.ends_with("renewals 1, writes_checked 3"), "{options}: {counts}");
        let newer = session.granted(&format!("SELECT lease_renew('a', {token})"))?;
        session.run(&format!(
            "SET pg_fence.token = {newer}; UPDATE t SET p = 3 - p, v = 1 WHERE id = 1"
        ))?;
        let newer = session.granted(&format!("SELECT lease_renew('a', {token})"))?;
        session.run(&format!("SET pg_fence.token = {newer}; DELETE FROM t"))?;
        let counts = counted(&mut session)?;
        ensure!(counts.ends_with("renewals 2, writes_checked 4"), "{options}: {counts}");
    }
    Ok(())
}

#[lab_test]
fn what_is_offered_and_then_updated_is_judged_twice(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let protect = "SELECT fence_protect('t', lease => 'a')";
    let token = table(&mut session, "PRIMARY KEY (id))", protect)?;
    let upsert = format!(
        "INSERT INTO t SELECT n, 0, {token} FROM generate_series(1, 4) n \
         ON CONFLICT (id) DO UPDATE SET v = t.v + 1, fence = EXCLUDED.fence"
    );
    session.run(&upsert)?;
    expect(&mut session, "all new", "guards 1, writes_checked 4")?;
    session.run(&upsert)?;
    expect(&mut session, "all there", "guards 1, writes_checked 8")?;
    session.run(&format!("SET pg_fence.token = {token}; DELETE FROM t WHERE id IN (1, 3)"))?;
    counted(&mut session)?;
    session.run(&upsert)?;
    expect(&mut session, "some there", "guards 1, writes_checked 6")?;
    session
        .run(&upsert.replace("DO UPDATE SET v = t.v + 1, fence = EXCLUDED.fence", "DO NOTHING"))?;
    expect(&mut session, "nothing done", "guards 1, writes_checked 4")
}

#[lab_test]
fn inserts_and_updates_of_one_merge_count_each(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let protect = "SELECT fence_protect('t', lease => 'a')";
    let token = table(&mut session, "PRIMARY KEY (id))", protect)?;
    session.run(&format!("INSERT INTO t SELECT n, 0, {token} FROM generate_series(2, 10, 2) n"))?;
    counted(&mut session)?;
    session.run(&format!(
        "MERGE INTO t USING (SELECT generate_series(1, 10)) AS s (id) ON t.id = s.id
          WHEN MATCHED THEN UPDATE SET v = 1, fence = {token}
          WHEN NOT MATCHED THEN INSERT VALUES (s.id, 1, {token})"
    ))?;
    expect(&mut session, "a MERGE", "guards 1, writes_checked 10")
}

#[lab_test]
fn when_it_had_to_wait_for_another_transaction(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let token =
        table(&mut session, "PRIMARY KEY (id))", "SELECT fence_protect('t', mode => 'monotonic')")?;
    session.run(&format!("INSERT INTO t VALUES (1, 0, {token})"))?;
    counted(&mut session)?;
    let mut first = db.connect()?;
    let mut second = Background::connect(&db.conninfo())?;
    let update = format!("UPDATE t SET v = v + 1, fence = {token} WHERE v < 10");
    first.run(&format!("BEGIN; {update}"))?;
    second.send(&update)?;
    second.wait_until_blocked()?;
    first.run("COMMIT")?;
    second.rows()?;
    ensure!(session.granted("SELECT v FROM t")? == 2);
    expect(&mut session, "evaluated again", "writes_checked 2")
}

#[lab_test]
fn in_a_statement_whose_plan_is_parallel(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let token = table(&mut session, "PRIMARY KEY (id))", "SELECT fence_protect('t')")?;
    session.run(
        "INSERT INTO t SELECT n, 0 FROM generate_series(1, 20000) n; ANALYZE t;
         SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0; SET min_parallel_table_scan_size = 0;
         CREATE TABLE chosen (id int); INSERT INTO chosen SELECT generate_series(1, 20000); ANALYZE chosen",
    )?;
    counted(&mut session)?;
    // A write has no parallel plan; what it calls may.
    session.run(
        "CREATE FUNCTION how_many() RETURNS bigint LANGUAGE sql VOLATILE AS 'SELECT count(*) FROM chosen WHERE id % 2 = 0'",
    )?;
    let plan = session.rows("EXPLAIN SELECT count(*) FROM chosen WHERE id % 2 = 0")?;
    ensure!(plan.iter().flatten().flatten().any(|line| line.contains("Gather")), "{plan:?}");
    session.run(&format!(
        "UPDATE t SET v = how_many(), fence = {token} WHERE id <= 100;
         SELECT count(*) FROM chosen WHERE id % 2 = 0"
    ))?;
    expect(&mut session, "a write beside parallel scans", "writes_checked 100")?;
    let looks = "SELECT grants FROM fence.stats, (SELECT count(*) FROM chosen WHERE id % 2 = 0) c";
    ensure!(session.granted(looks)? == 0);
    Ok(())
}

#[lab_test]
fn by_triggers_that_write_fenced_tables_themselves(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let token = table(&mut session, "PRIMARY KEY (id))", "SELECT fence_protect('t')")?;
    session.run(&format!(
        "CREATE TABLE parent (id int PRIMARY KEY, fence bigint); INSERT INTO parent VALUES (1), (2);
         CREATE TABLE child (id int REFERENCES parent ON DELETE CASCADE, fence bigint);
         INSERT INTO child SELECT n % 2 + 1 FROM generate_series(1, 6) n;
         SELECT fence_protect('parent'), fence_protect('child'); SET pg_fence.token = {token}"
    ))?;
    session.run("DELETE FROM parent")?;
    expect(&mut session, "a cascade", "writes_checked 8")
}

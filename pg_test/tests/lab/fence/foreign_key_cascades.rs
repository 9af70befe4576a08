//! Foreign keys that write to a fenced table on their own.

use crate::support::test_database::{shows, TestDatabase};
use pg_test::{lab_test, Context, Lab, Result};

const ROWS: &str =
    "SELECT (SELECT string_agg(id::text, ',' ORDER BY id) FROM parent), c.parent_id, c.fence \
     FROM (VALUES (1)) AS once LEFT JOIN child c ON true ORDER BY c.id";

/// Parents 1 and 9, a fenced child of 1 with the token that is returned second of three.
fn family(lab: &Lab, action: &str, fence: &str) -> Result<(TestDatabase, [i64; 3])> {
    let mut db = TestDatabase::new(lab)?;
    db.run(&format!(
        "CREATE TABLE parent (id int PRIMARY KEY); INSERT INTO parent VALUES (1), (9); \
         CREATE TABLE child (id int PRIMARY KEY, fence bigint, \
             parent_id int DEFAULT 9 REFERENCES parent {action}); \
         INSERT INTO child (id, parent_id) VALUES (5, 1); SELECT fence_protect('child'{fence})"
    ))?;
    let tokens = [db.token()?, db.token()?, db.token()?];
    if fence.is_empty() {
        db.run(&format!("UPDATE child SET fence = {}", tokens[1]))?;
    }
    Ok((db, tokens))
}

fn set(token: i64, sql: &str) -> String {
    format!("SET LOCAL pg_fence.token = '{token}'; {sql}")
}

/// The write on the parent, judged by the child's fence.
fn judged(db: &mut TestDatabase, [a, b, c]: [i64; 3], sql: &str, landed: &str) -> Result<()> {
    db.comes_to(sql, ROWS, "PF002")?;
    db.comes_to(&set(a, sql), ROWS, "PF001")?;
    db.comes_to(&set(b, sql), ROWS, "PF001")?;
    db.comes_to(&set(c + 1, sql), ROWS, "PF003")?;
    db.comes_to(&set(c, sql), ROWS, landed)?;
    shows(db, ROWS, &format!("1,9|1|{b}"))
}

#[lab_test]
fn each_action_of_a_key_is_fenced(lab: &Lab) -> Result<()> {
    for (action, kept) in [("CASCADE", None), ("SET NULL", Some("-")), ("SET DEFAULT", Some("9"))] {
        let (mut db, tokens) = family(lab, &format!("ON DELETE {action} ON UPDATE {action}"), "")?;
        let child = |gone: &str| match kept {
            Some(value) => format!("{value}|{}", tokens[2]),
            None => gone.to_owned(),
        };
        let deleted = format!("9|{}", child("-|-"));
        let updated = format!("2,9|{}", child(&format!("2|{}", tokens[2])));
        for (sql, landed) in [
            ("DELETE FROM parent WHERE id = 1", deleted),
            ("UPDATE parent SET id = 2 WHERE id = 1", updated),
        ] {
            judged(&mut db, tokens, sql, &landed).context(action)?;
        }
    }
    Ok(())
}

#[lab_test]
fn a_cascade_over_partitions_is_fenced(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(
        "CREATE TABLE parent (id int PRIMARY KEY); INSERT INTO parent VALUES (1), (9); \
         CREATE TABLE child (id int, fence bigint, \
             parent_id int REFERENCES parent ON DELETE CASCADE ON UPDATE CASCADE) \
             PARTITION BY RANGE (parent_id); \
         CREATE TABLE low PARTITION OF child FOR VALUES FROM (0) TO (5); \
         CREATE TABLE high PARTITION OF child FOR VALUES FROM (5) TO (99); \
         INSERT INTO child VALUES (5, NULL, 1); SELECT fence_protect('child')",
    )?;
    let tokens = [db.token()?, db.token()?, db.token()?];
    db.run(&format!("UPDATE child SET fence = {}", tokens[1]))?;
    judged(&mut db, tokens, "DELETE FROM parent WHERE id = 1", "9|-|-")?;
    // The key's cascade moves the child to the other partition.
    let landed = format!("7,9|7|{}", tokens[2]);
    judged(&mut db, tokens, "UPDATE parent SET id = 7 WHERE id = 1", &landed)
}

#[lab_test]
fn a_cascade_over_several_tables_is_all_or_nothing(lab: &Lab) -> Result<()> {
    let (mut db, [a, b, c]) = family(lab, "ON DELETE CASCADE", "")?;
    db.run(
        "CREATE TABLE grandchild (fence bigint, child_id int REFERENCES child ON DELETE CASCADE); \
         INSERT INTO grandchild VALUES (NULL, 5); SELECT fence_protect('grandchild')",
    )?;
    db.run(&format!("UPDATE grandchild SET fence = {c}"))?;
    let d = db.token()?;
    let rows = "SELECT (SELECT count(*) FROM parent), (SELECT count(*) FROM child), count(*) FROM grandchild";
    let delete = "DELETE FROM parent WHERE id = 1";
    for (token, wanted) in [(a, "PF001"), (c, "PF001"), (d, "1|0|0")] {
        db.comes_to(&set(token, delete), rows, wanted)?;
    }
    db.comes_to(delete, rows, "PF002")?;
    shows(&mut db, rows, "2|1|1")?;
    shows(&mut db, ROWS, &format!("1,9|1|{b}"))
}

#[lab_test]
fn a_cascade_to_a_bound_child_needs_its_lease(lab: &Lab) -> Result<()> {
    let (mut db, [foreign, ..]) =
        family(lab, "ON DELETE CASCADE ON UPDATE CASCADE", ", lease => 'child:{id}'")?;
    let old = db.grant("child:5")?;
    let new = db.take_over("child:5")?;
    for sql in ["DELETE FROM parent WHERE id = 1", "UPDATE parent SET id = 2 WHERE id = 1"] {
        db.comes_to(sql, ROWS, "PF002")?;
        db.comes_to(&set(old, sql), ROWS, "PF004")?;
        db.comes_to(&set(foreign, sql), ROWS, "PF004")?;
        let landed = if sql.starts_with('D') { "9|-|-".to_owned() } else { format!("2,9|2|{new}") };
        db.comes_to(&set(new, sql), ROWS, &landed)?;
        db.comes_to(&format!("SELECT lease_guard('child:5', {new}); {sql}"), ROWS, &landed)?;
    }
    Ok(())
}

#[lab_test]
fn a_cascade_that_changes_the_lease_needs_both(lab: &Lab) -> Result<()> {
    let (mut db, _) =
        family(lab, "ON DELETE SET NULL ON UPDATE CASCADE", ", lease => 'family:{parent_id}'")?;
    let update = "UPDATE parent SET id = 2 WHERE id = 1";
    let one = db.grant("family:1")?;
    db.comes_to(&set(one, update), ROWS, "PF004")?;
    // With NULL there would be no lease to guard the row.
    db.comes_to(&set(one, "DELETE FROM parent WHERE id = 1"), ROWS, "22004")?;
    db.run("SELECT lease_revoke('family:1')")?;
    let both: i64 =
        db.one("SELECT lease_acquire_all('{family:1,family:2}', 'test', '1 h')", &[])?;
    db.comes_to(&set(both, update), ROWS, &format!("2,9|2|{both}"))
}

#[lab_test]
fn a_role_without_rights_on_the_child_cascades_with_the_token(lab: &Lab) -> Result<()> {
    let (mut db, _) = family(lab, "ON DELETE CASCADE", ", lease => 'child:{id}'")?;
    let (clerk, owner) = (db.database().role("clerk")?, db.database().role("owner")?);
    db.run(&format!(
        "SELECT fence_grant('{clerk}'); GRANT SELECT, DELETE ON parent TO {clerk}; \
         ALTER TABLE child OWNER TO {owner}; ALTER TABLE parent OWNER TO {owner}"
    ))?;
    let mut session = db.database().connect_as(&clerk)?;
    session.refused("DELETE FROM child", "42501")?;
    session.refused("DELETE FROM parent WHERE id = 1", "PF002")?;
    // The cascade runs as the table's owner, but the token is the clerk's.
    let token: i64 = session.one("SELECT lease_acquire('child:5', ttl => '1 h')", &[])?;
    session.run(&format!("BEGIN; {}; COMMIT", set(token, "DELETE FROM parent WHERE id = 1")))?;
    shows(&mut db, ROWS, "9|-|-")
}

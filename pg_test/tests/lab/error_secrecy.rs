//! What an error keeps to itself: rows, leases and files that the caller may not see.

use crate::support::test_database::{TestDatabase, ORDERS};
use pg_test::{ensure, lab_test, Fault, Lab, Result, Session};

/// A token that no message holds by chance.
const SECRET: &str = "777000777000777";

/// A database where tokens are far ahead, whose order 1 has `SECRET`, and a role that may do this on it.
fn bed_with_secret(
    lab: &Lab,
    arguments: &str,
    grants: &str,
) -> Result<(TestDatabase, Session, i64)> {
    let mut db = TestDatabase::new(lab)?;
    db.run(ORDERS)?;
    let low = db.token()?;
    let secret: i64 = SECRET.parse()?;
    db.run(&format!("SELECT setval('fence.token_seq', {secret})"))?;
    db.run(&format!("UPDATE orders SET fence = {secret}"))?;
    db.protect(arguments)?;
    let role = db.database().role("writer")?;
    db.run(&format!("GRANT {grants} ON orders TO {role}"))?;
    let session = db.database().connect_as(&role)?;
    Ok((db, session, low))
}

fn text_of(fault: &Fault) -> String {
    format!("{fault} {:?} {:?} {:?}", fault.schema, fault.table, fault.column)
}

fn hides(fault: &Fault, keys: &[&str]) -> Result<()> {
    ensure!(!text_of(fault).contains(SECRET), "the stored token is shown: {fault}");
    let detail = fault.json()?;
    for key in keys {
        ensure!(detail.get(key).is_none(), "{key} is shown: {fault}");
    }
    Ok(())
}

#[lab_test]
fn without_select_neither_the_token_nor_the_key_is_shown(lab: &Lab) -> Result<()> {
    for mode in ["strict", "monotonic"] {
        let (_bed, mut session, low) =
            bed_with_secret(lab, &format!("mode => '{mode}'"), "UPDATE, DELETE, TRUNCATE")?;
        session.refused("SELECT fence FROM orders", "42501")?;
        for (sql, sqlstate) in [
            (format!("UPDATE orders SET fence = {low}"), "PF001"),
            ("UPDATE orders SET v = 7".to_owned(), "PF002"),
            ("UPDATE orders SET fence = NULL".to_owned(), "PF002"),
            ("UPDATE orders SET fence = -1".to_owned(), "PF003"),
            ("DELETE FROM orders".to_owned(), "PF002"),
            (format!("SET pg_fence.token = '{low}'; DELETE FROM orders"), "PF001"),
            (format!("SET pg_fence.token = '{low}'; UPDATE orders SET v = 7"), "PF001"),
        ] {
            let fault = session.refused(&sql, sqlstate)?;
            hides(&fault, &["stored", "key"])?;
            ensure!(fault.table.as_deref() == Some("orders"), "{fault}");
        }
        session.refused("TRUNCATE orders", "PF005")?;
    }
    Ok(())
}

#[lab_test]
fn with_select_on_some_columns_only_those_are_shown(lab: &Lab) -> Result<()> {
    let (_bed, mut session, low) = bed_with_secret(lab, "", "UPDATE, SELECT (id)")?;
    let stale = format!("UPDATE orders SET fence = {low} WHERE id = 1");
    let fault = session.refused(&stale, "PF001")?;
    hides(&fault, &["stored"])?;
    ensure!(fault.json()?["key"]["id"] == 1, "{fault}");
    let (_bed, mut session, low) = bed_with_secret(lab, "", "UPDATE, SELECT (fence)")?;
    let fault = session.refused(&format!("UPDATE orders SET fence = {low}"), "PF001")?;
    ensure!(fault.json()?["stored"].to_string().as_str() == SECRET, "{fault}");
    ensure!(fault.json()?.get("key").is_none(), "{fault}");
    Ok(())
}

#[lab_test]
fn with_row_security_nothing_of_the_row_is_shown(lab: &Lab) -> Result<()> {
    let (mut db, mut session, low) = bed_with_secret(lab, "", "SELECT, UPDATE")?;
    let stale = format!("UPDATE orders SET fence = {low}");
    let fault = session.refused(&stale, "PF001")?;
    ensure!(fault.json()?["stored"].to_string().as_str() == SECRET, "{fault}");
    db.run(
        "ALTER TABLE orders ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON orders USING (id = 1)",
    )?;
    let fault = session.refused(&stale, "PF001")?;
    hides(&fault, &["stored", "key"])?;
    // The superuser is not subject to it.
    let fault = db.refused(&stale, "PF001")?;
    ensure!(fault.json()?["key"]["id"] == 1, "{fault}");
    Ok(())
}

#[lab_test]
fn through_a_view_only_what_the_caller_may_read_is_shown(lab: &Lab) -> Result<()> {
    let (mut db, mut session, low) = bed_with_secret(lab, "", "REFERENCES")?;
    let role = session.text("SELECT current_user")?.unwrap_or_default();
    db.run(&format!(
        "CREATE VIEW seen AS SELECT v, fence AS f FROM orders; GRANT UPDATE ON seen TO {role}"
    ))?;
    for (sql, sqlstate) in [
        ("UPDATE seen SET v = 7".to_owned(), "PF002"),
        (format!("UPDATE seen SET f = {low}"), "PF001"),
    ] {
        hides(&session.refused(&sql, sqlstate)?, &["stored", "key"])?;
    }
    Ok(())
}

#[lab_test]
fn a_merge_does_not_show_the_token_as_the_presented_one(lab: &Lab) -> Result<()> {
    for arguments in ["", "lease => 'any'"] {
        let (_bed, mut session, low) = bed_with_secret(lab, arguments, "UPDATE, SELECT (id)")?;
        // The statement names the column, but not for this row, and reads it nowhere.
        let merge = format!(
            "MERGE INTO orders USING (VALUES (1)) AS s (id) ON s.id = orders.id \
             WHEN MATCHED AND s.id = 2 THEN UPDATE SET fence = {low} \
             WHEN MATCHED THEN UPDATE SET v = 7"
        );
        let Err(fault) = session.try_rows(&merge) else {
            pg_test::bail!("it landed");
        };
        ensure!(fault.sqlstate.starts_with("PF"), "{fault}");
        hides(&fault, &["stored"])?;
    }
    Ok(())
}

#[lab_test]
fn a_cascade_shows_the_child_to_its_readers_only(lab: &Lab) -> Result<()> {
    let (mut db, mut session, low) = bed_with_secret(lab, "", "REFERENCES")?;
    let role = session.text("SELECT current_user")?.unwrap_or_default();
    db.run(&format!(
        "CREATE TABLE head (id int PRIMARY KEY); INSERT INTO head VALUES (1); \
         ALTER TABLE orders ADD FOREIGN KEY (id) REFERENCES head ON DELETE CASCADE; \
         GRANT DELETE ON head TO {role}"
    ))?;
    // The cascade runs as the owner of the table; the error goes to somebody else.
    hides(&session.refused("DELETE FROM head", "PF002")?, &["stored", "key"])?;
    let stale = format!("SET pg_fence.token = '{low}'; DELETE FROM head");
    hides(&session.refused(&stale, "PF001")?, &["stored", "key"])?;
    db.run(&format!("GRANT SELECT ON orders TO {role}"))?;
    let fault = session.refused("DELETE FROM head", "PF002")?;
    ensure!(fault.json()?["stored"].to_string().as_str() == SECRET, "{fault}");
    Ok(())
}

#[lab_test]
fn the_name_of_a_lease_shows_no_column_that_may_not_be_read(lab: &Lab) -> Result<()> {
    let (mut db, mut session, _) = bed_with_secret(lab, "", "UPDATE, INSERT, SELECT (v)")?;
    db.run("ALTER TABLE orders ADD COLUMN patient text DEFAULT 'patient-4711'")?;
    db.protect("lease => 'file:{patient}'")?;
    let foreign = db.token()?;
    session.refused("SELECT patient FROM orders", "42501")?;
    for sql in [
        format!("UPDATE orders SET v = 7, fence = {foreign}"),
        format!("SET pg_fence.token = '{foreign}'; UPDATE orders SET v = 7"),
    ] {
        let fault = session.refused(&sql, "PF004")?;
        ensure!(!text_of(&fault).contains("4711"), "the lease is shown: {fault}");
        hides(&fault, &["stored", "key", "holder"])?;
    }
    let fault = db.refused(&format!("UPDATE orders SET v = 7, fence = {foreign}"), "PF004")?;
    ensure!(fault.json()?["lease"] == "file:patient-4711", "{fault}");
    // Nor does the refusal of a lease that is another role's.
    let token = db.grant("file:patient-4711")?;
    let fault = session.refused(&format!("UPDATE orders SET v = 7, fence = {token}"), "42501")?;
    ensure!(!text_of(&fault).contains("4711"), "the lease is shown: {fault}");
    Ok(())
}

#[lab_test]
fn the_holder_is_shown_to_those_who_may_use_leases_only(lab: &Lab) -> Result<()> {
    let (mut db, mut session, _) = bed_with_secret(lab, "lease => 'order:{id}'", "SELECT, UPDATE")?;
    let role = session.text("SELECT current_user")?.unwrap_or_default();
    db.run("SELECT lease_acquire('order:1', 'holder-4711', '1 h')")?;
    let foreign = db.token()?;
    let stale = format!("UPDATE orders SET v = 7, fence = {foreign}");
    let fault = session.refused(&stale, "PF004")?;
    ensure!(!text_of(&fault).contains("4711"), "the holder is shown: {fault}");
    hides(&fault, &["holder", "expires_at"])?;
    db.run(&format!("SELECT fence_grant('{role}')"))?;
    let fault = session.refused(&stale, "PF004")?;
    ensure!(fault.json()?["holder"] == "holder-4711", "{fault}");
    Ok(())
}

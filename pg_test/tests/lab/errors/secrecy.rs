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
    let role = session.text("SELECT current_user")?.unwrap_or_default();
    db.run(&format!("SELECT fence_grant('{role}')"))?;
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
    let detail = fault.json()?;
    ensure!(detail["presented"] == foreign && detail["lease"] == "order:1", "{fault}");
    db.run(&format!("SELECT fence_grant('{role}')"))?;
    let fault = session.refused(&stale, "PF004")?;
    ensure!(fault.json()?["holder"] == "holder-4711", "{fault}");
    ensure!(fault.json()?["expires_at"].is_string(), "{fault}");
    Ok(())
}

/// What the error says for each of these tokens, all of which must be refused; the token itself is left out.
fn said(session: &mut Session, write: &str, tokens: &[i64]) -> Result<Vec<String>> {
    let mut said = Vec::new();
    for token in tokens {
        let sql = write.replace("{}", &token.to_string());
        match session.try_rows(&sql) {
            Err(fault) => {
                session.run("RESET pg_fence.token")?;
                said.push(text_of(&fault).replace(&token.to_string(), "{}"));
            }
            Ok(_) => pg_test::bail!("it landed: {sql}"),
        }
    }
    Ok(said)
}

#[lab_test]
fn a_table_of_one_s_own_tells_nothing_of_another_s_lease(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    let role = db.database().role("stranger")?;
    let (earlier, foreign) = (db.grant("victim")?, db.token()?);
    let live = db.take_over("victim")?;
    let renewed: i64 = db.one("SELECT lease_renew('victim', $1)", &[&live])?;
    db.run(&format!("GRANT CREATE ON SCHEMA public TO {role}"))?;
    let mut stranger = db.database().connect_as(&role)?;
    stranger.run(
        "CREATE TABLE own (id int, fence bigint); INSERT INTO own VALUES (1); CREATE FUNCTION write(t bigint) RETURNS void
             LANGUAGE sql SECURITY DEFINER SET search_path = public AS 'INSERT INTO own VALUES (2, t)'",
    )?;
    let guesses =
        [live, renewed, earlier, foreign, renewed + 1, renewed + 1_000_000, i64::MAX, 777];
    for mode in ["monotonic", "strict", "managed"] {
        let protect = format!(
            "SELECT fence_protect('own', mode => '{mode}', lease => 'victim', verify => true)"
        );
        stranger.run(&protect)?;
        for write in [
            "INSERT INTO own VALUES (2, {})",
            "UPDATE own SET fence = {}",
            "SET pg_fence.token = '{}'; UPDATE own SET id = 2",
            "SET pg_fence.token = '{}'; DELETE FROM own",
            "SET pg_fence.token = '{}'; INSERT INTO own VALUES (2)",
            "SET pg_fence.token = '{}'; SELECT write({})",
        ] {
            // In managed mode the column presents nothing.
            if mode == "managed" && !write.starts_with("SET") {
                continue;
            }
            let said = said(&mut stranger, write, &guesses)?;
            ensure!(said[0].contains("PF004"), "{mode}: {write}: {said:#?}");
            ensure!(said.iter().all(|text| *text == said[0]), "{mode}: {write}: {said:#?}");
        }
    }
    // Nor that a renewal is all that a token lacks.
    db.run("SELECT fence_new_epoch()")?;
    let write = "INSERT INTO own VALUES (2, {})";
    stranger.run("SELECT fence_protect('own', mode => 'monotonic', lease => 'victim')")?;
    let said_after = said(&mut stranger, write, &guesses)?;
    ensure!(said_after[0].contains("PF004"), "{said_after:#?}");
    ensure!(said_after.iter().all(|text| *text == said_after[0]), "{said_after:#?}");
    // Those who may see leases are told what it is.
    let live: i64 = db.one("SELECT lease_renew('victim', $1)", &[&live])?;
    db.run(&format!("SELECT fence_grant('{role}')"))?;
    for (token, sqlstate) in [(live, "42501"), (foreign, "PF004"), (i64::MAX, "PF003")] {
        stranger.refused(&write.replace("{}", &token.to_string()), sqlstate)?;
    }
    Ok(())
}

#[lab_test]
fn a_worker_that_lost_its_rights_is_still_told_to_renew_its_own_grant(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "lease => 'order:{id}'")?;
    let role = db.database().role("worker")?;
    db.run(&format!("SELECT fence_grant('{role}'); GRANT ALL ON orders TO {role}"))?;
    let mut worker = db.database().connect_as(&role)?;
    let token: i64 = worker.one("SELECT lease_acquire('order:1', ttl => '1 h')", &[])?;
    db.run(&format!("SELECT fence_revoke('{role}'), fence_new_epoch()"))?;
    let fault = worker.refused(&format!("UPDATE orders SET v = 7, fence = {token}"), "PF004")?;
    ensure!(fault.json()?["renew_first"] == true, "{fault}");
    Ok(())
}

#[lab_test]
fn without_a_token_the_row_s_lease_is_shown_to_who_may_read_its_columns(lab: &Lab) -> Result<()> {
    for (grants, mode, shown) in [
        ("SELECT, UPDATE, DELETE", "monotonic", true),
        ("SELECT (id), UPDATE, DELETE", "managed", true),
        ("SELECT (v), UPDATE, DELETE", "monotonic", false),
        ("UPDATE, DELETE", "managed", false),
    ] {
        let arguments = format!(r"mode => '{mode}', lease => E'it''s \\{{id}}'");
        let (_bed, mut session, _) = bed_with_secret(lab, &arguments, grants)?;
        for sql in
            ["UPDATE orders SET v = 7", "UPDATE orders SET fence = NULL", "DELETE FROM orders"]
        {
            let fault = session.refused(sql, "PF002")?;
            let hint = fault.hint.clone().unwrap_or_default();
            let call = hint.contains(r"lease_guard(E'it''s \\1', token)");
            let lease = fault.json()?.get("lease").is_some_and(|lease| lease == r"it's \1");
            ensure!(call == shown && lease == shown, "{grants}: {fault}");
            ensure!(shown || !text_of(&fault).contains("it's"), "{fault}");
        }
    }
    Ok(())
}

//! A table of one's own tells nothing of another's lease. The rest is in secrecy.script.

use crate::support::test_database::TestDatabase;
use pg_test::{ensure, lab_test, Fault, Lab, Result, Session};

fn text_of(fault: &Fault) -> String {
    format!("{fault} {:?} {:?} {:?}", fault.schema, fault.table, fault.column)
}

/// The error for each of these tokens, all of which must be refused; the token itself is left out.
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
    // A role that may see leases is told what it is.
    let live: i64 = db.one("SELECT lease_renew('victim', $1)", &[&live])?;
    db.run(&format!("SELECT fence_grant('{role}')"))?;
    for (token, sqlstate) in [(live, "42501"), (foreign, "PF004"), (i64::MAX, "PF003")] {
        stranger.refused(&write.replace("{}", &token.to_string()), sqlstate)?;
    }
    Ok(())
}

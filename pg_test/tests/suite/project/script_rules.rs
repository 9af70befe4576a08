//! The check of the install and upgrade scripts (`cargo run -- pgspot`) finds faults.

use pg_test::script_rules::check;
use pg_test::{Harness, Result, ensure, harness_test};

#[harness_test(slow)]
fn pgspot_finds_what_is_wrong_in_a_script(harness: &Harness) -> Result<()> {
    let base = harness.rundir().path().join("rules_base.sql");
    std::fs::write(
        &base,
        "\\echo x \\quit\nCREATE SCHEMA fence;\nCREATE TABLE fence.t (a int);\n",
    )?;
    check(std::slice::from_ref(&base))?;
    for wrong in [
        "CREATE OR REPLACE VIEW v AS SELECT 1",
        "CREATE SCHEMA IF NOT EXISTS app",
        "CREATE TABLE IF NOT EXISTS u (a int)",
        "CREATE VIEW fence.v AS SELECT a + 1 FROM fence.t",
        "CREATE VIEW fence.v AS SELECT lower('A')",
        "CREATE FUNCTION f() RETURNS int LANGUAGE plpgsql AS $$ BEGIN RETURN 1; END $$",
        "CREATE FUNCTION f(i int) RETURNS int LANGUAGE sql RETURN i + 1",
        "CREATE FUNCTION f() RETURNS int LANGUAGE sql BEGIN ATOMIC SELECT 1 WHERE 1 = 1; END",
    ] {
        let script = harness.rundir().path().join("rules_wrong.sql");
        std::fs::write(&script, format!("{wrong};\nSELECT 1;\n"))?;
        ensure!(check(&[base.clone(), script]).is_err(), "it went through: {wrong}");
    }
    Ok(())
}

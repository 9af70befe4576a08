//! `fence_audit` on fences in `managed` mode: judged like monotonic ones, but a client that writes every column
//! back presents nothing there, and every INSERT is looked at.

use crate::support::holes::{AuditedDatabase, HOLE};
use pg_test::{ensure, lab_test, Lab, Result};

/// The triggers that fence a table in `managed` mode, made by hand.
fn by_hand(events: &str, arguments: &str) -> String {
    format!(
        "SELECT fence_unprotect('orders');
         CREATE TRIGGER fenced BEFORE {events} ON orders FOR EACH ROW EXECUTE FUNCTION fenced({arguments});
         CREATE TRIGGER fenced_truncate BEFORE TRUNCATE ON orders EXECUTE FUNCTION fenced({arguments})"
    )
}

const EVERY: &str = "INSERT OR UPDATE OR DELETE";

#[lab_test]
fn a_managed_fence_without_a_lease_is_no_finding(lab: &Lab) -> Result<()> {
    let mut audited = AuditedDatabase::new(lab)?;
    audited.stage(HOLE.table, "")?;
    for arguments in ["'fence', 'managed'", "'fence', 'managed', 'order:{id}'"] {
        audited.owner.run(&by_hand(EVERY, arguments))?;
        for what in ["'orders'", ""] {
            let rows = audited.audit(what)?;
            ensure!(rows.is_empty(), "{arguments}: {rows:?}");
        }
    }
    // The same fence in monotonic mode is one.
    audited.owner.run(&by_hand(EVERY, "'fence', 'monotonic'"))?;
    let rows = audited.audit("'orders'")?;
    ensure!(rows.len() == 1 && rows[0].0.starts_with("orders|hole|monotonic without"), "{rows:?}");
    Ok(())
}

#[lab_test]
fn a_managed_fence_without_insert_is_found(lab: &Lab) -> Result<()> {
    let mut audited = AuditedDatabase::new(lab)?;
    audited.stage(HOLE.table, "")?;
    audited.owner.run(&by_hand("UPDATE OR DELETE", "'fence', 'managed'"))?;
    let rows = audited.audit("'orders'")?;
    ensure!(rows.len() == 1 && rows[0].0 == "orders|hole|INSERT not fenced", "{rows:?}");
    let remedy = "SELECT public.fence_protect('s.orders', mode => 'managed', events => 'insert,update,delete,truncate');";
    ensure!(rows[0].1 == remedy, "{rows:?}");
    Ok(())
}

#[lab_test]
fn a_managed_fence_is_mended_as_one(lab: &Lab) -> Result<()> {
    let mut audited = AuditedDatabase::new(lab)?;
    audited.stage(HOLE.table, "")?;
    audited.owner.run("CREATE TABLE child () INHERITS (orders)")?;
    for (arguments, mended) in [
        ("'fence', 'managed'", "fenced('fence', 'managed')"),
        ("'fence', 'managed', 'order:{id}'", "fenced('fence', 'managed', 'order:{id}')"),
    ] {
        audited.owner.run(&by_hand(EVERY, arguments))?;
        let rows = audited.audit("'orders'")?;
        let told: Vec<&str> = rows.iter().map(|row| &*row.0).collect();
        ensure!(
            told == [
                "child|hole|INSERT, UPDATE, DELETE not fenced",
                "child|notice|TRUNCATE not fenced"
            ],
            "{told:?}"
        );
        ensure!(rows.iter().all(|row| row.1.contains(mended)), "{rows:?}");
        for (_, remedy) in &rows {
            audited.owner.run(remedy)?;
        }
        ensure!(audited.audit("'orders'")?.is_empty());
        // One that judges otherwise than its root does.
        let other = "CREATE OR REPLACE TRIGGER fenced BEFORE INSERT OR UPDATE OR DELETE ON child \
                     FOR EACH ROW EXECUTE FUNCTION fenced('fence', 'monotonic')";
        audited.owner.run(other)?;
        let rows = audited.audit("")?;
        ensure!(
            rows.len() == 1
                && rows[0]
                    .0
                    .starts_with(r#"child|hole|trigger "fenced" judges by other arguments"#),
            "{rows:?}"
        );
        audited.owner.run(&rows[0].1)?;
        ensure!(audited.audit("")?.is_empty());
        audited.owner.run("DROP TRIGGER fenced ON child; DROP TRIGGER fenced_truncate ON child")?;
    }
    Ok(())
}

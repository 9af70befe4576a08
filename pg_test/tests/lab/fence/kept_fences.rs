//! Bound rows whose fence is greater than the token that speaks for their lease: by an own renewal, a fellow under a shared
//! lease, or from elsewhere. They can be written, and keep what they have seen.

use crate::support::test_database::{TestDatabase, ROW};
use crate::support::write_statements::{DELETES, TOUCHES, UPDATES, VIEWS_AND_FUNCTIONS};
use pg_test::{ensure, lab_test, Lab, Result};

/// A fence that no server ever gives: 2^62.
const GARBAGE: i64 = 1 << 62;

/// The ways to bind a table in which a token that speaks is never stale.
const BOUND: &[&str] = &[
    "lease => 'order:{id}'",
    "lease => 'order:{id}', verify => true",
    "lease => 'order:{id}', mode => 'managed'",
    "lease => 'order:{id}', mode => 'managed', verify => true",
];

fn set(token: i64, sql: &str) -> String {
    format!("SET LOCAL pg_fence.token = '{token}'; {sql}")
}

#[lab_test]
fn a_fence_that_no_server_gives_is_no_obstacle(lab: &Lab) -> Result<()> {
    for arguments in BOUND {
        let managed = arguments.contains("managed");
        let mut db = TestDatabase::orders(lab, arguments)?;
        db.run(VIEWS_AND_FUNCTIONS)?;
        let token = db.grant("order:1")?;
        let (foreign, unknown) = (db.token()?, token + 1_000_000);
        db.run(&format!(
            "BEGIN; SET LOCAL session_replication_role = replica; UPDATE orders SET fence = {GARBAGE}; COMMIT"
        ))?;
        let landed = format!("7|{GARBAGE}");
        for path in UPDATES.iter().map(|path| path.replace("{t}", &token.to_string())) {
            if managed {
                db.comes_to(&path, ROW, "PF002")?;
                db.comes_to(&set(token, &path), ROW, &landed)?;
            } else {
                db.comes_to(&path, ROW, &landed)?;
            }
        }
        for path in TOUCHES {
            db.comes_to(path, ROW, "PF002")?;
            db.comes_to(&set(token, path), ROW, &landed)?;
            db.comes_to(&set(foreign, path), ROW, "PF001")?;
            db.comes_to(&set(unknown, path), ROW, "PF003")?;
        }
        for path in DELETES {
            db.comes_to(path, ROW, "PF002")?;
            db.comes_to(&set(token, path), ROW, "")?;
            db.comes_to(&set(foreign, path), ROW, "PF001")?;
            db.comes_to(&set(unknown, path), ROW, "PF003")?;
        }
        if !managed {
            // Nobody presents it, for it was never drawn.
            for same in ["fence", &GARBAGE.to_string()] {
                let named = format!("UPDATE orders SET v = 7, fence = {same}");
                db.comes_to(&named, ROW, "PF003")?;
            }
        }
        // The statement is told what is stored.
        db.run("BEGIN")?;
        let returning = set(token, "UPDATE orders SET v = 8 RETURNING fence");
        ensure!(db.try_rows(&returning)?.last() == Some(&vec![Some(GARBAGE.to_string())]));
        db.run("COMMIT")?;
        db.take_over("order:1")?;
        db.comes_to(&set(token, "UPDATE orders SET v = 9"), ROW, "PF001")?;
    }
    Ok(())
}

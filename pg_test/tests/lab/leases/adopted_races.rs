//! An adopter and a holder that wait for each other. The rest is in adopted_races.script.

use pg_test::{ensure, lab_test, Background, Calls, Lab, Result};

#[lab_test]
fn a_holder_that_releases_and_a_waiting_adopter_do_not_hang(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    db.connect()?.run(
        "CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t VALUES (1, 0);
         SELECT fence_protect('t', lease => 'job'), lease_adopt('job', 33)",
    )?;
    let (mut old, mut new) = (Background::connect(&db.conninfo())?, db.connect()?);
    old.run("BEGIN")?;
    old.run("UPDATE t SET v = 1, fence = 33")?;
    // The adopter has ended the older grant, not committed that, and waits: each waits for the other.
    new.run("BEGIN")?;
    new.nothing("SELECT lease_adopt('job', 34)")?;
    old.send("SELECT lease_release('job', 33)")?;
    old.wait_until_blocked()?;
    // For the grant, which the adopter keeps locked; not only for its row.
    let waits = format!("SELECT locktype FROM pg_locks WHERE pid = {} AND NOT granted", old.pid());
    ensure!(db.connect()?.text(&waits)?.as_deref() == Some("advisory"));
    let waits = new.try_rows("SELECT lease_adopt('job', 34, wait => '10 min')");
    match waits {
        Err(fault) => {
            ensure!(fault.sqlstate == "40P01", "{fault}");
            new.run("ROLLBACK")?;
            old.rows()?;
            old.run("COMMIT")?;
            ensure!(new.granted("SELECT lease_adopt('job', 34)")? == 34);
        }
        Ok(rows) => {
            ensure!(rows == [[Some("34".to_owned())]]);
            old.refused("40P01")?;
            new.run("COMMIT")?;
        }
    }
    db.connect()?.refused("SELECT lease_adopt('job', 33)", "PF001").map(drop)
}

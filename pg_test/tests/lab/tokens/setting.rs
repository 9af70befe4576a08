//! Where the setting `pg_fence.token` may come from. The rest is in setting.script.

use crate::support::test_database::{shows, TestDatabase};
use pg_test::{edition, lab_test, Lab, Result};

#[lab_test]
fn it_comes_from_wherever_settings_come(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "mode => 'monotonic'")?;
    let token = db.token()?;
    db.database()
        .conninfo()
        .set("pg_fence.token", &token.to_string())
        .connect()?
        .run("UPDATE orders SET v = 1")?;
    if !edition::is_lite() {
        let mut fresh = db.database().conninfo().set("pg_fence.token", "x0").connect()?;
        fresh.refused("UPDATE orders SET v = 7", "PF002")?;
    }
    let writer = db.database().role("writer")?;
    db.run(&format!(
        "GRANT ALL ON orders TO {writer}; ALTER ROLE {writer} SET pg_fence.token = '{token}'"
    ))?;
    db.database().connect_as(&writer)?.run("UPDATE orders SET v = 2")?;
    db.run(&format!("ALTER ROLE {writer} RESET pg_fence.token"))?;
    let mut session = db.database().connect_as(&writer)?;
    session.refused("UPDATE orders SET v = 3", "PF002")?;
    // Anyone may set it.
    session.run(&format!("SET pg_fence.token = '{token}'; UPDATE orders SET v = 3"))?;
    shows(&mut db, "SELECT v, fence FROM orders", &format!("3|{token}"))
}

//! Attacks that an unprivileged role might try, each shown to fail. More of it is in attacks.script.

use crate::roles::{gives_all_by_default, public_rights, role_of, PUBLIC};
use pg_test::{ensure, lab_test, Calls, Context, Lab, Result};

#[lab_test]
fn default_privileges_of_the_installer_give_nothing_away(lab: &Lab) -> Result<()> {
    let db = lab.bare_database()?;
    let role = db.role("favoured")?;
    let mut owner = db.connect()?;
    gives_all_by_default(&mut owner, &[&role])?;
    owner.run("CREATE EXTENSION pg_fence")?;
    let rights = public_rights(&db)?;
    ensure!(rights == PUBLIC, "{rights:?}");
    owner.run("SELECT lease_acquire('job')")?;
    let mut favoured = db.connect_as(&role)?;
    for attack in [
        "SELECT setval('fence.token_seq', 1)",
        "SELECT nextval('fence.token_seq')",
        "UPDATE fence.lease SET expires_at = 'infinity'",
        "DELETE FROM fence.lease",
        "TRUNCATE fence.lease",
        "CREATE TABLE fence.mine (n int)",
    ] {
        favoured.refused(attack, "42501")?;
    }
    for call in
        ["SELECT lease_revoke('job')", "SELECT fence_new_epoch()", "SELECT lease_acquire('x')"]
    {
        favoured.refused(call, "42501")?;
    }
    Ok(())
}

#[lab_test]
fn no_name_can_be_looked_for_that_has_the_locks_of_another(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut holder = db.connect()?;
    let token = holder.acquire("payroll", "1 h")?;
    let attacker = role_of(&db, "attacker", &[("worker", "a:")])?;
    let mut attacker = db.connect_as(&attacker)?;
    // By the unkeyed hash of PostgreSQL's hash indexes these two are alike.
    attacker.run("BEGIN")?;
    attacker.acquire(r"a:xxxxxxxxxx(lduo7\HSs0", "1 h")?;
    holder.run("SET statement_timeout = '30 s'")?;
    let renewed = holder.renew("payroll", token)?.context("held")?;
    holder.run(&format!("BEGIN; SELECT lease_guard('payroll', {renewed}); COMMIT"))?;
    holder.release("payroll", renewed)?.context("held")?;
    holder.acquire("payroll", "1 h")?;
    attacker.run("ROLLBACK")?;
    // Nobody is told the key of what he may not see, and another database has another one.
    attacker.nothing("SELECT fence.queue_key('payroll')")?;
    attacker.granted("SELECT fence.queue_key('a:')")?;
    attacker.refused("SELECT last_value FROM fence.lock_key_seq", "42501")?;
    let key = "SELECT fence.queue_key('payroll')";
    let other = lab.database()?.connect()?.granted(key)?;
    ensure!(holder.granted(key)? != other, "the key is no secret");
    Ok(())
}

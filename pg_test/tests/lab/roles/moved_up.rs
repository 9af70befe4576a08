//! The rights of roles once the extension has replaced the edition without a library.

use pg_test::edition::{is_lite, move_up_script};
use pg_test::test_case::left_out;
use pg_test::{ensure, lab_test, Calls, Database, Lab, Result};

#[lab_test]
fn nobody_gets_more_by_moving_up_and_the_owner_keeps_what_he_had(lab: &Lab) -> Result<()> {
    if is_lite() {
        return left_out("it needs the library");
    }
    let db = Database::with_lite(lab.cluster().conninfo("postgres"))?;
    let owner = format!("{}_lite_owner", db.name());
    let mut keeper = db.connect_as(&owner)?;
    let [some, none] = [db.role("some")?, db.role("none")?];
    keeper.run(&format!(
        "SELECT fence_grant('{some}'), fence_grant('{none}'), fence_revoke('{none}')"
    ))?;
    let token = keeper.acquire("job", "1 h")?;
    db.connect()?.run(&move_up_script()?)?;

    ensure!(keeper.renew("job", token)?.is_some(), "the owner's own lease");
    keeper.run("SELECT lease_revoke('job')")?;
    let mut worker = db.connect_as(&some)?;
    worker.acquire("a:1", "1 h")?;
    worker.refused("SELECT lease_revoke('a:1')", "42501")?;
    db.connect_as(&none)?.refused("SELECT lease_acquire('c:1')", "42501")?;
    Ok(())
}

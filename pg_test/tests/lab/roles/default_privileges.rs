//! Default privileges let others in as soon as something is created. Platforms have such for the roles of their APIs.

use crate::roles::gives_all_by_default;
use pg_test::edition::lite_script;
use pg_test::{ensure, lab_test, Calls, Lab, Result};

/// The default privileges of the role that installs the edition without a library, and installs it again.
#[lab_test]
fn they_give_nothing_of_the_lite_edition_away(lab: &Lab) -> Result<()> {
    let db = lab.bare_database()?;
    let (owner, anon, worker) = (db.role("keeper")?, db.role("anon")?, db.role("worker")?);
    db.connect()?.run(&format!("ALTER DATABASE {} OWNER TO {owner}", db.name()))?;
    let mut keeper = db.connect_as(&owner)?;
    gives_all_by_default(&mut keeper, &[&anon, &worker])?;
    for again in [false, true] {
        keeper.run(&lite_script()?)?;
        if !again {
            keeper.run(&format!("SELECT fence_grant('{worker}')"))?;
        }
        let token = keeper.acquire("job", "1 h")?;
        let mut stranger = db.connect_as(&anon)?;
        for attack in [
            "SELECT setval('fence.token_seq', 1)",
            "SELECT nextval('fence.token_seq')",
            "SELECT setval('fence.server_start_seq', 1)",
            "UPDATE fence.lease SET expires_at = 'infinity'",
            "DELETE FROM fence.lease",
            "TRUNCATE fence.lease",
            "SELECT FROM fence.turn",
            "SELECT FROM fence.leases",
            "CREATE TABLE fence.mine (n int)",
            "SELECT lease_acquire('x')",
            "SELECT lease_revoke('job')",
            "SELECT lease_prune()",
            "SELECT fence_new_epoch()",
            "SELECT fence_lite.move_on(0, true)",
            "SELECT fence_lite.relies('job', 1, '')",
            "SELECT fence_lite.uninstall()",
        ] {
            stranger.refused(attack, "42501")?;
        }
        ensure!(keeper.speaks("job", token)?);
        // The rights that fence_grant has given stay.
        let mut held = db.connect_as(&worker)?;
        let its = held.acquire("its", "1 h")?;
        held.release("its", its)?;
        held.granted("SELECT lease_revoke('job')")?;
    }
    Ok(())
}

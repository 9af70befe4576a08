//! Renewals leave no versions behind. Which tokens are a grant's, when one is drawn, and that they only grow: tokens.script.

automod::dir!(pub "tests/lab/tokens");

use pg_test::{ensure, lab_test, Calls, Lab, Result};

#[lab_test]
fn renewals_do_not_bloat_the_state(lab: &Lab) -> Result<()> {
    // A server of its own: old versions go only when no transaction of the whole server is older.
    let cluster = lab.builder().set("autovacuum", "off").start()?;
    let mut session = cluster.connect("postgres")?;
    session.run("CREATE EXTENSION pg_fence")?;
    let token = session.acquire("job", "1 h")?;
    for _ in 0..500 {
        session.renew("job", token)?;
    }
    // A heartbeat's row version takes the place of the one before, without a vacuum.
    let bytes = session.granted("SELECT pg_relation_size('fence.lease')")?;
    ensure!(bytes <= 5 * 8192, "{bytes} bytes for one lease after 500 renewals");
    let index = session.granted("SELECT pg_relation_size('fence.lease_pkey')")?;
    ensure!(index <= 2 * 8192, "{index} bytes of index for one lease");
    Ok(())
}

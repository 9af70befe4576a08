//! Slots: a crowd that waits. The rest is in slots.script.

use crate::support::concurrency::{at_once, sessions};
use pg_test::{ensure, lab_test, Lab, Result};

#[lab_test]
fn never_more_than_n_live_while_many_wait(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    db.connect()?.run("CREATE TABLE seen (n bigint)")?;
    let mut crowd = sessions(&db, 16)?;
    let (mut served, rounds) = (0, 4);
    for _ in 0..rounds {
        // Each counts, while it has a slot, how many have one.
        let outcomes = at_once(&mut crowd, |_| {
            "DO $$
             DECLARE t bigint;
             BEGIN
               t := lease_acquire('job', ttl => '1 min', wait => '5 min', slots => 3);
               COMMIT;
               INSERT INTO seen SELECT count(*) FROM fence.leases WHERE state = 'held';
               IF t IS NULL OR lease_release('job', t) IS NULL THEN RAISE 'lost'; END IF;
             END $$"
                .to_owned()
        });
        for outcome in outcomes {
            outcome?;
            served += 1;
        }
    }
    let row = db.connect()?.rows("SELECT max(n) <= 3, min(n) >= 1, count(*) FROM seen")?;
    ensure!(served == 16 * rounds && row[0][0].as_deref() == Some("t"), "{row:?}");
    ensure!(row[0][1].as_deref() == Some("t") && row[0][2] == Some(served.to_string()), "{row:?}");
    Ok(())
}

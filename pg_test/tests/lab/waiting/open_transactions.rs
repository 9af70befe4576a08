//! A wait for an open transaction whose lease's deadline has passed meanwhile. The rest is in
//! open_transactions.script.

use pg_test::calls::within_ttl;
use pg_test::{ensure, lab_test, Background, Calls, Lab, Result};

#[lab_test]
fn a_lease_that_expires_during_the_wait_is_lost(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut first, mut looker) = (db.connect()?, db.connect()?);
    let mut second = Background::connect(&db.conninfo())?;
    for call in ["lease_renew", "lease_release"] {
        let token = within_ttl(|ttl| {
            let token = first.acquire("job", ttl)?;
            first.run("BEGIN; SET LOCAL statement_timeout = 0")?;
            match first.renew("job", token)? {
                Some(_) => Ok(Some(token)),
                None => first.run("ROLLBACK").map(|()| None),
            }
        })?;
        second.send(&format!("SELECT {call}('job', {token})"))?;
        second.wait_until_blocked()?;
        looker.wait_expired("job")?;
        first.run("ROLLBACK")?;
        ensure!(second.rows()? == [[None]], "{call} judged by the time before its wait");
    }
    Ok(())
}

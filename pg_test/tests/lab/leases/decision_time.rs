//! A deadline that passes while a transaction is open. The rest is in decision_time.script.

use pg_test::calls::within_ttl;
use pg_test::{ensure, lab_test, Calls, Context, Lab, Result};

#[lab_test]
fn a_check_sees_the_deadline_pass_within_a_transaction(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut looker = db.connect()?;
    for isolation in ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
        let mut session = db.connect()?;
        let token = within_ttl(|ttl| {
            let token = session.acquire("job", ttl)?;
            session.run(&format!("BEGIN ISOLATION LEVEL {isolation}"))?;
            if session.speaks("job", token)? {
                return Ok(Some(token));
            }
            session.run("ROLLBACK").map(|()| None)
        })
        .context(isolation)?;
        looker.wait_expired("job")?;
        ensure!(!session.speaks("job", token)?, "{isolation}: checked by an old clock");
        ensure!(session.renew("job", token)?.is_none(), "{isolation}: renewed by an old clock");
        ensure!(session.release("job", token)?.is_none(), "{isolation}");
        let state = session.text("SELECT state FROM lease_info('job')")?;
        ensure!(state.as_deref() == Some("expired"), "{isolation}: {state:?}");
        session.run("COMMIT")?;
    }
    Ok(())
}

#[lab_test]
fn a_try_sees_the_deadline_pass_within_a_transaction(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut holder, mut other) = (db.connect()?, db.connect()?);
    let token = within_ttl(|ttl| {
        let token = holder.acquire("job", ttl)?;
        other.run("BEGIN")?;
        if other.token("SELECT lease_acquire('job')")?.is_none() {
            return Ok(Some(token));
        }
        other.run("ROLLBACK").map(|()| None)
    })?;
    holder.wait_expired("job")?;
    let next = other.granted("SELECT lease_acquire('job')")?;
    ensure!(next > token && other.speaks("job", next)?);
    other.run("COMMIT")
}

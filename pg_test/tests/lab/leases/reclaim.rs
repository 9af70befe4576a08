//! Reclaim: a holder that comes back, and everybody who is not that holder.

use pg_test::{ensure, lab_test, Background, Calls, Lab, Result};

const RECLAIM: &str = "SELECT lease_acquire('job', 'w1', '1 h', reclaim => true)";

#[lab_test]
fn a_holder_gets_its_lease_back_at_once(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut before, mut after) = (db.connect()?, db.connect()?);
    let first = before.granted("SELECT lease_acquire('job', 'w1', '1 h')")?;
    let renewed = before.renew("job", first)?.expect("held");
    let again = after.granted(RECLAIM)?;
    ensure!(again > renewed && after.speaks("job", again)?);
    for token in [first, renewed] {
        ensure!(!before.speaks("job", token)?, "an older token still speaks");
        ensure!(before.renew("job", token)?.is_none());
        ensure!(before.release("job", token)?.is_none());
    }
    ensure!(after.speaks("job", again)?, "ended by an older token");
    // And from the same session, and in one transaction.
    let third = after.granted(RECLAIM)?;
    after.run("BEGIN")?;
    let fourth = after.granted(RECLAIM)?;
    let fifth = after.granted(RECLAIM)?;
    after.run("COMMIT")?;
    ensure!(again < third && third < fourth && fourth < fifth);
    ensure!(!after.speaks("job", fourth)? && after.speaks("job", fifth)?);
    Ok(())
}

#[lab_test]
fn a_reclaim_is_a_new_grant(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let first =
        session.granted("SELECT lease_acquire('job', 'w1', '1 h', metadata => '{\"run\": 1}')")?;
    session.renew("job", first)?;
    let again = session.granted("SELECT lease_acquire('job', 'w1', '10 min', reclaim => true)")?;
    let row = session.rows(
        "SELECT holder, token, first_token, renewals, metadata, expires_at - acquired_at, state
           FROM lease_info('job')",
    )?;
    let token = again.to_string();
    let expected =
        [Some("w1"), Some(&token), Some(&token), Some("0"), None, Some("00:10:00"), Some("held")];
    ensure!(row.len() == 1 && row[0].iter().map(Option::as_deref).eq(expected), "{row:?}");
    Ok(())
}

#[lab_test]
fn a_reclaim_is_for_the_same_holder_only(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let token = session.granted("SELECT lease_acquire('job', 'w1', '1 h')")?;
    for other in ["w2", "W1", "w1 ", "w"] {
        session.nothing(&format!("SELECT lease_acquire('job', '{other}', reclaim => true)"))?;
    }
    ensure!(session.speaks("job", token)?);
    // A grant whose holder named none is nobody's to reclaim.
    session.acquire("anonymous", "1 h")?;
    session.nothing("SELECT lease_acquire('anonymous', '', reclaim => true)")?;
    session.refused("SELECT lease_acquire('anonymous', reclaim => true)", "22023")?;
    Ok(())
}

#[lab_test]
fn a_reclaim_is_for_the_same_role_only(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (one, two) = (db.role("one")?, db.role("two")?);
    let mut admin = db.connect()?;
    admin
        .run(&format!("SELECT fence_grant('{one}'), fence_grant('{two}'); GRANT {one} TO {two}"))?;
    let (mut a, mut b) = (db.connect_as(&one)?, db.connect_as(&two)?);
    let token = a.granted("SELECT lease_acquire('job', 'w1', '1 h')")?;
    // Not a member of the role, though it may renew and release; not even a superuser.
    b.nothing(RECLAIM)?;
    admin.nothing(RECLAIM)?;
    ensure!(a.speaks("job", token)?);
    ensure!(b.renew("job", token)?.is_some() && admin.renew("job", token)?.is_some());
    // But a role that acts as that one.
    b.run(&format!("SET ROLE {one}"))?;
    let again = b.granted(RECLAIM)?;
    ensure!(again > token && !a.speaks("job", token)?);
    let role = admin.text("SELECT role FROM lease_info('job')")?;
    ensure!(role.as_deref() == Some(&*one), "{role:?}");
    Ok(())
}

#[lab_test]
fn a_reclaim_of_what_is_free_is_an_acquire(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut other) = (db.connect()?, db.connect()?);
    let fresh = session.granted(RECLAIM)?;
    session.release("job", fresh)?;
    let released = session.granted(RECLAIM)?;
    session.granted(&format!("SELECT lease_renew('job', {released}, '1 us')"))?;
    session.wait_expired("job")?;
    let expired = session.granted(RECLAIM)?;
    ensure!(fresh < released && released < expired);
    // Once another has it, the name of the former holder opens nothing.
    session.granted(&format!("SELECT lease_renew('job', {expired}, '1 us')"))?;
    session.wait_expired("job")?;
    let theirs = other.granted("SELECT lease_acquire('job', 'w2', '1 h')")?;
    session.nothing(RECLAIM)?;
    ensure!(other.speaks("job", theirs)?);
    Ok(())
}

#[lab_test]
fn a_reclaim_that_is_rolled_back_leaves_the_old_grant(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut old, mut new) = (db.connect()?, db.connect()?);
    let token = old.granted("SELECT lease_acquire('job', 'w1', '1 h')")?;
    new.run("BEGIN")?;
    let never = new.granted(RECLAIM)?;
    ensure!(new.speaks("job", never)? && !new.speaks("job", token)?);
    ensure!(old.speaks("job", token)? && !old.speaks("job", never)?, "not committed yet");
    // The old holder's renewal waits for the verdict.
    let mut heartbeat = Background::connect(&db.conninfo())?;
    heartbeat.send(&format!("SELECT lease_renew('job', {token})"))?;
    heartbeat.wait_until_blocked()?;
    new.run("ROLLBACK")?;
    ensure!(heartbeat.rows()?[0][0].is_some());
    new.run("BEGIN")?;
    new.granted(RECLAIM)?;
    heartbeat.send(&format!("SELECT lease_renew('job', {token})"))?;
    heartbeat.wait_until_blocked()?;
    new.run("COMMIT")?;
    ensure!(heartbeat.rows()?[0][0].is_none(), "renewed what was reclaimed");
    Ok(())
}

#[lab_test]
fn a_reclaim_leaves_what_its_own_transaction_guards(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let shared = "SELECT lease_acquire('job', 'w1', '1 h', shared => true)";
    let (guarded, other) = (session.granted(shared)?, session.granted(shared)?);
    session.run(&format!("BEGIN; SELECT lease_guard('job', {guarded})"))?;
    let reclaim = "SELECT lease_acquire('job', 'w1', '1 h', shared => true, reclaim => true)";
    session.nothing(reclaim)?;
    session.run("COMMIT")?;
    ensure!(session.speaks("job", guarded)? && session.speaks("job", other)?);
    session.granted(reclaim)?;
    ensure!(!session.speaks("job", guarded)? && !session.speaks("job", other)?);
    Ok(())
}

#[lab_test]
fn what_a_reclaim_ended_speaks_no_more_in_its_transaction(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let shared = "SELECT lease_acquire('job', 'w1', '1 h', shared => true)";
    let old = [session.granted(shared)?, session.granted(shared)?];
    session.run("BEGIN")?;
    let fresh = session
        .granted("SELECT lease_acquire('job', 'w1', '1 h', shared => true, reclaim => true)")?;
    for token in old {
        ensure!(!session.speaks("job", token)? && session.release("job", token)?.is_none());
    }
    session.release("job", fresh)?.expect("held");
    ensure!(!session.speaks("job", fresh)?, "it was released");
    session.run("COMMIT")
}

#[lab_test]
fn a_reclaim_of_a_grant_in_use_neither_waits_nor_makes_a_second_one(lab: &Lab) -> Result<()> {
    for kind in ["shared => false", "shared => true", "slots => 1", "slots => 3"] {
        for uses in ["lease_guard", "lease_renew", "lease_release"] {
            let db = lab.database()?;
            let (mut before, mut after) = (db.connect()?, db.connect()?);
            let call = format!("SELECT lease_acquire('job', 'w1', '1 h', {kind}");
            let token = before.granted(&format!("{call})"))?;
            before.run(&format!("BEGIN; SELECT {uses}('job', {token})"))?;
            after.run("SET statement_timeout = '10 s'")?;
            // Not beside it either, where there is room.
            after.nothing(&format!("{call}, reclaim => true)"))?;
            before.run("COMMIT")?;
            let next = after.granted(&format!("{call}, reclaim => true)"))?;
            ensure!(!after.speaks("job", token)? && after.speaks("job", next)?, "{kind}, {uses}");
            let live = after.granted("SELECT count(*) FROM fence.leases WHERE state = 'held'")?;
            ensure!(live == 1, "{kind}, {uses}: {live} grants of one holder");
        }
    }
    Ok(())
}

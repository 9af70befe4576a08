//! Release and revocation: the closing token, in its transaction and after it.

use pg_test::calls::within_ttl;
use pg_test::{ensure, lab_test, Calls, Lab, Result};

#[lab_test]
fn a_closing_token_is_greater_than_all_of_the_grant_s(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let first = session.acquire("job", "1 h")?;
    let renewed = session.renew("job", first)?.expect("held");
    let closing = session.release("job", first)?.expect("held");
    ensure!(closing > renewed);
    let again = session.acquire("job", "1 h")?;
    ensure!(again > closing);
    let revoked = session.granted("SELECT lease_revoke('job')")?;
    ensure!(revoked > again);
    Ok(())
}

#[lab_test]
fn a_closing_token_speaks_until_its_transaction_ends(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut holder, mut other) = (db.connect()?, db.connect()?);
    let token = holder.acquire("job", "1 h")?;
    holder.run("BEGIN")?;
    let closing = holder.release("job", token)?.expect("held");
    ensure!(holder.speaks("job", closing)?, "it does not speak in its transaction");
    ensure!(!holder.speaks("job", token)?, "the grant has ended");
    ensure!(!other.speaks("job", closing)?, "it speaks in another transaction");
    ensure!(other.is_taken("job")?, "had while the last write may be under way");
    for token in [token, closing] {
        ensure!(holder.renew("job", token)?.is_none(), "re-armed in the transaction");
    }
    holder.run("SAVEPOINT s; RELEASE s")?;
    ensure!(holder.speaks("job", closing)?);
    holder.run("COMMIT")?;
    ensure!(!holder.speaks("job", closing)?, "it speaks after its transaction");
    for token in [token, closing] {
        ensure!(holder.release("job", token)?.is_none());
        ensure!(holder.renew("job", token)?.is_none(), "re-armed");
    }
    ensure!(other.text("SELECT state FROM lease_info('job')")?.as_deref() == Some("free"));
    ensure!(!other.is_taken("job")?);
    // A transaction of one statement is over with it.
    let token = holder.acquire("job", "1 h")?;
    let closing = holder.release("job", token)?.expect("held");
    ensure!(!holder.speaks("job", closing)?);
    Ok(())
}

#[lab_test]
fn releasing_again_in_the_transaction_returns_the_same_token(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let first = session.acquire("job", "1 h")?;
    let renewed = session.renew("job", first)?.expect("held");
    session.run("BEGIN")?;
    let closing = session.release("job", renewed)?;
    ensure!(closing.is_some());
    for token in [renewed, first, closing.unwrap_or_default()] {
        ensure!(session.release("job", token)? == closing, "by {token}");
    }
    session.run("SAVEPOINT s")?;
    ensure!(session.release("job", first)? == closing, "in a savepoint");
    session.run("ROLLBACK TO s")?;
    ensure!(session.release("job", first)? == closing, "behind a savepoint");
    ensure!(Some(session.last_token()?) == closing, "tokens were drawn");
    ensure!(session.release("job", first + 1_000)?.is_none(), "by a token of nobody's");
    session.run("COMMIT")
}

#[lab_test]
fn a_closing_token_outlives_the_deadline_in_its_transaction(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut holder, mut other) = (db.connect()?, db.connect()?);
    let (token, closing) = within_ttl(|ttl| {
        let token = holder.acquire("job", ttl)?;
        holder.run("BEGIN")?;
        match holder.release("job", token)? {
            Some(closing) => Ok(Some((token, closing))),
            None => holder.run("ROLLBACK").map(|()| None),
        }
    })?;
    other.wait_expired("job")?;
    ensure!(holder.speaks("job", closing)? && holder.release("job", token)? == Some(closing));
    ensure!(other.is_taken("job")?);
    holder.run("COMMIT")?;
    ensure!(!other.is_taken("job")?);
    Ok(())
}

#[lab_test]
fn a_lease_acquired_anew_in_a_savepoint_is_undone_with_it(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut holder, mut other) = (db.connect()?, db.connect()?);
    let token = holder.acquire("job", "1 h")?;
    holder.run("BEGIN")?;
    let closing = holder.release("job", token)?.expect("held");
    holder.run("SAVEPOINT s")?;
    let again = holder.acquire("job", "1 h")?;
    ensure!(again > closing && holder.speaks("job", again)?);
    ensure!(!holder.speaks("job", token)? && holder.renew("job", token)?.is_none());
    holder.run("ROLLBACK TO s")?;
    ensure!(!holder.speaks("job", again)? && holder.speaks("job", closing)?);
    ensure!(holder.release("job", token)? == Some(closing));
    ensure!(other.is_taken("job")?);
    holder.run("ROLLBACK")?;
    ensure!(holder.speaks("job", token)? && other.is_taken("job")?);
    Ok(())
}

#[lab_test]
fn a_revocation_ends_a_grant_whoever_has_it(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut admin, mut other) = (db.connect()?, db.connect()?);
    let role = db.role("worker")?;
    admin.run(&format!("SELECT fence_grant('{role}')"))?;
    let mut holder = db.connect_as(&role)?;
    let first = holder.acquire("job", "1 h")?;
    let renewed = holder.renew("job", first)?.expect("held");
    let closing = admin.granted("SELECT lease_revoke('job')")?;
    ensure!(closing > renewed);
    for token in [first, renewed, closing] {
        ensure!(!holder.speaks("job", token)? && holder.renew("job", token)?.is_none());
        ensure!(holder.release("job", token)?.is_none());
    }
    let next = other.acquire("job", "1 h")?;
    ensure!(next > closing);
    // Rolled back, it never was.
    admin.run("BEGIN")?;
    admin.granted("SELECT lease_revoke('job')")?;
    ensure!(!admin.speaks("job", next)? && holder.speaks("job", next)?);
    admin.run("ROLLBACK")?;
    ensure!(admin.speaks("job", next)? && other.renew("job", next)?.is_some());
    Ok(())
}

#[lab_test]
fn a_revocation_of_nothing_returns_null(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.nothing("SELECT lease_revoke('nobody')")?;
    session.acquire_expired("expired")?;
    session.nothing("SELECT lease_revoke('expired')")?;
    let token = session.acquire("free", "1 h")?;
    session.release("free", token)?;
    session.nothing("SELECT lease_revoke('free')")?;
    session.acquire("twice", "1 h")?;
    session.granted("SELECT lease_revoke('twice')")?;
    session.nothing("SELECT lease_revoke('twice')")
}

#[lab_test]
fn an_evicted_holder_leaves_the_others_and_their_guards_alone(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut other, mut admin) = (db.connect()?, db.connect()?, db.connect()?);
    for acquire in ["shared => true", "slots => 3"] {
        let acquire = format!("SELECT lease_acquire('job', ttl => '1 h', {acquire})");
        let tokens =
            [(); 3].map(|()| session.granted(&acquire).ok()).map(Option::unwrap_or_default);
        let [one, two, three] = tokens;
        other.run(&format!("BEGIN; SELECT lease_guard('job', {three})"))?;
        let renewed = session.renew("job", two)?.expect("held");
        let closing = admin.granted(&format!("SELECT lease_evict('job', {renewed})"))?;
        ensure!(
            closing > renewed
                && !session.speaks("job", two)?
                && session.renew("job", two)?.is_none()
        );
        ensure!(session.speaks("job", one)? && other.speaks("job", three)?);
        for token in [two, renewed, closing, 1] {
            admin.nothing(&format!("SELECT lease_evict('job', {token})"))?;
        }
        // Its place is free, and the guard stands.
        session.granted(&acquire)?;
        other.run("COMMIT")?;
        admin.granted("SELECT lease_revoke('job')")?;
    }
    // The guard of the one that is evicted stands, too, until its transaction ends.
    let token = session.acquire("alone", "1 h")?;
    other.run(&format!("BEGIN; SELECT lease_guard('alone', {token})"))?;
    admin.granted(&format!("SELECT lease_evict('alone', {token})"))?;
    ensure!(session.is_taken("alone")?);
    other.run("COMMIT")?;
    ensure!(!session.is_taken("alone")?);
    admin.run("SELECT lease_adopt('adopted', 7)")?;
    ensure!(admin.granted("SELECT lease_evict('adopted', 7)")? == 7);
    for (arguments, sqlstate) in
        [("'', 1", "22023"), ("'job', 0", "22023"), ("'job', NULL", "22004")]
    {
        admin.refused(&format!("SELECT lease_evict({arguments})"), sqlstate)?;
    }
    Ok(())
}

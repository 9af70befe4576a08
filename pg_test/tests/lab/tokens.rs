//! Which tokens are a grant's, when one is drawn, and that they only grow.

automod::dir!(pub "tests/lab/tokens");

use pg_test::{ensure, lab_test, Calls, Lab, Result};

#[lab_test]
fn each_call_that_grants_draws_one_token(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let mut last = session.last_token()?;
    ensure!(last > 0, "the creation moves the sequence on");
    for call in [
        "lease_acquire('a')",
        "lease_renew('a', (SELECT first_token FROM lease_info('a')))",
        "lease_release('a', (SELECT first_token FROM lease_info('a')))",
        "lease_acquire('a')",
        "lease_revoke('a')",
        "lease_acquire('b', 'me')",
        "lease_acquire('b', 'me', reclaim => true)",
    ] {
        let token = session.granted(&format!("SELECT {call}"))?;
        ensure!(token == last + 1, "{call} returned {token} after {last}");
        ensure!(session.last_token()? == token, "{call} drew more than one");
        last = token;
    }
    Ok(())
}

#[lab_test]
fn a_call_that_grants_nothing_draws_none(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run("SELECT lease_acquire('held', 'a')")?;
    let gone = session.acquire_expired("expired")?;
    let freed = session.acquire("freed", "1 h")?;
    let closing = session.release("freed", freed)?.expect("held");
    let last = session.last_token()?;
    for call in [
        "lease_acquire('held')".to_owned(),
        "lease_acquire('held', 'b', reclaim => true)".to_owned(),
        format!("lease_renew('held', {})", last + 1),
        format!("lease_renew('held', {freed})"),
        format!("lease_renew('expired', {gone})"),
        format!("lease_renew('freed', {freed})"),
        format!("lease_renew('freed', {closing})"),
        "lease_renew('nobody', 1)".to_owned(),
        format!("lease_release('held', {freed})"),
        format!("lease_release('expired', {gone})"),
        format!("lease_release('freed', {freed})"),
        format!("lease_release('freed', {closing})"),
        "lease_release('nobody', 1)".to_owned(),
        "lease_revoke('expired')".to_owned(),
        "lease_revoke('freed')".to_owned(),
        "lease_revoke('nobody')".to_owned(),
    ] {
        session.nothing(&format!("SELECT {call}"))?;
        ensure!(session.last_token()? == last, "{call} drew a token");
    }
    session.refused("SELECT lease_acquire('')", "22023")?;
    session.refused("SELECT lease_acquire('new', ttl => '0')", "22023")?;
    session.refused("BEGIN READ ONLY; SELECT lease_acquire('new')", "25006")?;
    session.run("ROLLBACK")?;
    ensure!(session.last_token()? == last, "an error drew a token");
    Ok(())
}

#[lab_test]
fn the_first_token_and_the_latest_sixteen_renewals_serve(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let first = session.acquire("job", "1 h")?;
    let mut renewals = Vec::new();
    for n in 1..=40 {
        renewals.push(session.renew("job", first)?.expect("held"));
        ensure!(session.speaks("job", first)?, "the acquire's token, after {n} renewals");
        let (old, latest) = renewals.split_at(renewals.len().saturating_sub(16));
        for &token in latest.iter().rev().take(17) {
            ensure!(session.speaks("job", token)?, "{token} of {renewals:?}");
        }
        if let Some(&token) = old.last() {
            ensure!(!session.speaks("job", token)?, "{token} of {renewals:?}");
        }
    }
    let (old, latest) = renewals.split_at(24);
    for &token in old {
        ensure!(!session.speaks("job", token)?);
        ensure!(session.renew("job", token)?.is_none() && session.release("job", token)?.is_none());
    }
    let next = session.renew("job", latest[0])?.expect("the sixteenth");
    ensure!(!session.speaks("job", latest[0])?, "now it is the seventeenth");
    ensure!(session.speaks("job", latest[1])? && session.speaks("job", next)?);
    ensure!(session.release("job", latest[1])?.is_some());
    Ok(())
}

#[lab_test]
fn a_token_of_another_lease_between_two_renewals_is_none(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let mine = session.acquire("mine", "1 h")?;
    let other = session.acquire("other", "1 h")?;
    let renewed = session.renew("mine", mine)?.expect("held");
    ensure!(mine < other && other < renewed);
    ensure!(!session.speaks("mine", other)? && session.speaks("other", other)?);
    ensure!(session.renew("mine", other)?.is_none());
    ensure!(session.release("mine", other)?.is_none());
    session.run("BEGIN")?;
    session.refused(&format!("SELECT lease_guard('mine', {other})"), "PF004")?;
    session.run("ROLLBACK")?;
    ensure!(session.speaks("mine", mine)? && session.speaks("other", other)?);
    Ok(())
}

#[lab_test]
fn tokens_grow_whatever_is_rolled_back(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let mut last = session.acquire("job", "1 h")?;
    let first = last;
    for call in ["renew('job', 1)", "release('job', 1)", "revoke('job')", "acquire('new')"] {
        let call = call.replace(", 1", &format!(", {first}"));
        for (begin, undo) in
            [("BEGIN", "ROLLBACK"), ("BEGIN; SAVEPOINT s", "ROLLBACK TO s; COMMIT")]
        {
            session.run(begin)?;
            let token = session.granted(&format!("SELECT lease_{call}"))?;
            session.run(undo)?;
            ensure!(token > last, "{call} returned {token} after {last}");
            ensure!(session.speaks("job", first)?, "{call} was rolled back");
            last = token;
        }
    }
    ensure!(session.renew("job", first)?.expect("held") > last);
    Ok(())
}

#[lab_test]
fn the_sequence_is_as_documented(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let row = session.rows(
        "SELECT seqtypid::regtype, seqincrement, seqcache, seqcycle, relpersistence
           FROM pg_sequence JOIN pg_class ON oid = seqrelid
          WHERE seqrelid = 'fence.token_seq'::regclass",
    )?;
    let texts: Vec<_> = row[0].iter().flatten().map(String::as_str).collect();
    ensure!(texts == ["bigint", "1", "1", "f", "p"], "{texts:?}");
    Ok(())
}

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

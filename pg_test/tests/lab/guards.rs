//! A guard that guards nothing is warned of. The rest of what a guard promises is in guards.script.

automod::dir!(pub "tests/lab/guards");

use pg_test::{ensure, lab_test, Calls, Lab, Result, Session};

/// The warnings since the last call.
fn warnings(session: &mut Session) -> Vec<pg_test::Fault> {
    session.notices().into_iter().filter(|notice| notice.severity == "WARNING").collect()
}

#[lab_test]
fn a_guard_that_ends_with_its_statement_is_warned_of(lab: &Lab) -> Result<()> {
    let database = lab.database()?;
    let mut session = database.connect()?;
    let token = session.acquire("job", "1 h")?;
    let guard = format!("SELECT lease_guard('job', {token})");
    let in_function = format!("DO $$ BEGIN PERFORM lease_guard('job', {token}); END $$");
    for sql in [&guard, &in_function] {
        warnings(&mut session);
        session.run(sql)?;
        let warned = warnings(&mut session);
        ensure!(warned.len() == 1 && warned[0].sqlstate == "25P01", "{sql}: {warned:?}");
        ensure!(warned[0].json()?["lease"] == "job", "{}", warned[0]);
        ensure!(warned[0].hint.as_deref().is_some_and(|h| h.contains("BEGIN")), "{}", warned[0]);
    }
    // By the extended protocol, too.
    session.one::<i64>("SELECT lease_guard('job', $1)", &[&token])?;
    ensure!(warnings(&mut session).len() == 1);
    // One that is refused guards nothing either, but says so.
    session.refused("SELECT lease_guard('job', 1000000000)", "PF004")?;
    session.run("SELECT 1")?;
    ensure!(warnings(&mut session).is_empty());
    Ok(())
}

#[lab_test]
fn a_guard_that_guards_something_is_not_warned_of(lab: &Lab) -> Result<()> {
    let database = lab.database()?;
    let mut session = database.connect()?;
    session.run("CREATE TABLE t (n int)")?;
    let token = session.acquire("job", "1 h")?;
    let guard = format!("lease_guard('job', {token})");
    warnings(&mut session);
    session.run(&format!("BEGIN; SELECT {guard}; COMMIT"))?;
    for statement in ["BEGIN", &format!("SELECT {guard}"), "SELECT count(*) FROM t", "COMMIT"] {
        session.run(statement)?;
    }
    // Several statements sent at once are one transaction.
    session.run(&format!("SELECT {guard}; SELECT count(*) FROM t"))?;
    session.run(&format!("SELECT {guard}; INSERT INTO t VALUES (1)"))?;
    // One that guards and writes.
    session.run(&format!("INSERT INTO t SELECT 1 FROM {guard}"))?;
    session.run(&format!("DO $$ BEGIN PERFORM {guard}; INSERT INTO t VALUES (1); END $$"))?;
    let mut transaction = session.transaction()?;
    transaction.query_one("SELECT lease_guard('job', $1)", &[&token])?;
    transaction.query_one("SELECT count(*) FROM t", &[])?;
    transaction.commit()?;
    let warned = warnings(&mut session);
    ensure!(warned.is_empty(), "{warned:?}");
    Ok(())
}

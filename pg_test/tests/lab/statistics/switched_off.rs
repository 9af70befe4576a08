//! pg_fence.statistics = off.

use super::shown;
use pg_test::{ensure, lab_test, Calls, Lab, Result, Session};

const TABLE: &str =
    "CREATE TABLE t (id int PRIMARY KEY, fence bigint); INSERT INTO t VALUES (1); SELECT fence_protect('t')";

/// Something of each kind.
fn work(session: &mut Session, name: &str) -> Result<()> {
    let token = session.acquire(name, "1 h")?;
    session.nothing(&format!("SELECT lease_acquire('{name}')"))?;
    session.run(&format!("UPDATE t SET fence = {token}"))?;
    session.refused("UPDATE t SET fence = 1", "PF001")?;
    session.refused(&format!("SELECT lease_guard('{name}', 1)"), "PF004")?;
    session.release(name, token)?.expect("held");
    Ok(())
}

#[lab_test]
fn where_it_is_off_nothing_is_counted_and_no_memory_taken(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    db.connect()?.run(&format!("ALTER DATABASE {} SET pg_fence.statistics = off", db.name()))?;
    let mut session = db.connect()?;
    session.run(TABLE)?;
    work(&mut session, "a")?;
    session.run("SELECT fence_stats_reset()")?;
    ensure!(session.truth("SELECT NOT is_called FROM fence.stats_memory_seq")?, "memory was taken");
    ensure!(session.truth("SELECT stats_reset IS NULL AND grants = 0 FROM fence.stats")?);
    ensure!(session.rows("SELECT * FROM fence.refusals")?.is_empty());
    // What was done meanwhile is not made up for.
    session.run("SET pg_fence.statistics = on")?;
    session.acquire("b", "1 h")?;
    ensure!(shown(&mut session)? == "grants 1", "{}", shown(&mut session)?);
    Ok(())
}

#[lab_test]
fn a_session_that_has_it_off_leaves_the_counters_of_others_alone(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut one, mut other) = (db.connect()?, db.connect()?);
    one.run(TABLE)?;
    one.acquire("x", "1 h")?;
    other.run("SET pg_fence.statistics = off")?;
    work(&mut other, "a")?;
    ensure!(shown(&mut other)? == "grants 1", "{}", shown(&mut other)?);
    // For a transaction.
    one.run("BEGIN; SET LOCAL pg_fence.statistics = off; SELECT lease_acquire('b', ttl => '1 h'); COMMIT")?;
    one.acquire("c", "1 h")?;
    ensure!(shown(&mut one)? == "grants 2" && one.rows("SELECT * FROM fence.refusals")?.is_empty());
    other.run("SELECT fence_stats_reset()")?;
    ensure!(shown(&mut one)?.is_empty());
    Ok(())
}

#[lab_test]
fn only_a_superuser_switches_it(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let role = db.role("worker")?;
    let mut admin = db.connect()?;
    admin.run(&format!("SELECT fence_grant('{role}', 'admin')"))?;
    let mut worker = db.connect_as(&role)?;
    // Before the library is loaded, anything can be set; it does not count.
    worker.run("SET pg_fence.statistics = off")?;
    worker.acquire("a", "1 h")?;
    worker.refused("SET pg_fence.statistics = off", "42501")?;
    ensure!(shown(&mut admin)? == "grants 1");
    Ok(())
}

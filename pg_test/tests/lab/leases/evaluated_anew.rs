//! An acquire in a row that READ COMMITTED evaluates anew, because another transaction has changed it meanwhile.

use crate::support::test_database::{shown, shows, TestDatabase};
use pg_test::{ensure, lab_test, Background, Context, Lab, Result};

const JOBS: &str =
    "CREATE TABLE jobs (id int PRIMARY KEY, tries int NOT NULL DEFAULT 0, token bigint, other bigint, at timestamptz)";
/// The grants that live, each with whether its only token is the one in the rows.
const HELD: &str =
    "SELECT name, count(*), bool_and(token = ALL (SELECT j.token FROM jobs j WHERE j.token > 0))
                      FROM fence.leases WHERE state = 'held' GROUP BY name ORDER BY name";

/// Runs the statement while another transaction changes the rows, which is committed when it waits for them; gives back
/// which of its cells are NULL, and the worker's session.
fn beside_a_change(
    lab: &Lab,
    rows: usize,
    statement: &str,
) -> Result<(TestDatabase, String, Background)> {
    let mut db = TestDatabase::new(lab)?;
    db.run(&format!("{JOBS}; INSERT INTO jobs SELECT generate_series(1, {rows})"))?;
    let mut worker = Background::connect(&db.database().conninfo())?;
    let mut other = db.another()?;
    // A statement that skips what is locked waits for this lock instead.
    other.run("BEGIN; SELECT pg_advisory_lock(7); UPDATE jobs SET tries = tries + 1")?;
    worker.send(statement)?;
    worker.wait_until_blocked()?;
    other.run("UPDATE jobs SET at = clock_timestamp(); COMMIT; SELECT pg_advisory_unlock(7)")?;
    let answer = worker.rows()?;
    let cells = answer.concat().into_iter().map(|cell| if cell.is_some() { "token" } else { "-" });
    let cells = cells.collect::<Vec<_>>().join(" ");
    Ok((db, cells, worker))
}

#[lab_test]
fn an_exclusive_acquire_answers_the_token_of_the_first_evaluation(lab: &Lab) -> Result<()> {
    for (rows, statement, answer, held) in [
        (1, "UPDATE jobs SET token = lease_acquire('j:' || id) WHERE id = 1 RETURNING token", "token", "j:1|1|t"),
        (1, "UPDATE jobs SET token = lease_acquire('j:' || id, wait => '1 h') RETURNING token", "token", "j:1|1|t"),
        (1, "UPDATE jobs SET token = lease_acquire('j:1', session => true, ttl => '1 h') RETURNING token", "token", "j:1|1|t"),
        (1, "UPDATE jobs SET token = lease_acquire('j:1', 'me', reclaim => true) RETURNING token", "token", "j:1|1|t"),
        (1, "UPDATE jobs SET token = lease_acquire_all(ARRAY['b', 'a']) RETURNING token", "token", "a|1|t b|1|t"),
        (1, "SELECT lease_acquire('j:' || id) FROM jobs FOR UPDATE", "token", "j:1|1|t"),
        (1, "SELECT id FROM jobs WHERE lease_acquire('j:1') > 0 FOR UPDATE", "token", "j:1|1|t"),
        (1, "SELECT id FROM jobs WHERE lease_acquire('j:' || id) > 0 AND pg_advisory_lock(7) IS NOT NULL \
             LIMIT 1 FOR UPDATE SKIP LOCKED", "token", "j:1|1|t"),
        (3, "SELECT id FROM jobs WHERE lease_acquire('j:' || id) > 0 ORDER BY tries, id FOR UPDATE", "token token token",
         "j:1|1|t j:2|1|t j:3|1|t"),
        // A further row finds it taken, and so does another place in the query.
        (3, "UPDATE jobs SET token = lease_acquire('same') RETURNING token", "token - -", "same|1|t"),
        (1, "UPDATE jobs SET token = lease_acquire('same'), other = lease_acquire('same') RETURNING token, other",
         "token -", "same|1|t"),
        // One that is over meanwhile is granted anew.
        (1, "UPDATE jobs SET token = lease_acquire('j:1', ttl => '1 us') \
             RETURNING nullif((SELECT acquired_at FROM lease_info('j:1', token)) > at, false)", "token", ""),
        // A shared grant takes another place.
        (1, "UPDATE jobs SET token = lease_acquire('s', shared => true) RETURNING token", "token", "s|2|f"),
    ] {
        let outcome = (|| {
            let (mut db, cells, _worker) = beside_a_change(lab, rows, statement)?;
            ensure!(cells == answer, "answered {cells}, not {answer}");
            shows(&mut db, HELD, held)
        })();
        outcome.with_context(|| statement.to_owned())?;
    }
    Ok(())
}

/// What is remembered goes with its query: no later one of the same plan is answered by it.
#[lab_test]
fn a_query_that_runs_again_is_a_further_one(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(&format!("{JOBS}; INSERT INTO jobs VALUES (1)"))?;
    db.run(
        "CREATE FUNCTION own(name text) RETURNS bigint LANGUAGE plpgsql AS 'BEGIN RETURN lease_acquire(name); END';
         PREPARE take AS SELECT lease_acquire('job') IS NOT NULL",
    )?;
    ensure!(shown(&mut db, "EXECUTE take; EXECUTE take; EXECUTE take")? == "t f f");
    shows(&mut db, "SELECT lease_acquire('same') IS NOT NULL FROM generate_series(1, 3)", "t f f")?;
    shows(&mut db, "SELECT own('own') IS NOT NULL FROM generate_series(1, 3)", "t f f")?;
    db.run("BEGIN; SELECT lease_acquire('undone'); ROLLBACK")?;
    shows(&mut db, "SELECT lease_acquire('undone') IS NOT NULL", "t")
}

//! A job that replaces a whole table in one guarded transaction.

use super::DemoScenario;
use crate::demo_run::{DemoRun, LoggedWorker};
use crate::process::{PATIENCE, wait_until};
use crate::timeline::Mark;
use anyhow::{Context, Result, anyhow, ensure};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The scenario that shows what a guard is for.
pub const DAILY_MERGE: DemoScenario = DemoScenario {
    title: "The daily merge",
    summary: "A freezes in the middle of a guarded transaction. Until that ends, the lease stays taken.",
    without: ("the guard", "A wakes up and commits beside B: the table is a mix of two merges."),
    play,
};

const ROWS: i64 = 5000;

fn play(scenario: &DemoRun) -> Result<String> {
    scenario.run(
        "DROP TABLE IF EXISTS stock; CREATE TABLE stock (item int, merged_by text);
         CREATE OR REPLACE VIEW items_1 AS SELECT n AS item FROM generate_series(1, 2500) AS n;
         CREATE OR REPLACE VIEW items_2 AS SELECT n AS item FROM generate_series(2501, 5000) AS n",
    )?;
    scenario.run(&format!(
        "BEGIN; {}; {}; COMMIT",
        first_half("yesterday"),
        second_half("yesterday")
    ))?;
    scenario.table("stock, before", STOCK)?;
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let onlooker = scope.spawn(|| look_on(scenario, &done));
        let outcome = if scenario.is_protecting() {
            an_administrator_ends_it(scenario).and_then(|()| it_wakes_and_commits(scenario))
        } else {
            nobody_guards_it(scenario)
        };
        done.store(true, Ordering::Relaxed);
        let looks = onlooker.join().map_err(|_| anyhow!("the onlooker panicked"))?;
        outcome?;
        scenario.table("stock, after", STOCK)?;
        Ok(format!(
            "{} looks at the table by another process: each saw one whole merge of {ROWS} rows.",
            looks?
        ))
    })
}

fn an_administrator_ends_it(scenario: &DemoRun) -> Result<()> {
    let (mut a, mut b) = (scenario.worker("A")?, scenario.worker("B")?);
    let token = a.acquires("merge")?;
    begins(&mut a, "A on Monday", token)?;
    a.freezes_before(&second_half("A on Monday"))?;
    scenario.wait_until_expired("merge")?;
    b.finds_taken("merge")?;

    let backend = a.worker().backend().to_string();
    let rows = scenario.table("fence.leases", LEASES)?;
    ensure!(rows[0][4] == Some(format!("{{{backend}}}")), "not {backend} holds it up: {rows:?}");
    scenario.run(&format!("SELECT pg_terminate_backend({backend}, 10000)"))?;
    scenario.tell("admin", Mark::Killed, format!("pg_terminate_backend({backend})"));

    merges(&mut b, "B on Monday")?;
    a.wakes()?;
    let fault = a.worker().outcome(PATIENCE)?.err().context("an ended transaction goes on")?;
    ensure!(fault.is_disconnect(), "{fault}");
    a.tell(Mark::Ended, "the connection is closed, and its transaction has left no trace");
    let found = merged_by(scenario)?;
    ensure!(found == "B on Monday", "{found}");
    Ok(())
}

fn it_wakes_and_commits(scenario: &DemoRun) -> Result<()> {
    scenario.note("Tuesday: A freezes again, but this time it wakes up by itself");
    let (mut a, mut b) = (scenario.worker("A")?, scenario.worker("B")?);
    let token = a.acquires("merge")?;
    begins(&mut a, "A on Tuesday", token)?;
    let second_half = second_half("A on Tuesday");
    a.freezes_before(&second_half)?;
    scenario.wait_until_expired("merge")?;
    b.finds_taken("merge")?;
    b.waits_for("merge")?;
    a.wakes_and_does(&second_half)?;
    a.commits()?;

    let token = b.is_granted("merge")?;
    let found = merged_by(scenario)?;
    ensure!(found == "A on Tuesday", "B got the lease, and A's merge is not there: {found}");
    merges_with(&mut b, "B on Tuesday", token)?;
    let found = merged_by(scenario)?;
    ensure!(found == "B on Tuesday", "{found}");
    Ok(())
}

/// Shows the mixed table that the guard rules out.
fn nobody_guards_it(scenario: &DemoRun) -> Result<()> {
    let (mut a, mut b) = (scenario.worker("A")?, scenario.worker("B")?);
    let token = a.acquires("merge")?;
    begins(&mut a, "A", token)?;
    let second = second_half("A");
    a.freezes_before(&second)?;
    scenario.wait_until_expired("merge")?;
    b.acquires("merge")?;
    b.worker().send(&format!("BEGIN; {}; {}; COMMIT", first_half("B"), second_half("B")))?;
    b.tell(Mark::Writes, "the same, as B");
    let backend = b.worker().backend();
    let mut session = scenario.session()?;
    wait_until("B waits for A's rows", PATIENCE, || {
        session.one("SELECT cardinality(pg_blocking_pids($1)) > 0", &[&backend]).unwrap_or(false)
    })?;
    a.wakes_and_does(&second)?;
    a.commits()?;
    b.worker().outcome(PATIENCE)??;
    scenario.table("stock, after", STOCK)?;
    let found = merged_by(scenario)?;
    ensure!(found == "B", "a mix of merges: {found}");
    Ok(())
}

const STOCK: &str = "SELECT merged_by, count(*) AS rows FROM stock GROUP BY merged_by";
const LEASES: &str = "SELECT name, holder, token, state, blocking_pids FROM lease_info('merge')";

fn first_half(name: &str) -> String {
    format!("DELETE FROM stock; INSERT INTO stock SELECT item, '{name}' FROM items_1")
}

fn second_half(name: &str) -> String {
    format!("INSERT INTO stock SELECT item, '{name}' FROM items_2")
}

/// Opens the guarded transaction and replaces the first half.
fn begins(worker: &mut LoggedWorker, name: &str, token: i64) -> Result<()> {
    worker.begins("merge", token)?;
    worker.writes(&first_half(name)).map(drop)
}

fn merges(worker: &mut LoggedWorker, name: &str) -> Result<()> {
    let token = worker.acquires("merge")?;
    merges_with(worker, name, token)
}

fn merges_with(worker: &mut LoggedWorker, name: &str, token: i64) -> Result<()> {
    begins(worker, name, token)?;
    worker.writes(&second_half(name))?;
    // The release is the transaction's last step: its guard holds the lease until the end.
    let release = format!("lease_release('merge', {token})");
    ensure!(worker.calls(&release)?.is_some(), "{release} found the lease lost");
    worker.commits()
}

fn merged_by(scenario: &DemoRun) -> Result<String> {
    scenario.session()?.one("SELECT string_agg(DISTINCT merged_by, ' and ') FROM stock", &[])
}

/// Reads the table until `done`: it must always be one whole merge. Returns the number of reads.
fn look_on(scenario: &DemoRun, done: &AtomicBool) -> Result<u64> {
    let mut worker = scenario.silent_worker("onlooker")?;
    let whole = [ROWS, ROWS, 1].map(|number| Some(number.to_string()));
    let mut looks = 0;
    while !done.load(Ordering::Relaxed) {
        let sql = "SELECT count(*), count(DISTINCT item), count(DISTINCT merged_by) FROM stock";
        let rows = worker.rows(sql)?;
        ensure!(rows == [whole.to_vec()], "not one whole merge: {rows:?}");
        looks += 1;
        // Leaves the CPU to the workers.
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(looks)
}

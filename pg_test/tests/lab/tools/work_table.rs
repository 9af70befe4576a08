//! A table of work as `docs/recipes/work-table.md` shows it, with worker processes that are frozen in the middle of a run,
//! overtaken, and come back; or killed.

use crate::project::pages::example;
use pg_test::markdown;
use pg_test::worker::Worker;
use pg_test::{ensure, lab_test, Background, Calls, Context, Database, Lab, Result, Session};

/// How long a run is a worker's unless it keeps it.
const TTL: &str = "1500 ms";

/// The first statement below that heading of the page, for this worker, run and token.
fn statement(heading: &str, worker: &str, run: i64, token: i64) -> Result<String> {
    let page = pg_test::source_tree::source_root().join("docs/recipes/work-table.md");
    let page = std::fs::read_to_string(page)?;
    let blocks = example::blocks(markdown::section(&page, heading)?, u32::MAX)?;
    let step = blocks.first().and_then(|steps| steps.first()).context("a statement")?;
    let sql = example::filled(&step.sql, |_| Some(token.to_string()))?;
    Ok(sql
        .replace("holder => 'worker A'", &format!("holder => '{worker}', ttl => '{TTL}'"))
        .replace("RETURNING id, attempts, input", "RETURNING id, token, attempts")
        .replace("run:1", &format!("run:{run}"))
        .replace("id = 1 ", &format!("id = {run} "))
        .replace("id = 2 ", &format!("id = {run} "))
        .replace("run:2", &format!("run:{run}")))
}

/// How the page fails a run: the second statement there.
fn failure(run: i64, token: i64) -> String {
    format!(
        "UPDATE runs SET state = CASE WHEN attempts < 3 THEN 'ready' ELSE 'failed' END, error = 'late', \
         fence = lease_release('run:{run}', {token}) WHERE id = {run} AND state = 'running'"
    )
}

/// A table with so many runs.
struct Scene<'a> {
    lab: &'a Lab,
    db: Database,
    admin: Session,
}

impl Scene<'_> {
    fn set(lab: &Lab, runs: usize) -> Result<Scene<'_>> {
        let db = lab.database()?;
        let mut admin = db.connect()?;
        let page = pg_test::source_tree::source_root().join("docs/recipes/work-table.md");
        let blocks = example::blocks(&std::fs::read_to_string(page)?, u32::MAX)?;
        for step in
            blocks.first().context("the table")?.iter().filter(|s| !s.sql.contains("INSERT"))
        {
            admin.run(&step.sql)?;
        }
        admin
            .run(&format!("INSERT INTO runs (input) SELECT 'x' FROM generate_series(1, {runs})"))?;
        Ok(Scene { lab, db, admin })
    }

    fn worker(&self, name: &str) -> Result<Worker> {
        self.lab.worker(name, &self.db.conninfo())
    }

    /// Claims a run: its number and the token, or nothing.
    fn claim(&self, worker: &mut Worker, name: &str) -> Result<Option<(i64, i64)>> {
        let rows = worker.rows(&statement("## Claim", name, 1, 0)?)?;
        let Some(row) = rows.first() else { return Ok(None) };
        let number =
            |n: usize| -> Result<i64> { Ok(row[n].as_deref().context("a number")?.parse()?) };
        Ok(Some((number(0)?, number(1)?)))
    }

    /// The leases of runs that their workers have let run out are taken over.
    fn take_over(&mut self, run: i64) -> Result<()> {
        self.admin.wait_expired(&format!("run:{run}"))?;
        self.admin.run(&statement("## Take over what died", "", 1, 0)?)
    }

    /// The state of the run, with its attempts, result and error.
    fn state(&mut self, run: i64) -> Result<String> {
        let sql = format!(
            "SELECT concat_ws(' ', state, attempts, result, error) FROM runs WHERE id = {run}"
        );
        Ok(self.admin.text(&sql)?.unwrap_or_default())
    }
}

/// A run that the frozen worker has lost to another one.
struct Overtaken<'a> {
    scene: Scene<'a>,
    first: Worker,
    old: i64,
    second: Worker,
    new: i64,
}

impl Overtaken<'_> {
    fn set(lab: &Lab) -> Result<Overtaken<'_>> {
        let mut scene = Scene::set(lab, 1)?;
        let (mut first, mut second) = (scene.worker("first")?, scene.worker("second")?);
        let (run, old) = scene.claim(&mut first, "worker A")?.context("a run")?;
        ensure!(run == 1 && scene.claim(&mut second, "worker B")?.is_none());
        first.freeze()?;
        scene.take_over(1)?;
        let (_, new) = scene.claim(&mut second, "worker B")?.context("a run")?;
        second.rows(&format!("SELECT lease_renew('run:1', {new}, '1 h')"))?;
        first.thaw()?;
        Ok(Overtaken { scene, first, old, second, new })
    }

    /// The second worker goes on and finishes as if nothing had been.
    fn ends_well(mut self, attempts: u32) -> Result<()> {
        let state = self.scene.state(1)?;
        ensure!(state == format!("running {attempts} its worker died"), "{state}");
        self.second.rows(&statement("## Finish", "", 1, self.new)?)?;
        let state = self.scene.state(1)?;
        ensure!(state == format!("done {attempts} A its worker died"), "{state}");
        Ok(())
    }
}

#[lab_test]
fn a_heartbeat_that_comes_too_late_does_not_extend_the_successor_s_lease(lab: &Lab) -> Result<()> {
    let mut run = Overtaken::set(lab)?;
    let until = "SELECT expires_at FROM fence.leases WHERE name = 'run:1'";
    let before = run.scene.admin.text(until)?;
    let rows = run.first.rows(&statement("## Keep", "", 1, run.old)?)?;
    ensure!(rows[0][1].as_deref() == Some("lost"), "{rows:?}");
    ensure!(run.scene.admin.text(until)? == before);
    run.ends_well(2)
}

#[lab_test]
fn a_release_that_comes_too_late_does_not_free_the_run(lab: &Lab) -> Result<()> {
    let mut run = Overtaken::set(lab)?;
    let released = run.first.number(&format!("SELECT lease_release('run:1', {})", run.old))?;
    ensure!(released.is_none() && run.scene.admin.is_taken("run:1")?);
    run.ends_well(2)
}

#[lab_test]
fn a_result_that_comes_too_late_does_not_land(lab: &Lab) -> Result<()> {
    let mut run = Overtaken::set(lab)?;
    run.first.refused(&statement("## Finish", "", 1, run.old)?, "PF002")?;
    let late = format!("UPDATE runs SET result = 'late', fence = {} WHERE id = 1", run.old);
    run.first.refused(&late, "PF001")?;
    run.ends_well(2)
}

#[lab_test]
fn a_failure_that_comes_too_late_is_not_reported_and_no_attempt_is_counted(
    lab: &Lab,
) -> Result<()> {
    let mut run = Overtaken::set(lab)?;
    run.first.refused(&failure(1, run.old), "PF002")?;
    let count =
        format!("UPDATE runs SET attempts = attempts + 1, fence = {} WHERE id = 1", run.old);
    run.first.refused(&count, "PF001")?;
    run.ends_well(2)
}

#[lab_test]
fn a_worker_that_restarted_under_the_same_name_is_another_one(lab: &Lab) -> Result<()> {
    let mut scene = Scene::set(lab, 1)?;
    let (mut first, mut again) = (scene.worker("first")?, scene.worker("again")?);
    let (_, old) = scene.claim(&mut first, "worker A")?.context("a run")?;
    first.freeze()?;
    ensure!(scene.claim(&mut again, "worker A")?.is_none(), "its name alone opens it");
    scene.take_over(1)?;
    let (_, new) = scene.claim(&mut again, "worker A")?.context("a run")?;
    first.thaw()?;
    ensure!(new > old);
    first.refused(&statement("## Finish", "", 1, old)?, "PF002")?;
    again.rows(&statement("## Finish", "", 1, new)?)?;
    ensure!(scene.state(1)?.starts_with("done 2"));
    Ok(())
}

#[lab_test]
fn a_run_whose_worker_died_is_claimed_after_its_ttl(lab: &Lab) -> Result<()> {
    let mut scene = Scene::set(lab, 2)?;
    let (mut first, mut second) = (scene.worker("first")?, scene.worker("second")?);
    let (run, _) = scene.claim(&mut first, "worker A")?.context("a run")?;
    first.kill()?;
    // Not yet: it might be alive.
    ensure!(scene.claim(&mut second, "worker B")?.is_some_and(|(other, _)| other == 2));
    ensure!(scene.state(run)? == "running 1", "{}", scene.state(run)?);
    scene.take_over(run)?;
    ensure!(scene.state(run)?.starts_with("ready 1"), "{}", scene.state(run)?);
    ensure!(scene.claim(&mut second, "worker B")?.is_some_and(|(other, _)| other == run));
    Ok(())
}

#[lab_test]
fn a_job_that_kills_each_worker_is_given_up(lab: &Lab) -> Result<()> {
    let mut scene = Scene::set(lab, 1)?;
    for attempt in 1..=3 {
        let mut worker = scene.worker(&format!("worker {attempt}"))?;
        scene.claim(&mut worker, "worker A")?.context("a run")?;
        worker.kill()?;
        scene.take_over(1)?;
        let state = scene.state(1)?;
        let wanted = if attempt < 3 { "ready" } else { "failed" };
        ensure!(state == format!("{wanted} {attempt} its worker died"), "{state}");
    }
    ensure!(scene.claim(&mut scene.worker("last")?, "worker B")?.is_none());
    Ok(())
}

#[lab_test]
fn a_run_that_was_finished_between_read_and_claim_is_not_claimed(lab: &Lab) -> Result<()> {
    let mut scene = Scene::set(lab, 2)?;
    let mut worker = scene.worker("worker")?;
    let mut late = Background::connect(&scene.db.conninfo())?;
    scene.admin.run("SELECT pg_advisory_lock(7)")?;
    // It reads both runs as ready, and is held up before it claims.
    let held_up = statement("## Claim", "worker B", 1, 0)?.replace(
        "WHERE state = 'ready' ORDER",
        "WHERE state = 'ready' AND pg_advisory_xact_lock_shared(7)::text = '' ORDER",
    );
    late.send(&held_up)?;
    late.wait_until_blocked()?;
    let (run, token) = scene.claim(&mut worker, "worker A")?.context("a run")?;
    worker.rows(&statement("## Finish", "", run, token)?)?;
    scene.admin.run("SELECT pg_advisory_unlock(7)")?;
    let rows = late.rows()?;
    ensure!(rows.len() == 1 && rows[0][0].as_deref() == Some("2"), "{rows:?}");
    ensure!(scene.state(1)? == "done 1 A", "{}", scene.state(1)?);
    Ok(())
}

#[lab_test]
fn a_run_that_was_finished_before_its_lease_was_taken_is_not_done_twice(lab: &Lab) -> Result<()> {
    let mut scene = Scene::set(lab, 1)?;
    let (mut first, mut second) = (scene.worker("first")?, scene.worker("second")?);
    let (run, token) = scene.claim(&mut first, "worker A")?.context("a run")?;
    first.rows(&statement("## Finish", "", run, token)?)?;
    first.freeze()?;
    // By its name alone, and by somebody who has read long ago that it is ready.
    let token = second.number("SELECT lease_acquire('run:1')")?.context("it is free")?;
    let claim = format!(
        "UPDATE runs SET state = 'running', attempts = attempts + 1, fence = {token} \
         WHERE id = 1 AND state = 'ready' RETURNING id"
    );
    ensure!(second.rows(&claim)?.is_empty() && scene.state(1)? == "done 1 A");
    first.thaw()
}

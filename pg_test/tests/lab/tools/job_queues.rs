//! Job queues as they are, with workers that lease each job and fence its result: a worker that froze in the middle
//! of a job, and whose job the queue gave to another, comes back. `docs/recipes/job-queues.md` shows the workers.

automod::dir!(pub "tests/lab/tools/job_queues");

use crate::support::program::Program;
use office::Office;
use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Context, Database, Lab, Result, Session};
use queue::{Queue, GRAPHILE_WORKER, PG_BOSS, PROCRASTINATE};
use std::time::Duration;
use worker::Programs;

/// The results. The queue's own tables are left alone.
const TABLE: &str = "
    CREATE TABLE totals (job_id text PRIMARY KEY, amount int NOT NULL);
    SELECT fence_protect('totals', lease => 'job:{job_id}');
";

const QUEUES: [&Queue; 3] = [&GRAPHILE_WORKER, &PG_BOSS, &PROCRASTINATE];

/// A database with the queue in it, its programs, and the office that the jobs ask for amounts.
struct Scene<'a> {
    lab: &'a Lab,
    queue: &'a Queue,
    programs: Programs,
    database: Database,
    admin: Session,
    office: Office,
}

impl<'a> Scene<'a> {
    /// `changes` are made to the worker's program: what it should say, and what it says instead.
    fn set(lab: &'a Lab, queue: &'a Queue, changes: &[(&str, &str)]) -> Result<Scene<'a>> {
        let programs = Programs::bring(queue, changes)?;
        let database = lab.database()?;
        let mut admin = database.connect()?;
        admin.run(TABLE)?;
        let scene = Scene { lab, queue, programs, database, admin, office: Office::open()? };
        if queue.has_setup {
            scene.worker(&["setup"])?.ends_well()?;
        }
        Ok(scene)
    }

    fn worker(&self, arguments: &[&str]) -> Result<Program> {
        self.programs.start(self.lab, &self.database, arguments)
    }

    /// Puts a job into the queue and returns the worker that is in the middle of it.
    fn in_the_middle(&mut self) -> Result<(Program, office::Request)> {
        let worker = self.worker(&[])?;
        wait_until("the queue is there", PATIENCE, || self.admin.rows(self.queue.job).is_ok())?;
        self.worker(&[&self.office.url()])?.ends_well()?;
        let request = self.office.next(PATIENCE)?.context("nobody asks")?;
        Ok((worker, request))
    }

    /// The queue's view of the job: its state, then its worker.
    fn job(&mut self) -> Result<String> {
        self.admin.one(&format!("SELECT coalesce(({}), 'gone')", self.queue.job), &[])
    }

    /// A worker that has been given the job of the frozen one, and is in the middle of it.
    fn next_worker(&mut self) -> Result<(Program, office::Request)> {
        let mut worker = self.worker(&[])?;
        let mut request = None;
        wait_until("the queue gives the job to another worker", PATIENCE, || {
            if let Some(rescue) = self.queue.rescue {
                let _ = self.admin.run(rescue);
            }
            request = self.office.next(Duration::from_secs(1)).ok().flatten();
            request.is_some() || worker.has_ended()
        })?;
        let request = request.with_context(|| format!("it has ended: {}", worker.said()))?;
        Ok((worker, request))
    }

    fn wait_until_done(&mut self) -> Result<()> {
        let mut state = String::new();
        wait_until("the job is done", PATIENCE, || {
            state = self.job().unwrap_or_default();
            state.starts_with(self.queue.done)
        })
        .with_context(|| format!("the job is {state}"))
    }

    fn wait_for_result(&mut self, amount: i32) -> Result<()> {
        wait_until("the result is there", PATIENCE, || self.result().is_ok_and(|is| is == amount))
    }

    /// The only result there is.
    fn result(&mut self) -> Result<i32> {
        self.admin.one(
            "SELECT CASE WHEN count(*) = 1 AND min(fence) > 0 THEN max(amount) END FROM totals",
            &[],
        )
    }
}

/// A job of two workers: the first froze for longer than its lease, and has come back in the middle of the second's run.
struct Overtaken<'a> {
    scene: Scene<'a>,
    first: Program,
    _second: Program,
    to_second: office::Request,
    /// The queue's view of the job before.
    job: String,
}

impl<'a> Overtaken<'a> {
    fn worker(lab: &'a Lab, queue: &'a Queue, changes: &[(&str, &str)]) -> Result<Overtaken<'a>> {
        let mut scene = Scene::set(lab, queue, changes)?;
        let (mut first, to_first) = scene.in_the_middle()?;
        first.freeze()?;
        let (_second, to_second) = scene.next_worker()?;
        let job = scene.job()?;
        to_first.answer(1)?;
        first.thaw()?;
        Ok(Overtaken { scene, first, _second, to_second, job })
    }

    /// The same with one that does not leave when its lease is lost.
    fn that_stays(lab: &'a Lab, queue: &'a Queue) -> Result<Overtaken<'a>> {
        Overtaken::worker(lab, queue, &[(queue.exit, queue.no_exit)])
    }
}

/// By an error of the lease, or by what a client tells as soon as it is lost.
fn tells_a_loss(said: &str) -> bool {
    said.contains("LeaseLost") || said.contains("kind='lost'")
}

fn a_frozen_worker_comes_back(lab: &Lab, queue: &Queue) -> Result<()> {
    let Overtaken { mut scene, mut first, _second, to_second, job } =
        Overtaken::worker(lab, queue, &[])?;
    let said = first.leaves_with_failure(PATIENCE)?;
    ensure!(said.contains("the job is another's now") && tells_a_loss(&said), "{said}");
    let left = scene.job()?;
    ensure!(left == job, "the late worker has told the queue something: {job} became {left}");

    to_second.answer(2)?;
    scene.wait_until_done()?;
    ensure!(scene.result()? == 2, "the result is the late worker's");
    ensure!(scene.office.next(Duration::ZERO)?.is_none(), "there was a third run");
    Ok(())
}

/// The server refuses the result before the worker's own clock tells it anything.
fn a_worker_whose_lease_was_revoked_writes_nothing(lab: &Lab, queue: &Queue) -> Result<()> {
    let mut scene = Scene::set(lab, queue, &[])?;
    let (mut first, to_first) = scene.in_the_middle()?;
    let job = scene.job()?;
    scene.admin.run("SELECT lease_revoke(name) FROM fence.leases WHERE name LIKE 'job:%'")?;
    to_first.answer(1)?;
    let said = first.leaves_with_failure(PATIENCE)?;
    ensure!(
        said.contains("NotSpeaking") || said.contains("Refused") || tells_a_loss(&said),
        "{said}"
    );
    ensure!(scene.job()? == job, "it has told the queue something");
    ensure!(scene.admin.one::<i64>("SELECT count(*) FROM totals", &[])? == 0, "it has written");
    Ok(())
}

/// A worker that reports its loss as a failure: the queue takes it for the failure of the run that is under way, and
/// a third run follows. Its result is refused by nothing but the question whether there is one already.
fn a_reported_loss_starts_a_third_run(lab: &Lab, queue: &Queue) -> Result<()> {
    // The workers go on to the end.
    let Overtaken { mut scene, first: _first, _second, to_second, job } =
        Overtaken::that_stays(lab, queue)?;
    wait_until("the late worker's report changes the job", PATIENCE, || {
        scene.job().unwrap_or_default() != job
    })?;
    to_second.answer(2)?;
    let third = scene.office.next(PATIENCE)?.context("no third run followed")?;
    ensure!(scene.result()? == 2, "the second run's result is not there");
    third.answer(3)?;
    scene.wait_until_done()?;
    wait_until("the third run ends", PATIENCE, || {
        scene
            .admin
            .one("SELECT NOT EXISTS (SELECT FROM fence.leases WHERE state = 'held')", &[])
            .unwrap_or(false)
    })?;
    ensure!(scene.result()? == 2, "the third run has written over the second's result");
    Ok(())
}

cases![
    slow:
    graphile_worker_keeps_one_result_of_a_frozen_worker_s_job => a_frozen_worker_comes_back(&GRAPHILE_WORKER),
    pg_boss_keeps_one_result_of_a_frozen_worker_s_job => a_frozen_worker_comes_back(&PG_BOSS),
    procrastinate_keeps_one_result_of_a_frozen_worker_s_job => a_frozen_worker_comes_back(&PROCRASTINATE),
    a_loss_reported_to_pg_boss_starts_a_third_run => a_reported_loss_starts_a_third_run(&PG_BOSS),
    a_loss_reported_to_procrastinate_starts_a_third_run => a_reported_loss_starts_a_third_run(&PROCRASTINATE),
];

/// A worker that hides its loss and returns: the queue takes that for the success of the run that is under way. Were
/// that one to fail, nobody would try again.
fn a_hidden_loss_ends_the_job_of_another(lab: &Lab, queue: &Queue) -> Result<()> {
    let changes = [(queue.exit, queue.no_exit), queue.hides];
    let Overtaken { mut scene, first: _first, _second, to_second, job } =
        Overtaken::worker(lab, queue, &changes)?;
    ensure!(!job.starts_with(queue.done), "the job is {job}");
    scene.wait_until_done()?;
    let results: i64 = scene.admin.one("SELECT count(*) FROM totals", &[])?;
    ensure!(results == 0, "nothing is done yet");
    to_second.answer(2)?;
    scene.wait_for_result(2)
}

#[lab_test(slow)]
fn a_loss_hidden_from_a_queue_ends_the_job_of_another(lab: &Lab) -> Result<()> {
    // In pg-boss a timer of its own has told of a failure before.
    for queue in [&GRAPHILE_WORKER, &PROCRASTINATE] {
        a_hidden_loss_ends_the_job_of_another(lab, queue).context(queue.name)?;
    }
    Ok(())
}

#[lab_test(slow)]
fn a_loss_reported_to_procrastinate_without_retries_fails_the_running_job(lab: &Lab) -> Result<()> {
    let queue = &PROCRASTINATE;
    let changes = [(queue.exit, queue.no_exit), ("retry=5", "retry=False")];
    let Overtaken { mut scene, first: _first, _second, to_second, job } =
        Overtaken::worker(lab, queue, &changes)?;
    ensure!(job.starts_with("doing"));
    wait_until("the running job has failed", PATIENCE, || {
        scene.job().is_ok_and(|job| job.starts_with("failed"))
    })?;
    to_second.answer(2)?;
    scene.wait_for_result(2)
}

#[lab_test(slow)]
fn a_failure_reported_to_graphile_worker_leaves_the_running_job(lab: &Lab) -> Result<()> {
    let Overtaken { mut scene, first, _second, to_second, job } =
        Overtaken::that_stays(lab, &GRAPHILE_WORKER)?;
    wait_until("the late worker has told its loss", PATIENCE, || {
        first.said().contains("Failed task")
    })?;
    ensure!(scene.job()? == job, "the running job has changed");
    to_second.answer(2)?;
    scene.wait_until_done()?;
    ensure!(scene.result()? == 2);
    ensure!(scene.office.next(Duration::ZERO)?.is_none(), "there was a third run");
    Ok(())
}

#[lab_test(slow)]
fn every_queue_s_worker_leaves_when_its_lease_is_revoked(lab: &Lab) -> Result<()> {
    for queue in QUEUES {
        a_worker_whose_lease_was_revoked_writes_nothing(lab, queue).context(queue.name)?;
    }
    Ok(())
}

#[lab_test]
fn the_page_shows_the_workers_that_run(_: &Lab) -> Result<()> {
    let page = std::fs::read_to_string(
        pg_test::source_tree::source_root().join("docs/recipes/job-queues.md"),
    )?;
    for queue in QUEUES {
        let block = format!("```{}\n{}```\n", queue.language, queue.source()?);
        ensure!(
            page.contains(&block),
            "docs/recipes/job-queues.md shows another {}",
            queue.program
        );
    }
    Ok(())
}

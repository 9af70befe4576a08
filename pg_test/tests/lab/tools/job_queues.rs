//! Job queues as they are, with the workers of `docs/recipes/job-queues.md`, which lease each job and fence its result: a
//! worker that froze in the middle of a job, and whose job the queue gave to another, comes back.

automod::dir!("tests/lab/tools/job_queues");

use crate::support::program::{Program, Shown};
use office::Office;
use pg_test::orm::{self, Runtime};
use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Context, Database, Lab, Result, Session};
use std::time::Duration;

/// The results. The queue's own tables are left alone.
const TABLE: &str = "
    CREATE TABLE totals (job_id text PRIMARY KEY, amount int NOT NULL);
    SELECT fence_protect('totals', lease => 'job:{job_id}');
";

/// A lease that a test can outlive; a queue that gives up a job later than its lease ends.
const SECONDS: [(&str, &str); 2] = [("LEASE_SECONDS", "9"), ("EXPIRE_SECONDS", "20")];

/// A queue and its worker, and what a test must know of it.
struct Queue {
    runtime: Runtime,
    worker: Shown,
    /// `setup` must be run before the first worker, which cannot make the queue's tables.
    has_setup: bool,
    /// How the job is: its state, then what changes when it is given to somebody else.
    job: &'static str,
    /// How that begins when the job is done.
    done: &'static str,
    /// Has the worker's rescuer run now, where it would run but once a minute.
    rescue: Option<&'static str>,
}

const NODE: Runtime = Runtime::Node(&["graphile-worker@0.17.3", "pg-boss@10.4.2", "pg@8.23.1"]);
const PAGE: &str = "docs/recipes/job-queues.md";

const GRAPHILE_WORKER: Queue = Queue {
    runtime: NODE,
    worker: Shown(PAGE, "js", "graphile-worker"),
    has_setup: false,
    job: "SELECT concat_ws(' ', CASE WHEN locked_by IS NULL THEN 'waiting' ELSE 'active' END, \
          attempts, locked_by) FROM graphile_worker.jobs WHERE task_identifier = 'total'",
    done: "gone",
    rescue: Some("SELECT graphile_worker.add_job('rescue', job_key => 'rescue')"),
};

const PG_BOSS: Queue = Queue {
    runtime: NODE,
    worker: Shown(PAGE, "js", "pg-boss"),
    has_setup: false,
    job:
        "SELECT concat_ws(' ', state, retry_count, started_on) FROM pgboss.job WHERE name = 'total'",
    done: "completed",
    rescue: None,
};

const PROCRASTINATE: Queue = Queue {
    runtime: Runtime::Python(&["procrastinate==3.10.0", "psycopg[binary,pool]==3.3.9"]),
    worker: Shown(PAGE, "python", "procrastinate"),
    has_setup: true,
    job: "SELECT concat_ws(' ', status, attempts, worker_id) FROM procrastinate_jobs WHERE task_name = 'total'",
    done: "succeeded",
    rescue: None,
};

/// A database with the queue in it, its worker's program, and the office that the jobs ask for amounts.
struct Scene<'a> {
    lab: &'a Lab,
    queue: &'a Queue,
    source: String,
    database: Database,
    admin: Session,
    office: Office,
}

impl<'a> Scene<'a> {
    fn set(lab: &'a Lab, queue: &'a Queue, changes: &[(&str, &str)]) -> Result<Scene<'a>> {
        let source = queue.worker.source(changes)?;
        let database = lab.database()?;
        let mut admin = database.connect()?;
        admin.run(TABLE)?;
        let scene = Scene { lab, queue, source, database, admin, office: Office::open()? };
        if queue.has_setup {
            scene.worker(&["setup"])?.ends_well()?;
        }
        Ok(scene)
    }

    fn worker(&self, arguments: &[&str]) -> Result<Program> {
        let mut command = orm::command(self.lab.rundir(), self.queue.runtime, &self.source)?;
        let conninfo = self.database.conninfo();
        let (port, name) = conninfo.place();
        command.arg(format!("postgresql://postgres@127.0.0.1:{port}/{name}")).args(arguments);
        command.envs(SECONDS);
        Program::start(command)
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

    /// Waits until that is so.
    fn job_is(&mut self, what: &str, is_so: impl Fn(&str) -> bool) -> Result<()> {
        let mut job = String::new();
        wait_until(what, PATIENCE, || {
            job = self.job().unwrap_or_default();
            is_so(&job)
        })
        .with_context(|| format!("the job is {job}"))
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

    /// The results that there are, fenced: their number, and the greatest.
    fn results(&mut self) -> Result<String> {
        let sql = "SELECT count(*) FILTER (WHERE fence > 0) || ': ' || coalesce(max(amount), 0) FROM totals";
        self.admin.one(sql, &[])
    }
}

/// By an error of the lease, or by what a client tells as soon as it is lost.
fn tells_a_loss(said: &str) -> bool {
    said.contains("LeaseLost") || said.contains("kind='lost'")
}

/// How the workers leave at a loss, and what goes on to tell the queue of it instead.
const STAYS_JS: (&str, &str) = ("process.exit(1);", "");
const STAYS_PYTHON: (&str, &str) = ("os._exit(1)", "pass");
/// What would tell the queue a failure then, and what tells it a success instead.
const HIDES_JS: (&str, &str) = ("throw error;", "");
const HIDES_PYTHON: (&str, &str) = ("        raise\n", "");

/// A worker is frozen for longer than its lease, and comes back in the middle of the next one's run. It says those words,
/// and the queue's view of the job becomes that, or another, or stays the same; and there are so many runs. Its result never counts,
/// and were there a third run, it would be refused by nothing but the question whether there is a result already.
fn comes_back(
    lab: &Lab,
    queue: &Queue,
    changes: &[(&str, &str)],
    (says, becomes, runs): (&str, &str, u32),
) -> Result<()> {
    let mut scene = Scene::set(lab, queue, changes)?;
    let (mut first, to_first) = scene.in_the_middle()?;
    first.freeze()?;
    let (_second, to_second) = scene.next_worker()?;
    let job = scene.job()?;
    ensure!(becomes == "same" || !job.starts_with(becomes), "the job is {job}");
    to_first.answer(1);
    first.thaw()?;
    if changes.is_empty() {
        let said = first.leaves_with_failure()?;
        ensure!(tells_a_loss(&said), "{said}");
    }
    wait_until("the late worker tells its loss", PATIENCE, || first.said().contains(says))
        .with_context(|| first.said())?;
    match becomes {
        "same" => ensure!(scene.job()? == job, "{job} became {}", scene.job()?),
        "another" => scene.job_is("the late worker's report changes the job", |now| now != job)?,
        _ => scene.job_is(becomes, |now| now.starts_with(becomes))?,
    }
    ensure!(scene.results()? == "0: 0", "the late worker has written");
    to_second.answer(2);
    if runs == 3 {
        let third = scene.office.next(PATIENCE)?.context("no third run followed")?;
        ensure!(scene.results()? == "1: 2", "the second run's result is not there");
        third.answer(3);
        scene.job_is("done", |job| job.starts_with(queue.done))?;
    } else if becomes == "same" {
        scene.job_is("done", |job| job.starts_with(queue.done))?;
        ensure!(scene.office.next(Duration::ZERO)?.is_none(), "there was a third run");
    }
    wait_until("all runs have ended", PATIENCE, || {
        let held = "SELECT count(*) FROM fence.leases WHERE state = 'held'";
        scene.admin.one::<i64>(held, &[]).unwrap_or(1) == 0
    })?;
    ensure!(scene.results()? == "1: 2", "the results are {}", scene.results()?);
    Ok(())
}

const LEFT: (&str, &str, u32) = ("the job is another's now", "same", 2);
/// The queue takes the report for the failure of the run that is under way, and a third run follows.
const REPORTED: (&str, &str, u32) = ("", "another", 3);

cases![
    slow:
    graphile_worker_keeps_one_result_of_a_frozen_worker_s_job => comes_back(&GRAPHILE_WORKER, &[], LEFT),
    pg_boss_keeps_one_result_of_a_frozen_worker_s_job => comes_back(&PG_BOSS, &[], LEFT),
    procrastinate_keeps_one_result_of_a_frozen_worker_s_job => comes_back(&PROCRASTINATE, &[], LEFT),
    a_loss_reported_to_pg_boss_starts_a_third_run => comes_back(&PG_BOSS, &[STAYS_JS], REPORTED),
    a_loss_reported_to_procrastinate_starts_a_third_run => comes_back(&PROCRASTINATE, &[STAYS_PYTHON], REPORTED),
    a_loss_reported_to_procrastinate_without_retries_fails_the_running_job =>
        comes_back(&PROCRASTINATE, &[STAYS_PYTHON, ("retry=5", "retry=False")], ("", "failed", 2)),
    a_loss_reported_to_graphile_worker_leaves_the_running_job =>
        comes_back(&GRAPHILE_WORKER, &[STAYS_JS], ("Failed task", "same", 2)),
    // The queue takes it for the success of the run that is under way. Were that one to fail, nobody would try again.
    // (In pg-boss a timer of its own has told of a failure before.)
    a_loss_hidden_from_graphile_worker_ends_the_job_of_another =>
        comes_back(&GRAPHILE_WORKER, &[STAYS_JS, HIDES_JS], ("", GRAPHILE_WORKER.done, 2)),
    a_loss_hidden_from_procrastinate_ends_the_job_of_another =>
        comes_back(&PROCRASTINATE, &[STAYS_PYTHON, HIDES_PYTHON], ("", PROCRASTINATE.done, 2)),
];

/// The server refuses the result before the worker's own clock tells it anything.
#[lab_test(slow)]
fn every_queue_s_worker_leaves_when_its_lease_is_revoked(lab: &Lab) -> Result<()> {
    for queue in [&GRAPHILE_WORKER, &PG_BOSS, &PROCRASTINATE] {
        let mut scene = Scene::set(lab, queue, &[])?;
        let (mut first, to_first) = scene.in_the_middle()?;
        let job = scene.job()?;
        scene.admin.run("SELECT lease_revoke(name) FROM fence.leases WHERE name LIKE 'job:%'")?;
        to_first.answer(1);
        let said = first.leaves_with_failure()?;
        let tells = said.contains("NotSpeaking") || said.contains("Refused") || tells_a_loss(&said);
        ensure!(tells, "{said}");
        ensure!(scene.job()? == job, "it has told the queue something");
        ensure!(scene.results()? == "0: 0", "it has written");
    }
    Ok(())
}

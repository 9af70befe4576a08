//! The queues, and what a test must know of each.

use pg_test::orm::Runtime;
use pg_test::source_tree::source_root;
use pg_test::{Context, Result};

/// A queue and its worker.
pub struct Queue {
    pub name: &'static str,
    /// From where it is fetched.
    pub runtime: Runtime,
    /// The worker's file in this directory, and how a page marks its language.
    pub program: &'static str,
    pub language: &'static str,
    /// `setup` must be run before the first worker, which cannot make the queue's tables.
    pub has_setup: bool,
    /// How the job is: its state, then what changes when it is given to somebody else.
    pub job: &'static str,
    /// How that begins when the job is done.
    pub done: &'static str,
    /// Has the worker's rescuer run now, where it would run but once a minute.
    pub rescue: Option<&'static str>,
    /// How the program leaves at a loss, and what goes on to tell the queue instead.
    pub exit: &'static str,
    pub no_exit: &'static str,
    /// The statement that would tell the queue a failure then, and the one that tells it a success instead.
    pub hides: (&'static str, &'static str),
}

impl Queue {
    pub fn source(&self) -> Result<String> {
        let path = source_root().join("pg_test/tests/lab/tools/job_queues").join(self.program);
        std::fs::read_to_string(&path).with_context(|| path.display().to_string())
    }
}

const NODE: Runtime = Runtime::Node(&["graphile-worker@0.17.3", "pg-boss@10.4.2", "pg@8.23.1"]);

pub const GRAPHILE_WORKER: Queue = Queue {
    name: "graphile-worker",
    runtime: NODE,
    program: "graphile_worker.mjs",
    language: "js",
    has_setup: false,
    job: "SELECT concat_ws(' ', CASE WHEN locked_by IS NULL THEN 'waiting' ELSE 'active' END, \
          attempts, locked_by) FROM graphile_worker.jobs WHERE task_identifier = 'total'",
    done: "gone",
    rescue: Some("SELECT graphile_worker.add_job('rescue', job_key => 'rescue')"),
    exit: "process.exit(1);",
    no_exit: "",
    hides: ("throw error;", ""),
};

pub const PG_BOSS: Queue = Queue {
    name: "pg-boss",
    runtime: NODE,
    program: "pg_boss.mjs",
    language: "js",
    has_setup: false,
    job:
        "SELECT concat_ws(' ', state, retry_count, started_on) FROM pgboss.job WHERE name = 'total'",
    done: "completed",
    rescue: None,
    exit: "process.exit(1);",
    no_exit: "",
    hides: ("throw error;", ""),
};

pub const PROCRASTINATE: Queue = Queue {
    name: "Procrastinate",
    runtime: Runtime::Python(&["procrastinate==3.10.0", "psycopg[binary,pool]==3.3.9"]),
    program: "procrastinate_worker.py",
    language: "python",
    has_setup: true,
    job: "SELECT concat_ws(' ', status, attempts, worker_id) FROM procrastinate_jobs WHERE task_name = 'total'",
    done: "succeeded",
    rescue: None,
    exit: "os._exit(1)",
    no_exit: "pass",
    hides: ("        raise\n", ""),
};

//! Every SQL example of every page gives the result that the page shows. Each page is one test, on its own server.

use super::example::{self, ResultUse, Statement};
use super::page;
use pg_test::markdown;
use pg_test::process::{PATIENCE, wait_until};
use pg_test::{Background, Conninfo, Context, Harness, Result, Rows, bail, ensure, harness_test};
use std::collections::BTreeMap;

/// Defines one test for each page. (`code.md` must explain SQL blocks on any other page.)
macro_rules! pages {
    ($($page:ident = $path:literal),* $(,)?) => {
        pub const RUN: &[&str] = &[$($path),*];
        $(
            #[harness_test]
            fn $page(harness: &Harness) -> Result<()> {
                run(harness, $path)
            }
        )*
    };
}

pages![
    readme = "README.md",
    adopt = "docs/recipes/adopt/README.md",
    beyond_one_machine = "docs/operations/beyond-one-machine.md",
    capacity = "docs/operations/capacity.md",
    clients = "docs/tutorial/orms-and-poolers.md",
    concepts = "docs/tutorial/concepts.md",
    creating_rows = "docs/recipes/creating-rows.md",
    from_advisory_locks = "docs/recipes/from/advisory-locks.md",
    from_etcd_and_zookeeper = "docs/recipes/from/etcd-and-zookeeper.md",
    from_lease_columns = "docs/recipes/from/lease-columns.md",
    from_lease_table = "docs/recipes/from/lease-table.md",
    from_redis = "docs/recipes/from/redis.md",
    from_shedlock = "docs/recipes/from/shedlock.md",
    from_syncguard = "docs/recipes/from/syncguard.md",
    guards_and_waiting = "docs/tutorial/guards-and-waiting.md",
    installing = "docs/operations/installing.md",
    job_queues = "docs/recipes/job-queues.md",
    many_databases = "docs/recipes/many-databases.md",
    monitoring = "docs/operations/monitoring.md",
    operations = "docs/operations/operations.md",
    recipes = "docs/recipes/README.md",
    reference = "docs/reference/sql.md",
    security_and_audit = "docs/operations/security-and-audit.md",
    testing_and_migrations = "docs/recipes/testing-and-migrations.md",
    troubleshooting = "docs/reference/errors.md",
    work_table = "docs/recipes/work-table.md",
    wrappers = "docs/tutorial/wrappers.md",
];

/// The sessions of the workers in the examples, and their stored values.
struct Page {
    path: String,
    conninfo: Conninfo,
    sessions: BTreeMap<String, Background>,
    waiting: BTreeMap<String, Statement>,
    kept: BTreeMap<String, String>,
}

impl Page {
    fn new(path: &str, conninfo: Conninfo) -> Page {
        let (sessions, waiting, kept) = Default::default();
        Page { path: path.to_owned(), conninfo, sessions, waiting, kept }
    }

    fn place(&self, statement: &Statement) -> String {
        format!("{}:{}: {}", self.path, statement.line, statement.sql)
    }

    fn session(&mut self, worker: &str) -> Result<&mut Background> {
        if !self.sessions.contains_key(worker) {
            let session = Background::connect(&self.conninfo)?;
            self.sessions.insert(worker.to_owned(), session);
        }
        self.sessions.get_mut(worker).context("just connected")
    }

    fn block(&mut self, statements: &[Statement]) -> Result<()> {
        for statement in statements {
            self.arrive(&statement.worker)?;
            let place = self.place(statement);
            self.play(statement).context(place)?;
        }
        let waiting: Vec<String> = self.waiting.keys().cloned().collect();
        waiting.iter().try_for_each(|worker| self.arrive(worker))
    }

    fn play(&mut self, statement: &Statement) -> Result<()> {
        let sql = markdown::filled(&statement.sql, |name| self.kept.get(name).cloned())?;
        let session = self.session(&statement.worker)?;
        session.send(&sql)?;
        if statement.waits {
            session.wait_until_blocked()?;
            self.waiting.insert(statement.worker.clone(), statement.clone());
            return Ok(());
        }
        let mut outcome = session.outcome(PATIENCE)?;
        if outcome.as_ref().is_err_and(|fault| fault.is_disconnect()) {
            // Another worker has ended the session, so its client connects again.
            self.sessions.remove(&statement.worker);
            let session = self.session(&statement.worker)?;
            session.send(&sql)?;
            outcome = session.outcome(PATIENCE)?;
        }
        if sql.contains("wait_event") {
            // A waiter wakes up for a moment now and then to check. If it never waits, the statement's check fails.
            let session = self.session(&statement.worker)?;
            let _ = wait_until("they are seen to wait", PATIENCE, || {
                let as_told = example::check(statement, &outcome).is_ok();
                if !as_told && session.send(&sql).is_ok() {
                    outcome = session.outcome(PATIENCE).unwrap_or_else(|_| outcome.clone());
                }
                as_told
            });
        }
        example::check(statement, &outcome)?;
        self.then(statement, outcome.unwrap_or_default())
    }

    /// Waits for the answer of a blocked worker.
    fn arrive(&mut self, worker: &str) -> Result<()> {
        let Some(statement) = self.waiting.remove(worker) else { return Ok(()) };
        let outcome = self.session(worker)?.outcome(PATIENCE)?;
        example::check(&statement, &outcome).with_context(|| self.place(&statement))?;
        self.then(&statement, outcome.unwrap_or_default())
    }

    fn then(&mut self, statement: &Statement, rows: Rows) -> Result<()> {
        match &statement.then {
            ResultUse::Show => {}
            ResultUse::Keep(name) => {
                let [row] = &rows[..] else { bail!("\\gset: not one row: {rows:?}") };
                let [Some(value)] = &row[..] else { bail!("\\gset: not one value: {row:?}") };
                self.kept.insert(name.clone(), value.clone());
            }
            ResultUse::Run => {
                for sql in rows.into_iter().flatten().flatten() {
                    self.session(&statement.worker)?.run(&sql)?;
                }
            }
        }
        Ok(())
    }
}

fn run(harness: &Harness, path: &str) -> Result<()> {
    // The examples create roles, so each page has its own server.
    let cluster = harness.builder().start()?;
    // These two pages create the extension themselves.
    if !["README.md", "docs/operations/installing.md"].contains(&path) {
        cluster.connect("postgres")?.run("CREATE EXTENSION pg_fence")?;
    }
    play(path, cluster.conninfo("postgres"))
}

/// Runs the examples of a page in a database.
pub fn play(path: &str, conninfo: Conninfo) -> Result<()> {
    let version = conninfo.connect()?.text("SHOW server_version_num")?.context("no version")?;
    let major = version.parse::<u32>()? / 10_000;
    let blocks = example::blocks(&page(path)?, major)?;
    ensure!(!blocks.is_empty(), "{path} has no example");
    let mut page = Page::new(path, conninfo);
    blocks.iter().try_for_each(|block| page.block(block))
}

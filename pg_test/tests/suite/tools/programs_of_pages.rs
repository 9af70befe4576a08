//! Complete programs from the pages, run unchanged.

use crate::support::program::{Holder, Program, Shown};
use pg_test::orm;
use pg_test::process::output_of;
use pg_test::runtime::{self, PYTHON, Runtime};
use pg_test::setup::{self, Package};
use pg_test::{Calls, Context, Database, Harness, Result, ensure, harness_test};
use std::fs;
use std::process::Command;

const NODE: Runtime = Runtime::Node(&["pg@8", "typescript@5", "@types/node@20", "@types/pg@8"]);

/// Keeps a lease with a ttl of a second for three seconds, and must then learn that it was revoked.
const KEEPS: &str = r#"
import sys, threading, types

with psycopg.connect(sys.argv[1], autocommit=True) as conn:
    one = lambda sql, *given: conn.execute(sql, given).fetchone()[0]
    lease, done = types.SimpleNamespace(ttl=1, deadline=time.monotonic() + 1), threading.Event()
    token = one("SELECT lease_acquire('job', ttl => '1 s')")
    thread = threading.Thread(target=heartbeat, args=(sys.argv[1], "job", token, lease, done))
    thread.start()
    time.sleep(3)
    assert one("SELECT lease_check('job', %s)", token) and time.monotonic() < lease.deadline
    one("SELECT lease_revoke('job')")
    thread.join(10)
    assert lease.deadline == 0
    done.set()
"#;

/// Processes runs until none is left. A run of `b` fails.
const WORKS_IN_PYTHON: &str = r#"
import os

def stop_when_all_is_done():
    with psycopg.connect(sys.argv[1], autocommit=True) as connection:
        while connection.execute("SELECT 1 FROM runs WHERE state IN ('ready', 'running') LIMIT 1").fetchone():
            time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)

def process(given):
    if given == "b":
        raise ValueError("no b")
    return given.upper()

threading.Thread(target=stop_when_all_is_done).start()
work(sys.argv[1], process)
"#;

/// Is told to end in the middle of its work.
const IS_TOLD_TO_END: &str = r#"
import os

def process(given):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3600)

work(sys.argv[1], process)
"#;

const END_HEARTBEAT: &str = r#"
import os

def end_heartbeat(connection):
    end = """SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity
        WHERE datname = current_database() AND query LIKE '%UPDATE runs%' AND pid <> pg_backend_pid()"""
    while connection.execute(end).fetchone() == (0,):
        time.sleep(0.1)
"#;

/// The session of its heartbeat is terminated, and it continues until the lease has been renewed again. Then it ends.
const LOSES_ITS_HEARTBEAT_S_SESSION: &str = r#"
def process(given):
    with psycopg.connect(sys.argv[1], autocommit=True) as other:
        end_heartbeat(other)
        seen = lambda: other.execute("SELECT held_until > clock_timestamp(), held_until FROM runs WHERE id = 1").fetchone()
        beats, before = 0, seen()[1]
        while beats < 2:
            held, now = seen()
            assert held
            beats, before = beats + (now > before), now
            time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3600)
"#;

/// No later heartbeat gets an answer, because of an error or for no reason, and the work takes its time.
const HEARS_NOTHING: [&str; 2] = [
    r#"
def process(given):
    with psycopg.connect(sys.argv[1], autocommit=True) as other:
        def fail(*_, **__):
            raise psycopg.OperationalError("the server is away")
        psycopg.connect = fail
        end_heartbeat(other)
    time.sleep(3600)
"#,
    r#"
def process(given):
    psycopg.Connection.execute = lambda *_, **__: threading.Event().wait()
    time.sleep(3600)
"#,
];

/// Reads a file in the middle of its work, and then has done it.
const WAITS_FOR_A_FILE: &str = r#"
import os

def process(given):
    open(os.environ["WORK"]).read()
    return given.upper()

work(sys.argv[1], process)
"#;

const IN_THREE_SECONDS: &str = r#"
work(sys.argv[1], process, ttl=3)
"#;

/// Processes runs until none is left, or is told to end in the middle of its work.
const WORKS_IN_TYPESCRIPT: &str = r#"
const [url, how] = globalThis.process.argv.slice(2) as [string, string];
const end = () => globalThis.process.kill(globalThis.process.pid, "SIGTERM");
const watch = new Pool({ connectionString: url });
const stopWhenAllIsDone = async () => {
  while ((await watch.query("SELECT FROM runs WHERE state IN ('ready', 'running') LIMIT 1")).rowCount) await sleep(100);
  end();
};
if (how === "works") void stopWhenAllIsDone();
await work(url, async (given) => {
  if (how === "ends") {
    end();
    await new Promise(() => {});
  }
  if (given === "b") throw new Error("no b");
  return given.toUpperCase();
});
await watch.end();
"#;

const TABLE_OF_WORK: &str = "docs/recipes/work-table.md";

/// A failed run is due at once.
const NO_PAUSE: [(&str, &str); 1] = [("interval '1 min'", "interval '1 ms'")];

fn python(harness: &Harness, db: &Database, code: &str) -> Result<Command> {
    let mut python = orm::command(harness.rundir(), PYTHON, code)?;
    python.arg(db.conninfo().to_string());
    Ok(python)
}

fn in_python(harness: &Harness, db: &Database, code: &str) -> Result<()> {
    output_of(&mut python(harness, db, code)?).map(drop)
}

/// Returns the page's worker in Python, with what is done with it.
fn worker_in_python(rest: &[&str]) -> Result<String> {
    Ok(Shown(TABLE_OF_WORK, "python", "").source(&NO_PAUSE)? + &rest.concat())
}

/// The same worker with pg_fence's client. The page shows it below the SQL of the other.
fn worker_with_client(rest: &[&str]) -> Result<String> {
    let shown = Shown(TABLE_OF_WORK, "python", "work_with_client").source(&[])?;
    worker_in_python(&[&shown, "work = work_with_client\n", &rest.concat()])
}

/// Creates the page's table and its runs: three if nothing is changed.
fn table_of_work(harness: &Harness, changes: &[(&str, &str)]) -> Result<Database> {
    let db = harness.database()?;
    db.connect()?.run(&Shown(TABLE_OF_WORK, "sql", "CREATE TABLE").source(changes)?)?;
    Ok(db)
}

const ONE_RUN: [(&str, &str); 1] = [("('a'), ('b'), ('c')", "('a')")];

fn the_run_is(db: &Database, wanted: &str) -> Result<()> {
    let run = db
        .connect()?
        .text("SELECT concat_ws(' ', state, attempts, result) FROM runs WHERE id = 1")?;
    ensure!(run.as_deref() == Some(wanted), "{run:?}");
    Ok(())
}

fn the_runs_are_done(db: &Database) -> Result<()> {
    let runs = "SELECT string_agg(concat_ws(' ', input, state, result, attempts, error IS NULL), ', ' ORDER BY id) FROM runs";
    let got = db.connect()?.text(runs)?;
    ensure!(got.as_deref() == Some("a done A 1 t, b failed 3 f, c done C 1 t"), "{got:?}");
    Ok(())
}

#[harness_test(slow)]
fn the_least_heartbeat_keeps_its_lease_and_notices_its_loss(harness: &Harness) -> Result<()> {
    let code = Shown("docs/tutorial/orms-and-poolers.md", "python", "").source(&[])?;
    in_python(harness, &harness.database()?, &format!("{code}{KEEPS}"))
}

#[harness_test(slow)]
fn the_worker_in_python_does_all_runs(harness: &Harness) -> Result<()> {
    let db = table_of_work(harness, &[])?;
    in_python(harness, &db, &worker_in_python(&[WORKS_IN_PYTHON])?)?;
    the_runs_are_done(&db)?;
    let db = table_of_work(harness, &[])?;
    in_python(harness, &db, &worker_with_client(&[WORKS_IN_PYTHON])?)?;
    the_runs_are_done(&db)
}

/// That is as often as a run may fail.
#[harness_test(slow)]
fn three_deployments_do_not_fail_a_run_in_python(harness: &Harness) -> Result<()> {
    let told_to_end =
        [worker_in_python(&[IS_TOLD_TO_END])?, worker_with_client(&[IS_TOLD_TO_END])?];
    let works = [worker_in_python(&[WORKS_IN_PYTHON])?, worker_with_client(&[WORKS_IN_PYTHON])?];
    for (told_to_end, works) in told_to_end.iter().zip(&works) {
        let db = table_of_work(harness, &ONE_RUN)?;
        for _ in 0..3 {
            in_python(harness, &db, told_to_end)?;
            the_run_is(&db, "ready 0")?;
        }
        in_python(harness, &db, works)?;
        the_run_is(&db, "done 1 A")?;
    }
    Ok(())
}

#[harness_test(slow)]
fn an_error_of_one_heartbeat_is_no_loss_in_python(harness: &Harness) -> Result<()> {
    let db = table_of_work(harness, &ONE_RUN)?;
    let code = [END_HEARTBEAT, LOSES_ITS_HEARTBEAT_S_SESSION, IN_THREE_SECONDS];
    in_python(harness, &db, &worker_in_python(&code)?)?;
    the_run_is(&db, "ready 0")
}

#[harness_test(slow)]
fn a_worker_in_python_that_hears_nothing_ends_with_its_lease(harness: &Harness) -> Result<()> {
    for nothing in HEARS_NOTHING {
        let db = table_of_work(harness, &ONE_RUN)?;
        let code = [END_HEARTBEAT, nothing, IN_THREE_SECONDS];
        Program::start(python(harness, &db, &worker_in_python(&code)?)?)?.leaves_with_failure()?;
        the_run_is(&db, "running 1")?;
    }
    Ok(())
}

/// The process is frozen until its run belongs to another worker. Its watchdog may end it before the fence refuses its
/// write.
#[harness_test(slow)]
fn a_worker_in_python_that_was_frozen_writes_nothing_over_its_successor(
    harness: &Harness,
) -> Result<()> {
    let db = table_of_work(harness, &ONE_RUN)?;
    let code = worker_in_python(&[WAITS_FOR_A_FILE])?;
    let mut holder = Holder::start(harness, |work| {
        let mut python = python(harness, &db, &code)?;
        python.env("WORK", work);
        Ok(python)
    })?;
    holder.is_at_work()?;
    holder.program.freeze()?;
    let mut session = db.connect()?;
    // As if its deadline had passed.
    let passes = "UPDATE runs SET held_until = now() - interval '1 s'";
    session.run(&format!("SET session_replication_role = replica; {passes}"))?;
    session.run("RESET session_replication_role")?;
    session.run("UPDATE runs SET held_until = now() + interval '1 h', result = 'B'")?;
    holder.reads("")?;
    holder.program.thaw()?;
    let said = holder.program.leaves_with_failure()?;
    ensure!(said.contains("stale fencing token"), "{said}");
    the_run_is(&db, "running 1 B")
}

#[harness_test(slow)]
fn the_worker_in_typescript_does_all_runs_after_three_deployments(harness: &Harness) -> Result<()> {
    let db = table_of_work(harness, &[])?;
    let home = runtime::fetch(NODE)?;
    orm::link_client(&home)?;
    // Node.js finds libraries that are beside the file.
    let code = Shown(TABLE_OF_WORK, "ts", "").source(&NO_PAUSE)?;
    fs::write(home.join("page.mts"), format!("{code}{WORKS_IN_TYPESCRIPT}"))?;
    let mut compiler = harness.rundir().command("node");
    compiler.args(["node_modules/typescript/bin/tsc", "page.mts", "--strict", "--types", "node"]);
    compiler.args(["--module", "nodenext", "--target", "es2022"]);
    output_of(compiler.current_dir(&home))?;
    let conninfo = db.conninfo();
    let (port, name) = conninfo.place();
    let url = format!("postgresql://postgres@127.0.0.1:{port}/{name}");
    for how in ["ends", "ends", "ends", "works"] {
        output_of(harness.rundir().command("node").arg(home.join("page.mjs")).args([&url, how]))?;
        if how == "ends" {
            the_run_is(&db, "ready 0")?;
        }
    }
    the_runs_are_done(&db)
}

/// Checks a program that writes under its lease, reports a taken lease, and is refused once it has lost the lease. It
/// reads a file in place of the page's slow work.
fn keeps_to_its_lease(
    harness: &Harness,
    shown: Shown,
    packages: &[Package],
    [program, option]: [&str; 2],
    [slow, reads]: [&str; 2],
) -> Result<()> {
    setup::ensure(packages)?;
    let code = shown.source(&[(slow, &format!("{reads}\n{slow}"))])?;
    let code = code.trim_start_matches("<?php");
    let cluster = harness.builder().start()?;
    let mut session = cluster.connect("postgres")?;
    session.run(
        "CREATE EXTENSION pg_fence; CREATE TABLE orders (id bigint PRIMARY KEY, status text);
         INSERT INTO orders VALUES (7, 'new'); SELECT fence_protect('orders', lease => 'order:{id}');
         CREATE ROLE app LOGIN; SELECT fence_grant('app'); GRANT SELECT, UPDATE ON orders TO app",
    )?;
    let start = || {
        Holder::start(harness, |work| {
            let mut command = harness.rundir().command(program);
            let (host, port) = ("127.0.0.1", cluster.port());
            let dsn = format!("pgsql:host={host};port={port};dbname=postgres;user=app");
            command.args([option, code]).env("WORK", work).env("PDO_DSN", dsn);
            command.env("DATABASE_URL", format!("postgresql://app@{host}:{port}/postgres"));
            Ok(command)
        })
    };
    let at_work = || start().and_then(|mut holder| holder.is_at_work().map(|()| holder));
    let status = "SELECT status FROM orders";

    let mut lost = at_work()?;
    let (_, said) = start()?.program.ends()?;
    ensure!(said.contains("is taken"), "{said}");
    session.run("SELECT lease_revoke('order:7')")?;
    let token = session.acquire("order:7", "1 h")?;
    lost.reads("")?;
    let (is_well, said) = lost.program.ends()?;
    ensure!(said.contains("is lost") || !is_well && said.contains("does not speak"), "{said}");
    ensure!(session.text(status)?.as_deref() == Some("new"), "{said}");
    session.release("order:7", token)?.context("held")?;

    let mut holder = at_work()?;
    holder.reads("")?;
    let (is_well, said) = holder.program.ends()?;
    ensure!(is_well, "{said}");
    ensure!(session.text(status)?.as_deref() == Some("paid"), "{said}");
    ensure!(session.text("SELECT state FROM fence.leases")?.as_deref() == Some("free"), "{said}");
    Ok(())
}

#[harness_test(slow)]
fn programs_without_a_client_of_ours_keep_to_their_leases(harness: &Harness) -> Result<()> {
    let ruby = [Package::new("ruby-pg", "/usr/lib/ruby/vendor_ruby/pg.rb")];
    let shown = Shown("docs/tutorial/languages/ruby.md", "ruby", "");
    let slow = ["# the slow work", "File.read(ENV['WORK'])"];
    keeps_to_its_lease(harness, shown, &ruby, ["ruby", "-e"], slow).context("Ruby")?;
    let php = [
        Package::new("php-cli", "/usr/bin/php"),
        Package::new("php-pgsql", "/usr/share/doc/php-pgsql"),
    ];
    let shown = Shown("docs/tutorial/languages/php.md", "php", "");
    let slow = ["// the slow work", "file_get_contents(getenv('WORK'));"];
    keeps_to_its_lease(harness, shown, &php, ["php", "-r"], slow).context("PHP")
}

//! Programs that pages show whole, run as they stand there.

use crate::project::pages::page;
use pg_test::markdown::blocks;
use pg_test::orm::{fetch, Runtime, PYTHON};
use pg_test::process::output_of;
use pg_test::{ensure, lab_test, Context, Database, Lab, Result};
use std::fs;
use std::process::Command;

const NODE: Runtime = Runtime::Node(&["pg@8", "typescript@5", "@types/node@20", "@types/pg@8"]);

/// Keeps a lease of a second for three, then is told that it was revoked.
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

/// Does all runs; those that fail, three times.
const WORKS_IN_PYTHON: &str = r#"
import sys

def process(given):
    if given == "b":
        raise ValueError("no b")
    return given.upper()

work(sys.argv[1], "worker A", process)
"#;

const WORKS_IN_TYPESCRIPT: &str = r#"
await work(globalThis.process.argv[2]!, "worker A", async (given) => {
  if (given === "b") throw new Error("no b");
  return given.toUpperCase();
});
"#;

/// The first block of that mark on the page.
fn program(path: &str, mark: &str) -> Result<String> {
    let block = blocks(&page(path)?).into_iter().find(|block| block.mark == mark);
    Ok(block.with_context(|| format!("{path} shows nothing in {mark}"))?.code)
}

fn in_python(lab: &Lab, db: &Database, code: &str) -> Result<()> {
    let file = lab.prefix().new_dir("page")?.join("page.py");
    fs::write(&file, code)?;
    let mut python = lab.rundir().command(fetch(PYTHON)?.join("bin/python"));
    output_of(python.arg(file).arg(db.conninfo().to_string())).map(drop)
}

/// The table of the page, and its three runs.
fn table_of_work(lab: &Lab) -> Result<Database> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    for block in blocks(&page("docs/recipes/work-table.md")?).iter().take(1) {
        session.run(&block.code)?;
    }
    Ok(db)
}

fn the_runs_are_done(db: &Database) -> Result<()> {
    let runs = "SELECT string_agg(concat_ws(' ', input, state, result, attempts), ', ' ORDER BY id) FROM runs";
    let told = db.connect()?.text(runs)?;
    ensure!(told.as_deref() == Some("a done A 1, b failed 3, c done C 1"), "{told:?}");
    ensure!(!db
        .connect()?
        .one::<bool>("SELECT bool_or(error IS NULL) FROM runs WHERE state = 'failed'", &[])?);
    Ok(())
}

#[lab_test(slow)]
fn the_least_heartbeat_keeps_its_lease_and_is_told_of_its_loss(lab: &Lab) -> Result<()> {
    let code = program("docs/tutorial/orms-and-poolers.md", "python")?;
    in_python(lab, &lab.database()?, &format!("{code}{KEEPS}"))
}

#[lab_test(slow)]
fn the_worker_in_python_does_all_runs(lab: &Lab) -> Result<()> {
    let db = table_of_work(lab)?;
    let code = program("docs/recipes/work-table.md", "python")?;
    in_python(lab, &db, &format!("{code}{WORKS_IN_PYTHON}"))?;
    the_runs_are_done(&db)
}

#[lab_test(slow)]
fn the_worker_in_typescript_does_all_runs(lab: &Lab) -> Result<()> {
    let db = table_of_work(lab)?;
    let home = fetch(NODE)?;
    // Beside its libraries, where they are found.
    let file = home.join("page.mts");
    fs::write(
        &file,
        format!("{}{WORKS_IN_TYPESCRIPT}", program("docs/recipes/work-table.md", "ts")?),
    )?;
    let mut compiler = Command::new("node");
    compiler.arg(home.join("node_modules/typescript/bin/tsc")).arg(&file);
    compiler.args(["--strict", "--module", "nodenext", "--target", "es2022", "--types", "node"]);
    output_of(compiler.current_dir(&home))?;
    let conninfo = db.conninfo();
    let (port, name) = conninfo.place();
    let url = format!("postgresql://postgres@127.0.0.1:{port}/{name}");
    output_of(lab.rundir().command("node").arg(home.join("page.mjs")).arg(url))?;
    the_runs_are_done(&db)
}

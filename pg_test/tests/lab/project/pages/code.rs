//! Every block of code of every page is run by a test, or says here why not.

use super::{client_pages, examples, page, pages};
use pg_test::markdown::blocks;
use pg_test::process::output_of;
use pg_test::{ensure, lab_test, test_case, Calls, Context, Lab, Result};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// The treatment of some blocks of a page.
enum Held {
    /// A test runs them, or compares them with what runs.
    By(&'static str),
    /// Nothing runs them. Why.
    Not(&'static str),
}

use Held::{By, Not};

const COMMAND: Held = By("command::pages::every_command_line_of_the_pages_runs");
const VERBS: Held = Not("`cargo run -- clients` has the language's own tools check or run it");
const SET_UP: Held = By("project::pages::code::a_client_s_page_lets_the_role_of_its_workers_work");
const DOCKER: Held = Not("there is no Docker here: buildah has made both images, by hand");
const OTHERS: Held = Not(
    "a drawing, or calls of another product, beside the statements that the page has tests play",
);

/// A page, the mark of some of its blocks, how many these are, and what becomes of them. Not here: what the examples
/// play, and blocks whose every line is understood (`every_command_of_the_laboratory_is_understood`).
const BLOCKS: &[(&str, &str, usize, Held)] = &[
    ("CONTRIBUTING.md", "text", 1, By("project::pages::code::a_released_lease_can_be_had_at_once")),
    ("CONTRIBUTING.md", "sh", 1, Not("`.ci/run` does this, and rustfmt is there to write")),
    ("README.md", "sh", 2, DOCKER),
    (
        "clients/README.md",
        "sql",
        12,
        By("scenarios::clients::the_statements_of_the_common_page_can_be_prepared"),
    ),
    (
        "clients/README.md",
        "python",
        1,
        Not("OpenTelemetry's side of `on_event`, whose events the scenarios see"),
    ),
    ("clients/go/README.md", "go", 8, VERBS),
    ("clients/go/README.md", "sh", 1, VERBS),
    ("clients/go/README.md", "sql", 1, SET_UP),
    ("clients/java/README.md", "java", 6, VERBS),
    ("clients/java/README.md", "sh", 1, VERBS),
    ("clients/java/README.md", "sql", 2, SET_UP),
    (
        "clients/new-language.md",
        "rust",
        1,
        Not("the form of a declaration, which each language has in the source"),
    ),
    ("clients/python/README.md", "python", 8, VERBS),
    ("clients/python/README.md", "sh", 1, VERBS),
    ("clients/python/README.md", "sql", 2, SET_UP),
    ("clients/rust/README.md", "rust", 5, VERBS),
    (
        "clients/rust/README.md",
        "sh",
        1,
        Not("it needs a program of the reader's; the laboratory's own name these crates"),
    ),
    ("clients/rust/README.md", "sql", 1, SET_UP),
    ("clients/scenarios.md", "", 54, Not("scenarios, which `cargo run -- clients` plays, each")),
    ("clients/typescript/README.md", "js", 1, VERBS),
    ("clients/typescript/README.md", "sh", 1, VERBS),
    ("clients/typescript/README.md", "sql", 1, SET_UP),
    ("clients/typescript/README.md", "ts", 7, VERBS),
    ("clients/rust/cli/README.md", "sh", 1, COMMAND),
    (
        "docs/internals/architecture.md",
        "text",
        1,
        By("project::pages::lists::every_room_of_the_source_is_on_the_map"),
    ),
    ("docs/internals/laboratory.md", "sh", 1, Not("chaos builds so for each planted bug")),
    ("docs/internals/laboratory.md", "text", 1, Not("an excerpt of what the specs expect")),
    (
        "docs/operations/beyond-one-machine.md",
        "text",
        1,
        Not("settings of other programs: the page says which parts were tried"),
    ),
    ("docs/operations/beyond-one-machine.md", "text", 2, By("tools::switch_over::")),
    ("docs/operations/citus.md", "sql", 12, By("tools::citus::")),
    ("docs/operations/installing.md", "sh", 2, By("project::packages::fresh_debian::")),
    ("docs/operations/installing.md", "sh", 1, By("project::packages::replaced_files::")),
    (
        "docs/operations/installing.md",
        "sh",
        2,
        Not("it ends in an image, and there is no podman; the tarballs are tested"),
    ),
    (
        "docs/operations/installing.md",
        "sh",
        1,
        Not("nothing is published at PGXN yet; the archive is tested"),
    ),
    (
        "docs/operations/installing.md",
        "text",
        1,
        By("project::packages::release::postgresql_18_finds_it_in_a_side_folder"),
    ),
    (
        "docs/operations/installing.md",
        "text",
        1,
        Not("it takes an image of PostgreSQL; the package is tested"),
    ),
    ("docs/operations/monitoring.md", "text", 2, Not("settings of other programs, of one machine")),
    ("docs/operations/monitoring.md", "text", 1, By("statistics::segments::")),
    (
        "docs/operations/monitoring.md",
        "sh",
        1,
        By("statistics::monitoring::the_rules_pass_their_unit_tests"),
    ),
    ("docs/operations/operations.md", "sh", 2, By("failover::restores::")),
    (
        "docs/operations/operations.md",
        "sh",
        1,
        By("failover::restoring::a_dump_is_restored_in_jobs_by_its_sections"),
    ),
    (
        "docs/recipes/adopt/etcd.md",
        "sh",
        1,
        By("tools::adopted::the_pages_show_the_programs_that_run"),
    ),
    ("docs/recipes/adopt/others.md", "text", 4, OTHERS),
    (
        "docs/recipes/adopt/pg-fence.md",
        "sh",
        1,
        By("tools::adopted::the_pages_show_the_programs_that_run"),
    ),
    (
        "docs/recipes/adopt/redis.md",
        "python",
        1,
        By("tools::adopted::the_pages_show_the_programs_that_run"),
    ),
    ("docs/recipes/adopt/redis.md", "text", 1, OTHERS),
    (
        "docs/recipes/adopt/zookeeper.md",
        "python",
        1,
        By("tools::adopted::the_pages_show_the_programs_that_run"),
    ),
    ("docs/recipes/from/etcd-and-zookeeper.md", "text", 1, OTHERS),
    ("docs/recipes/from/flock.md", "sh", 1, COMMAND),
    (
        "docs/recipes/from/flock.md",
        "text",
        1,
        Not("the old lock around the new one, for the change"),
    ),
    ("docs/recipes/from/redis.md", "text", 1, OTHERS),
    ("docs/recipes/from/syncguard.md", "text", 1, OTHERS),
    (
        "docs/recipes/job-queues.md",
        "js",
        2,
        By("tools::job_queues::the_page_shows_the_workers_that_run"),
    ),
    (
        "docs/recipes/job-queues.md",
        "python",
        1,
        By("tools::job_queues::the_page_shows_the_workers_that_run"),
    ),
    (
        "docs/recipes/many-databases.md",
        "text",
        1,
        Not("of the lease database; the examples run in a shard"),
    ),
    (
        "docs/recipes/testing-and-migrations.md",
        "python",
        5,
        By("tools::test_suites::the_page_shows_what_the_suite_runs"),
    ),
    (
        "docs/recipes/testing-and-migrations.md",
        "python",
        2,
        Not("a setting, and two migrations in the form of the suite's"),
    ),
    (
        "docs/recipes/work-table.md",
        "python",
        1,
        By("tools::programs_of_pages::the_worker_in_python_does_all_runs"),
    ),
    (
        "docs/recipes/work-table.md",
        "ts",
        1,
        By("tools::programs_of_pages::the_worker_in_typescript_does_all_runs"),
    ),
    ("docs/recipes/work-table.md", "sql", 6, By("tools::work_table::")),
    ("docs/reference/command.md", "sh", 5, COMMAND),
    (
        "docs/reference/command.md",
        "text",
        6,
        Not("what it prints, and settings of crons and systemd: `command::` has tests of them"),
    ),
    ("docs/reference/lite.md", "sh", 2, By("lite::")),
    (
        "docs/reference/sql.md",
        "text",
        27,
        By("project::pages::reference::every_function_is_there_as_it_is"),
    ),
    ("docs/tutorial/languages/dotnet.md", "csharp", 1, Not("no .NET is here: the page says so")),
    ("docs/tutorial/languages/elixir.md", "elixir", 1, Not("no Elixir is here: the page says so")),
    (
        "docs/tutorial/languages/php.md",
        "php",
        1,
        By("tools::languages::the_page_s_program_in_php_keeps_to_its_lease"),
    ),
    (
        "docs/tutorial/languages/ruby.md",
        "ruby",
        1,
        By("tools::languages::the_page_s_program_in_ruby_keeps_to_its_lease"),
    ),
    (
        "docs/tutorial/orms-and-poolers.md",
        "python",
        1,
        By("tools::programs_of_pages::the_least_heartbeat_keeps_its_lease_and_is_told_of_its_loss"),
    ),
    (
        "docs/tutorial/orms-and-poolers.md",
        "python",
        1,
        Not("a fragment: `tools::orm::django_saves_only_under_a_lease` makes these calls"),
    ),
];

fn all_pages() -> Result<Vec<String>> {
    let others = ["clients/rust/cli/README.md".to_owned()];
    Ok([pages()?, client_pages()?, others.into()].concat())
}

#[lab_test]
fn every_block_of_every_page_is_run_or_says_why_not(_: &Lab) -> Result<()> {
    let mut there: BTreeMap<(String, String), usize> = BTreeMap::new();
    for path in all_pages()? {
        for block in blocks(&page(&path)?) {
            let played = block.mark == "sql" && examples::RUN.contains(&&*path);
            let understood =
                || block.code.lines().all(|line| understand(line).is_ok_and(|known| known));
            if !(played || block.mark == "sh" && understood()) {
                *there.entry((path.clone(), block.mark)).or_default() += 1;
            }
        }
    }
    let (mut told, tests): (BTreeMap<_, usize>, _) = (BTreeMap::new(), test_case::names()?);
    for (path, mark, count, held) in BLOCKS {
        *told.entry(((*path).to_owned(), (*mark).to_owned())).or_default() += count;
        match held {
            By(name) => ensure!(
                tests
                    .iter()
                    .any(|test| test == name || name.ends_with("::") && test.starts_with(name)),
                "{path}: there is no test {name}"
            ),
            Not(why) => ensure!(why.len() > 10, "{path}: why are they not run?"),
        }
    }
    for (block, count) in &there {
        let told = told.remove(block).unwrap_or_default();
        ensure!(told == *count, "{block:?}: {count} blocks, and something is known of {told}");
    }
    ensure!(told.is_empty(), "there are no such blocks: {told:?}");
    Ok(())
}

/// Whether this line is the laboratory's, or what CI runs; an error if it does not understand it.
fn understand(line: &str) -> Result<bool> {
    let root = pg_test::source_tree::source_root();
    let code = line.split(" #").next().unwrap_or_default();
    for part in code.split("&&").flat_map(|part| part.split(['(', ')'])).map(str::trim) {
        let words: Vec<&str> = part.split_whitespace().collect();
        let words: Vec<&str> =
            words.into_iter().skip_while(|word| word.starts_with("PG_FENCE_")).collect();
        let arguments: Vec<&str> =
            words.iter().skip_while(|word| **word != "--").skip(1).copied().collect();
        match &words[..] {
            [] => {}
            ["cargo", "run", ..] => is_a_command(&arguments).with_context(|| line.to_owned())?,
            ["cargo", "test", "--test", "lab", ..] => {
                finds_tests(&arguments).with_context(|| line.to_owned())?
            }
            ["cargo", "test", "--test", name] => {
                let tests = root.join("pg_test/tests").join(name);
                ensure!(
                    tests.exists() || tests.with_extension("rs").exists(),
                    "{line}: there is no {name}"
                );
            }
            ["cargo", "test", "-p", "pg_fence_rules"] | ["cargo", "test"] => {}
            ["git", "diff", path] => {
                ensure!(root.join(path).exists(), "{line}: there is no {path}")
            }
            [".ci/run"] => ensure!(root.join(".ci/run").exists(), "there is no .ci/run"),
            _ => return Ok(false),
        }
    }
    Ok(true)
}

/// The laboratory's program takes these arguments: asked for help behind them, it looks at each first.
fn is_a_command(arguments: &[&str]) -> Result<()> {
    if let ["bench", options @ ..] = arguments {
        let all: String = ["lib.rs", "sections.rs"]
            .iter()
            .map(|file| page(&format!("pg_test/bench/src/{file}")).unwrap_or_default())
            .collect();
        let names = options.windows(2).filter(|pair| pair[0] == "--only").map(|pair| pair[1]);
        for name in names {
            ensure!(all.contains(&format!("\"{name}\"")), "the bench has no section {name}");
        }
        return Ok(());
    }
    let before = arguments.iter().take_while(|word| **word != "--");
    let mut program = Command::new(env!("CARGO_BIN_EXE_pg_test"));
    output_of(program.args(before).arg("--help")).map(drop)
}

/// This program of tests finds some by these arguments.
fn finds_tests(arguments: &[&str]) -> Result<()> {
    let mut program = Command::new(std::env::current_exe()?);
    let others = arguments.iter().filter(|word| **word != "--list");
    let listed = output_of(program.args(others).arg("--list"))?;
    ensure!(!listed.trim().is_empty(), "it finds no test");
    Ok(())
}

#[lab_test]
fn every_command_of_the_laboratory_is_understood(_: &Lab) -> Result<()> {
    let mut understood = 0;
    for path in all_pages()? {
        for block in blocks(&page(&path)?).iter().filter(|block| block.mark == "sh") {
            for line in block.code.lines() {
                understood += usize::from(understand(line).context(path.clone())?);
            }
        }
    }
    ensure!(understood > 40, "only {understood} commands were found");
    for bad in [
        "cargo run -- chaos --minute 60",
        "cargo run -- demon",
        "cargo test --test lab -- no_such_test",
        "cargo test --test modl",
    ] {
        ensure!(understand(bad).is_err(), "understood: {bad}");
    }
    ensure!(!understand("docker run -it debian")?);
    Ok(())
}

#[lab_test]
fn contributing_shows_a_test_as_it_is(_: &Lab) -> Result<()> {
    let shown = blocks(&page("CONTRIBUTING.md")?).into_iter().find(|block| block.mark == "text");
    let shown = shown.context("it shows no test")?.code;
    ensure!(
        page("pg_test/tests/lab/project/pages/code.script")?.contains(&shown),
        "another than\n{shown}"
    );
    Ok(())
}

/// After what a client's page has an administrator and an owner do, its first worker can write as `app`.
#[lab_test]
fn a_client_s_page_lets_the_role_of_its_workers_work(lab: &Lab) -> Result<()> {
    let cluster = lab.builder().start()?;
    cluster.connect("postgres")?.run("CREATE ROLE app LOGIN")?;
    let paths: Vec<_> = BLOCKS
        .iter()
        .filter(|(.., held)| matches!(held, By(name) if name.contains("lets_the_role")))
        .collect();
    ensure!(paths.len() > 4, "only {} pages", paths.len());
    for (database, (path, ..)) in (1..).map(|n| format!("shop{n}")).zip(paths) {
        cluster.connect("postgres")?.run(&format!("CREATE DATABASE {database}"))?;
        examples::play(path, cluster.conninfo(&database))?;
        let mut worker = cluster.conninfo(&database).user("app").connect()?;
        let token = worker.acquire("order:7", "1 h")?;
        let paid = worker.run(&format!(
            "BEGIN; SELECT set_config('pg_fence.token', '{token}', true); UPDATE orders SET status = 'paid' WHERE id = 7; COMMIT"
        ));
        paid.with_context(|| Path::new(path).display().to_string())?;
    }
    Ok(())
}

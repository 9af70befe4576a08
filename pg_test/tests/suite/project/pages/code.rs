//! Every code block of every page is run by a test, or `code.md` says why not.

use super::lists::is_there;
use super::{examples, page, pages};
use pg_test::markdown::{Cell, blocks, rows};
use pg_test::process::output_of;
use pg_test::{Calls, Context, Harness, Result, ensure, harness_test, script, test_case};
use std::collections::BTreeMap;
use std::process::Command;

/// Returns the rows of `code.md`: a page, the language of some of its blocks, their number, and how they are tested.
fn listed() -> Result<Vec<[Cell; 4]>> {
    let table = page("pg_test/tests/suite/project/pages/code.md")?;
    let cells = |row: Vec<Cell>| row.try_into().ok().context("a row has four cells");
    rows(&table).into_iter().map(cells).collect()
}

#[harness_test]
fn every_block_of_every_page_is_run_or_says_why_not(_: &Harness) -> Result<()> {
    let mut there: BTreeMap<(String, String), usize> = BTreeMap::new();
    let mut understood = 0;
    let of_command = "clients/rust/cli/README.md".to_owned();
    for path in pages()?.into_iter().chain([of_command]) {
        for block in blocks(&page(&path)?) {
            let mut is_held = block.mark == "sql" && examples::RUN.contains(&&*path);
            if block.mark == "sh" {
                let lines = block.code.lines().map(|line| understand(line).context(path.clone()));
                let known = lines.collect::<Result<Vec<_>>>()?;
                understood += known.iter().filter(|known| **known).count();
                is_held = !known.contains(&false);
            }
            if !is_held {
                *there.entry((path.clone(), block.mark)).or_default() += 1;
            }
        }
    }
    ensure!(understood > 40, "only {understood} commands were found");
    let (mut expected, tests): (BTreeMap<_, usize>, _) = (BTreeMap::new(), test_case::names()?);
    for [path, mark, count, held] in listed()? {
        *expected.entry((path.text, mark.text)).or_default() += count.text.parse::<usize>()?;
        match held.codes.first().filter(|name| **name == held.text) {
            Some(name) => ensure!(is_there(name, &tests), "there is no test {name}"),
            None => ensure!(held.text.len() > 10, "why is nothing run?"),
        }
    }
    for (block, count) in &there {
        let listed = expected.remove(block).unwrap_or_default();
        ensure!(listed == *count, "{block:?}: {count} blocks, and {listed} are listed");
    }
    ensure!(expected.is_empty(), "there are no such blocks: {expected:?}");
    Ok(())
}

/// Returns true if this is a command of this crate's program or one that CI runs. An unknown command is an error.
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
            ["cargo", "test", "--test", "suite", ..] => {
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

/// Checks that this crate's program accepts these arguments: with `--help` appended it parses all others first.
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

/// Checks that these arguments select at least one test.
fn finds_tests(arguments: &[&str]) -> Result<()> {
    let mut program = Command::new(std::env::current_exe()?);
    let others = arguments.iter().filter(|word| **word != "--list");
    let listed = output_of(program.args(others).arg("--list"))?;
    ensure!(!listed.trim().is_empty(), "it finds no test");
    Ok(())
}

/// The test that CONTRIBUTING shows, as it stands there.
#[harness_test]
fn a_released_lease_is_available_at_once(harness: &Harness) -> Result<()> {
    let shown = blocks(&page("CONTRIBUTING.md")?).into_iter().find(|block| block.mark == "text");
    let tests = script::tests_of("CONTRIBUTING.md", &shown.context("it shows no test")?.code)?;
    ensure!(tests.len() == 1 && tests[0].name == "a_released_lease_is_available_at_once");
    tests[0].run(harness)
}

/// After the steps of the administrator and the owner on a client's page, its first worker can write as `app`.
#[harness_test]
fn a_client_s_page_lets_the_role_of_its_workers_work(harness: &Harness) -> Result<()> {
    let cluster = harness.builder().start()?;
    let lets = |held: &Cell| held.text.contains("lets_the_role");
    let listed = listed()?;
    let mut paths: Vec<&str> =
        listed.iter().filter(|row| lets(&row[3])).map(|row| &*row[0].text).collect();
    ensure!(paths.len() > 4, "only {} pages", paths.len());
    // Whoever comes from the first page uses its table: no lease may be left there.
    paths.push("README.md");
    for (database, path) in (1..).map(|n| format!("shop{n}")).zip(paths) {
        let mut owner = cluster.connect("postgres")?;
        owner.run(&format!("CREATE DATABASE {database}"))?;
        examples::play(path, cluster.conninfo(&database))?;
        // A server as it is installed lets nobody in over TCP without a password.
        let secret = "SELECT rolpassword IS NOT NULL FROM pg_authid WHERE rolname = 'app'";
        ensure!(owner.text(secret)?.as_deref() == Some("t"), "{path}: app has no password");
        let mut worker = cluster.conninfo(&database).user("app").connect()?;
        let token = worker.acquire("order:7", "1 h")?;
        let paid = worker.run(&format!(
            "BEGIN; SELECT set_config('pg_fence.token', '{token}', true); UPDATE orders SET status = 'paid' WHERE id = 7; COMMIT"
        ));
        paid.context(path.to_owned())?;
        cluster.connect(&database)?.run("DROP OWNED BY app; DROP ROLE app")?;
    }
    Ok(())
}

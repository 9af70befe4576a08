//! The clients in other languages, in short: `cargo run -- clients` runs everything. A client whose libraries have
//! never been fetched on this machine is left out. The command fetches them.

use pg_test::clients::languages::{ALL, Client};
use pg_test::clients::{first_worker, fixture, scenario};
use pg_test::process::output_of;
use pg_test::source_tree::source_root;
use pg_test::{Context, Database, Harness, Result, ensure, harness_test};

/// The quick scenarios, one of each kind: a normal run, a late write, a cut connection.
const SHORT: &[&str] =
    &["a-day-without-trouble", "frozen-in-the-middle-of-a-write", "the-link-is-cut"];

fn of_those_there(run: impl Fn(&Client) -> Result<()>) -> Result<()> {
    for client in ALL {
        if (client.is_there)() {
            client.prepare().and_then(|client| run(&client)).context(client.name)?;
        } else {
            eprintln!("left out: cargo run -- clients {} brings what it needs", client.name);
        }
    }
    Ok(())
}

#[harness_test]
fn every_readme_shows_a_short_first_worker(_: &Harness) -> Result<()> {
    ALL.iter().try_for_each(|client| first_worker::is_shown(client).context(client.name))
}

#[harness_test]
fn the_clients_have_the_version_of_the_extension(_: &Harness) -> Result<()> {
    let version = pg_test::extension::VERSION;
    for (manifest, line) in [
        ("python/pyproject.toml", format!("version = \"{version}\"")),
        ("typescript/package.json", format!("\"version\": \"{version}\"")),
        ("java/pom.xml", format!("<version>{version}</version>")),
        // The version of a Go module is the tag of its release. That of the workspace is the extension's.
        ("rust/Cargo.toml", "version.workspace = true".to_owned()),
    ] {
        let path = pg_test::source_tree::source_root().join("clients").join(manifest);
        ensure!(std::fs::read_to_string(path)?.contains(&line), "{manifest}: {line}");
    }
    Ok(())
}

#[harness_test]
fn the_first_workers_do_their_work(harness: &Harness) -> Result<()> {
    of_those_there(|client| first_worker::runs(harness, client, &harness.database()?))
}

#[harness_test]
fn the_clients_go_through_the_short_scenarios(harness: &Harness) -> Result<()> {
    let scenarios = scenario::all()?;
    let short: Vec<_> = scenarios.iter().filter(|s| SHORT.contains(&s.key().as_str())).collect();
    ensure!(short.len() == SHORT.len(), "a scenario has another name now");
    of_those_there(|client| {
        short.iter().try_for_each(|one| fixture::play(harness, one, client, None).context(one.name))
    })
}

#[harness_test(slow)]
fn the_clients_pass_their_own_tests(harness: &Harness) -> Result<()> {
    of_those_there(|client| match client.language.tests {
        "" => Ok(()),
        _ => first_worker::tests_pass(harness, client),
    })
}

/// The SQL that each client sends is valid on the server.
#[harness_test]
fn the_statements_of_the_common_pages_can_be_prepared(harness: &Harness) -> Result<()> {
    let page = |name: &str| std::fs::read_to_string(source_root().join("clients").join(name));
    let pages = page("README.md")? + &page("new-language.md")?;
    let db = harness.database()?;
    let mut session = db.connect()?;
    let mut prepared = 0;
    for block in pages.split("```sql\n").skip(1) {
        let (block, _) = block.split_once("```").context("a block has no end")?;
        let code: Vec<_> = block.lines().map(|l| l.split("--").next().unwrap_or("")).collect();
        let code = code.join("\n");
        for statement in code.split(';').map(str::trim) {
            if !matches!(statement, "" | "BEGIN" | "COMMIT") {
                session.run(&format!("PREPARE one AS {statement}; DEALLOCATE one"))?;
                prepared += 1;
            }
        }
    }
    ensure!(prepared > 6, "only {prepared} statements were found");
    Ok(())
}

/// A test harness that catches no planted fault proves nothing.
#[harness_test]
fn a_planted_fault_is_caught(harness: &Harness) -> Result<()> {
    let scenarios = scenario::all()?;
    let slow_answers = scenarios.iter().find(|s| s.key() == "slow-answers").context("renamed")?;
    of_those_there(|client| {
        let caught = fixture::play(harness, slow_answers, client, Some("deadline-from-answer"));
        let text = caught.err().map(|error| format!("{error:#}")).unwrap_or_default();
        ensure!(text.contains("longer than the server does"), "not caught, but: {text}");
        Ok(())
    })
}

/// Without a library, too, the first workers run as the READMEs show them.
#[harness_test]
fn the_first_workers_do_their_work_without_a_library(harness: &Harness) -> Result<()> {
    of_those_there(|client| {
        let database = Database::with_lite(harness.cluster().conninfo("postgres"))?;
        first_worker::runs(harness, client, &database)
    })
}

/// Runs all scenarios whose calls the lite edition has.
#[harness_test(slow)]
fn the_clients_go_through_the_scenarios_without_a_library(harness: &Harness) -> Result<()> {
    of_those_there(|client| {
        let mut program = harness.rundir().command(harness.rundir().program());
        program.args(["clients", client.language.name, "--edition", "lite", "--no-plants"]);
        output_of(&mut program).map(drop)
    })
}

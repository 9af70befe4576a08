//! A PostgreSQL with assertions (Debian's source, built with `--enable-cassert`), and the suite run on it.

use crate::debian_source::{self, Flavour};
use crate::majors::PG_CONFIG_VARIABLE;
use crate::setup;
use crate::source_tree;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

/// Names the file to which clusters append their failed assertions.
pub const FAILURES_VARIABLE: &str = "PG_FENCE_FAILED_ASSERTIONS";

#[derive(Debug, Clone, Default, clap::Args)]
pub struct Options {
    /// Only build the server and print the path of its pg_config, for PG_FENCE_PG_CONFIG
    #[arg(long)]
    build: bool,
    /// The arguments of `cargo test --test suite --`: names of tests, --test-threads
    #[arg(last = true)]
    tests: Vec<String>,
}

/// Builds the server if necessary, runs the suite on it, and fails if an assertion or a test fails.
pub fn run(options: &Options) -> Result<()> {
    let major = setup::major();
    let dir = directory(&major);
    setup::ensure(&setup::machine())?;
    let pg_config = debian_source::server(&dir, &major, Flavour::Assertions)?;
    if options.build {
        println!("{}", pg_config.display());
        return Ok(());
    }
    let failures = dir.join("failures");
    fs::write(&failures, "")?;
    let status = source_tree::cargo()
        .args(["test", "--package", "pg_test", "--test", "suite", "--"])
        .args(&options.tests)
        .env(PG_CONFIG_VARIABLE, &pg_config)
        .env(FAILURES_VARIABLE, &failures)
        .status()
        .context("cannot run cargo")?;
    let found = fs::read_to_string(&failures)?;
    let kinds = by_assertion(&found);
    for (assertion, (count, first)) in &kinds {
        println!("\n{count} × {assertion}\n{first}");
    }
    ensure!(
        kinds.is_empty(),
        "{} assertions failed; all of it: {}",
        kinds.len(),
        failures.display()
    );
    ensure!(status.success(), "no assertion failed, but tests did ({status})");
    println!("No assertion failed.");
    Ok(())
}

fn directory(major: &str) -> PathBuf {
    source_tree::target_dir().join(match major {
        "15" => "cassert".to_owned(),
        _ => format!("cassert-{major}"),
    })
}

/// The failed assertions in a server's log, each with its stack and the statement that was running.
pub fn failures_in(log: &str) -> Vec<String> {
    let mut failures: Vec<String> = Vec::new();
    let mut lines = log.lines().peekable();
    while let Some(line) = lines.next() {
        if line.starts_with("TRAP: ") {
            let mut failure = line.to_owned();
            // A line that the server logs begins with the time.
            let is_frame = |line: &&str| {
                !line.starts_with(|c: char| c.is_ascii_digit()) && !line.starts_with("TRAP: ")
            };
            while let Some(frame) = lines.next_if(is_frame) {
                failure += &format!("\n    {}", frame.trim_start());
            }
            failures.push(failure);
        } else if let Some((_, statement)) = line.split_once("Failed process was running: ")
            && let Some(last) = failures.last_mut()
        {
            *last += &format!("\n    running: {statement}");
        }
    }
    failures
}

/// The number of failures of each assertion, and the first one.
fn by_assertion(failures: &str) -> BTreeMap<String, (usize, String)> {
    let mut kinds = BTreeMap::new();
    for failure in failures_in(failures) {
        let (head, rest) = failure.split_once('\n').unwrap_or((&failure, ""));
        let assertion = head.split(", PID: ").next().unwrap_or(head).to_owned();
        let (count, _) = kinds.entry(assertion).or_insert_with(|| (0, rest.to_owned()));
        *count += 1;
    }
    kinds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_assertion_is_found_with_its_stack_and_its_statement() {
        let log = "2026-01-01 [1] LOG:  ready\n\
            TRAP: FailedAssertion(\"x\", File: \"a.c\", Line: 7, PID: 12)\n\
            postgres: u d SELECT(ExceptionalCondition+0x57)[0x1]\n\
            /lib/x.so(+0x2)[0x3]\n\
            2026-01-01 [1] LOG:  server process (PID 12) was terminated by signal 6: Aborted\n\
            2026-01-01 [1] DETAIL:  Failed process was running: COMMIT\n\
            2026-01-01 [1] LOG:  all server processes terminated; reinitializing\n\
            TRAP: FailedAssertion(\"x\", File: \"a.c\", Line: 7, PID: 99)\n";
        let failures = failures_in(log);
        assert_eq!(failures.len(), 2);
        assert!(failures[0].contains("ExceptionalCondition"), "{failures:?}");
        assert!(failures[0].ends_with("running: COMMIT"), "{failures:?}");
        let kinds = by_assertion(&failures.join("\n"));
        let counts: Vec<_> =
            kinds.iter().map(|(assertion, (count, _))| (assertion.as_str(), *count)).collect();
        assert_eq!(counts, [("TRAP: FailedAssertion(\"x\", File: \"a.c\", Line: 7", 2)]);
    }
}

//! The whole suite on each major version, a line a version.

use crate::candidate;
use crate::chaos::KnownBug;
use crate::extension::BuildPlace;
use crate::installation::Installation;
use crate::majors;
use crate::process::output_of;
use crate::{extension, setup};
use anyhow::{bail, Context, Result};
use clap::ValueEnum;
use std::fmt;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

#[derive(Debug, Clone, Default, clap::Args)]
pub struct Options {
    /// Which major versions; `newest` is one of them, and 19, a candidate, only if it is named
    #[arg(long, value_delimiter = ',', default_values = majors::ALL, value_parser = majors::parse_any)]
    majors: Vec<String>,
    /// Only build, without a warning, and play the isolation specs and the pages' examples
    #[arg(long)]
    short: bool,
    /// Build the extension with the pgrx that comes next, as it is for the candidate
    #[arg(long)]
    next_pgrx: bool,
    /// Also a chaos run of so many minutes
    #[arg(long, value_name = "MINUTES")]
    chaos: Option<f64>,
    /// Also each planted bug, which a chaos run must catch
    #[arg(long)]
    plants: bool,
    /// How many tests run at a time
    #[arg(long)]
    test_threads: Option<usize>,
}

/// Runs it on one version after the other; that anything failed on any of them is an error.
pub fn run(options: &Options) -> Result<()> {
    let dir = extension::target_dir().join("matrix");
    fs::create_dir_all(&dir)?;
    if options.next_pgrx {
        // For the tests, too, which are programs of their own.
        std::env::set_var(candidate::PGRX_VARIABLE, "1");
    }
    let mut failed = Vec::new();
    for major in &options.majors {
        let log = dir.join(format!("{major}.log"));
        let _ = fs::remove_file(&log);
        eprintln!("PostgreSQL {major}: all output goes to {}", log.display());
        let result = Version { major, log }.run(options);
        match &result {
            Ok(outcome) => println!("{outcome}"),
            Err(error) => println!("{major}: {error:#}"),
        }
        if !result.is_ok_and(|outcome| outcome.failures.is_empty()) {
            failed.push(major.as_str());
        }
    }
    if !failed.is_empty() {
        bail!("failed on {}; {} has all output", failed.join(", "), dir.display());
    }
    Ok(())
}

/// One version under test, and the file for what its steps print.
struct Version<'a> {
    major: &'a str,
    log: PathBuf,
}

/// What came of it.
#[derive(Debug, Default)]
struct Outcome {
    version: String,
    tests: Counts,
    /// Steps and tests that failed.
    failures: Vec<String>,
    /// Tests that are not for this version, with the reason.
    left_out: Vec<String>,
    seconds: u64,
}

/// What the summaries of test programs say, taken together.
#[derive(Debug, Default, PartialEq)]
struct Counts {
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl Version<'_> {
    fn run(&self, options: &Options) -> Result<Outcome> {
        let installation = majors::of(self.major).context("it cannot be had")?;
        let version = output_of(Command::new(&installation.pg_config).arg("--version"))?;
        let mut version = version.trim().trim_start_matches("PostgreSQL ").to_owned();
        if self.major == candidate::MAJOR {
            version += " (a candidate)";
        }
        if candidate::builds(self.major) {
            version += &format!(" with pgrx {}", candidate::PGRX);
        }
        let start = Instant::now();
        let mut outcome = Outcome { version, ..Outcome::default() };
        for (name, mut command) in self.steps(options, &installation)? {
            let (succeeded, printed) = self.logged(&mut command)?;
            outcome.tests.add(&printed);
            outcome.left_out.extend(left_out(&printed));
            if !succeeded {
                outcome.failures.push(name);
                outcome.failures.extend(failed_tests(&printed));
            }
        }
        outcome.seconds = start.elapsed().as_secs();
        Ok(outcome)
    }

    fn steps(
        &self,
        options: &Options,
        installation: &Installation,
    ) -> Result<Vec<(String, Command)>> {
        let mut steps = vec![("warnings".to_owned(), self.warnings(installation)?)];
        if options.short {
            for tests in ["isolation_specs", "pages", "roles::levels"] {
                let arguments = ["test", "--package", "pg_test", "--test", "lab", tests];
                steps.push((tests.to_owned(), self.cargo(&arguments)));
            }
        } else {
            steps.push((
                "tests".to_owned(),
                self.cargo(&["test", "--package", "pg_test", "--no-fail-fast"]),
            ));
        }
        if let Some(threads) = options.test_threads {
            for (_, command) in steps.iter_mut().skip(1) {
                command.args(["--", "--test-threads", &threads.to_string()]);
            }
        }
        let mut run = |name: String, arguments: &[&str]| {
            steps.push((
                name,
                self.cargo(&[&["run", "--package", "pg_test", "--"], arguments].concat()),
            ))
        };
        run("demo".to_owned(), &["demo"]);
        if let Some(minutes) = options.chaos {
            run("chaos".to_owned(), &["chaos", "--minutes", &minutes.to_string()]);
        }
        for bug in KnownBug::value_variants().iter().filter(|_| options.plants) {
            let bug = bug.name();
            run(format!("plant {bug}"), &["chaos", "--plant", &bug]);
        }
        Ok(steps)
    }

    /// With the headers of that very version.
    fn warnings(&self, installation: &Installation) -> Result<Command> {
        let feature = format!("pg{}", self.major);
        // Clippy is part of the machine's own Rust, which may be too old for that pgrx.
        let check = if candidate::builds(self.major) { "rustc" } else { "clippy" };
        // As it is built for the tests: the bindings that were made from the headers are the same.
        let mut command = extension::cargo_for(self.major)?;
        command
            .args([check, "--release", "--package", extension::NAME, "--lib"])
            .args(["--no-default-features", "--features", &feature, "--", "-D", "warnings"])
            .env("PGRX_PG_CONFIG_PATH", &installation.pg_config);
        BuildPlace::of(installation).tell(&mut command);
        Ok(command)
    }

    fn cargo(&self, arguments: &[&str]) -> Command {
        let mut command = extension::cargo();
        command
            .args(arguments)
            .env(setup::MAJOR_VARIABLE, self.major)
            .env_remove(majors::PG_CONFIG_VARIABLE);
        command
    }

    /// Runs a step; returns whether it succeeded and what it printed.
    fn logged(&self, command: &mut Command) -> Result<(bool, String)> {
        let before = fs::metadata(&self.log).map_or(0, |meta| meta.len()) as usize;
        let file = File::options().create(true).append(true).open(&self.log)?;
        let status = command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).status();
        let status = status.with_context(|| format!("cannot run {command:?}"))?;
        let printed = fs::read(&self.log)?.split_off(before);
        Ok((status.success(), String::from_utf8_lossy(&printed).into_owned()))
    }
}

impl Counts {
    /// Adds what summaries say: `test result: ok. 12 passed; 0 failed; 1 ignored; …`.
    fn add(&mut self, printed: &str) {
        for line in printed.lines().filter(|line| line.starts_with("test result: ")) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let count = |what: &str| {
                let pair = words.windows(2).find(|pair| pair[1].trim_end_matches(';') == what);
                pair.and_then(|pair| pair[0].parse::<u64>().ok()).unwrap_or(0)
            };
            self.passed += count("passed");
            self.failed += count("failed");
            self.ignored += count("ignored");
        }
    }
}

/// The names of tests that are said to have failed.
fn failed_tests(printed: &str) -> Vec<String> {
    let of_test = |line: &str| {
        let name = line.strip_prefix("test ")?.strip_suffix(" ... FAILED")?;
        Some(name.trim().to_owned())
    };
    printed.lines().filter_map(of_test).collect()
}

/// Tests that say why they were left out: `test a::b ... ignored, for PostgreSQL 17 and newer`.
fn left_out(printed: &str) -> Vec<String> {
    let of_test = |line: &str| {
        let (name, reason) = line.strip_prefix("test ")?.split_once(" ... ignored, ")?;
        Some(format!("{} ({reason})", name.trim()))
    };
    printed.lines().filter_map(of_test).collect()
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counts { passed, failed, ignored } = &self.tests;
        let (minutes, seconds) = (self.seconds / 60, self.seconds % 60);
        write!(
            f,
            "{:<8} {passed} passed, {failed} failed, {ignored} ignored, {minutes} min {seconds:02} s",
            self.version
        )?;
        if !self.left_out.is_empty() {
            write!(f, "; left out: {}", self.left_out.join(", "))?;
        }
        if !self.failures.is_empty() {
            write!(f, "; failed: {}", self.failures.join(", "))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summaries_of_several_programs_are_added_up() {
        let mut counts = Counts::default();
        counts.add(
            "running 2 tests\ntest a ... ok\n\
             test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.1s\n\
             test result: FAILED. 20 passed; 3 failed; 4 ignored; 0 measured; 0 filtered out\n",
        );
        assert_eq!(counts, Counts { passed: 22, failed: 3, ignored: 5 });
    }

    #[test]
    fn what_failed_is_named() {
        let printed =
            "test a::b       ... ok\ntest c::d ... FAILED\ntest result: FAILED. 1 passed\n";
        assert_eq!(failed_tests(printed), ["c::d"]);
    }

    #[test]
    fn what_is_left_out_is_named_with_its_reason() {
        let printed =
            "test a::b ... ignored\ntest c::d   ... ignored, for PostgreSQL 17 and newer\n";
        assert_eq!(left_out(printed), ["c::d (for PostgreSQL 17 and newer)"]);
    }
}

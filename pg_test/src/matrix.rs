//! The whole test suite on each major version.

use crate::environment;
use crate::extension::BuildPlace;
use crate::installation::Installation;
use crate::majors;
use crate::process::output_of;
use crate::release_candidate;
use crate::source_tree;
use crate::{extension, setup};
use anyhow::{Context, Result, bail, ensure};
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

#[derive(Debug, Clone, Default, clap::Args)]
pub struct Options {
    /// Which major versions; `newest` is one of them, and 19, a candidate, only if it is named
    #[arg(long, value_delimiter = ',', default_values = majors::ALL, value_parser = majors::parse_any)]
    majors: Vec<String>,
    /// Only build, without a warning, and run what guards promise and the pages' examples
    #[arg(long)]
    short: bool,
    /// Build the extension with the pgrx that comes next, as it is for the candidate
    #[arg(long)]
    next_pgrx: bool,
    /// How many tests run at a time
    #[arg(long)]
    test_threads: Option<usize>,
}

/// Runs the suite on one version after the other. Returns an error if anything failed on any of them.
pub fn run(options: &Options) -> Result<()> {
    let dir = source_tree::target_dir().join("matrix");
    fs::create_dir_all(&dir)?;
    if options.next_pgrx {
        // The tests are separate programs and read it from the environment.
        environment::set(release_candidate::PGRX_VARIABLE, "1");
    }
    let mut failed = Vec::new();
    for major in &options.majors {
        let log = dir.join(format!("{major}.log"));
        let _ = fs::remove_file(&log);
        eprintln!("PostgreSQL {major}: all output goes to {}", log.display());
        if let Err(error) = (Version { major, log }).run(options) {
            println!("{major}: {error:#}");
            failed.push(major.as_str());
        }
    }
    if !failed.is_empty() {
        bail!("failed on {}; {} has all output", failed.join(", "), dir.display());
    }
    Ok(())
}

/// One version under test, and the file that receives the output of its steps.
struct Version<'a> {
    major: &'a str,
    log: PathBuf,
}

impl Version<'_> {
    /// Runs the steps and prints their results: what failed, what was skipped and why, and the summaries of the test
    /// programs.
    fn run(&self, options: &Options) -> Result<()> {
        let installation =
            majors::of(self.major).context("cannot get this version of PostgreSQL")?;
        let version = output_of(Command::new(&installation.pg_config).arg("--version"))?;
        let mut version = version.trim().trim_start_matches("PostgreSQL ").to_owned();
        if self.major == release_candidate::MAJOR {
            version += " (a candidate)";
        }
        if release_candidate::builds(self.major) {
            version += &format!(" with pgrx {}", release_candidate::PGRX);
        }
        let mut failed = Vec::new();
        for (name, mut command) in self.steps(options, &installation)? {
            let start = Instant::now();
            let (succeeded, printed) = self.logged(&mut command)?;
            let verdict = if succeeded { "ok" } else { "FAILED" };
            println!("{version}, {name}: {verdict} ({} s)", start.elapsed().as_secs());
            let is_told = |line: &&str| {
                line.ends_with(" ... FAILED")
                    || line.contains(" ... ignored, ")
                    || line.starts_with("test result: ")
            };
            printed.lines().filter(is_told).for_each(|line| println!("    {line}"));
            failed.extend((!succeeded).then_some(name));
        }
        ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
        Ok(())
    }

    fn steps(
        &self,
        options: &Options,
        installation: &Installation,
    ) -> Result<Vec<(&'static str, Command)>> {
        let mut steps = vec![("warnings", self.warnings(installation)?)];
        if options.short {
            for tests in ["guards", "pages", "roles::levels"] {
                let arguments = ["test", "--package", "pg_test", "--test", "suite", tests];
                steps.push((tests, self.cargo(&arguments)));
            }
        } else {
            steps.push(("tests", self.cargo(&["test", "--package", "pg_test", "--no-fail-fast"])));
        }
        if let Some(threads) = options.test_threads {
            for (_, command) in steps.iter_mut().skip(1) {
                command.args(["--", "--test-threads", &threads.to_string()]);
            }
        }
        steps.push(("demo", self.cargo(&["run", "--package", "pg_test", "--", "demo"])));
        Ok(steps)
    }

    /// The compiler's check, with the headers of that very version.
    fn warnings(&self, installation: &Installation) -> Result<Command> {
        let feature = format!("pg{}", self.major);
        // Clippy is part of the machine's own Rust, which may be too old for the candidate's pgrx.
        let check = if release_candidate::builds(self.major) { "rustc" } else { "clippy" };
        // It is built as for the tests, so the generated bindings can be reused.
        let mut command = extension::cargo_for(self.major)?;
        command
            .args([check, "--release", "--package", extension::NAME, "--lib"])
            .args(["--no-default-features", "--features", &feature, "--", "-D", "warnings"])
            .env("PGRX_PG_CONFIG_PATH", &installation.pg_config);
        BuildPlace::of(installation).tell(&mut command);
        Ok(command)
    }

    fn cargo(&self, arguments: &[&str]) -> Command {
        let mut command = source_tree::cargo();
        command
            .args(arguments)
            .env(setup::MAJOR_VARIABLE, self.major)
            .env_remove(majors::PG_CONFIG_VARIABLE);
        command
    }

    /// Runs a step. Returns whether it succeeded, and its output.
    fn logged(&self, command: &mut Command) -> Result<(bool, String)> {
        let before = fs::metadata(&self.log).map_or(0, |meta| meta.len()) as usize;
        let file = File::options().create(true).append(true).open(&self.log)?;
        let status = command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).status();
        let status = status.with_context(|| format!("cannot run {command:?}"))?;
        let printed = fs::read(&self.log)?.split_off(before);
        Ok((status.success(), String::from_utf8_lossy(&printed).into_owned()))
    }
}

//! A test of the suite: a function that gets the harness, marked with `#[harness_test]`.
//!
//! ```text
//! #[harness_test]
//! fn what_it_shows(harness: &Harness) -> Result<()> { … }
//! ```
//!
//! The attribute hands the function to [`inventory`], which collects what is marked anywhere in the program. Beside them are
//! the tests of the [scripts](crate::script).

use crate::edition;
use crate::environment;
use crate::harness::Harness;
use crate::script::{self, Blessings};
use crate::skipped::LeftOut;
use crate::source_tree;
use anyhow::{Result, ensure};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::collections::BTreeSet;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A marked function, filled in by `#[harness_test]`.
pub struct TestCase {
    /// The path of the function's module, with the crate.
    pub module: &'static str,
    /// The name of the function.
    pub name: &'static str,
    pub run: fn(&Harness) -> Result<()>,
    /// True if the test runs only with `PG_FENCE_SLOW` set (or `--include-ignored`).
    pub slow: bool,
    /// The first major version of PostgreSQL that it is for.
    pub from: u32,
}

inventory::collect!(TestCase);

type Run = Box<dyn FnOnce(&Harness) -> Result<()> + Send>;

/// With `--bless`, the expectations of scenario files that are to be replaced.
static BLESSINGS: OnceLock<Blessings> = OnceLock::new();

/// A test, from Rust or from a scenario file.
struct AnyTest {
    /// `folder::file::what_it_shows`.
    name: String,
    run: Run,
    slow: bool,
    from: u32,
}

/// Runs the tests of this program that the command line selects. `program` is this crate's binary.
pub fn run_all(program: &Path) -> ExitCode {
    let found = match all_are_here().and_then(|()| all()) {
        Ok(found) => found,
        Err(error) => {
            eprintln!("{error:#}");
            return ExitCode::FAILURE;
        }
    };
    // A failure then names the line of its test.
    environment::set("RUST_LIB_BACKTRACE", "1");
    let arguments = match edition::take_arguments(std::env::args()) {
        Ok(Some(arguments)) => arguments,
        Ok(None) => return ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let (blessing, arguments): (Vec<_>, Vec<_>) =
        arguments.into_iter().partition(|argument| argument == "--bless");
    if !blessing.is_empty() {
        BLESSINGS.get_or_init(Blessings::default);
    }
    let mut arguments = Arguments::from_iter(arguments);
    // Tests mostly wait for the server and the disk, so a few more threads than cores are faster.
    arguments.test_threads.get_or_insert(4);
    static HARNESS: OnceLock<Arc<Harness>> = OnceLock::new();
    if !arguments.list {
        match Harness::start(program) {
            Ok(harness) => drop(HARNESS.set(Arc::new(harness))),
            Err(error) => {
                eprintln!("the harness does not start: {error:?}");
                return ExitCode::FAILURE;
            }
        }
    }
    let harness = || HARNESS.get().expect("it was started above").clone();
    let names: Vec<String> = found.iter().map(|test| test.name.clone()).collect();
    let tests: Vec<Trial> = found.into_iter().map(|test| test.with(harness)).collect();
    let unknown = edition::without_a_test(&names);
    if !unknown.is_empty() {
        eprintln!("the lite edition leaves out what is no test: {}", unknown.join(", "));
        return ExitCode::FAILURE;
    }
    let conclusion = libtest_mimic::run(&arguments, tests);
    if let Some(harness) = HARNESS.get() {
        harness.close();
    }
    if let Some(blessings) = BLESSINGS.get() {
        match blessings.write() {
            Ok(written) => {
                written.iter().for_each(|place| println!("expectation written: {place}"))
            }
            Err(error) => {
                eprintln!("an expectation cannot be written: {error:#}");
                return ExitCode::FAILURE;
            }
        }
    }
    conclusion.exit_code()
}

/// Returns all tests of this program and of the scenario files, by name.
fn all() -> Result<Vec<AnyTest>> {
    let harness = source_tree::source_root().join("pg_test/tests/suite");
    let scripts = script::tests_below(&harness)?.into_iter().map(|(module, test)| AnyTest {
        name: format!("{module}::{}", test.name),
        slow: test.slow,
        from: test.from,
        run: Box::new(move |harness| test.run_blessing(harness, BLESSINGS.get())),
    });
    let cases = inventory::iter::<TestCase>().map(|case| AnyTest {
        name: format!("{}::{}", case.module_below(), case.name),
        slow: case.slow,
        from: case.from,
        run: Box::new(case.run),
    });
    let mut all: Vec<AnyTest> = scripts.chain(cases).collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    let twice = all.windows(2).find(|two| two[0].name == two[1].name);
    ensure!(twice.is_none(), "two tests are named {}", twice.map_or("", |two| &two[0].name));
    Ok(all)
}

/// Returns the names of all tests.
pub fn names() -> Result<BTreeSet<String>> {
    Ok(all()?.into_iter().map(|test| test.name).collect())
}

impl TestCase {
    /// Returns the path of the test's module below the crate: `folder::file`.
    fn module_below(&self) -> &'static str {
        self.module.split_once("::").map_or(self.module, |(_, below)| below)
    }
}

impl AnyTest {
    /// Returns the test for the test runner. `harness` is called when the test runs.
    fn with(self, harness: impl Fn() -> Arc<Harness> + Send + 'static) -> Trial {
        let AnyTest { name, run, slow, from } = self;
        let left_out = slow && std::env::var_os("PG_FENCE_SLOW").is_none();
        let not_for_lite = edition::reason(&name).filter(|_| edition::is_lite());
        let full_name = name.clone();
        let trial = move || {
            if let Some(reason) = not_for_lite {
                return Ok(Completion::ignored_with(reason));
            }
            let harness = harness();
            // It is reported as ignored: a test that is left out must not look like one that has passed.
            if harness.install_dir().major_number() < from {
                return Ok(Completion::ignored_with(format!("for PostgreSQL {from} and newer")));
            }
            within_limit(harness, full_name, run)
        };
        Trial::ignorable_test(name, trial).with_ignored_flag(left_out)
    }
}

/// Checks that every file below `pg_test/tests/suite` with a test is a module of this program. Cargo does not compile a
/// file that no module names, and a filter for its tests would run none of them and pass.
fn all_are_here() -> Result<()> {
    let harness = source_tree::source_root().join("pg_test/tests/suite");
    let modules = inventory::iter::<TestCase>().map(TestCase::module_below).collect();
    let missing = missing_of(&harness, Path::new(""), &modules)?;
    ensure!(
        missing.is_empty(),
        "no test of {} is in this program.\n\
         A new file: Cargo does not notice it by itself, so `touch pg_test/tests/suite/main.rs` and try again.\n\
         A new folder: it needs a file of its name beside it, with the line `automod::dir!` of the others.",
        missing.join(", ")
    );
    Ok(())
}

/// Returns the files below a folder of the suite that have tests and are not among the modules.
fn missing_of(harness: &Path, folder: &Path, modules: &BTreeSet<&str>) -> Result<Vec<String>> {
    let mut missing = Vec::new();
    for entry in fs::read_dir(harness.join(folder))? {
        let entry = entry?;
        let path = folder.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            missing.extend(missing_of(harness, &path, modules)?);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            let module = path.with_extension("").to_string_lossy().replace('/', "::");
            let text = fs::read_to_string(entry.path())?;
            let mut lines = text.lines().map(str::trim_start);
            if !modules.contains(&*module) && lines.any(|line| line.starts_with("#[harness_test")) {
                missing.push(path.display().to_string());
            }
        }
    }
    missing.sort();
    Ok(missing)
}

fn limit() -> Duration {
    let seconds = std::env::var("PG_FENCE_TEST_TIMEOUT").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(600))
}

/// Runs a test in its own thread, which is abandoned if it hangs.
fn within_limit(
    harness: Arc<Harness>,
    name: String,
    run: impl FnOnce(&Harness) -> Result<()> + Send + 'static,
) -> Result<Completion, Failed> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let outcome = catch_unwind(AssertUnwindSafe(|| run(&harness)));
        drop(harness);
        let _ = sender.send(match outcome {
            Ok(Ok(())) => Ok(Completion::Completed),
            Ok(Err(error)) => match error.downcast_ref::<LeftOut>() {
                Some(LeftOut(reason)) => Ok(Completion::ignored_with(reason)),
                None => match edition::refused_by_lite(&format!("{error:#}")) {
                    // A proof that is not run proves nothing.
                    Some(what) if edition::is_proof_for_lite(&name) => {
                        Err(format!("{what}, and its page names this test as a proof"))
                    }
                    Some(what) => Ok(Completion::ignored_with(what)),
                    None => Err(causes_of(&error)),
                },
            },
            Err(panic) => Err(message_of(panic.as_ref())),
        });
    });
    match receiver.recv_timeout(limit()) {
        Ok(outcome) => outcome.map_err(Failed::from),
        Err(RecvTimeoutError::Timeout) => Err(format!("not done within {:?}", limit()).into()),
        Err(RecvTimeoutError::Disconnected) => Err("its thread died".into()),
    }
}

/// Returns the error, its causes, and the line of the test that it came from.
fn causes_of(error: &anyhow::Error) -> String {
    let mut text = error.chain().map(ToString::to_string).collect::<Vec<_>>().join("\n  from: ");
    let backtrace = error.backtrace().to_string();
    let line = backtrace.lines().find(|line| line.contains("/tests/suite/"));
    if let Some(line) = line {
        text.push_str(&format!("\n  {}", line.trim()));
    }
    text
}

fn message_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("panicked: {}", text.unwrap_or("without a message"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_tests_that_is_no_module_is_named() {
        let harness = source_tree::target_dir().join(format!("harness-{}", std::process::id()));
        fs::create_dir_all(harness.join("guards")).unwrap();
        for (name, text) in [
            ("guards/locks.rs", "#[harness_test]\nfn"),
            ("guards/new.rs", "    #[harness_test(slow)]\n    fn"),
            ("guards/helper.rs", "// no #[harness_test]"),
        ] {
            fs::write(harness.join(name), text).unwrap();
        }
        let missing = missing_of(&harness, Path::new(""), &BTreeSet::from(["guards::locks"]));
        fs::remove_dir_all(&harness).unwrap();
        assert_eq!(missing.unwrap(), ["guards/new.rs"]);
    }
}

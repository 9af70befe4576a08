//! A test of the lab: a function that gets the lab, marked with `#[lab_test]`.
//!
//! ```text
//! #[lab_test]
//! fn what_it_shows(lab: &Lab) -> Result<()> { … }
//! ```
//!
//! The attribute hands the function to [`inventory`], which collects what is marked anywhere in the program.

use crate::lab::Lab;
use anyhow::Result;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::fmt;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A marked function. `#[lab_test]` fills it in.
pub struct TestCase {
    /// The path of the function's module, with the crate.
    pub module: &'static str,
    /// What the function is called.
    pub name: &'static str,
    pub run: fn(&Lab) -> Result<()>,
    /// Whether it runs only with `PG_FENCE_SLOW` set (or `--include-ignored`).
    pub slow: bool,
    /// The first major version of PostgreSQL that it is for.
    pub from: u32,
}

inventory::collect!(TestCase);

/// Runs the tests of this program that the command line asks for. `program` is the lab's binary.
pub fn run_all(program: &Path) -> ExitCode {
    // So that a failure can name the line of its test.
    std::env::set_var("RUST_LIB_BACKTRACE", "1");
    let mut arguments = Arguments::from_args();
    // Tests mostly wait for the server and the disk, so a few more than cores pay.
    arguments.test_threads.get_or_insert(4);
    static LAB: OnceLock<Arc<Lab>> = OnceLock::new();
    if !arguments.list {
        match Lab::start(program) {
            Ok(lab) => drop(LAB.set(Arc::new(lab))),
            Err(error) => {
                eprintln!("the lab does not start: {error:?}");
                return ExitCode::FAILURE;
            }
        }
    }
    let lab = || LAB.get().expect("it was started above").clone();
    let mut tests: Vec<Trial> = inventory::iter::<TestCase>().map(|case| case.with(lab)).collect();
    // The linker keeps no order.
    tests.sort_by(|a, b| a.name().cmp(b.name()));
    let conclusion = libtest_mimic::run(&arguments, tests);
    if let Some(lab) = LAB.get() {
        lab.close();
    }
    conclusion.exit_code()
}

impl TestCase {
    /// As the test runner wants it, named after its module below the crate. `lab` is called when the test runs.
    fn with(&self, lab: impl Fn() -> Arc<Lab> + Send + 'static) -> Trial {
        let module = self.module.split_once("::").map_or(self.module, |(_, below)| below);
        let run = self.run;
        let left_out = self.slow && std::env::var_os("PG_FENCE_SLOW").is_none();
        let from = self.from;
        let trial = move || {
            let lab = lab();
            // Said, and counted: a test that is left out must not look like one that has passed.
            if lab.prefix().major_number() < from {
                return Ok(Completion::ignored_with(format!("for PostgreSQL {from} and newer")));
            }
            within_limit(lab, run)
        };
        Trial::ignorable_test(format!("{module}::{}", self.name), trial).with_ignored_flag(left_out)
    }
}

/// Why a test cannot be run here.
#[derive(Debug)]
struct LeftOut(String);

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "left out: {}", self.0)
    }
}

impl std::error::Error for LeftOut {}

/// What a test returns that cannot be run here: it counts as ignored, with that reason, and not as passed.
pub fn left_out<T>(reason: &str) -> Result<T> {
    Err(LeftOut(reason.to_owned()).into())
}

fn limit() -> Duration {
    let seconds = std::env::var("PG_FENCE_TEST_TIMEOUT").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(600))
}

/// Runs a test in a thread of its own, which is left behind if it hangs.
fn within_limit(lab: Arc<Lab>, run: fn(&Lab) -> Result<()>) -> Result<Completion, Failed> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let outcome = catch_unwind(AssertUnwindSafe(|| run(&lab)));
        drop(lab);
        let _ = sender.send(match outcome {
            Ok(Ok(())) => Ok(Completion::Completed),
            Ok(Err(error)) => match error.downcast_ref::<LeftOut>() {
                Some(LeftOut(reason)) => Ok(Completion::ignored_with(reason)),
                None => Err(causes_of(&error)),
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

/// The error, its causes, and the line of the test that it came from.
fn causes_of(error: &anyhow::Error) -> String {
    let mut text = error.chain().map(ToString::to_string).collect::<Vec<_>>().join("\n  from: ");
    let backtrace = error.backtrace().to_string();
    let line = backtrace.lines().find(|line| line.contains("/tests/lab/"));
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

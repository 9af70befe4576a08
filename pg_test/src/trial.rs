//! A test of the lab: a name and a function that gets the lab.

use crate::lab::Lab;
use anyhow::Result;
use libtest_mimic::Failed;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::Arc;
use std::time::Duration;

/// A test.
pub struct Trial {
    name: String,
    run: fn(&Lab) -> Result<()>,
    slow: bool,
}

impl Trial {
    /// A test called after `module`, below its crate, and `name`.
    pub fn new(module: &str, name: &str, run: fn(&Lab) -> Result<()>) -> Trial {
        let module = module.split_once("::").map_or(module, |(_, below)| below);
        Trial { name: format!("{module}::{name}"), run, slow: false }
    }

    /// The same as a slow one, which runs with `PG_FENCE_SLOW` set (or `--include-ignored`) only.
    pub fn slow(self) -> Trial {
        Trial { slow: true, ..self }
    }

    /// As the test runner wants it. `lab` is called when the first test runs.
    pub fn with(self, lab: impl Fn() -> Arc<Lab> + Send + 'static) -> libtest_mimic::Trial {
        let left_out = self.slow && std::env::var_os("PG_FENCE_SLOW").is_none();
        libtest_mimic::Trial::test(self.name, move || within_limit(lab(), self.run))
            .with_ignored_flag(left_out)
    }
}

/// Lists the tests of a module: `pg_test::trials![this, that];` defines its `pub fn trials()`. Slow
/// ones come last: `pg_test::trials![this; slow: that]`.
#[macro_export]
macro_rules! trials {
    ($($name:ident),* $(,)? $(; slow: $($slow:ident),+ $(,)?)?) => {
        /// The tests of this module.
        pub fn trials() -> Vec<$crate::Trial> {
            vec![
                $($crate::Trial::new(module_path!(), stringify!($name), $name),)*
                $($($crate::Trial::new(module_path!(), stringify!($slow), $slow).slow(),)+)?
            ]
        }
    };
}

fn limit() -> Duration {
    let seconds = std::env::var("PG_FENCE_TRIAL_TIMEOUT").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(600))
}

/// Runs a test in a thread of its own, which is left behind if it hangs.
fn within_limit(lab: Arc<Lab>, run: fn(&Lab) -> Result<()>) -> Result<(), Failed> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let outcome = catch_unwind(AssertUnwindSafe(|| run(&lab)));
        drop(lab);
        let _ = sender.send(match outcome {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(story_of(&error)),
            Err(panic) => Err(words_of(panic.as_ref())),
        });
    });
    match receiver.recv_timeout(limit()) {
        Ok(outcome) => outcome.map_err(Failed::from),
        Err(RecvTimeoutError::Timeout) => Err(format!("not done within {:?}", limit()).into()),
        Err(RecvTimeoutError::Disconnected) => Err("its thread died".into()),
    }
}

/// The error, its causes, and the line of the test that it came from.
fn story_of(error: &anyhow::Error) -> String {
    let mut story = error.chain().map(ToString::to_string).collect::<Vec<_>>().join("\n  from: ");
    let backtrace = error.backtrace().to_string();
    let line = backtrace.lines().find(|line| line.contains("/tests/lab/"));
    if let Some(line) = line {
        story.push_str(&format!("\n  {}", line.trim()));
    }
    story
}

fn words_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("panicked: {}", text.unwrap_or("without words"))
}

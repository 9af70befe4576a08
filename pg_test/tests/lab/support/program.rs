//! A program as a process of its own, to be frozen, thawed and listened to.

use nix::sys::signal::Signal;
use pg_test::process::{self, wait_until, PATIENCE};
use pg_test::{ensure, Context, Result};
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// It is killed at the end at the latest, with what it has started.
pub struct Program {
    child: Child,
    said: Arc<Mutex<String>>,
}

impl Program {
    pub fn start(mut command: Command) -> Result<Program> {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))?;
        let said: Arc<Mutex<String>> = Arc::default();
        keep(child.stdout.take(), &said)?;
        keep(child.stderr.take(), &said)?;
        Ok(Program { child, said })
    }

    /// Everything that it has printed.
    pub fn said(&self) -> String {
        self.said.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_some())
    }

    /// Freezes it and what it has started, as a machine that stands still.
    pub fn freeze(&mut self) -> Result<()> {
        let pid = self.child.id() as i32;
        process::signal(-pid, Signal::SIGSTOP)?;
        wait_until("it is frozen", PATIENCE, || are_stopped(pid))
    }

    pub fn thaw(&mut self) -> Result<()> {
        process::resume(-(self.child.id() as i32))
    }

    /// It ends by itself, and nothing failed.
    pub fn ends_well(mut self) -> Result<()> {
        self.end(PATIENCE, true).map(drop)
    }

    /// It ends by itself with a failure; returns what it said.
    pub fn leaves_with_failure(&mut self, limit: Duration) -> Result<String> {
        self.end(limit, false)
    }

    fn end(&mut self, limit: Duration, well: bool) -> Result<String> {
        let ended = wait_until("the program leaves", limit, || self.has_ended());
        ended.with_context(|| self.said())?;
        let status = self.child.wait()?;
        // Its last lines may still be on their way here.
        wait_until("its pipes are read", limit, || Arc::strong_count(&self.said) == 1)?;
        let said = self.said();
        ensure!(status.success() == well, "{status}: {said}");
        Ok(said)
    }
}

/// The source of a program with those changes: what it should say, and what it says instead.
pub fn changed(mut source: String, changes: &[(&str, &str)]) -> Result<String> {
    for (what, instead) in changes {
        ensure!(source.contains(what), "the program does not say {what}");
        source = source.replace(what, instead);
    }
    Ok(source)
}

/// A process and those that it has started.
fn are_stopped(pid: i32) -> bool {
    process::is_stopped(pid) && process::children_of(pid).into_iter().all(are_stopped)
}

fn keep(pipe: Option<impl Read + Send + 'static>, said: &Arc<Mutex<String>>) -> Result<()> {
    let (mut pipe, said) = (pipe.context("no pipe")?, said.clone());
    std::thread::Builder::new().name("listener".to_owned()).spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = pipe.read(&mut bytes) {
            let text = String::from_utf8_lossy(&bytes[..count]);
            said.lock().unwrap_or_else(|e| e.into_inner()).push_str(&text);
        }
    })?;
    Ok(())
}

impl Drop for Program {
    fn drop(&mut self) {
        // Once it was waited for, its number may be another's.
        if !self.has_ended() {
            let _ = process::signal(-(self.child.id() as i32), Signal::SIGKILL);
            let _ = self.child.wait();
        }
    }
}

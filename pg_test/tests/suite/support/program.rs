//! A program as a separate process, to be frozen, thawed and read from, and the programs that pages show.

use crate::project::pages::page;
use nix::sys::signal::Signal;
use pg_test::markdown::blocks;
use pg_test::process::{self, PATIENCE, output_of, wait_until};
use pg_test::{Context, Harness, Result, ensure};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

/// A program. It and its children are killed at the latest when this value is dropped.
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

    /// Returns all its output so far.
    pub fn said(&self) -> String {
        self.said.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_some())
    }

    /// Freezes it and its children, as if the machine stood still.
    pub fn freeze(&mut self) -> Result<()> {
        let pid = self.child.id() as i32;
        process::signal(-pid, Signal::SIGSTOP)?;
        wait_until("it is frozen", PATIENCE, || are_stopped(pid))
    }

    pub fn thaw(&mut self) -> Result<()> {
        process::resume(-(self.child.id() as i32))
    }

    /// Waits until it ends by itself, which must be successful.
    pub fn ends_well(&mut self) -> Result<()> {
        let (is_well, said) = self.ends()?;
        ensure!(is_well, "{said}");
        Ok(())
    }

    /// Waits until it ends by itself with a failure. Returns its output.
    pub fn leaves_with_failure(&mut self) -> Result<String> {
        let (is_well, said) = self.ends()?;
        ensure!(!is_well, "no failure: {said}");
        Ok(said)
    }

    /// Waits until it ends by itself. Returns whether it was successful, and its output.
    pub fn ends(&mut self) -> Result<(bool, String)> {
        let ended = wait_until("the program leaves", PATIENCE, || self.has_ended());
        ended.with_context(|| self.said())?;
        let status = self.child.wait()?;
        // Its last lines may still be on their way.
        wait_until("its pipes are read", PATIENCE, || Arc::strong_count(&self.said) == 1)?;
        Ok((status.success(), self.said()))
    }
}

/// A program on a page: the page, the language of its block, and words that only this block of that language has.
#[derive(Clone, Copy)]
pub struct Shown(pub &'static str, pub &'static str, pub &'static str);

impl Shown {
    /// Returns its source with these changes: a text that it must contain, and the text that replaces it.
    pub fn source(self, changes: &[(&str, &str)]) -> Result<String> {
        let Shown(path, mark, words) = self;
        let is_it = |code: &str| code.contains(words);
        let block = blocks(&page(path)?).into_iter().find(|b| b.mark == mark && is_it(&b.code));
        let mut source = block.with_context(|| format!("{path} has none in {mark}"))?.code;
        for (what, instead) in changes {
            ensure!(source.contains(what), "the program of {path} does not say {what}");
            source = source.replace(what, instead);
        }
        Ok(source)
    }
}

/// A program that reads a file during its work, and continues when the test writes the file.
pub struct Holder {
    pub program: Program,
    pipe: PathBuf,
    work: Option<File>,
}

impl Holder {
    pub fn start(
        harness: &Harness,
        command: impl FnOnce(&Path) -> Result<Command>,
    ) -> Result<Holder> {
        let pipe = harness.install_dir().new_dir("work")?.join("body.txt");
        output_of(Command::new("mkfifo").arg(&pipe))?;
        Ok(Holder { program: Program::start(command(&pipe)?)?, pipe, work: None })
    }

    /// Waits until it reads the file: it has then acquired all that it needs.
    pub fn is_at_work(&mut self) -> Result<()> {
        let Holder { program, pipe, work } = self;
        wait_until("the program is at its work", PATIENCE, || {
            // A pipe cannot be opened for writing before it is opened for reading.
            let mut options = OpenOptions::new();
            *work = options.write(true).custom_flags(nix::libc::O_NONBLOCK).open(&*pipe).ok();
            work.is_some() || program.has_ended()
        })
        .with_context(|| program.said())?;
        ensure!(work.is_some(), "it has ended: {}", program.said());
        Ok(())
    }

    /// Writes the content to the file and closes it.
    pub fn reads(&mut self, content: &str) -> Result<()> {
        Ok(self.work.take().context("it is not at work")?.write_all(content.as_bytes())?)
    }
}

/// Returns true if a process and its children are stopped.
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
        // Once the process was waited for, its pid may belong to another one.
        if !self.has_ended() {
            let _ = process::signal(-(self.child.id() as i32), Signal::SIGKILL);
            let _ = self.child.wait();
        }
    }
}

//! A program as a process of its own, to be frozen, thawed and listened to; and the programs that pages show.

use crate::project::pages::page;
use nix::sys::signal::Signal;
use pg_test::markdown::blocks;
use pg_test::process::{self, output_of, wait_until, PATIENCE};
use pg_test::{ensure, Context, Lab, Result};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

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
    pub fn ends_well(&mut self) -> Result<()> {
        let (is_well, said) = self.ends()?;
        ensure!(is_well, "{said}");
        Ok(())
    }

    /// It ends by itself with a failure; returns what it said.
    pub fn leaves_with_failure(&mut self) -> Result<String> {
        let (is_well, said) = self.ends()?;
        ensure!(!is_well, "no failure: {said}");
        Ok(said)
    }

    /// It ends by itself; returns whether nothing failed, and what it said.
    pub fn ends(&mut self) -> Result<(bool, String)> {
        let ended = wait_until("the program leaves", PATIENCE, || self.has_ended());
        ended.with_context(|| self.said())?;
        let status = self.child.wait()?;
        // Its last lines may still be on their way here.
        wait_until("its pipes are read", PATIENCE, || Arc::strong_count(&self.said) == 1)?;
        Ok((status.success(), self.said()))
    }
}

/// A program that a page shows: the page, the mark of its block, and words that are in no other block of that mark.
#[derive(Clone, Copy)]
pub struct Shown(pub &'static str, pub &'static str, pub &'static str);

impl Shown {
    /// As it stands there, but for those changes: what it should say, and what it says instead.
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

/// A program that reads a file in the middle of its work, and goes on when the test says what is in it.
pub struct Holder {
    pub program: Program,
    pipe: PathBuf,
    work: Option<File>,
}

impl Holder {
    pub fn start(lab: &Lab, command: impl FnOnce(&Path) -> Result<Command>) -> Result<Holder> {
        let pipe = lab.prefix().new_dir("work")?.join("body.txt");
        output_of(Command::new("mkfifo").arg(&pipe))?;
        Ok(Holder { program: Program::start(command(&pipe)?)?, pipe, work: None })
    }

    /// Waits until it reads the file: it has all that it takes before.
    pub fn is_at_work(&mut self) -> Result<()> {
        let Holder { program, pipe, work } = self;
        wait_until("the program is at its work", PATIENCE, || {
            // Nobody can write to a pipe that nobody reads.
            let mut options = OpenOptions::new();
            *work = options.write(true).custom_flags(nix::libc::O_NONBLOCK).open(&*pipe).ok();
            work.is_some() || program.has_ended()
        })
        .with_context(|| program.said())?;
        ensure!(work.is_some(), "it has ended: {}", program.said());
        Ok(())
    }

    /// Gives it the content, and the end.
    pub fn reads(&mut self, content: &str) -> Result<()> {
        Ok(self.work.take().context("it is not at work")?.write_all(content.as_bytes())?)
    }
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

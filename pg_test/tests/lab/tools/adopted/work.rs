//! A program's input before it writes: a file that gives its content when the test says so.

use crate::support::program::Program;
use pg_test::process::{output_of, wait_until, PATIENCE};
use pg_test::{Context, Result};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A named pipe.
pub struct Work(PathBuf);

/// The other end of it, at which a program reads.
pub struct Reader(File);

impl Work {
    pub fn new(path: PathBuf) -> Result<Work> {
        output_of(Command::new("mkfifo").arg(&path))?;
        Ok(Work(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Waits until the program reads it: the program has all that it takes before.
    pub fn is_asked_for(&self, program: &mut Program) -> Result<Reader> {
        let (mut pipe, mut has_ended) = (None, false);
        wait_until("the program is at its work", PATIENCE, || {
            // Nobody can write to a pipe that nobody reads.
            let mut options = OpenOptions::new();
            let options = options.write(true).custom_flags(nix::libc::O_NONBLOCK);
            pipe = options.open(&self.0).ok();
            has_ended = program.has_ended();
            pipe.is_some() || has_ended
        })
        .with_context(|| program.said())?;
        pipe.map(Reader).with_context(|| format!("it has ended: {}", program.said()))
    }
}

impl Reader {
    /// Gives it the content, and the end.
    pub fn reads(mut self, content: &str) -> Result<()> {
        Ok(self.0.write_all(content.as_bytes())?)
    }
}

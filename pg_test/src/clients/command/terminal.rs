//! A terminal for a test, provided by `script`.

use super::fixture::{CommandFixture, kill};
use crate::process::ChildProcess;
use anyhow::{Context, Result, ensure};
use std::io::Write;
use std::process::Stdio;

/// The file, in a test's directory, with everything that terminals have shown.
pub const SHOWN: &str = "shown";

/// A terminal, which is closed on drop.
pub struct Terminal {
    script: ChildProcess,
}

impl Terminal {
    /// Runs a shell command in a terminal of its own, where `$RUN` is `pg_fence run`.
    pub fn start(fixture: &CommandFixture, line: &str) -> Result<Terminal> {
        // Tests under nohup, or in the background of a script, would pass on that these signals are ignored.
        let mut command = fixture.servers.harness.rundir().command("env");
        command.args(["--default-signal=HUP,INT,QUIT", "script", "-qfec", line]);
        fixture.surround(&mut command).arg(fixture.dir.join(SHOWN));
        command.env("SHELL", "/bin/bash").env("RUN", "pg_fence run");
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Terminal { script: ChildProcess::start(&mut command)? })
    }

    pub fn types(&mut self, keys: &str) -> Result<()> {
        let stdin = self.script.stdin.as_mut().context("no keyboard")?;
        stdin.write_all(keys.as_bytes())?;
        Ok(stdin.flush()?)
    }

    pub fn ends_with(mut self, code: i32) -> Result<()> {
        let status = self.script.ended()?;
        ensure!(status.code() == Some(code), "not {code}, but {status:?}");
        Ok(())
    }

    /// Closes the terminal, as when a window is closed or a network connection ends.
    pub fn is_torn_away(&self) -> Result<()> {
        kill(self.script.pid())
    }
}

//! A terminal for a test, provided by `script`.

use super::fixture::{CommandFixture, kill};
use crate::process;
use anyhow::{Context, Result, ensure};
use std::io::Write;
use std::process::{Child, Command, Stdio};

/// The file, in a test's directory, with everything that terminals have shown.
pub const SHOWN: &str = "shown";

/// A terminal, which is closed on drop.
pub struct Terminal {
    script: Child,
}

impl Terminal {
    /// Runs a shell command in a terminal of its own, where `$RUN` is `pg_fence … run`.
    pub fn start(fixture: &CommandFixture, line: &str) -> Result<Terminal> {
        let mut given = fixture.command();
        given.arg("run");
        let words: Vec<String> = std::iter::once(given.get_program())
            .chain(given.get_args())
            .map(|word| format!("'{}'", word.to_string_lossy().replace('\'', "'\\''")))
            .collect();
        let path = fixture.dir().join("run");
        std::fs::write(&path, format!("exec {} \"$@\"\n", words.join(" ")))?;
        // Tests under nohup, or in the background of a script, would pass on that these signals are ignored.
        let mut command = Command::new("env");
        command.arg("--default-signal=HUP,INT,QUIT");
        command
            .args(["script", "-qfec", line])
            .arg(fixture.dir().join(SHOWN))
            .env("SHELL", "/bin/bash");
        for (name, value) in given.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.env("RUN", format!("sh {}", path.display()));
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Terminal { script: command.spawn().context("cannot start script")? })
    }

    pub fn types(&mut self, keys: &str) -> Result<()> {
        let stdin = self.script.stdin.as_mut().context("no keyboard")?;
        stdin.write_all(keys.as_bytes())?;
        Ok(stdin.flush()?)
    }

    pub fn ends_with(mut self, code: i32) -> Result<()> {
        let status = process::ended(&mut self.script)?;
        ensure!(status.code() == Some(code), "not {code}, but {status:?}");
        Ok(())
    }

    /// Closes the terminal, as when a window is closed or a network connection ends.
    pub fn is_torn_away(&self) -> Result<()> {
        kill(self.script.id() as i32)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.script.kill();
        let _ = self.script.wait();
    }
}

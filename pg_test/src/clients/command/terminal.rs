//! A terminal of a test's own. `script` gives one to a program.

use super::stage::{kill, Stage};
use crate::process;
use anyhow::{ensure, Context, Result};
use std::io::Write;
use std::process::{Child, Command, Stdio};

/// The file with all that terminals have shown, below a test's directory.
pub const SHOWN: &str = "shown";

/// It is torn away when it is dropped.
pub struct Terminal {
    script: Child,
}

impl Terminal {
    /// A shell command in a terminal of its own, where `$RUN` is `pg_fence … run`.
    pub fn start(stage: &Stage, line: &str) -> Result<Terminal> {
        let mut given = stage.command();
        given.arg("run");
        let words: Vec<String> = std::iter::once(given.get_program())
            .chain(given.get_args())
            .map(|word| format!("'{}'", word.to_string_lossy().replace('\'', "'\\''")))
            .collect();
        let path = stage.dir().join("run");
        std::fs::write(&path, format!("exec {} \"$@\"\n", words.join(" ")))?;
        // Under nohup, or in the background of a script, the tests themselves would hand on that these are ignored.
        let mut command = Command::new("env");
        command.arg("--default-signal=HUP,INT,QUIT");
        command
            .args(["script", "-qfec", line])
            .arg(stage.dir().join(SHOWN))
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

    /// As when a window is closed, or a network connection ends.
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

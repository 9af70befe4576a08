//! Shell commands in the test's own folder, in which `psql` and other programs find the test's database.

use crate::client::Conninfo;
use crate::clients::command::fixture;
use crate::harness::Harness;
use crate::process::{as_server_user, wait_until};
use crate::source_tree::source_root;
use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

pub struct Shell<'a> {
    harness: &'a Harness,
    dir: PathBuf,
    path: OsString,
    with_command: bool,
    /// The process groups of all shells so far: background processes may still run.
    groups: Vec<Pid>,
}

pub struct Ended {
    code: Option<i32>,
    pub out: String,
    err: String,
}

impl<'a> Shell<'a> {
    /// Makes a shell. With `with_command` it also finds `pg_fence`.
    pub fn new(harness: &'a Harness, with_command: bool) -> Result<Shell<'a>> {
        let command = if with_command { Some(fixture::program()?) } else { None };
        let path = harness.install_dir().path(command.as_deref().and_then(Path::parent));
        let dir = harness.install_dir().new_dir("shell")?;
        Ok(Shell { harness, dir, path, with_command, groups: Vec::new() })
    }

    /// Runs the commands until they end or one fails.
    pub fn run(
        &mut self,
        conninfo: &Conninfo,
        data: Option<PathBuf>,
        text: &str,
        patience: Duration,
    ) -> Result<Ended> {
        let file = |what: &str| self.dir.join(format!("{what}{}", self.groups.len()));
        let (out, err) = (file(".out"), file(".err"));
        let (port, dbname) = conninfo.place();
        let mut command = self.harness.rundir().command("sh");
        if data.is_some() && !self.with_command {
            // The files of servers belong to that user.
            as_server_user(&mut command)?;
        }
        command.envs(data.map(|data| ("PGDATA", data)));
        command.args(["-ec", text]).current_dir(&self.dir).process_group(0);
        command.envs([("PGHOST", "127.0.0.1"), ("PGDATABASE", dbname)]).env("PATH", &self.path);
        command.env("PGUSER", conninfo.role()).env("PGPORT", port.to_string());
        command
            .env("HOME", &self.dir)
            .env("SOURCE", source_root())
            .env_remove("PGOPTIONS")
            .stdin(Stdio::null());
        // Output goes into files: a background process would keep a pipe open.
        let mut child = command.stdout(File::create(&out)?).stderr(File::create(&err)?).spawn()?;
        self.groups.push(Pid::from_raw(child.id() as i32));
        let mut status = None;
        let ends = wait_until("the shell ends", patience, || {
            status = child.try_wait().ok().flatten();
            status.is_some()
        });
        let said = |path| Ok::<_, anyhow::Error>(fs::read_to_string(path)?.trim_end().to_owned());
        let ended = Ended {
            code: status.and_then(|status| status.code()),
            out: said(out)?,
            err: said(err)?,
        };
        ends.with_context(|| format!("{text}\n  said: {}", ended.shown())).map(|()| ended)
    }
}

impl Drop for Shell<'_> {
    fn drop(&mut self) {
        for group in &self.groups {
            let _ = killpg(*group, Signal::SIGKILL);
        }
        // Copies of servers' files are large.
        let _ = fs::remove_dir_all(&self.dir);
    }
}

impl Ended {
    /// Returns true if the result is `code|output|words … words of the errors`. The last parts may be left out.
    pub fn is(&self, wanted: &str) -> bool {
        let mut cells = wanted.splitn(3, '|').map(str::trim);
        let code = cells.next().is_some_and(|code| code == self.code());
        let out = match cells.next() {
            None | Some("*") => true,
            Some("" | "''") => self.out.is_empty(),
            Some(out) => out == self.out_on_one_line(),
        };
        let err = match cells.next() {
            Some("''") => self.err.is_empty(),
            words => {
                words.is_none_or(|words| words.split('…').all(|w| self.err.contains(w.trim())))
            }
        };
        code && out && err
    }

    /// Checks the result against the expected one.
    pub fn check(&self, text: &str, wanted: &str) -> Result<()> {
        ensure!(self.is(wanted), "{text}\n  wanted: {wanted}\n  got: {}", self.shown());
        Ok(())
    }

    /// Returns the expectations that this result meets, with as many parts as the old one.
    pub fn proposals(&self, old: &str) -> Vec<String> {
        let err = self.err.lines().last().unwrap_or("''").to_owned();
        let parts = [self.code(), self.out_on_one_line(), err];
        vec![parts[..old.splitn(3, '|').count()].join("|")]
    }

    fn code(&self) -> String {
        self.code.map(|code| code.to_string()).unwrap_or_default()
    }

    fn out_on_one_line(&self) -> String {
        if self.out.is_empty() { "''".to_owned() } else { self.out.replace('\n', " / ") }
    }

    fn shown(&self) -> String {
        format!("{:?}|{}|{}", self.code, self.out.replace('\n', " / "), self.err)
    }
}

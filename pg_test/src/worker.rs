//! A worker process with its own client, to be frozen and killed like a real one.
//!
//! This crate's program starts itself as `worker`. Parent and child exchange lines of JSON: statements and their
//! outcomes. The child does nothing by itself, so the test alone decides who does what, in which order.

use crate::client::{Conninfo, Rows, Session};
use crate::fault::Fault;
use crate::process::{self, ChildProcess, PATIENCE};
use crate::rundir::RunDir;
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

/// The child's answer.
#[derive(Debug, Serialize, Deserialize)]
enum Reply {
    /// The pid of its backend, sent once at the start.
    Connected(i32),
    /// The rows of the statement.
    Rows(Rows),
    Refused(Fault),
}

/// A worker process, as seen by the test or the scenario that started it.
pub struct Worker {
    /// Its name in a timeline.
    pub name: String,
    child: ChildProcess,
    stdin: ChildStdin,
    replies: Receiver<Reply>,
    backend: i32,
}

impl Worker {
    /// Starts a worker that connects by `conninfo`.
    pub fn start(rundir: &RunDir, name: &str, conninfo: &Conninfo) -> Result<Worker> {
        Worker::start_by(rundir.command(rundir.program()), name, conninfo)
    }

    /// Starts a worker that connects by `conninfo`. `command` runs this crate's program.
    pub fn start_by(mut command: Command, name: &str, conninfo: &Conninfo) -> Result<Worker> {
        command.arg("worker").arg(conninfo.clone().application(name).to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut child = ChildProcess::start(&mut command)?;
        let stdin = child.stdin.take().context("no pipe")?;
        let stdout = child.stdout.take().context("no pipe")?;
        let (reply_to, replies) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let Ok(reply) = serde_json::from_str(&line) else { return };
                if reply_to.send(reply).is_err() {
                    return;
                }
            }
        });
        let mut worker = Worker { name: name.to_owned(), child, stdin, replies, backend: 0 };
        match worker.reply(PATIENCE)? {
            Reply::Connected(pid) => worker.backend = pid,
            Reply::Refused(fault) => return Err(fault.into()),
            reply => return worker.out_of_turn(reply),
        }
        Ok(worker)
    }

    /// Returns the pid of the process.
    pub fn pid(&self) -> i32 {
        self.child.pid()
    }

    /// Returns the pid of its backend.
    pub fn backend(&self) -> i32 {
        self.backend
    }

    /// Sends a statement without waiting for its outcome.
    pub fn send(&mut self, sql: &str) -> Result<()> {
        let line = serde_json::to_string(sql)?;
        writeln!(self.stdin, "{line}").with_context(|| format!("{} is gone", self.name))?;
        Ok(self.stdin.flush()?)
    }

    fn out_of_turn<T>(&self, reply: Reply) -> Result<T> {
        bail!("the worker {} talks out of turn: {reply:?}", self.name)
    }

    /// Returns the outcome of the oldest statement not yet answered.
    pub fn outcome(&mut self, limit: Duration) -> Result<Result<Rows, Fault>> {
        match self.reply(limit)? {
            Reply::Rows(rows) => Ok(Ok(rows)),
            Reply::Refused(fault) => Ok(Err(fault)),
            reply => self.out_of_turn(reply),
        }
    }

    /// Runs a statement to its end and returns its rows.
    pub fn rows(&mut self, sql: &str) -> Result<Rows> {
        self.send(sql)?;
        self.outcome(PATIENCE)?.with_context(|| format!("{}: {sql}", self.name))
    }

    /// Returns the only column of the only row, as a number. NULL is `None`.
    pub fn number(&mut self, sql: &str) -> Result<Option<i64>> {
        let mut rows = self.rows(sql)?;
        ensure!(rows.len() == 1 && rows[0].len() == 1, "not one value: {sql}: {rows:?}");
        match rows.remove(0).remove(0) {
            Some(text) => Ok(Some(text.parse()?)),
            None => Ok(None),
        }
    }

    /// Runs a statement that must be refused with that SQLSTATE, and returns the error.
    pub fn refused(&mut self, sql: &str, sqlstate: &str) -> Result<Fault> {
        self.send(sql)?;
        let outcome = self.outcome(PATIENCE)?;
        crate::fault::expect_err(outcome, sqlstate).with_context(|| format!("{}: {sql}", self.name))
    }

    /// Freezes the process (SIGSTOP).
    pub fn freeze(&self) -> Result<()> {
        process::freeze_living(self.pid())
    }

    /// Resumes the process (SIGCONT).
    pub fn thaw(&self) -> Result<()> {
        process::signal(self.pid(), Signal::SIGCONT)
    }

    /// Kills the process (SIGKILL) and waits for its end.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()
    }

    fn reply(&mut self, limit: Duration) -> Result<Reply> {
        let name = &self.name;
        self.replies
            .recv_timeout(limit)
            .with_context(|| format!("the worker {name} did not answer within {limit:?}"))
    }
}

/// The child's main function: it connects, then runs what it reads until its input closes.
pub fn serve(conninfo: &str) -> Result<()> {
    let mut session = match Session::connect(conninfo) {
        Ok(session) => session,
        Err(fault) => return reply(Reply::Refused(fault)),
    };
    reply(Reply::Connected(session.pid()))?;
    for line in std::io::stdin().lines() {
        let sql: String = serde_json::from_str(&line?)?;
        reply(match session.try_rows(&sql) {
            Ok(rows) => Reply::Rows(rows),
            Err(fault) => Reply::Refused(fault),
        })?;
    }
    Ok(())
}

fn reply(reply: Reply) -> Result<()> {
    let line = serde_json::to_string(&reply)?;
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{line}")?;
    stdout.flush()?;
    Ok(())
}

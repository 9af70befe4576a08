//! A worker process with a client of its own, to be frozen and killed like a real one.
//!
//! The lab's program starts itself as `worker`; parent and child talk in lines of JSON: statements and their outcomes. The
//! child does nothing by itself, so a scenario reads as a script: who does what, in which order.

use crate::client::{Conninfo, Rows, Session};
use crate::fault::Fault;
use crate::process::{self, PATIENCE};
use crate::rundir::RunDir;
use anyhow::{bail, ensure, Context, Result};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

/// The child's answer.
#[derive(Debug, Serialize, Deserialize)]
enum Reply {
    /// The pid of its backend, once at the start.
    Connected(i32),
    /// The rows of the statement.
    Rows(Rows),
    Refused(Fault),
}

/// A worker process, as the test or the story that started it sees it.
pub struct Worker {
    /// Its name in a timeline.
    pub name: String,
    child: Child,
    stdin: ChildStdin,
    replies: Receiver<Reply>,
    backend: i32,
}

impl Worker {
    /// Starts a worker that connects by `conninfo`.
    pub fn start(rundir: &RunDir, name: &str, conninfo: &Conninfo) -> Result<Worker> {
        Worker::start_by(rundir.command(rundir.program()), name, conninfo)
    }

    /// The same, where `command` starts the lab's program in its own way.
    pub fn start_by(mut command: Command, name: &str, conninfo: &Conninfo) -> Result<Worker> {
        let mut child = command
            .arg("worker")
            .arg(conninfo.clone().application(name).to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .context("cannot start a worker")?;
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

    /// The pid of the process.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// The pid of its backend.
    pub fn backend(&self) -> i32 {
        self.backend
    }

    /// Hands it a statement without waiting for the outcome.
    pub fn send(&mut self, sql: &str) -> Result<()> {
        let line = serde_json::to_string(sql)?;
        writeln!(self.stdin, "{line}").with_context(|| format!("{} is gone", self.name))?;
        Ok(self.stdin.flush()?)
    }

    fn out_of_turn<T>(&self, reply: Reply) -> Result<T> {
        bail!("the worker {} talks out of turn: {reply:?}", self.name)
    }

    /// The outcome of the oldest statement not yet answered.
    pub fn outcome(&mut self, limit: Duration) -> Result<Result<Rows, Fault>> {
        match self.reply(limit)? {
            Reply::Rows(rows) => Ok(Ok(rows)),
            Reply::Refused(fault) => Ok(Err(fault)),
            reply => self.out_of_turn(reply),
        }
    }

    /// Has it run a statement to its end.
    pub fn rows(&mut self, sql: &str) -> Result<Rows> {
        self.send(sql)?;
        self.outcome(PATIENCE)?.with_context(|| format!("{}: {sql}", self.name))
    }

    /// The only column of the only row, as a number; NULL is `None`.
    pub fn number(&mut self, sql: &str) -> Result<Option<i64>> {
        let mut rows = self.rows(sql)?;
        ensure!(rows.len() == 1 && rows[0].len() == 1, "not one value: {sql}: {rows:?}");
        match rows.remove(0).remove(0) {
            Some(text) => Ok(Some(text.parse()?)),
            None => Ok(None),
        }
    }

    /// Has it run a statement that must be refused with that SQLSTATE.
    pub fn refused(&mut self, sql: &str, sqlstate: &str) -> Result<Fault> {
        self.send(sql)?;
        let outcome = self.outcome(PATIENCE)?;
        crate::fault::expect_err(outcome, sqlstate).with_context(|| format!("{}: {sql}", self.name))
    }

    /// Freezes the process where it is (SIGSTOP).
    pub fn freeze(&self) -> Result<()> {
        process::freeze_living(self.pid())
    }

    /// Lets it go on (SIGCONT).
    pub fn thaw(&self) -> Result<()> {
        process::signal(self.pid(), Signal::SIGCONT)
    }

    /// Kills the process (SIGKILL) and waits for its end.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    fn reply(&mut self, limit: Duration) -> Result<Reply> {
        let name = &self.name;
        self.replies
            .recv_timeout(limit)
            .with_context(|| format!("the worker {name} did not answer within {limit:?}"))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// The child's whole life: it connects, then does what it reads until its input closes.
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

//! A worker process with a client of its own, to be frozen and killed like a real one.
//!
//! The lab's program starts itself as `worker`; parent and child talk in lines of JSON. The child
//! does nothing by itself, so a scenario reads as a script: who does what, in which order.

use crate::client::{Conninfo, Rows, Session};
use crate::fault::Fault;
use crate::process::{self, wait_until};
use crate::rundir::RunDir;
use anyhow::{bail, ensure, Context, Result};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

/// What the parent asks.
#[derive(Debug, Serialize, Deserialize)]
struct Request {
    sql: String,
}

/// What the child answers.
#[derive(Debug, Serialize, Deserialize)]
enum Reply {
    /// The pid of its backend, once at the start.
    Connected(i32),
    /// The rows of the statement.
    Rows(Rows),
    /// The server's error.
    Refused(Fault),
}

/// A worker process.
pub struct Worker {
    /// What to call it in a timeline.
    pub name: String,
    child: Child,
    stdin: ChildStdin,
    replies: Receiver<Reply>,
    backend: i32,
}

impl Worker {
    /// Starts a worker that connects by `conninfo`.
    pub fn start(rundir: &RunDir, name: &str, conninfo: &Conninfo) -> Result<Worker> {
        let mut child = rundir
            .command(rundir.program())
            .arg("worker")
            .arg(conninfo.clone().application(name).to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .context("cannot start a worker")?;
        let stdin = child.stdin.take().context("no pipe")?;
        let stdout = child.stdout.take().context("no pipe")?;
        let (sender, replies) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let reply = serde_json::from_str(&line);
                if reply.is_err() || sender.send(reply.expect("checked")).is_err() {
                    return;
                }
            }
        });
        let mut worker = Worker { name: name.to_owned(), child, stdin, replies, backend: 0 };
        match worker.reply(Duration::from_secs(30))? {
            Reply::Connected(pid) => worker.backend = pid,
            Reply::Refused(fault) => return Err(fault.into()),
            Reply::Rows(_) => bail!("the worker {name} talks out of turn"),
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
        let request = serde_json::to_string(&Request { sql: sql.to_owned() })?;
        writeln!(self.stdin, "{request}").with_context(|| format!("{} is gone", self.name))?;
        self.stdin.flush()?;
        Ok(())
    }

    /// The outcome of the oldest statement not yet answered.
    pub fn outcome(&mut self, limit: Duration) -> Result<Result<Rows, Fault>> {
        match self.reply(limit)? {
            Reply::Rows(rows) => Ok(Ok(rows)),
            Reply::Refused(fault) => Ok(Err(fault)),
            Reply::Connected(_) => bail!("the worker {} talks out of turn", self.name),
        }
    }

    /// Has it run a statement to its end.
    pub fn rows(&mut self, sql: &str) -> Result<Rows> {
        self.send(sql)?;
        self.outcome(Duration::from_secs(60))?.with_context(|| format!("{}: {sql}", self.name))
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
        let outcome = self.outcome(Duration::from_secs(60))?;
        crate::fault::expect_err(outcome, sqlstate).with_context(|| format!("{}: {sql}", self.name))
    }

    /// Freezes the process where it is (SIGSTOP).
    pub fn freeze(&self) -> Result<()> {
        process::signal(self.pid(), Signal::SIGSTOP)?;
        let limit = Duration::from_secs(10);
        wait_until("the worker is frozen", limit, || process::is_stopped(self.pid()))
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

/// The child's whole life: it connects, then runs what it reads until its input closes.
pub fn serve(conninfo: &str) -> Result<()> {
    let mut stdout = std::io::stdout();
    let mut say = |reply: Reply| -> Result<()> {
        writeln!(stdout, "{}", serde_json::to_string(&reply)?)?;
        stdout.flush()?;
        Ok(())
    };
    let mut session = match Session::connect(conninfo) {
        Ok(session) => session,
        Err(fault) => return say(Reply::Refused(fault)),
    };
    say(Reply::Connected(session.pid()))?;
    for line in std::io::stdin().lines() {
        let request: Request = serde_json::from_str(&line?)?;
        say(match session.try_rows(&request.sql) {
            Ok(rows) => Reply::Rows(rows),
            Err(fault) => Reply::Refused(fault),
        })?;
    }
    Ok(())
}

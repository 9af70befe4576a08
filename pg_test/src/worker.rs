//! A worker process with a client of its own, to be frozen and killed like a real one.
//!
//! The lab's program starts itself as `worker`; parent and child talk in lines of JSON. The child
//! does nothing by itself but its heartbeat, so a scenario reads as a script: who does what, in
//! which order.

use crate::client::{literal, microseconds, Conninfo, Rows, Session};
use crate::fault::Fault;
use crate::process::{self, wait_until, PATIENCE};
use crate::rundir::RunDir;
use anyhow::{bail, ensure, Context, Result};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

/// What a worker exits with when its heartbeat finds the lease lost.
pub const LEASE_LOST: i32 = 3;

/// What the parent asks.
#[derive(Debug, Serialize, Deserialize)]
enum Request {
    /// To run a statement.
    Run(String),
    /// To renew a lease from now on, every third of its ttl, in a thread and session of its own.
    Heartbeat { lease: String, token: i64, ttl_ms: u64 },
}

/// What the child says.
#[derive(Debug, Serialize, Deserialize)]
enum Word {
    /// The outcome of a request, or of the start.
    Reply(Reply),
    /// The outcome of a renewal.
    Beat(Beat),
}

/// What the child answers.
#[derive(Debug, Serialize, Deserialize)]
enum Reply {
    /// The pid of its backend, once at the start.
    Connected(i32),
    /// The rows of the statement.
    Rows(Rows),
    Refused(Fault),
    /// The heartbeat's first renewal is done.
    Beating,
}

/// A renewal by a worker's heartbeat.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Beat {
    Renewed(Renewal),
    /// It came back NULL: the worker stops.
    Lost,
    /// It failed, so the worker cannot know, and stops.
    Failed(Fault),
}

/// A renewal that was granted and committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Renewal {
    /// The token that it returned.
    pub token: i64,
    /// When it was asked for, by the server's clock in microseconds since 1970: its ttl begins then or later.
    pub asked_at: i64,
}

/// A worker process, as the test or the story that started it sees it.
pub struct Worker {
    /// What to call it in a timeline.
    pub name: String,
    child: Child,
    stdin: ChildStdin,
    replies: Receiver<Reply>,
    beats: Receiver<Beat>,
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
        let (beat_to, beats) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let heard = match serde_json::from_str(&line) {
                    Ok(Word::Reply(reply)) => reply_to.send(reply).is_ok(),
                    Ok(Word::Beat(beat)) => beat_to.send(beat).is_ok(),
                    Err(_) => false,
                };
                if !heard {
                    return;
                }
            }
        });
        let mut worker = Worker { name: name.to_owned(), child, stdin, replies, beats, backend: 0 };
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
        self.request(&Request::Run(sql.to_owned()))
    }

    fn request(&mut self, request: &Request) -> Result<()> {
        let request = serde_json::to_string(request)?;
        writeln!(self.stdin, "{request}").with_context(|| format!("{} is gone", self.name))?;
        self.stdin.flush()?;
        Ok(())
    }

    /// Starts its heartbeat: it renews the lease at once and then every `ttl / 3`, and the worker
    /// stops by itself, with [`LEASE_LOST`], when a renewal comes back NULL.
    pub fn heartbeat(&mut self, lease: &str, token: i64, ttl: Duration) -> Result<()> {
        let ttl_ms = ttl.as_millis() as u64;
        self.request(&Request::Heartbeat { lease: lease.to_owned(), token, ttl_ms })?;
        match self.reply(PATIENCE)? {
            Reply::Beating => Ok(()),
            reply => self.out_of_turn(reply),
        }
    }

    /// The renewals since the last call.
    pub fn beats(&mut self) -> Vec<Beat> {
        self.beats.try_iter().collect()
    }

    /// What the worker exits with when it stops by itself, within `limit`.
    pub fn exit_code(&mut self, limit: Duration) -> Result<Option<i32>> {
        let mut status = None;
        wait_until("the worker stops", limit, || {
            status = self.child.try_wait().ok().flatten();
            status.is_some()
        })?;
        Ok(status.and_then(|status| status.code()))
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
        process::signal(self.pid(), Signal::SIGSTOP)?;
        wait_until("the worker is frozen", PATIENCE, || process::is_stopped(self.pid()))
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
        reply(match serde_json::from_str(&line?)? {
            Request::Run(sql) => match session.try_rows(&sql) {
                Ok(rows) => Reply::Rows(rows),
                Err(fault) => Reply::Refused(fault),
            },
            Request::Heartbeat { lease, token, ttl_ms } => {
                let mut session = match Session::connect(conninfo) {
                    Ok(session) => session,
                    Err(fault) => return reply(Reply::Refused(fault)),
                };
                renew(&mut session, &lease, token)?;
                let pause = Duration::from_millis(ttl_ms / 3);
                std::thread::spawn(move || loop {
                    std::thread::sleep(pause);
                    if renew(&mut session, &lease, token).is_err() {
                        std::process::exit(1);
                    }
                });
                Reply::Beating
            }
        })?;
    }
    Ok(())
}

/// Renews, with the token of the grant: it serves for as long as the grant lives. A worker that cannot
/// renew has nothing left to do here.
fn renew(session: &mut Session, lease: &str, token: i64) -> Result<()> {
    let renew = format!("lease_renew({}, {token})", literal(lease));
    let now = microseconds("clock_timestamp()");
    let beat = match session.try_rows(&format!("SELECT {now}, {renew}")) {
        Ok(rows) => match &rows[0][..] {
            [Some(asked_at), Some(token)] => {
                Beat::Renewed(Renewal { token: token.parse()?, asked_at: asked_at.parse()? })
            }
            _ => Beat::Lost,
        },
        Err(fault) => Beat::Failed(fault),
    };
    let lost = !matches!(beat, Beat::Renewed(_));
    say(&Word::Beat(beat))?;
    if lost {
        std::process::exit(LEASE_LOST);
    }
    Ok(())
}

fn reply(reply: Reply) -> Result<()> {
    say(&Word::Reply(reply))
}

fn say(word: &Word) -> Result<()> {
    let line = serde_json::to_string(word)?;
    // Two threads talk: a line is written whole.
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{line}")?;
    stdout.flush()?;
    Ok(())
}

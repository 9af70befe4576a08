//! A worker process in some language, which executes commands and reports events. clients/new-language.md describes the
//! messages.

use super::languages::Client;
use super::tcp_proxy::TcpProxy;
use crate::harness::Harness;
use crate::process::{self, ChildProcess, PATIENCE, wait_until};
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{ChildStdin, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Instant;

/// What a message of a worker is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// The answer to the oldest command that has none yet; also output that is none of a worker's.
    Answer,
    Event,
    Renewal,
}

fn kind_of(said: &Value) -> Kind {
    match said["event"].as_str() {
        Some("renewed") => Kind::Renewal,
        Some("lost" | "leading" | "stopped") => Kind::Event,
        _ => Kind::Answer,
    }
}

/// A message in the words of scenarios.
pub fn in_words(said: &Value) -> String {
    // An error of the server has its SQLSTATE, whatever type a client makes of it.
    let state = said["sqlstate"].as_str();
    let state = state.filter(|state| state.starts_with("PF") || said["error"] == "refused");
    let how = state.or(said["error"].as_str()).or(said["reason"].as_str()).map(str::to_owned);
    let how = how.or_else(|| said["count"].as_i64().map(|count| count.to_string()));
    let event = said["event"].as_str().unwrap_or_default();
    how.map_or(event.to_owned(), |how| format!("{event} {how}"))
}

/// The worker, its link, and what is known of it.
pub struct ClientWorker {
    name: String,
    pub child: ChildProcess,
    stdin: Option<ChildStdin>,
    pub link: TcpProxy,
    stdout: Receiver<Value>,
    /// What it has said and nobody has waited for.
    said: Vec<Value>,
    /// Its standard error.
    complaints: PathBuf,
    /// True if the last event was the loss of the lease.
    is_lost: bool,
    /// The leases taken by `hold`, with their ttl.
    pub crowd: BTreeSet<String>,
    pub crowd_ttl_ms: i64,
    /// The token of its grant, and the latest deadline that it reported, in milliseconds since 1970.
    pub token: Option<i64>,
    pub deadline: Option<i64>,
    /// The number of threads or tasks right after it connected.
    tasks: i64,
}

impl ClientWorker {
    /// Starts a worker, which connects through the link.
    pub fn start(
        harness: &Harness,
        client: &Client,
        name: &str,
        link: TcpProxy,
        connect: &Value,
    ) -> Result<ClientWorker> {
        let complaints = harness.rundir().path().join(format!("{name}-{}", link.port()));
        let mut command = client.program(harness, client.language.worker);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(File::create(&complaints)?);
        let mut child = ChildProcess::start(command.process_group(0))?;
        let lines = BufReader::new(child.stdout.take().context("no pipe")?).lines();
        let (to, stdout) = mpsc::channel();
        std::thread::spawn(move || {
            let said = |line: String| {
                let said: Option<Value> = serde_json::from_str(&line).ok();
                let said = said.filter(|said| said["event"].is_string());
                said.unwrap_or_else(|| json!({ "event": format!("no message: {line}") }))
            };
            lines.map_while(Result::ok).try_for_each(|line| to.send(said(line)))
        });
        let mut worker = ClientWorker {
            name: name.to_owned(),
            stdin: child.stdin.take(),
            child,
            link,
            stdout,
            said: Vec::new(),
            complaints,
            is_lost: false,
            crowd: BTreeSet::new(),
            crowd_ttl_ms: 0,
            token: None,
            deadline: None,
            tasks: 0,
        };
        worker.ask(connect, "connected")?;
        worker.tasks = worker.tasks()?;
        Ok(worker)
    }

    pub fn tell(&mut self, order: &Value) -> Result<()> {
        let stdin = self.stdin.as_mut().context("it is gone")?;
        writeln!(stdin, "{order}").with_context(|| format!("{} is gone", self.name))?;
        Ok(stdin.flush()?)
    }

    fn ask(&mut self, order: &Value, answer: &str) -> Result<Value> {
        self.tell(order)?;
        let said = self.says(Kind::Answer)?;
        ensure!(said["event"] == answer, "{} should say {answer}, and says {said}", self.name);
        Ok(said)
    }

    /// The next message of this kind.
    pub fn says(&mut self, kind: Kind) -> Result<Value> {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.said.iter().position(|said| kind_of(said) == kind) {
                return Ok(self.said.remove(at));
            }
            let (name, complaints) = (&self.name, || self.complaints());
            if kind == Kind::Renewal && self.is_lost {
                bail!("{name} renews nothing any more, for its lease is lost{}", complaints());
            }
            match self.stdout.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(said) => self.note(said),
                Err(error) => bail!("{name}: no {kind:?}: {error}{}", complaints()),
            }
        }
    }

    /// The next renewal from now on.
    pub fn renews(&mut self) -> Result<Value> {
        self.note_all();
        self.said.retain(|said| kind_of(said) != Kind::Renewal);
        self.says(Kind::Renewal)
    }

    fn note_all(&mut self) {
        while let Ok(said) = self.stdout.try_recv() {
            self.note(said);
        }
    }

    fn note(&mut self, said: Value) {
        let of_crowd = said["name"].as_str().is_some_and(|name| self.crowd.contains(name));
        match said["event"].as_str() {
            Some("lost") if !of_crowd => self.is_lost = true,
            Some("acquired" | "leading" | "renewed") => self.is_lost = false,
            _ => {}
        }
        if kind_of(&said) == Kind::Renewal {
            self.deadline = said["deadline"].as_i64().max(self.deadline);
        }
        self.said.push(said);
    }

    /// Its standard error.
    fn complained(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.complaints).unwrap_or_default()).into_owned()
    }

    /// The end of its standard error.
    fn complaints(&self) -> String {
        let text = self.complained();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].iter().map(|line| format!("\n    {line}")).collect()
    }

    /// The number of lines on its standard error.
    pub fn logged(&self) -> usize {
        self.complained().lines().count()
    }

    /// Checks that it has said nothing, except for renewals, that nobody has waited for.
    pub fn has_said_all(&mut self) -> Result<()> {
        self.note_all();
        let more = self.said.iter().find(|said| kind_of(said) != Kind::Renewal);
        ensure!(more.is_none(), "nobody asked, and {} said {more:?}", self.name);
        Ok(())
    }

    pub fn freeze(&self) -> Result<()> {
        process::freeze_living(self.child.pid())
    }

    pub fn thaw(&self) -> Result<()> {
        process::resume(self.child.pid())
    }

    /// Sends SIGTERM and waits for the end of the worker.
    pub fn terminate(&mut self) -> Result<()> {
        process::signal(self.child.pid(), Signal::SIGTERM)?;
        self.ends().map(drop)
    }

    /// Checks that it releases its leases, and has nothing left of them.
    pub fn close(&mut self) -> Result<()> {
        // It may be frozen still.
        self.thaw()?;
        self.link.restore();
        self.ask(&json!({ "do": "close" }), "closed")?;
        let mut more = 0;
        let ended = wait_until("its threads end", PATIENCE, || {
            more = self.tasks().unwrap_or(i64::MAX);
            more <= 0
        });
        ended.with_context(|| format!("{} has {more} more threads or tasks", self.name))
    }

    /// Closes its input and waits for its end.
    pub fn leave(&mut self) -> Result<()> {
        drop(self.stdin.take());
        let status = self.ends()?;
        ensure!(status.success(), "{} ends with {status:?}{}", self.name, self.complaints());
        Ok(())
    }

    fn ends(&mut self) -> Result<ExitStatus> {
        self.child.ended().with_context(|| self.name.clone())
    }

    /// The number of threads and tasks beyond those right after its start.
    pub fn tasks(&mut self) -> Result<i64> {
        let said = self.ask(&json!({ "do": "census" }), "census")?;
        Ok(said["tasks"].as_i64().context("a census without a number")? - self.tasks)
    }
}

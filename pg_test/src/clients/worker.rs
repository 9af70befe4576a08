//! A worker process in some language, which executes commands and reports events. clients/new-language.md describes the
//! messages.

use super::languages::Client;
use super::scenario_servers::ScenarioServers;
use super::tcp_proxy::TcpProxy;
use crate::process::{self, ChildProcess, PATIENCE, wait_until};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Stdio;
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
    pub link: TcpProxy,
    stdout: Receiver<Value>,
    /// What it has said and nobody has waited for.
    said: Vec<Value>,
    /// Its standard error.
    complaints: PathBuf,
    /// The leases taken by `hold`, with their ttl in milliseconds.
    pub crowd: BTreeMap<String, i64>,
    /// The token of its grant, and the latest deadline that it reported, in milliseconds since 1970.
    pub token: Option<i64>,
    pub deadline: Option<i64>,
    /// The number of threads or tasks right after it connected.
    tasks: i64,
}

impl ClientWorker {
    /// Starts a worker, which connects through a link of its own.
    pub fn start(servers: &ScenarioServers, client: &Client, name: &str) -> Result<ClientWorker> {
        let link = TcpProxy::start(servers.port())?;
        let connect = json!({
            "do": "connect", "host": "127.0.0.1", "port": link.port(), "user": servers.role,
            "dbname": servers.database.name(), "application": name,
        });
        let rundir = servers.harness.rundir().path();
        let complaints = rundir.join(format!("{name}-{}", link.port()));
        let mut command = client.program(servers.harness, client.language.worker);
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
            child,
            link,
            stdout,
            said: Vec::new(),
            complaints,
            crowd: BTreeMap::new(),
            token: None,
            deadline: None,
            tasks: 0,
        };
        worker.ask(&connect, "connected")?;
        worker.tasks = worker.tasks()?;
        Ok(worker)
    }

    pub fn tell(&mut self, order: &Value) -> Result<()> {
        let stdin = self.child.stdin.as_mut().context("it is gone")?;
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
            let event = self.said.iter().find(|said| kind_of(said) == Kind::Event);
            if let (Kind::Renewal, Some(said)) = (kind, event) {
                bail!("{name} should renew, and says {said}{}", complaints());
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
        if kind_of(&said) == Kind::Renewal {
            self.deadline = said["deadline"].as_i64().max(self.deadline);
        }
        self.said.push(said);
    }

    /// The lines on its standard error.
    pub fn logged(&self) -> Vec<String> {
        let text = fs::read(&self.complaints).unwrap_or_default();
        String::from_utf8_lossy(&text).lines().map(str::to_owned).collect()
    }

    /// The end of its standard error.
    fn complaints(&self) -> String {
        let lines = self.logged();
        lines[lines.len().saturating_sub(20)..].iter().map(|line| format!("\n    {line}")).collect()
    }

    /// Checks that it has said nothing, except for renewals, that nobody has waited for.
    pub fn has_said_all(&mut self) -> Result<()> {
        self.note_all();
        let more = self.said.iter().find(|said| kind_of(said) != Kind::Renewal);
        ensure!(more.is_none(), "nobody asked, and {} said {more:?}", self.name);
        Ok(())
    }

    /// Checks that it releases its leases, and has nothing left of them.
    pub fn close(&mut self) -> Result<()> {
        // It may be frozen still.
        process::resume(self.child.pid())?;
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
        drop(self.child.stdin.take());
        let status = self.child.ended()?;
        ensure!(status.success(), "{} ends with {status:?}{}", self.name, self.complaints());
        Ok(())
    }

    /// The number of threads and tasks beyond those right after its start.
    pub fn tasks(&mut self) -> Result<i64> {
        let said = self.ask(&json!({ "do": "census" }), "census")?;
        Ok(said["tasks"].as_i64().context("a census without a number")? - self.tasks)
    }
}

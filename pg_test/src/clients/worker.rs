//! A worker process in some language, which executes commands and reports events. clients/new-language.md describes the
//! messages.

use super::languages::Client;
use super::tcp_proxy::{LinkState, TcpProxy};
use crate::harness::Harness;
use crate::process::{self, PATIENCE, wait_until};
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A line of output of a worker.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Said {
    pub event: String,
    /// The time in milliseconds since 1970.
    pub at: i64,
    /// The time until which it holds the lease, likewise.
    pub deadline: Option<i64>,
    pub token: Option<i64>,
    /// The kind of error: `lost`, `taken`…
    pub error: Option<String>,
    /// The reason of a loss.
    pub reason: Option<String>,
    /// The name of the lost lease.
    pub name: Option<String>,
    /// The number of leases that are held.
    pub count: Option<i64>,
    pub tasks: Option<i64>,
    pub sqlstate: Option<String>,
    pub message: Option<String>,
}

impl Said {
    /// The event in the words of scenarios.
    pub fn words(&self) -> String {
        // An error of the server has its SQLSTATE, whatever type a client makes of it.
        let state = self
            .sqlstate
            .clone()
            .filter(|state| state.starts_with("PF") || self.error.as_deref() == Some("refused"));
        let how = state.or_else(|| self.error.clone()).or_else(|| self.reason.clone());
        match how.or_else(|| self.count.map(|count| count.to_string())) {
            Some(how) => format!("{} {how}", self.event),
            None => self.event.clone(),
        }
    }
}

/// The worker, its link, and what is known of it.
pub struct ClientWorker {
    name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    pub link: TcpProxy,
    answers: Receiver<Said>,
    unasked: Receiver<Said>,
    /// The events of renewals, and of the begin and end of leases, in order.
    renewals: Receiver<Said>,
    /// True if the last event was the loss of the lease.
    is_lost: bool,
    /// The leases taken by `hold`, with their ttl.
    pub crowd: BTreeSet<String>,
    pub crowd_ttl_ms: i64,
    complaints: Arc<Mutex<String>>,
    /// The token of its grant, and the latest deadline that it reported.
    pub token: Option<i64>,
    pub deadline: Option<i64>,
    pub is_frozen: bool,
    /// The time of the last thaw.
    pub thawed_at: Option<i64>,
    /// The number of threads or tasks right after it connected.
    tasks: i64,
}

/// The present time in milliseconds since 1970.
pub fn unix_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_millis() as i64
}

impl ClientWorker {
    /// Starts a worker, which connects through the link.
    pub fn start(
        harness: &Harness,
        client: &Client,
        name: &str,
        link: TcpProxy,
        place: &Value,
    ) -> Result<ClientWorker> {
        let mut command = client.program(harness, client.language.worker);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().context("no pipe")?;
        let mut stderr = child.stderr.take().context("no pipe")?;
        let complaints: Arc<Mutex<String>> = Arc::default();
        let heard = complaints.clone();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = stderr.read(&mut bytes) {
                let text = String::from_utf8_lossy(&bytes[..count]);
                heard.lock().unwrap_or_else(|e| e.into_inner()).push_str(&text);
            }
        });
        let (answers, unasked, renewals) = listen(stdout);
        let mut worker = ClientWorker {
            name: name.to_owned(),
            child,
            stdin,
            link,
            answers,
            unasked,
            renewals,
            is_lost: false,
            crowd: BTreeSet::new(),
            crowd_ttl_ms: 0,
            complaints,
            token: None,
            deadline: None,
            is_frozen: false,
            thawed_at: None,
            tasks: 0,
        };
        worker.tell(&order("connect", place))?;
        worker.expect("connected")?;
        worker.tasks = worker.census()?;
        Ok(worker)
    }

    pub fn tell(&mut self, order: &Value) -> Result<()> {
        let stdin = self.stdin.as_mut().context("it is gone")?;
        writeln!(stdin, "{order}").with_context(|| format!("{} is gone", self.name))?;
        stdin.flush()?;
        Ok(())
    }

    /// The answer to the oldest unanswered command.
    pub fn answer(&mut self) -> Result<Said> {
        self.hear(&self.answers, PATIENCE).context("no answer")
    }

    fn expect(&mut self, event: &str) -> Result<Said> {
        let said = self.answer()?;
        ensure!(said.event == event, "{} should say {event}, and says {said:?}", self.name);
        Ok(said)
    }

    /// The next event.
    pub fn says(&self, limit: Duration) -> Result<Said> {
        self.hear(&self.unasked, limit).context("it says nothing")
    }

    /// The next event of a renewal.
    pub fn renewal(&mut self) -> Result<Said> {
        self.note_renewals();
        while !self.is_lost {
            let said = self.hear(&self.renewals, PATIENCE).context("it renews nothing")?;
            self.note(&said);
            if said.event == "renewed" {
                return Ok(said);
            }
        }
        // No renewal will come any more.
        bail!("{} renews nothing, for its lease is lost{}", self.name, self.complaints())
    }

    /// Takes the deadlines of renewals that nobody has waited for.
    pub fn note_renewals(&mut self) {
        while let Ok(said) = self.renewals.try_recv() {
            self.note(&said);
        }
    }

    fn note(&mut self, said: &Said) {
        if said.name.as_ref().is_some_and(|name| self.crowd.contains(name)) {
            return;
        }
        self.is_lost = said.event == "lost";
        if said.event == "renewed" {
            self.deadline = said.deadline.max(self.deadline);
        }
    }

    fn hear(&self, words: &Receiver<Said>, limit: Duration) -> Result<Said> {
        words.recv_timeout(limit).map_err(|error| {
            let why = match error {
                RecvTimeoutError::Timeout => format!("not within {limit:?}"),
                RecvTimeoutError::Disconnected => "it has ended".to_owned(),
            };
            anyhow::anyhow!("{}: {why}{}", self.name, self.complaints())
        })
    }

    /// The end of its standard error.
    fn complaints(&self) -> String {
        let text = self.complaints.lock().unwrap_or_else(|e| e.into_inner());
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].iter().map(|line| format!("\n    {line}")).collect()
    }

    /// An event, other than a renewal, that nobody has waited for.
    pub fn unexpected(&self) -> Option<Said> {
        self.answers.try_recv().or_else(|_| self.unasked.try_recv()).ok()
    }

    pub fn freeze(&mut self) -> Result<()> {
        let pid = self.child.id() as i32;
        self.is_frozen = true;
        process::freeze_living(pid)
    }

    pub fn thaw(&mut self) -> Result<()> {
        self.is_frozen = false;
        self.thawed_at = Some(unix_ms());
        process::resume(self.child.id() as i32)
    }

    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// The number of lines on its standard error.
    pub fn logged(&self) -> usize {
        self.complaints.lock().unwrap_or_else(|e| e.into_inner()).lines().count()
    }

    /// Sends SIGTERM and waits for the end of the worker.
    pub fn terminate(&mut self) -> Result<()> {
        process::signal(self.pid(), Signal::SIGTERM)?;
        self.ends().map(drop)
    }

    /// Checks that it releases its leases, has nothing left of them, and exits.
    pub fn close(&mut self) -> Result<()> {
        if self.is_frozen {
            self.thaw()?;
        }
        self.link.set(LinkState::Restored);
        self.tell(&order("close", &Value::Null))?;
        self.expect("closed")?;
        let mut tasks = 0;
        let fewer = wait_until("its threads end", PATIENCE, || {
            tasks = self.census().unwrap_or(i64::MAX);
            tasks <= self.tasks
        });
        if fewer.is_err() {
            bail!("{} had {} threads or tasks, and has {tasks}", self.name, self.tasks);
        }
        Ok(())
    }

    /// Closes its input and waits for its end.
    pub fn leave(&mut self) -> Result<()> {
        drop(self.stdin.take());
        let status = self.ends()?;
        ensure!(status.success(), "{} ends with {status:?}{}", self.name, self.complaints());
        Ok(())
    }

    fn ends(&mut self) -> Result<ExitStatus> {
        process::ended(&mut self.child).with_context(|| self.name.clone())
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// The number of threads and tasks beyond those right after its start.
    pub fn tasks(&mut self) -> Result<i64> {
        Ok(self.census()? - self.tasks)
    }

    fn census(&mut self) -> Result<i64> {
        self.tell(&order("census", &Value::Null))?;
        self.expect("census")?.tasks.context("a census without a number")
    }
}

impl Drop for ClientWorker {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

fn order(what: &str, with: &Value) -> Value {
    let mut order = json!({ "do": what });
    if let (Some(order), Some(with)) = (order.as_object_mut(), with.as_object()) {
        order.extend(with.clone());
    }
    order
}

/// Sorts the worker's output into answers, events, and events of renewals and of leases that begin or end.
fn listen(stdout: impl Read + Send + 'static) -> (Receiver<Said>, Receiver<Said>, Receiver<Said>) {
    let (answer_to, answers) = mpsc::channel();
    let (unasked_to, unasked) = mpsc::channel();
    let (renewal_to, renewals) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            // Any other output counts as an unexpected answer.
            let said: Said = serde_json::from_str(&line)
                .unwrap_or_else(|_| Said { event: format!("no JSON: {line}"), ..Said::default() });
            let begins_or_ends = matches!(said.event.as_str(), "acquired" | "leading" | "lost");
            if begins_or_ends && renewal_to.send(said.clone()).is_err() {
                return;
            }
            let to = match said.event.as_str() {
                "renewed" => &renewal_to,
                "lost" | "leading" | "stopped" => &unasked_to,
                _ => &answer_to,
            };
            if to.send(said).is_err() {
                return;
            }
        }
    });
    (answers, unasked, renewals)
}

//! A running scenario: its servers and workers, and what each line does with them.

use super::languages::Client;
use super::scenario_servers::{self, ScenarioServers, ServerAction};
use super::tcp_proxy::{LinkState, TcpProxy};
use super::worker::{ClientWorker, Said, unix_ms};
use crate::process::PATIENCE;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// The allowed delay of a loss report on a busy machine, in milliseconds. A fault causes a longer one.
const SLACK_MS: i64 = 1500;

/// The number of threads or tasks that a client may have for any number of leases.
const FEW_TASKS: i64 = 12;

/// In the error chain of a scenario that could not even begin; that does not catch a planted fault.
#[derive(Debug, Clone, Copy)]
pub struct NotReady;

impl fmt::Display for NotReady {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the scenario cannot be played")
    }
}

/// An event that happens to a worker's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Frozen,
    Thawed,
    Killed,
    /// Its input ends, and it exits as programs in its language do.
    Ended,
    /// It exits after SIGTERM.
    Terminated,
}

/// A running scenario, and the actions of its lines.
pub struct Fixture<'a> {
    servers: ScenarioServers<'a>,
    client: &'a Client,
    /// The factor by which all durations of the scenario are multiplied.
    pace: u32,
    workers: BTreeMap<String, ClientWorker>,
    /// The time of the last event of a worker, a link or the server, in milliseconds since 1970.
    disturbed_at: i64,
}

impl<'a> Fixture<'a> {
    pub fn new(servers: ScenarioServers<'a>, client: &'a Client, pace: u32) -> Fixture<'a> {
        let (workers, disturbed_at) = (BTreeMap::new(), unix_ms());
        Fixture { servers, client, pace, workers, disturbed_at }
    }
    fn slack_ms(&self) -> i64 {
        SLACK_MS * i64::from(self.pace)
    }

    pub fn pause(&self, time: Duration) -> Result<()> {
        std::thread::sleep(time * self.pace);
        Ok(())
    }

    /// Checks that exactly these values were written, in this order.
    pub fn writes(&self, values: &[&str]) -> Result<()> {
        let written = scenario_servers::written(&mut self.servers.admin()?)?;
        ensure!(written == values, "what landed: {written:?}");
        Ok(())
    }

    /// Checks that a worker has written at most this number of lines to its standard error.
    pub fn logs(&mut self, name: &str, at_most: usize) -> Result<()> {
        let logged = self.worker(name)?.logged();
        ensure!(logged <= at_most, "{name} has logged {logged} lines");
        Ok(())
    }

    pub fn link(&mut self, name: &str, state: LinkState) -> Result<()> {
        self.disturbed_at = unix_ms();
        self.worker(name)?.link.set(state);
        Ok(())
    }

    /// The worker of that name, which is started when first mentioned.
    fn worker(&mut self, name: &str) -> Result<&mut ClientWorker> {
        if !self.workers.contains_key(name) {
            let link = TcpProxy::start(self.servers.port())?;
            let place = json!({
                "host": "127.0.0.1", "port": link.port(), "user": self.servers.role(),
                "dbname": self.servers.dbname(), "application": name,
            });
            let harness = self.servers.harness();
            let worker = ClientWorker::start(harness, self.client, name, link, &place)
                .with_context(|| format!("{name} does not start"))
                .context(NotReady)?;
            self.workers.insert(name.to_owned(), worker);
        }
        self.workers.get_mut(name).context("just started")
    }

    /// Sends a command to a worker.
    pub fn tell(&mut self, name: &str, order: &Value) -> Result<()> {
        let order = &slowed_down(order, self.pace);
        let worker = self.worker(name)?;
        if order["do"] == "hold" {
            worker.crowd_ttl_ms = order["ttl_ms"].as_i64().unwrap_or_default();
            let names = order["names"].as_array().into_iter().flatten();
            worker.crowd.extend(names.filter_map(Value::as_str).map(str::to_owned));
        }
        worker.tell(order)
    }

    /// Checks that a worker's answer to the oldest command is one of these.
    pub fn answer(&mut self, name: &str, any_of: &[String]) -> Result<()> {
        let said = self.worker(name)?.answer()?;
        ensure!(any_of.contains(&said.words()), "{name} answers \"{}\": {said:?}", said.words());
        if let (Some(token), Some(_)) = (said.token, said.deadline) {
            self.worker(name)?.token = Some(token);
        }
        self.note_deadline(name, &said)
    }

    /// Checks that a worker's next event is one of these.
    pub fn says(&mut self, name: &str, event: &str, any_of: &[String]) -> Result<()> {
        match event {
            "renewed" => {
                let said = self.worker(name)?.renewal()?;
                self.note_deadline(name, &said)
            }
            _ => {
                let said = self.worker(name)?.says(PATIENCE)?;
                let how = said.reason.clone().unwrap_or_default();
                let is_meant = any_of.is_empty() && how.is_empty() || any_of.contains(&how);
                ensure!(said.event == event && is_meant, "{name} says {said:?}");
                self.worker(name)?.token = said.token;
                self.note_deadline(name, &said)
            }
        }
    }

    /// Checks that a client does not claim the lease for longer than the server grants it.
    fn note_deadline(&mut self, name: &str, said: &Said) -> Result<()> {
        let Some(deadline) = said.deadline else { return Ok(()) };
        let worker = self.worker(name)?;
        worker.deadline = Some(deadline);
        let token = worker.token.context("a deadline without a token")?;
        if !self.servers.tells_the_time() {
            return Ok(());
        }
        if let Some(holds) = self.servers.holds_until(token)? {
            ensure!(
                deadline <= holds,
                "{name} believes that it holds the lease {} ms longer than the server does",
                deadline - holds
            );
        }
        Ok(())
    }

    /// Checks that a loss is reported by the deadline, or as soon as the worker continues.
    pub fn says_lost(&mut self, name: &str, any_of: &[String]) -> Result<()> {
        let slack_ms = self.slack_ms();
        let worker = self.worker(name)?;
        worker.note_renewals();
        let deadline = worker.deadline.context("it never had the lease")?;
        let due = deadline.max(worker.thawed_at.unwrap_or(i64::MIN)) + slack_ms;
        let limit = Duration::from_millis((due - unix_ms()).max(0) as u64 + 3000);
        let said = worker.says(limit)?;
        ensure!(said.event == "lost", "{name} says {said:?}");
        let reason = said.reason.clone().unwrap_or_default();
        ensure!(any_of.is_empty() || any_of.contains(&reason), "{name} says {said:?}");
        // A renewal may have come in between.
        worker.note_renewals();
        let deadline = worker.deadline.unwrap_or(deadline);
        let due = deadline.max(worker.thawed_at.unwrap_or(i64::MIN)) + slack_ms;
        ensure!(said.at <= due, "{name} says it {} ms too late", said.at - due + slack_ms);
        let early = deadline - said.at;
        ensure!(
            reason != "deadline" || early < 50,
            "{name} gives the lease up {early} ms before the deadline"
        );
        Ok(())
    }

    /// Checks the loss of one of many leases, or of a session lease. Workers do not report the renewals of these; the
    /// last one was in time when the last event happened.
    pub fn says_one_lost(
        &mut self,
        name: &str,
        any_of: &[String],
        lease: Option<&str>,
        at_once: bool,
    ) -> Result<()> {
        let (slack_ms, disturbed_at) = (self.slack_ms(), self.disturbed_at);
        let worker = self.worker(name)?;
        let ttl_ms = if at_once { 0 } else { worker.crowd_ttl_ms };
        let due = (disturbed_at + ttl_ms).max(worker.thawed_at.unwrap_or(i64::MIN)) + slack_ms;
        let said = worker.says(Duration::from_millis((due - unix_ms()).max(0) as u64 + 3000))?;
        ensure!(said.event == "lost", "{name} says {said:?}");
        let reason = said.reason.clone().unwrap_or_default();
        ensure!(any_of.is_empty() || any_of.contains(&reason), "{name} says {said:?}");
        ensure!(lease.is_none() || said.name.as_deref() == lease, "{name} says {said:?}");
        ensure!(said.at <= due, "{name} says it {} ms too late", said.at - due + slack_ms);
        // The lease was renewed within the last third of its ttl before that.
        let early = disturbed_at + ttl_ms / 2 - said.at;
        ensure!(reason != "deadline" || early < 0, "{name} gives it up long before its deadline");
        if !at_once {
            let lost = said.name.unwrap_or_default();
            ensure!(worker.crowd.remove(&lost), "{name} has lost {lost:?}, which it did not hold");
        }
        Ok(())
    }

    /// Measures the cost of renewing its leases; it has one session meanwhile.
    pub fn measure(&mut self, name: &str, time: Duration) -> Result<()> {
        let time = time * self.pace;
        let worker = self.worker(name)?;
        let tasks = worker.tasks()?;
        ensure!(tasks <= FEW_TASKS, "{name} has {tasks} threads or tasks more than at its start");
        let process = worker.pid();
        let cost = self.servers.measure(name, process, time)?;
        eprintln!("{name}, measured for {time:?}: {cost}");
        ensure!(cost.beats > 1.0, "it has renewed too little");
        Ok(())
    }

    pub fn befall(&mut self, name: &str, fate: Fate) -> Result<()> {
        self.disturbed_at = unix_ms();
        match fate {
            Fate::Frozen => self.worker(name)?.freeze(),
            Fate::Thawed => self.worker(name)?.thaw(),
            Fate::Killed | Fate::Ended | Fate::Terminated => {
                let mut worker = self.workers.remove(name).context("who?")?;
                if let Some(said) = worker.unexpected() {
                    anyhow::bail!("{name} said {said:?}");
                }
                match fate {
                    Fate::Killed => worker.kill(),
                    Fate::Ended => worker.leave(),
                    _ => worker.terminate(),
                }
            }
        }
    }

    pub fn server(&mut self, disturbs: bool, act: &ServerAction) -> Result<()> {
        if disturbs {
            self.disturbed_at = unix_ms();
        }
        act(&mut self.servers)?;
        let port = self.servers.port();
        self.workers.values().for_each(|worker| worker.link.redirect(port));
        Ok(())
    }

    /// Checks that there were no further events, and that nothing is left.
    pub fn close(mut self) -> Result<()> {
        for (name, worker) in &mut self.workers {
            if let Some(said) = worker.unexpected() {
                anyhow::bail!("nobody asked, and {name} said {said:?}");
            }
            worker.close().with_context(|| name.clone())?;
        }
        self.servers.nothing_is_left()?;
        self.workers.values_mut().try_for_each(ClientWorker::leave)
    }
}

/// The same command with all durations multiplied. The delay of a network link is unchanged, because drivers have their
/// own connect timeouts.
fn slowed_down(order: &Value, times: u32) -> Value {
    let mut slower = order.clone();
    for key in ["ttl_ms", "wait_ms", "within_ms", "ms"] {
        if let Some(ms) = order[key].as_u64() {
            slower[key] = json!(ms * u64::from(times));
        }
    }
    slower
}

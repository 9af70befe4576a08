//! A running scenario: its servers and workers, and what each line does with them.

use super::languages::Client;
use super::scenario::{Scenario, duration, order};
use super::scenario_servers::ScenarioServers;
use super::tcp_proxy::{BOTH, Direction};
use super::worker::{ClientWorker, Kind, in_words};
use crate::harness::Harness;
use crate::skipped::is_left_out;
use crate::{edition, process, stall_detector};
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

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

/// Checks that a scenario has failed with a planted fault.
pub fn is_caught(fault: &str, scenario: &str, played: Result<()>) -> Result<()> {
    match played {
        Err(error) if error.is::<NotReady>() || is_left_out(&error) => Err(error),
        Err(caught) => {
            eprintln!("{fault}: caught by \"{scenario}\": {caught:#}");
            Ok(())
        }
        Ok(()) => bail!("{fault} is not caught by \"{scenario}\""),
    }
}

/// A running scenario.
struct Fixture<'a> {
    servers: ScenarioServers<'a>,
    client: &'a Client,
    /// The factor by which all durations of the scenario are multiplied.
    pace: u32,
    workers: BTreeMap<String, ClientWorker>,
    /// The time of the last event of a worker, a link or the server, in milliseconds since 1970.
    disturbed_at: i64,
}

/// Plays a scenario, with a planted fault if one is named. The error says what was different.
///
/// On a machine that stalls, renewals come late and leases expire that the scenario needs. Such a failure proves
/// nothing, so the scenario is played again, more slowly. A fault of the client fails at every pace.
pub fn play(
    harness: &Harness,
    scenario: &Scenario,
    client: &Client,
    plant: Option<&str>,
) -> Result<()> {
    stall_detector::at_some_pace(harness.rundir().path(), scenario.name, |pace| {
        let servers = servers(harness, scenario, plant, pace).context(NotReady)?;
        let (workers, disturbed_at) = (BTreeMap::new(), unix_ms());
        let mut fixture = Fixture { servers, client, pace, workers, disturbed_at };
        for line in &scenario.steps {
            fixture.play(line).with_context(|| format!("at \"{line}\""))?;
        }
        fixture.close().context("at the end")
    })
}

fn servers<'a>(
    harness: &'a Harness,
    scenario: &Scenario,
    plant: Option<&str>,
    pace: u32,
) -> Result<ScenarioServers<'a>> {
    let servers = ScenarioServers::start(harness, scenario.need)?;
    let (mut admin, role) = (servers.admin()?, &servers.role);
    if !edition::is_lite() {
        admin.run(&format!("SELECT fence_grant('{role}', 'adopter')"))?;
    }
    for &(name, value) in &scenario.role_settings {
        let time = duration(&value.split(' ').collect::<Vec<_>>());
        let slower = time.map(|time| format!("{} ms", (time * pace).as_millis()));
        let value = slower.unwrap_or_else(|_| value.to_owned());
        admin.run(&format!("ALTER ROLE {role} SET {name} = '{value}'"))?;
    }
    if let Some(fault) = plant {
        let planted = include_str!("planted.sql").replace("FAULT", fault);
        admin.run(&planted.replace("PACE", &pace.to_string()))?;
    }
    Ok(servers)
}

fn unix_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_millis() as i64
}

impl Fixture<'_> {
    fn play(&mut self, line: &str) -> Result<()> {
        let (what, answer) = line.split_once("->").unwrap_or((line, ""));
        let words: Vec<&str> = what.split_whitespace().collect();
        // Some events of the server only observe.
        if let ["link" | "freeze" | "thaw" | "kill" | "end" | "term" | "server", what, ..] = *words
            && !matches!(what, "holds" | "sees" | "shows")
        {
            self.disturbed_at = unix_ms();
        }
        match *words {
            ["pause", ref time @ ..] => std::thread::sleep(duration(time)? * self.pace),
            ["writes", ref values @ ..] => self.servers.has_written(values)?,
            ["server", ref event @ ..] => {
                self.servers.event(event)?;
                let port = self.servers.port();
                self.workers.values().for_each(|worker| worker.link.redirect(port));
            }
            ["link", worker, ref state @ ..] => {
                let link = &self.worker(worker)?.link;
                match *state {
                    ["swallows", "both"] => link.swallow(BOTH),
                    ["swallows", "requests"] => link.swallow(&[Direction::Requests]),
                    ["swallows", "answers"] => link.swallow(&[Direction::Answers]),
                    // Not more slowly, because drivers have their own connect timeouts.
                    ["delays", "answers", ref time @ ..] => link.delay_answers(duration(time)?),
                    ["restored"] => link.restore(),
                    _ => bail!("the link does what?"),
                }
            }
            ["freeze", worker] => process::freeze_living(self.worker(worker)?.child.pid())?,
            ["thaw", worker] => process::resume(self.worker(worker)?.child.pid())?,
            [fate @ ("kill" | "end" | "term"), worker] => {
                let mut worker = self.workers.remove(worker).context("who?")?;
                worker.has_said_all()?;
                match fate {
                    "kill" => worker.child.kill()?,
                    // Its input ends, and it exits as programs in its language do.
                    "end" => worker.leave()?,
                    _ => {
                        process::signal(worker.child.pid(), Signal::SIGTERM)?;
                        worker.child.ended()?;
                    }
                }
            }
            [worker, "logs", "at", "most", lines, "lines"] => {
                let logged = self.worker(worker)?.logged().len();
                ensure!(logged <= lines.parse()?, "{worker} has logged {logged} lines");
            }
            [worker, "is", "measured", "for", ref time @ ..] => {
                let tasks = self.worker(worker)?.tasks()?;
                ensure!(tasks <= FEW_TASKS, "{worker} has {tasks} more threads or tasks");
                let process = self.worker(worker)?.child.pid();
                self.servers.measure(worker, process, duration(time)? * self.pace)?;
            }
            [worker, "says", "renewed"] => {
                let said = self.worker(worker)?.renews()?;
                self.check_deadline(worker, &said)?;
            }
            [worker, "says", "lost", ref how @ ..] => self.loses(worker, how)?,
            [worker, "says", count, "lost", ref how @ ..] => {
                (0..count.parse()?).try_for_each(|_: u32| self.loses(worker, how))?;
            }
            [worker, "says", ref event @ ..] => {
                let said = self.worker(worker)?.says(Kind::Event)?;
                ensure!(in_words(&said) == event.join(" "), "{worker} says {said}");
                self.check_deadline(worker, &said)?;
            }
            [worker, ref order @ ..] => {
                if !order.is_empty() {
                    self.tell(worker, order)?;
                }
                if !answer.is_empty() {
                    self.answers(worker, answer.trim())?;
                }
            }
            [] => bail!("an answer to what?"),
        }
        Ok(())
    }

    /// The worker of that name, which is started when first mentioned.
    fn worker(&mut self, name: &str) -> Result<&mut ClientWorker> {
        if !self.workers.contains_key(name) {
            let worker = ClientWorker::start(&self.servers, self.client, name)
                .with_context(|| format!("{name} does not start"))
                .context(NotReady)?;
            self.workers.insert(name.to_owned(), worker);
        }
        self.workers.get_mut(name).context("just started")
    }

    fn tell(&mut self, name: &str, words: &[&str]) -> Result<()> {
        let order = order(words, self.pace)?;
        let worker = self.worker(name)?;
        if order["do"] == "hold" {
            let ttl_ms = order["ttl_ms"].as_i64().context("it has no ttl")?;
            let names = order["names"].as_array().into_iter().flatten().filter_map(Value::as_str);
            worker.crowd.extend(names.map(|name| (name.to_owned(), ttl_ms)));
        }
        worker.tell(&order)
    }

    /// Checks a worker's answer to the oldest command. `committed|refused lost|stale` means `committed`, `refused lost`
    /// or `refused stale`.
    fn answers(&mut self, name: &str, any_of: &str) -> Result<()> {
        let said = self.worker(name)?.says(Kind::Answer)?;
        let answer = in_words(&said);
        let (events, how) = any_of.split_once(' ').unwrap_or((any_of, ""));
        let (others, event) = events.rsplit_once('|').unwrap_or(("", events));
        let is_meant = others.split('|').any(|other| other == answer)
            || how.split('|').any(|how| format!("{event} {how}").trim_end() == answer);
        ensure!(is_meant, "{name} answers \"{answer}\": {said}");
        self.check_deadline(name, &said)
    }

    /// Checks that a client does not claim the lease for longer than the server grants it.
    fn check_deadline(&mut self, name: &str, said: &Value) -> Result<()> {
        let Some(deadline) = said["deadline"].as_i64() else { return Ok(()) };
        let worker = self.worker(name)?;
        worker.deadline = Some(deadline);
        // A renewal counts for the grant.
        if said["event"] != "renewed" {
            worker.token = said["token"].as_i64();
        }
        let token = worker.token.context("a deadline without a token")?;
        let holds = self.servers.holds_until(token)?.unwrap_or(i64::MAX);
        let more = deadline.saturating_sub(holds);
        ensure!(
            more <= 0,
            "{name} believes that it holds the lease {more} ms longer than the server does"
        );
        Ok(())
    }

    /// Checks that a loss is reported by the deadline, or as soon as a frozen worker continues; `at once`, right after
    /// the last event. The renewals of one of many leases are not reported; the last one was in time when the last
    /// event happened.
    fn loses(&mut self, name: &str, how: &[&str]) -> Result<()> {
        let (slack_ms, disturbed_at) = (SLACK_MS * i64::from(self.pace), self.disturbed_at);
        let worker = self.worker(name)?;
        let said = worker.says(Kind::Event)?;
        let [reason, lease] = ["reason", "name"].map(|key| said[key].as_str().unwrap_or_default());
        let (any_of, which) = how.split_first().context("lost for what reason?")?;
        let is_meant = said["event"] == "lost" && any_of.split('|').any(|one| one == reason);
        let at_once = which == ["at", "once"];
        let is_that = at_once || which.is_empty() || which == [lease];
        ensure!(is_meant && is_that, "{name} says {said}");
        let (earliest, deadline) = if let Some(ttl_ms) = worker.crowd.remove(lease) {
            // It was renewed within the last third of its ttl before the last event.
            (disturbed_at + ttl_ms / 2, disturbed_at + ttl_ms)
        } else {
            let deadline = worker.deadline.context("it never had the lease")?;
            (deadline - 50, if at_once { disturbed_at } else { deadline })
        };
        let at = said["at"].as_i64().context("when?")?;
        let late = at - deadline.max(disturbed_at) - slack_ms;
        ensure!(late <= 0, "{name} says {said} {late} ms too late");
        let early = earliest - at;
        ensure!(reason != "deadline" || early <= 0, "{name} gives it up {early} ms too early");
        Ok(())
    }

    /// Checks that there were no further events, and that nothing is left.
    fn close(mut self) -> Result<()> {
        for (name, worker) in &mut self.workers {
            worker.has_said_all()?;
            worker.close().with_context(|| name.clone())?;
        }
        self.servers.nothing_is_left()?;
        self.workers.values_mut().try_for_each(ClientWorker::leave)
    }
}

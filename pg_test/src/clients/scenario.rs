//! The scenarios of `clients/scenarios.md`, read into steps.

use crate::edition::Surface;
use crate::source_tree::source_root;
use anyhow::{bail, ensure, Context, Result};
use serde_json::{json, Map, Value};
use std::fs;
use std::time::Duration;

/// The things that a scenario needs beside a database of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    Nothing,
    /// A server of its own.
    Server,
    /// And a standby of it.
    Standby,
    /// A server whose clock can be set.
    Clock,
    /// PgBouncer in transaction mode between the workers and the server.
    Pooler,
}

/// A way of a cable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Requests,
    Answers,
    Both,
}

/// An event of a worker's cable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CableState {
    Swallows(Way),
    DelaysAnswers(Duration),
    Mended,
}

/// An event of a worker's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Frozen,
    Thawed,
    Killed,
    /// Its input ends, and it ends as a program in its language does.
    Ended,
    /// The same by SIGTERM.
    Terminated,
}

/// An event at the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Restarts,
    FailsOver,
    /// So many seconds from the right time.
    Clock(i64),
    Revokes(String),
    /// It ends all sessions of a worker.
    Terminates(String),
    /// Every `lease_keep` of a worker fails.
    Starves(String),
    /// The workers' role may use leases no more.
    DeniesLeases,
    /// Another session sees that the lease was renewed.
    ShowsRenewal(String),
    /// Another session keeps a transaction open that has renewed the lease.
    Locks(String),
    /// That transaction ends, by COMMIT or ROLLBACK.
    Unlocks(&'static str),
    /// So many leases are held.
    Holds(i64),
    /// A worker has so many sessions, or will have.
    Sees {
        sessions: i64,
        worker: String,
    },
    HasNoTable(String),
}

/// One line of a scenario.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// A worker is told to do something.
    Tell {
        worker: String,
        order: Value,
    },
    /// Its answer to the oldest order, one of these.
    Answer {
        worker: String,
        any_of: Vec<String>,
    },
    /// Its words unasked, one of these.
    Says {
        worker: String,
        event: String,
        any_of: Vec<String>,
    },
    /// It tells the losses of so many leases.
    Loses {
        worker: String,
        count: usize,
        any_of: Vec<String>,
        /// Of a lease that was taken by `hold` or `claim`.
        name: Option<String>,
        /// As soon as the last thing happened, and not at a deadline.
        at_once: bool,
    },
    /// Its workers have claimed so many leases, each claimed by one of them.
    Claimed {
        workers: Vec<String>,
        count: usize,
    },
    /// The cost of keeping its leases, for so long; it has one session meanwhile.
    Measure {
        worker: String,
        time: Duration,
    },
    /// It has written at most so many lines to its standard error.
    Logs {
        worker: String,
        at_most: usize,
    },
    Befalls {
        worker: String,
        fate: Fate,
    },
    Cable {
        worker: String,
        state: CableState,
    },
    Server(Event),
    Pause(Duration),
    /// All that has been written, in order.
    Writes(Vec<String>),
}

impl Action {
    fn slow_down(&mut self, times: u32) {
        match self {
            Action::Tell { order: Value::Object(order), .. } => {
                for key in ["ttl_ms", "wait_ms", "within_ms", "ms"] {
                    if let Some(ms) = order.get(key).and_then(Value::as_u64) {
                        order.insert(key.to_owned(), json!(ms * u64::from(times)));
                    }
                }
            }
            Action::Pause(time) | Action::Measure { time, .. } => *time *= times,
            // A delayed answer stays as it is: drivers have timeouts of their own for the time that a connect takes.
            _ => {}
        }
    }
}

/// A line and what it means: an order and its answer are two actions.
#[derive(Debug, Clone)]
pub struct Step {
    pub text: String,
    pub actions: Vec<Action>,
}

/// A scenario.
#[derive(Debug, Clone)]
pub struct Scenario {
    pub name: String,
    pub need: Need,
    /// Settings of the role that the workers log in as.
    pub role_settings: Vec<(String, String)>,
    /// The planted faults that make it fail.
    pub catches: Vec<String>,
    pub steps: Vec<Step>,
}

/// All scenarios, in the order of the page.
pub fn all() -> Result<Vec<Scenario>> {
    let path = source_root().join("clients/scenarios.md");
    parse(&fs::read_to_string(&path).with_context(|| path.display().to_string())?)
}

fn parse(page: &str) -> Result<Vec<Scenario>> {
    let sections = page.split("\n## ").skip(1);
    sections.map(|section| scenario(section).with_context(|| first_line(section))).collect()
}

fn first_line(section: &str) -> String {
    section.lines().next().unwrap_or("").trim().to_owned()
}

fn scenario(section: &str) -> Result<Scenario> {
    let (_, code) = section.split_once("\n```\n").context("no steps")?;
    let (code, _) = code.split_once("\n```").context("the steps have no end")?;
    let mut scenario = Scenario {
        name: first_line(section),
        need: Need::Nothing,
        role_settings: Vec::new(),
        catches: Vec::new(),
        steps: Vec::new(),
    };
    for line in code.lines().map(str::trim).filter(|line| !line.is_empty()) {
        scenario.read(line).with_context(|| line.to_owned())?;
    }
    ensure!(
        code.lines().last().is_some_and(|line| line.starts_with("writes")),
        "it does not end with what was written"
    );
    Ok(scenario)
}

impl Scenario {
    /// The part of it that this edition has not; None where it can be played.
    pub fn lacks(&self, surface: &Surface) -> Option<&'static str> {
        let asks = |wanted: &dyn Fn(&Value) -> bool| {
            self.steps
                .iter()
                .flat_map(|step| &step.actions)
                .any(|action| matches!(action, Action::Tell { order, .. } if wanted(order)))
        };
        let several = |order: &Value| {
            order["do"] == "acquire" && order["names"].as_array().is_some_and(|all| all.len() > 1)
        };
        let keeps_snapshot =
            self.role_settings.iter().any(|(name, _)| name == "default_transaction_isolation");
        let waits = asks(&|order| order["wait_ms"].is_u64());
        [
            (surface.sessions, asks(&|order| order["session"] == true), "session => true"),
            (surface.multi_holder, asks(&|order| order["shared"] == true), "shared grants"),
            (surface.multi_holder, asks(&|order| order["slots"].is_u64()), "slots"),
            (surface.several, asks(&several), "several leases at once"),
            (surface.several, keeps_snapshot && waits, "wait at REPEATABLE READ"),
            (surface.adoption, asks(&|order| order["do"] == "adopted"), "adoption"),
            (
                surface.several,
                asks(&|order| order["do"] == "guard-all"),
                "tokens of several guards",
            ),
        ]
        .into_iter()
        .find_map(|(is_there, is_asked, what)| (is_asked && !is_there).then_some(what))
    }

    /// As it is called on the command line.
    pub fn key(&self) -> String {
        let plain = self.name.to_lowercase().replace(' ', "-");
        plain.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect()
    }

    /// The same, where everything lasts that many times as long: ttls, waits, pauses, timeouts of the server.
    pub fn slowed_down(&self, times: u32) -> Scenario {
        let mut slower = self.clone();
        for (_, value) in &mut slower.role_settings {
            let words: Vec<&str> = value.split_whitespace().collect();
            if let Ok(time) = duration(&words) {
                *value = format!("{} ms", (time * times).as_millis());
            }
        }
        for action in slower.steps.iter_mut().flat_map(|step| &mut step.actions) {
            action.slow_down(times);
        }
        slower
    }

    fn read(&mut self, line: &str) -> Result<()> {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["with", "a", need] => self.need = need_of(need)?,
            ["catches", plants @ ..] => {
                self.catches.extend(plants.iter().map(|plant| (*plant).to_owned()));
            }
            ["role", setting, value @ ..] => {
                self.role_settings.push(((*setting).to_owned(), value.join(" ")));
            }
            _ => {
                let actions = actions(line)?;
                let text = words.join(" ");
                self.steps.push(Step { text, actions });
            }
        }
        Ok(())
    }
}

fn need_of(word: &str) -> Result<Need> {
    Ok(match word {
        "server" => Need::Server,
        "standby" => Need::Standby,
        "clock" => Need::Clock,
        "pooler" => Need::Pooler,
        _ => bail!("with a what?"),
    })
}

fn actions(line: &str) -> Result<Vec<Action>> {
    let (what, answer) = match line.split_once("->") {
        Some((what, answer)) => (what, Some(answer.trim())),
        None => (line, None),
    };
    let words: Vec<&str> = what.split_whitespace().collect();
    let mut actions = Vec::new();
    match words.as_slice() {
        ["pause", time @ ..] => actions.push(Action::Pause(duration(time)?)),
        ["writes", values @ ..] => {
            actions.push(Action::Writes(values.iter().map(|v| (*v).to_owned()).collect()));
        }
        ["server", event @ ..] => actions.push(Action::Server(server_event(event)?)),
        ["cable", worker, state @ ..] => {
            let state = cable_state(state)?;
            actions.push(Action::Cable { worker: (*worker).to_owned(), state });
        }
        [fate @ ("freeze" | "thaw" | "kill" | "end" | "term"), worker] => {
            let fate = match *fate {
                "freeze" => Fate::Frozen,
                "thaw" => Fate::Thawed,
                "kill" => Fate::Killed,
                "end" => Fate::Ended,
                _ => Fate::Terminated,
            };
            actions.push(Action::Befalls { worker: (*worker).to_owned(), fate });
        }
        [worker, "says", count, "lost", how @ ..] => {
            actions.push(loses(worker, count.parse()?, how)?);
        }
        [worker, "says", "lost", how @ ..] => actions.push(loses(worker, 1, how)?),
        [one, "and", other, "claimed", count] => {
            let workers = vec![(*one).to_owned(), (*other).to_owned()];
            actions.push(Action::Claimed { workers, count: count.parse()? });
        }
        [worker, "logs", "at", "most", lines, "lines" | "line"] => {
            actions.push(Action::Logs { worker: (*worker).to_owned(), at_most: lines.parse()? });
        }
        [worker, "is", "measured", "for", time @ ..] => {
            let time = duration(time)?;
            actions.push(Action::Measure { worker: (*worker).to_owned(), time });
        }
        [worker, "says", event, how @ ..] => {
            let any_of = how.first().map(|how| alternatives(how)).unwrap_or_default();
            let (worker, event) = ((*worker).to_owned(), (*event).to_owned());
            actions.push(Action::Says { worker, event, any_of });
        }
        [worker, order @ ..] => {
            let worker = (*worker).to_owned();
            if !order.is_empty() {
                actions.push(Action::Tell { worker: worker.clone(), order: order_of(order)? });
            }
            if let Some(answer) = answer {
                actions.push(Action::Answer { worker, any_of: answers(answer)? });
            }
        }
        [] => bail!("an answer to what?"),
    }
    Ok(actions)
}

/// `deadline|gone`, `gone w7`, `session at once`
fn loses(worker: &str, count: usize, how: &[&str]) -> Result<Action> {
    let any_of = how.first().map(|how| alternatives(how)).unwrap_or_default();
    let (name, at_once) = match how {
        [] | [_] => (None, false),
        [_, "at", "once"] => (None, true),
        [_, name] => (Some((*name).to_owned()), false),
        _ => bail!("what is {how:?}?"),
    };
    Ok(Action::Loses { worker: worker.to_owned(), count, any_of, name, at_once })
}

fn alternatives(words: &str) -> Vec<String> {
    words.split('|').map(str::to_owned).collect()
}

/// `committed|refused lost|stale` means `committed`, `refused lost` or `refused stale`.
fn answers(text: &str) -> Result<Vec<String>> {
    let words: Vec<&str> = text.split_whitespace().collect();
    Ok(match words.as_slice() {
        [event] => alternatives(event),
        [events, how] => {
            let mut all = alternatives(events);
            let event = all.pop().unwrap_or_default();
            all.extend(alternatives(how).iter().map(|how| format!("{event} {how}")));
            all
        }
        _ => bail!("an answer is one word or two"),
    })
}

fn server_event(words: &[&str]) -> Result<Event> {
    Ok(match words {
        ["restarts"] => Event::Restarts,
        ["fails", "over"] => Event::FailsOver,
        ["clock", sign_and_number, unit] => {
            let (sign, number) = sign_and_number.split_at(1);
            let seconds = duration(&[number, unit])?.as_secs() as i64;
            Event::Clock(if sign == "-" { -seconds } else { seconds })
        }
        ["revokes", name] => Event::Revokes((*name).to_owned()),
        ["terminates", worker] => Event::Terminates((*worker).to_owned()),
        ["starves", worker] => Event::Starves((*worker).to_owned()),
        ["denies", "leases"] => Event::DeniesLeases,
        ["locks", name] => Event::Locks((*name).to_owned()),
        ["unlocks"] => Event::Unlocks("ROLLBACK"),
        ["commits"] => Event::Unlocks("COMMIT"),
        ["holds", leases] => Event::Holds(leases.parse()?),
        ["sees", sessions, "sessions" | "session", "of", worker] => {
            Event::Sees { sessions: sessions.parse()?, worker: (*worker).to_owned() }
        }
        ["shows", "a", "renewal", "of", name] => Event::ShowsRenewal((*name).to_owned()),
        ["has", "no", "table", name] => Event::HasNoTable((*name).to_owned()),
        _ => bail!("the server does what?"),
    })
}

fn cable_state(words: &[&str]) -> Result<CableState> {
    Ok(match words {
        ["swallows", "both"] => CableState::Swallows(Way::Both),
        ["swallows", "requests"] => CableState::Swallows(Way::Requests),
        ["swallows", "answers"] => CableState::Swallows(Way::Answers),
        ["delays", "answers", time @ ..] => CableState::DelaysAnswers(duration(time)?),
        ["mended"] => CableState::Mended,
        _ => bail!("the cable does what?"),
    })
}

/// The order to the worker: see clients/new-language.md.
fn order_of(words: &[&str]) -> Result<Value> {
    let (what, mut rest) = words.split_first().context("no order")?;
    let mut order = Map::new();
    order.insert("do".to_owned(), json!(what));
    let first = match *what {
        "acquire" | "hold" | "claim" => Some("names"),
        "lead" | "adopted" => Some("name"),
        "update" | "write" | "unfenced" => Some("value"),
        "wrong" => Some("what"),
        "work" => Some("how"),
        _ => None,
    };
    if let Some(first) = first {
        let (value, others) = rest.split_first().context("of what?")?;
        rest = others;
        let value = if first == "names" { json!(names(value)?) } else { json!(value) };
        order.insert(first.to_owned(), value);
    }
    while !rest.is_empty() {
        rest = option(&mut order, rest)?;
    }
    Ok(Value::Object(order))
}

/// `a,b`, and `w1..50` for `w1` to `w50`.
fn names(list: &str) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for one in list.split(',') {
        let Some((first, last)) = one.split_once("..") else {
            names.push(one.to_owned());
            continue;
        };
        let word = first.trim_end_matches(|c: char| c.is_ascii_digit());
        let range = first[word.len()..].parse::<u32>()?..=last.parse::<u32>()?;
        names.extend(range.map(|number| format!("{word}{number}")));
    }
    Ok(names)
}

fn option<'a>(order: &mut Map<String, Value>, words: &'a [&'a str]) -> Result<&'a [&'a str]> {
    let (key, value, rest) = match words {
        ["ttl", number, unit, rest @ ..] => ("ttl_ms", ms(number, unit)?, rest),
        ["wait", number, unit, rest @ ..] => ("wait_ms", ms(number, unit)?, rest),
        ["token", number, rest @ ..] => ("token", json!(number.parse::<i64>()?), rest),
        ["slots", number, rest @ ..] => ("slots", json!(number.parse::<i32>()?), rest),
        ["within", number, unit, rest @ ..] => ("within_ms", ms(number, unit)?, rest),
        ["holder", holder, rest @ ..] => ("holder", json!(holder), rest),
        ["n", number, rest @ ..] => ("n", json!(number.parse::<i32>()?), rest),
        [flag @ ("session" | "shared" | "reclaim"), rest @ ..] => (*flag, json!(true), rest),
        ["after-reading", rest @ ..] => ("read_first", json!(true), rest),
        ["releasing", rest @ ..] => ("release", json!(true), rest),
        // How long a `sleep` takes.
        [number, unit, rest @ ..] => ("ms", ms(number, unit)?, rest),
        _ => bail!("what is {words:?}?"),
    };
    order.insert(key.to_owned(), value);
    Ok(rest)
}

fn ms(number: &str, unit: &str) -> Result<Value> {
    Ok(json!(duration(&[number, unit])?.as_millis() as u64))
}

fn duration(words: &[&str]) -> Result<Duration> {
    let [number, unit] = words else { bail!("a time is a number and a unit") };
    let number: u64 = number.parse()?;
    Ok(match *unit {
        "ms" => Duration::from_millis(number),
        "s" => Duration::from_secs(number),
        "min" => Duration::from_secs(60 * number),
        "h" => Duration::from_secs(3600 * number),
        _ => bail!("{unit} is no unit of time"),
    })
}

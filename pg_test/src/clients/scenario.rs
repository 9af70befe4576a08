//! The scenarios of `clients/scenarios.md`, read into what a [`Fixture`] does for each line.

use super::duration::duration;
use super::fixture::{Fate, Fixture};
use super::scenario_servers::{Needs, event};
use super::tcp_proxy::{Direction, LinkState};
use crate::surface::Surface;
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

type Action = Box<dyn Fn(&mut Fixture) -> Result<()>>;

/// One scenario line: an action of the test and the command sent to the worker.
pub struct Line {
    pub text: &'static str,
    /// The command sent to a worker.
    order: Option<Value>,
    pub play: Action,
}

/// A scenario.
pub struct Scenario {
    pub name: String,
    pub needs: Needs,
    /// The planted faults with which the scenario fails.
    pub catches: Vec<&'static str>,
    pub lines: Vec<Line>,
}

const PAGE: &str = include_str!("../../../clients/scenarios.md");

/// All scenarios, in the order of the page.
pub fn all() -> Result<Vec<Scenario>> {
    let sections = PAGE.split("\n## ").skip(1);
    sections.map(|section| scenario(section).with_context(|| first_line(section))).collect()
}

fn first_line(section: &str) -> String {
    section.lines().next().unwrap_or("").trim().to_owned()
}

fn scenario(section: &'static str) -> Result<Scenario> {
    let (_, code) = section.split_once("\n```\n").context("no steps")?;
    let (code, _) = code.split_once("\n```").context("the steps have no end")?;
    let mut scenario = Scenario {
        name: first_line(section),
        needs: Needs::default(),
        catches: Vec::new(),
        lines: Vec::new(),
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
    /// What this edition lacks for the scenario; `None` if it can be played.
    pub fn lacks(&self, surface: &Surface) -> Option<&'static str> {
        let asks = |wanted: &dyn Fn(&Value) -> bool| {
            self.lines.iter().filter_map(|line| line.order.as_ref()).any(wanted)
        };
        let several = |order: &Value| {
            order["do"] == "acquire" && order["names"].as_array().is_some_and(|all| all.len() > 1)
        };
        let keeps_snapshot = self
            .needs
            .role_settings
            .iter()
            .any(|(name, _)| *name == "default_transaction_isolation");
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
        .find_map(|(is_there, is_used, what)| (is_used && !is_there).then_some(what))
    }

    /// The scenario's name on the command line.
    pub fn key(&self) -> String {
        let plain = self.name.to_lowercase().replace(' ', "-");
        plain.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect()
    }

    fn read(&mut self, line: &'static str) -> Result<()> {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["with", "a", need @ ("server" | "standby" | "clock" | "pooler")] => {
                self.needs.server = Some(need)
            }
            ["with", ..] => bail!("with a what?"),
            ["catches", plants @ ..] => self.catches.extend(plants),
            ["role", setting, value @ ..] => {
                self.needs.role_settings.push((setting, value.join(" ")))
            }
            _ => {
                let (order, play) = action(line)?;
                self.lines.push(Line { text: line, order, play });
            }
        }
        Ok(())
    }
}

/// Parses a scenario line into an action of the test and the command sent to the worker.
fn action(line: &'static str) -> Result<(Option<Value>, Action)> {
    let (what, answer) = match line.split_once("->") {
        Some((what, answer)) => (what, Some(answer.trim())),
        None => (line, None),
    };
    let words: Vec<&str> = what.split_whitespace().collect();
    let play: Action = match *words.as_slice() {
        ["pause", ref time @ ..] => {
            let time = duration(time)?;
            Box::new(move |fixture| fixture.pause(time))
        }
        ["writes", ref values @ ..] => {
            let values = values.to_vec();
            Box::new(move |fixture| fixture.writes(&values))
        }
        ["server", ref words @ ..] => {
            let (disturbs, act) = event(words)?;
            Box::new(move |fixture| fixture.server(disturbs, &act))
        }
        ["link", worker, ref state @ ..] => {
            let state = link_state(state)?;
            Box::new(move |fixture| fixture.link(worker, state))
        }
        ["freeze", worker] => Box::new(move |fixture| fixture.befall(worker, Fate::Frozen)),
        ["thaw", worker] => Box::new(move |fixture| fixture.befall(worker, Fate::Thawed)),
        ["kill", worker] => Box::new(move |fixture| fixture.befall(worker, Fate::Killed)),
        ["end", worker] => Box::new(move |fixture| fixture.befall(worker, Fate::Ended)),
        ["term", worker] => Box::new(move |fixture| fixture.befall(worker, Fate::Terminated)),
        [worker, "says", count, "lost", ref how @ ..] => loses(worker, count.parse()?, how)?,
        [worker, "says", "lost", ref how @ ..] => loses(worker, 1, how)?,
        [worker, "logs", "at", "most", lines, "lines" | "line"] => {
            let at_most = lines.parse()?;
            Box::new(move |fixture| fixture.logs(worker, at_most))
        }
        [worker, "is", "measured", "for", ref time @ ..] => {
            let time = duration(time)?;
            Box::new(move |fixture| fixture.measure(worker, time))
        }
        [worker, "says", event, ref how @ ..] => {
            let any_of = how.first().map(|how| alternatives(how)).unwrap_or_default();
            Box::new(move |fixture| fixture.says(worker, event, &any_of))
        }
        [worker, ref order @ ..] => {
            let command = if order.is_empty() { None } else { Some(order_of(order)?) };
            let (order, any_of) = (command.clone(), answer.map(answers).transpose()?);
            let play: Action = Box::new(move |fixture| {
                order.iter().try_for_each(|order| fixture.tell(worker, order))?;
                any_of.iter().try_for_each(|any_of| fixture.answer(worker, any_of))
            });
            return Ok((command, play));
        }
        [] => bail!("an answer to what?"),
    };
    Ok((None, play))
}

/// The losses of this number of leases: `deadline|gone`, `gone w7` for one that was taken by `hold`, or `session at
/// once` (right after the last event, rather than at a deadline).
fn loses(worker: &'static str, count: usize, how: &[&'static str]) -> Result<Action> {
    let any_of = how.first().map(|how| alternatives(how)).unwrap_or_default();
    let (name, at_once) = match *how {
        [] | [_] => (None, false),
        [_, "at", "once"] => (None, true),
        [_, name] => (Some(name), false),
        _ => bail!("what is {how:?}?"),
    };
    if (count, name, at_once) == (1, None, false) {
        return Ok(Box::new(move |fixture| fixture.says_lost(worker, &any_of)));
    }
    Ok(Box::new(move |fixture| {
        (0..count).try_for_each(|_| fixture.says_one_lost(worker, &any_of, name, at_once))
    }))
}

fn alternatives(words: &str) -> Vec<String> {
    words.split('|').map(str::to_owned).collect()
}

/// Expands alternatives: `committed|refused lost|stale` means `committed`, `refused lost` or `refused stale`.
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

fn link_state(words: &[&str]) -> Result<LinkState> {
    Ok(match words {
        ["swallows", "both"] => LinkState::Swallows(Direction::Both),
        ["swallows", "requests"] => LinkState::Swallows(Direction::Requests),
        ["swallows", "answers"] => LinkState::Swallows(Direction::Answers),
        ["delays", "answers", time @ ..] => LinkState::DelaysAnswers(duration(time)?),
        ["restored"] => LinkState::Restored,
        _ => bail!("the link does what?"),
    })
}

/// The command to the worker: see clients/new-language.md.
fn order_of(words: &[&str]) -> Result<Value> {
    let (what, mut rest) = words.split_first().context("no order")?;
    let mut order = Map::new();
    order.insert("do".to_owned(), json!(what));
    let first = match *what {
        "acquire" | "hold" => Some("names"),
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

/// Expands `a,b`, and `w1..50` to `w1` to `w50`.
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
        [flag @ ("session" | "shared" | "reclaim"), rest @ ..] => (*flag, json!(true), rest),
        ["after-reading", rest @ ..] => ("read_first", json!(true), rest),
        ["releasing", rest @ ..] => ("release", json!(true), rest),
        // The duration of a `sleep`.
        [number, unit, rest @ ..] => ("ms", ms(number, unit)?, rest),
        _ => bail!("what is {words:?}?"),
    };
    order.insert(key.to_owned(), value);
    Ok(rest)
}

fn ms(number: &str, unit: &str) -> Result<Value> {
    Ok(json!(duration(&[number, unit])?.as_millis() as u64))
}

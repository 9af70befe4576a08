//! The scenarios of `clients/scenarios.md`, and the commands that their lines send to workers.

use crate::surface::Surface;
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::time::Duration;

const PAGE: &str = include_str!("../../../clients/scenarios.md");

/// A scenario: its name, and its lines.
pub struct Scenario {
    pub name: &'static str,
    lines: Vec<&'static str>,
}

/// All scenarios, in the order of the page.
pub fn all() -> Result<Vec<Scenario>> {
    PAGE.split("\n## ").skip(1).map(scenario).collect()
}

fn scenario(section: &'static str) -> Result<Scenario> {
    let (name, text) = section.split_once('\n').context("a heading alone")?;
    let code = text.split_once("```\n").and_then(|(_, code)| code.split_once("```"));
    let lines: Vec<_> = code.with_context(|| format!("{name}: no steps"))?.0.lines().collect();
    ensure!(
        lines.last().is_some_and(|line| line.starts_with("writes")),
        "{name}: it does not end with what was written"
    );
    Ok(Scenario { name, lines })
}

impl Scenario {
    /// The scenario's name on the command line.
    pub fn key(&self) -> String {
        let plain = self.name.to_lowercase().replace(' ', "-");
        plain.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect()
    }

    /// What follows this word in the lines that begin with it.
    fn settings(&self, word: &str) -> impl Iterator<Item = &'static str> {
        self.lines.iter().filter_map(move |line| line.strip_prefix(word))
    }

    /// What it needs besides a database: see [`ScenarioServers::start`](super::scenario_servers::ScenarioServers::start).
    pub fn need(&self) -> Option<&'static str> {
        self.settings("with a ").next()
    }

    /// The planted faults with which the scenario fails.
    pub fn catches(&self) -> impl Iterator<Item = &'static str> {
        self.settings("catches ").flat_map(str::split_whitespace)
    }

    /// The settings of the role with which workers log in.
    pub fn role_settings(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        self.settings("role ").filter_map(|setting| setting.split_once(' '))
    }

    /// The lines that are played.
    pub fn steps(&self) -> impl Iterator<Item = &'static str> {
        let is_step =
            |line: &&str| !["with ", "catches ", "role "].iter().any(|word| line.starts_with(word));
        self.lines.iter().copied().filter(is_step)
    }

    /// What this edition lacks for the scenario; `None` if it can be played.
    pub fn lacks(&self, surface: &Surface) -> Option<&'static str> {
        let asks = |order: &str, option: &str| {
            let is_such = |line: &&str| line.split_whitespace().nth(1) == Some(order);
            self.lines.iter().copied().filter(is_such).any(|line| line.contains(option))
        };
        let keeps_snapshot =
            self.role_settings().any(|(name, _)| name == "default_transaction_isolation");
        let keeps_snapshot = keeps_snapshot && asks("acquire", " wait ");
        [
            (surface.sessions, asks("acquire", " session "), "session => true"),
            (surface.multi_holder, asks("acquire", " shared "), "shared grants"),
            (surface.multi_holder, asks("acquire", " slots "), "slots"),
            (surface.several, asks("acquire", ","), "several leases at once"),
            (surface.several, keeps_snapshot, "wait at REPEATABLE READ"),
            (surface.adoption, asks("adopted", ""), "adoption"),
            (surface.several, asks("guard-all", ""), "tokens of several guards"),
        ]
        .into_iter()
        .find_map(|(is_there, is_used, what)| (is_used && !is_there).then_some(what))
    }
}

/// A duration in the lines of scenarios: `300 ms`, `2 s`.
pub fn duration(words: &[&str]) -> Result<Duration> {
    let [number, unit] = words else { bail!("a time is a number and a unit") };
    let number: u64 = number.parse()?;
    Ok(match *unit {
        "ms" => Duration::from_millis(number),
        "s" => Duration::from_secs(number),
        "min" => Duration::from_secs(60 * number),
        _ => bail!("{unit} is no unit of time"),
    })
}

/// The command to a worker (see clients/new-language.md), with all durations multiplied.
pub fn order(words: &[&str], pace: u32) -> Result<Value> {
    let (what, mut rest) = words.split_first().context("no order")?;
    let mut order = json!({ "do": what });
    let first = match *what {
        "acquire" | "hold" => "names",
        "lead" | "adopted" => "name",
        "update" | "write" | "unfenced" => "value",
        "wrong" => "what",
        "work" => "how",
        _ => "",
    };
    if !first.is_empty() {
        let (value, others) = rest.split_first().context("of what?")?;
        order[first] = if first == "names" { names(value)? } else { json!(value) };
        rest = others;
    }
    let ms = |number, unit| -> Result<Value> {
        Ok(json!((duration(&[number, unit])? * pace).as_millis() as u64))
    };
    while !rest.is_empty() {
        let (key, value, others) = match *rest {
            ["ttl", number, unit, ref rest @ ..] => ("ttl_ms", ms(number, unit)?, rest),
            ["wait", number, unit, ref rest @ ..] => ("wait_ms", ms(number, unit)?, rest),
            ["within", number, unit, ref rest @ ..] => ("within_ms", ms(number, unit)?, rest),
            [key @ ("token" | "slots"), number, ref rest @ ..] => {
                (key, json!(number.parse::<i64>()?), rest)
            }
            ["holder", holder, ref rest @ ..] => ("holder", json!(holder), rest),
            [flag @ ("session" | "shared" | "reclaim"), ref rest @ ..] => (flag, json!(true), rest),
            ["after-reading", ref rest @ ..] => ("read_first", json!(true), rest),
            ["releasing", ref rest @ ..] => ("release", json!(true), rest),
            // The duration of a `sleep`.
            [number, unit, ref rest @ ..] => ("ms", ms(number, unit)?, rest),
            _ => bail!("what is {rest:?}?"),
        };
        order[key] = value;
        rest = others;
    }
    Ok(order)
}

/// Expands `a,b`, and `w1..50` to `w1` to `w50`.
fn names(list: &str) -> Result<Value> {
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
    Ok(json!(names))
}

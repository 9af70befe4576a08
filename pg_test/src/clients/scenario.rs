//! The scenarios of `clients/scenarios.md`, and the commands that their lines send to workers.

use crate::surface::Surface;
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::time::Duration;

const PAGE: &str = include_str!("../../../clients/scenarios.md");

#[derive(Default)]
pub struct Scenario {
    pub name: &'static str,
    /// What it needs besides a database: see [`ScenarioServers::start`](super::scenario_servers::ScenarioServers::start).
    pub need: Option<&'static str>,
    /// The planted faults with which it fails.
    pub catches: Vec<&'static str>,
    /// The settings of the role with which workers log in.
    pub role_settings: Vec<(&'static str, &'static str)>,
    /// The lines that are played.
    pub steps: Vec<&'static str>,
}

/// All scenarios, in the order of the page.
pub fn all() -> Result<Vec<Scenario>> {
    PAGE.split("\n## ").skip(1).map(scenario).collect()
}

fn scenario(section: &'static str) -> Result<Scenario> {
    let (name, text) = section.split_once('\n').context("a heading alone")?;
    let code = text.split_once("```\n").and_then(|(_, code)| code.split_once("```"));
    let (lines, _) = code.with_context(|| format!("{name}: no steps"))?;
    let mut scenario = Scenario { name, ..Scenario::default() };
    for line in lines.lines() {
        match line.split_once(' ') {
            Some(("with", need)) => scenario.need = need.strip_prefix("a "),
            Some(("catches", faults)) => scenario.catches.extend(faults.split_whitespace()),
            Some(("role", setting)) => scenario.role_settings.extend(setting.split_once(' ')),
            _ => scenario.steps.push(line),
        }
    }
    ensure!(
        scenario.steps.last().is_some_and(|line| line.starts_with("writes")),
        "{name}: it does not end with what was written"
    );
    Ok(scenario)
}

impl Scenario {
    /// The scenario's name on the command line.
    pub fn key(&self) -> String {
        let plain = self.name.to_lowercase().replace(' ', "-");
        plain.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect()
    }

    /// Returns true if an edition has all calls of the scenario.
    pub fn is_in(&self, surface: &Surface) -> bool {
        let asks = |order: &str, option: &str| {
            let is_such = |line: &&str| line.split_whitespace().nth(1) == Some(order);
            self.steps.iter().copied().filter(is_such).any(|line| line.contains(option))
        };
        let keeps_snapshot =
            self.role_settings.iter().any(|(name, _)| *name == "default_transaction_isolation");
        // Editions without calls on several leases have no wait at REPEATABLE READ either.
        let asks_several = asks("acquire", ",")
            || asks("guard-all", "")
            || (keeps_snapshot && asks("acquire", " wait "));
        let asks_multi_holder = asks("acquire", " shared ") || asks("acquire", " slots ");
        (surface.sessions || !asks("acquire", " session "))
            && (surface.multi_holder || !asks_multi_holder)
            && (surface.several || !asks_several)
            && (surface.adoption || !asks("adopted", ""))
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
    let (what, rest) = words.split_first().context("no order")?;
    let mut order = json!({ "do": what });
    let mut words = rest.iter().copied();
    let first = match *what {
        "acquire" | "hold" => "names",
        "lead" | "adopted" => "name",
        "update" | "write" | "unfenced" => "value",
        "work" => "how",
        _ => "",
    };
    if !first.is_empty() {
        let value = words.next().context("of what?")?;
        order[first] = if first == "names" { names(value)? } else { json!(value) };
    }
    let ms = |time: [&str; 2]| anyhow::Ok(json!((duration(&time)? * pace).as_millis() as u64));
    while let Some(word) = words.next() {
        let mut next = || words.next().with_context(|| format!("{word} what?"));
        match word {
            "ttl" | "wait" | "within" => order[format!("{word}_ms")] = ms([next()?, next()?])?,
            "token" | "slots" => order[word] = json!(next()?.parse::<i64>()?),
            "holder" => order[word] = json!(next()?),
            "session" | "shared" | "reclaim" => order[word] = json!(true),
            "after-reading" => order["read_first"] = json!(true),
            "releasing" => order["release"] = json!(true),
            // The duration of a `sleep`.
            number => order["ms"] = ms([number, next()?])?,
        }
    }
    Ok(order)
}

/// Expands `a,b`, and `w1..50` to `w1` to `w50`.
fn names(list: &str) -> Result<Value> {
    let mut names = Vec::new();
    for one in list.split(',') {
        if let Some((first, last)) = one.split_once("..") {
            let word = first.trim_end_matches(|c: char| c.is_ascii_digit());
            let range = first[word.len()..].parse::<u32>()?..=last.parse::<u32>()?;
            names.extend(range.map(|number| format!("{word}{number}")));
        } else {
            names.push(one.to_owned());
        }
    }
    Ok(json!(names))
}

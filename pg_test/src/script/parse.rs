//! The parser of scenarios.

use super::{
    Action, Bypass, Condition, Finding, Place, ServerStep, Step, StepKind, Test, Verb, Wanted,
};
use crate::edition::Edition;
use crate::markdown::{blocks as blocks_of_code, filled, section};
use crate::source_tree::source_root;
use anyhow::{Context, Result, anyhow, bail, ensure};
use std::fs;
use std::sync::Arc;

struct Line<'a> {
    number: usize,
    indent: usize,
    text: &'a str,
}

/// Returns the tests of a scenario file. `path` is for error messages.
pub fn tests_of(path: &str, text: &str) -> Result<Vec<Test>> {
    tests(path, text).map_err(|error| anyhow!("{path}:{error:#}"))
}

fn lines_of(text: &str) -> Vec<Line<'_>> {
    let lines = text.lines().enumerate().map(|(n, line)| {
        let text = line.trim();
        Line { number: n + 1, indent: line.len() - line.trim_start().len(), text }
    });
    lines.filter(|line| !line.text.is_empty() && !line.text.starts_with('#')).collect()
}

fn tests(path: &str, text: &str) -> Result<Vec<Test>> {
    let lines = lines_of(text);
    if let Some(first) = lines.first() {
        ensure!(first.indent == 0, "{}: indented, but below nothing", first.number);
    }
    let (mut tests, mut setup) = (Vec::new(), Arc::new(Vec::new()));
    for (head, body) in blocks(&lines)? {
        if let ("setup", shared) = head.text.split_once(' ').unwrap_or((head.text, "")) {
            let mut all = Vec::new();
            if !shared.is_empty() {
                let file = format!("pg_test/tests/suite/support/{shared}.steps");
                let text = fs::read_to_string(source_root().join(&file)).context(file)?;
                all.extend(steps(&lines_of(&text))?);
            }
            all.extend(steps(body)?);
            setup = Arc::new(all);
            continue;
        }
        let at = || head.number.to_string();
        let mut test = head_of(head.text).with_context(at)?;
        test.path = path.to_owned();
        test.setup = setup.clone();
        test.steps = steps(body)?;
        ensure!(!test.steps.is_empty(), "{}: a test without a step", head.number);
        tests.push(test);
    }
    Ok(tests)
}

fn head_of(text: &str) -> Result<Test> {
    let mut words = text.split_whitespace().peekable();
    let name = match (words.next(), words.next()) {
        (Some("test"), Some(name)) if is_name(name) => name.to_owned(),
        _ => bail!("neither `setup` nor `test its_name`: {text}"),
    };
    let mut test = Test { name, ..Test::default() };
    while let Some(word) = words.next() {
        match word {
            "slow" => test.slow = true,
            "bare" => test.bare = true,
            "lite" => test.lite = true,
            "command" => test.command = true,
            "pooled" => {
                let count = words.next().context("by how many connections?")?.parse()?;
                let mode = words.next_if(|word| ["statement", "session"].contains(word));
                test.pooled = Some((count, mode.unwrap_or("transaction").to_owned()));
                test.takes_options = words.next_if_eq(&"without-options").is_none();
            }
            "repack" => test.repack = true,
            "server" => {
                let mut settings = Vec::new();
                while let Some((name, value)) = words.peek().and_then(|word| word.split_once('=')) {
                    settings.push((name.to_owned(), value.to_owned()));
                    words.next();
                }
                test.server = Some(settings);
            }
            "clock" => {
                test.clock = true;
                test.server.get_or_insert_default();
            }
            "tool" => {
                test.tool = words.next().map(str::to_owned);
                test.server.get_or_insert_default();
            }
            "from" => test.from = words.next().context("from which version?")?.parse()?,
            _ => bail!("unknown word behind the name: {word}"),
        }
    }
    Ok(test)
}

/// Splits lines into blocks: each line of the first line's depth, with the deeper lines below it.
fn blocks<'a>(lines: &'a [Line<'a>]) -> Result<Vec<(&'a Line<'a>, &'a [Line<'a>])>> {
    let (mut blocks, mut rest) = (Vec::new(), lines);
    while let Some((head, after)) = rest.split_first() {
        ensure!(head.indent == lines[0].indent, "{}: indented like no line above", head.number);
        let own = after.iter().take_while(|line| line.indent > head.indent).count();
        blocks.push((head, &after[..own]));
        rest = &after[own..];
    }
    Ok(blocks)
}

fn steps(lines: &[Line]) -> Result<Vec<Step>> {
    blocks(lines)?.into_iter().map(|(head, body)| step(head, body)).collect()
}

fn step(head: &Line, body: &[Line]) -> Result<Step> {
    let (text, line) = (head.text, head.number);
    let (first, rest) = text.split_once(' ').unwrap_or((text, ""));
    let (number, behind) = rest.split_once(' ').unwrap_or((rest, ""));
    let (condition, text) = match (first, number.parse()) {
        ("full", _) => (Condition::In(Edition::Full), rest),
        ("lite", _) => (Condition::In(Edition::Lite), rest),
        ("from", Ok(major)) => (Condition::From(major), behind),
        ("until", Ok(major)) => (Condition::Until(major), behind),
        _ => (Condition::Everywhere, text),
    };
    let bypass = text.strip_prefix("owner: ").unwrap_or(text).strip_prefix("bypass ");
    let kind = match (text.strip_prefix("each "), bypass) {
        _ if text == "at once" => StepKind::AtOnce(at_once(head, body)?),
        _ if first == "steps" && is_name(rest) => StepKind::Steps(rest.to_owned(), steps(body)?),
        _ if first == "within" && is_name(rest) => StepKind::Within(rest.to_owned(), steps(body)?),
        (Some(names), _) => each(head, names, body)?,
        (_, Some(built)) => bypass_of(!text.starts_with("owner: "), built, body),
        _ => {
            let lines: Vec<&str> = [text].into_iter().chain(body.iter().map(|l| l.text)).collect();
            step_kind(&lines.join("\n")).with_context(|| line.to_string())?
        }
    };
    Ok(Step { line, condition, kind })
}

fn each(head: &Line, names: &str, body: &[Line]) -> Result<StepKind> {
    let names: Vec<String> = names.split(',').map(|name| name.trim().to_owned()).collect();
    ensure!(names.iter().all(|name| is_name(name)), "{}: these are no names", head.number);
    let (mut rows, mut own) = (Vec::new(), Vec::new());
    for (head, body) in blocks(body)? {
        let Some(row) = head.text.strip_prefix('|') else {
            own.push(step(head, body)?);
            continue;
        };
        ensure!(own.is_empty(), "{}: a row below a step", head.number);
        let lines: Vec<&str> = [row].into_iter().chain(body.iter().map(|l| l.text)).collect();
        let row = lines.join("\n") + " ";
        let cells: Vec<String> = match names.len() {
            1 => vec![row.trim().to_owned()],
            _ => row.split(" | ").map(|cell| cell.trim().to_owned()).collect(),
        };
        let (got, wanted) = (cells.len(), names.len());
        ensure!(got == wanted, "{}: {got} cells for {wanted} names", head.number);
        rows.push((head.number, cells));
    }
    ensure!(!rows.is_empty() && !own.is_empty(), "{}: it needs rows and steps", head.number);
    Ok(StepKind::Each { names, rows, steps: own })
}

fn at_once(head: &Line, body: &[Line]) -> Result<Vec<(String, String)>> {
    let mut rows = Vec::new();
    for (head, body) in blocks(body)? {
        let lines: Vec<&str> = [head.text].into_iter().chain(body.iter().map(|l| l.text)).collect();
        let row = lines.join("\n");
        let row = row.strip_prefix('|').and_then(|row| row.split_once(" | "));
        let (count, sql) = row.with_context(|| format!("{}: no | 8 | SQL", head.number))?;
        rows.push((count.trim().to_owned(), sql.trim().to_owned()));
    }
    ensure!(!rows.is_empty(), "{}: nobody at once", head.number);
    Ok(rows)
}

fn bypass_of(by_admin: bool, built: &str, body: &[Line]) -> StepKind {
    let (found, values) = Default::default();
    let mut bypass = Bypass { by_admin, built: built.to_owned(), found, values };
    for line in body {
        let (only, row) = line.text.split_once('|').unwrap_or(("no row", ""));
        if ["", "in one ", "in all "].contains(&only) {
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            let (in_one, in_all) = (only != "in all ", only != "in one ");
            bypass.found.push(Finding { in_one, in_all, text: cells.join("|") });
        } else if let Some(value) = definition(line.text) {
            bypass.values.push(value);
        } else {
            bypass.built += "\n";
            bypass.built += line.text;
        }
    }
    StepKind::FencedTable(Some(bypass))
}

/// Parses `x := text`.
fn definition(text: &str) -> Option<(String, String)> {
    let (name, value) = text.split_once(":=").filter(|(name, _)| is_name(name.trim()))?;
    Some((name.trim().to_owned(), value.trim().to_owned()))
}

/// Parses `docs/page.md ## Heading` and returns the SQL there.
fn sql_of_page(place: &str) -> Result<String> {
    let (path, heading) = place.split_once(' ').context("no heading")?;
    let page = std::fs::read_to_string(source_root().join(path))?;
    let blocks = blocks_of_code(section(&page, heading)?);
    let block = blocks.into_iter().find(|block| block.mark == "sql").context("no SQL there")?;
    let lines: Vec<&str> = block.code.lines().take_while(|line| !line.starts_with("--")).collect();
    filled(lines.join("\n").trim_end_matches(';'), |name| Some(format!("${name}")))
}

fn step_kind(text: &str) -> Result<StepKind> {
    if let Some((name, value)) = definition(text) {
        let of_page = value.strip_prefix("page ").map(sql_of_page).transpose()?;
        return Ok(StepKind::Define(name, of_page.unwrap_or(value)));
    }
    match text.split_once(' ').unwrap_or((text, "")) {
        ("fenced", "table") => return Ok(StepKind::FencedTable(None)),
        ("clock", seconds) if seconds.parse::<i64>().is_ok() => {
            return Ok(StepKind::Server(ServerStep::Clock(seconds.parse()?)));
        }
        ("database", rest) => {
            let (name, options) = rest.split_once(' ').unwrap_or((rest, ""));
            ensure!(is_name(name), "this is no name: {name}");
            return Ok(StepKind::Database(name.to_owned(), options.to_owned()));
        }
        (verb, name) if name.is_empty() || is_name(name) => {
            if let Some(verb) = Verb::of(verb) {
                return Ok(StepKind::Server(ServerStep::Do(verb, name.to_owned())));
            }
        }
        _ => {}
    }
    if let Some(names) = text.strip_prefix("role ") {
        ensure!(names.split_whitespace().all(is_name), "these are no names: {names}");
        return Ok(StepKind::Roles(names.split_whitespace().map(str::to_owned).collect()));
    }
    let (place, text) = place_of(text);
    if let Some(name) = text.strip_prefix("play ").filter(|name| is_name(name)) {
        return Ok(StepKind::Play(place, name.to_owned()));
    }
    if let Some(shell) = shell(&place, text)? {
        return Ok(shell);
    }
    let (mut statement, outcome) = match expectation(text, SQL_QUOTES)? {
        Some(at) => (text[..at].trim(), Some(text[at + 2..].trim().replace('\n', " "))),
        None => (text, None),
    };
    let mut wanted = outcome.map_or(Wanted::Success, Wanted::Outcome);
    if let Wanted::Outcome(outcome) = &wanted {
        ensure!(!outcome.is_empty(), "nothing behind the =>");
    } else if let Some((names, rest)) = values_of(statement) {
        (statement, wanted) = (rest, Wanted::Values(names));
    }
    if let Some((before, whom)) = statement.rsplit_once(" waits") {
        let whom = whom.strip_prefix(" for ").map(str::trim).or(whom.is_empty().then_some(""));
        if let Some(whom) = whom.filter(|_| before != "still" && !before.is_empty()) {
            ensure!(matches!(wanted, Wanted::Success), "what waits has no outcome yet");
            let whom = (!whom.is_empty()).then(|| whom.to_owned());
            (statement, wanted) = (before, Wanted::Waits(whom));
        }
    }
    if let Some(before) = statement.strip_suffix(" runs") {
        ensure!(matches!(wanted, Wanted::Success), "what runs has no outcome yet");
        (statement, wanted) = (before, Wanted::Runs);
    }
    let action = match (action(statement)?, &wanted) {
        (Action::Notices(_), Wanted::Outcome(notices)) => Action::Notices(notices.clone()),
        (action, _) => action,
    };
    let fits = match (&action, &wanted) {
        (Action::Run(_), _) => true,
        (Action::Woken, wanted) => !matches!(wanted, Wanted::Waits(_) | Wanted::Runs),
        (Action::Race(..), wanted) => matches!(wanted, Wanted::Success | Wanted::Values(_)),
        (Action::Try(..) | Action::Until(_) | Action::Notices(_), wanted) => {
            matches!(wanted, Wanted::Outcome(_))
        }
        (_, wanted) => matches!(wanted, Wanted::Success),
    };
    ensure!(fits, "what must come of it is left out, or there is nothing to come: {text}");
    Ok(StepKind::Do { place, action, wanted })
}

/// Parses `sh …` and `x = sh …`.
fn shell(place: &Place, text: &str) -> Result<Option<StepKind>> {
    let (names, rest) = values_of(text).unwrap_or((Vec::new(), text));
    let Some(commands) = rest.strip_prefix("sh ") else { return Ok(None) };
    let (commands, wanted) = match expectation(commands, SHELL_QUOTES)? {
        Some(at) => {
            (commands[..at].trim(), Wanted::Outcome(commands[at + 2..].trim().replace('\n', " ")))
        }
        None if names.is_empty() => (commands, Wanted::Success),
        None => (commands, Wanted::Values(names)),
    };
    Ok(Some(StepKind::Shell(place.clone(), commands.to_owned(), wanted)))
}

fn action(statement: &str) -> Result<Action> {
    let sql = |text: &str| -> Result<String> {
        let text = text.trim();
        // A misspelt keyword of a step is thus never taken for SQL.
        let is_sql = text.starts_with(|c: char| c.is_ascii_uppercase() || "($".contains(c));
        ensure!(is_sql, "unknown step; SQL begins with a capital letter: {text}");
        Ok(text.to_owned())
    };
    Ok(match statement {
        "still waits" => Action::StillWaits,
        "woken" => Action::Woken,
        "notices" => Action::Notices(String::new()),
        "disconnect" => Action::Disconnect,
        "cancel" => Action::Cancel,
        "terminate" => Action::Terminate,
        "freeze" => Action::Freeze,
        "thaw" => Action::Thaw,
        _ => {
            if let Some(text) = statement.strip_prefix("race ") {
                let (count, text) = text.split_once(' ').context("how many race for what?")?;
                Action::Race(count.parse()?, sql(text)?)
            } else if let Some(text) = statement.strip_prefix("try ") {
                match text.split_once(";;") {
                    Some((text, probe)) => Action::Try(sql(text)?, Some(sql(probe)?)),
                    None => Action::Try(sql(text)?, None),
                }
            } else if let Some(text) = statement.strip_prefix("until ") {
                Action::Until(sql(text)?)
            } else {
                Action::Run(sql(statement)?)
            }
        }
    })
}

/// Parses `b: …`, `b as role: …`, `b on place: …` or both. Without one of them the step runs in the unnamed session.
fn place_of(text: &str) -> (Place, &str) {
    if let Some((head, rest)) = text.split_once(':') {
        let (head, on) = head.split_once(" on ").map_or((head, None), |(h, on)| (h, Some(on)));
        let (name, role) = head.split_once(" as ").map_or((head, None), |(n, r)| (n, Some(r)));
        let is_one = |on: &str| !on.contains(char::is_whitespace);
        let is_ours = is_name(name.strip_prefix('$').unwrap_or(name));
        let is_head = is_ours && role.is_none_or(is_name) && on.is_none_or(is_one);
        if is_head && rest.starts_with([' ', '\n']) {
            let own = |name: &str| name.to_owned();
            let place = Place { session: own(name), role: role.map(own), on: on.map(own) };
            return (place, rest.trim());
        }
    }
    (Place::default(), text)
}

/// Parses `x, y = …`.
fn values_of(statement: &str) -> Option<(Vec<String>, &str)> {
    let (names, rest) = statement.split_once('=')?;
    let names: Vec<String> = names.split(',').map(|name| name.trim().to_owned()).collect();
    names.iter().all(|name| is_name(name)).then(|| (names, rest.trim()))
}

/// What begins and ends a quoted text.
pub(super) const SQL_QUOTES: &[&str] = &["$$", "'", "\""];
pub(super) const SHELL_QUOTES: &[&str] = &["'", "\""];

/// Returns the position of the `=>` that begins the expectation. One inside of quotes or parentheses is an argument's
/// name. All quotes and parentheses must be closed.
pub(super) fn expectation(text: &str, quotes: &[&'static str]) -> Result<Option<usize>> {
    let (mut quote, mut depth, mut at) = (None, 0, 0);
    while at < text.len() {
        let rest = &text[at..];
        let mark = quotes.iter().copied().find(|mark| rest.starts_with(mark));
        match (quote, mark) {
            (None, Some(_)) => quote = mark,
            (Some(_), Some(_)) if quote == mark => quote = None,
            (None, None) if rest.starts_with('(') => depth += 1,
            (None, None) if rest.starts_with(')') => depth -= 1,
            (None, None) if depth == 0 && rest.starts_with("=>") => return Ok(Some(at)),
            _ => {}
        }
        at += mark.map_or(rest.chars().next().map_or(1, char::len_utf8), str::len);
    }
    ensure!(quote.is_none() && depth == 0, "a quote or parenthesis is not closed: {text}");
    Ok(None)
}

fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_lowercase())
        && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

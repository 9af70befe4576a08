//! `--bless`: writes the actual outcomes into the scenario files where the expected ones differ. Whoever reads the diff
//! decides whether that is right.

use super::parse::{SHELL_QUOTES, SQL_QUOTES, expectation};
use super::shown::{cells, fields, is, says, shown};
use crate::background::Outcome;
use crate::fault::Fault;
use crate::source_tree::source_root;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// The place of an expectation in a scenario file.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Site {
    pub path: String,
    /// The first line of the step, or of the row of `each`.
    pub line: usize,
    pub part: Part,
}

/// The part of those lines that is the expectation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    /// What follows the `=>` of SQL.
    #[default]
    OfSql,
    /// What follows the `=>` of shell commands.
    OfShell,
    /// A cell of a row, by its index and the number of cells.
    Cell(usize, usize),
}

/// An expectation that was met as it stands, or what is to replace it.
struct Seen {
    old: String,
    new: Option<String>,
}

/// The expectations of all tests of this run, and what replaces them.
#[derive(Default)]
pub struct Blessings(Mutex<BTreeMap<Site, Seen>>);

impl Blessings {
    /// Returns true if the expectation is met, or if one of the proposals is met and replaces it. A step may run
    /// several times; all its outcomes must meet the same expectation.
    pub(super) fn settle(
        &self,
        site: &Site,
        old: &str,
        is_met: impl Fn(&str) -> bool,
        proposals: Vec<String>,
    ) -> bool {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(seen) = all.get_mut(site) {
            let is_met = is_met(seen.new.as_ref().unwrap_or(&seen.old));
            if !is_met {
                // No expectation is right for both outcomes.
                seen.new = None;
            }
            return is_met;
        }
        let met_as_it_is = is_met(old);
        let new = proposals.into_iter().find(|new| !met_as_it_is && is_met(new));
        let is_settled = met_as_it_is || new.is_some();
        if is_settled {
            all.insert(site.clone(), Seen { old: old.to_owned(), new });
        }
        is_settled
    }

    /// Writes the replacements into the files. Returns the places, `path:line`.
    pub fn write(&self) -> Result<Vec<String>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut files = BTreeMap::<&str, Vec<(&Site, &str, &str)>>::new();
        for (site, Seen { old, new }) in &*all {
            if let Some(new) = new {
                files.entry(&site.path).or_default().push((site, old, new));
            }
        }
        let mut written = Vec::new();
        for (path, changes) in files {
            let file = source_root().join(path);
            let mut text = fs::read_to_string(&file).with_context(|| path.to_owned())?;
            // From the end, because a replacement may have fewer lines than what it replaces.
            for (site, old, new) in changes.into_iter().rev() {
                let place = format!("{path}:{}", site.line);
                let range = range(&text, site).with_context(|| place.clone())?;
                let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
                let there = &text[range.clone()];
                ensure!(words(there) == words(old), "{place}: {old:?} was expected, not {there:?}");
                // A cell before another one keeps its width if the new text is not longer.
                let new = match there.chars().count() {
                    width if there.ends_with(' ') => format!(" {new:0$} ", width - 2),
                    _ => format!(" {new}"),
                };
                text.replace_range(range, &new);
                written.push(place);
            }
            fs::write(&file, text)?;
        }
        written.sort();
        Ok(written)
    }
}

/// Returns the bytes of the expectation in the text of a file.
fn range(text: &str, site: &Site) -> Result<Range<usize>> {
    let begin: usize = text.split_inclusive('\n').take(site.line - 1).map(str::len).sum();
    let rest = &text[begin..];
    let depth = |line: &str| line.len() - line.trim_start().len();
    let is_empty = |line: &str| line.trim().is_empty() || line.trim_start().starts_with('#');
    // The step's lines, up to the next line that is no deeper than the first. Comments are blanked out.
    let (mut end, mut at, mut own) = (0, 0, String::new());
    for line in rest.split_inclusive('\n') {
        if at > 0 && !is_empty(line) && depth(line) <= depth(rest) {
            break;
        }
        at += line.len();
        if is_empty(line) {
            own.extend(line.bytes().map(|byte| if byte == b'\n' { '\n' } else { ' ' }));
        } else {
            own += line;
            end = begin + at - (line.len() - line.trim_end().len());
        }
    }
    let from = match site.part {
        Part::OfSql => expectation(&own, SQL_QUOTES)?.context("no =>")? + 2,
        Part::OfShell => expectation(&own, SHELL_QUOTES)?.context("no =>")? + 2,
        Part::Cell(index, count) => {
            let row = own.find('|').context("no row")? + 1;
            if count == 1 {
                return Ok(begin + row..end);
            }
            let mut from = row;
            for (n, cell) in own[row..].split(" | ").enumerate() {
                // The blanks beside the bars belong to the cell.
                let length = usize::from(n > 0) + cell.len() + 1;
                if n == index {
                    return Ok(begin + from..(begin + from + length).min(end));
                }
                from += length + 1;
            }
            anyhow::bail!("there is no cell {index}");
        }
    };
    Ok(begin + from..end)
}

/// Returns expectations that an outcome may meet: first the old one with as few changes as possible. `filled` replaces
/// variables.
pub(super) fn proposals(
    outcome: &Outcome,
    old: &str,
    filled: impl Fn(&str) -> Result<String>,
) -> Vec<String> {
    match outcome {
        Ok(rows) => {
            let rows = cells(rows);
            let old: Vec<Vec<&str>> =
                old.split(" / ").map(|row| row.split('|').collect()).collect();
            let cell = |(new, old): (&String, &&str)| match filled(old) {
                Ok(text) if text == *new || (text == "*" && new != "-") => (*old).to_owned(),
                _ => new.clone(),
            };
            let row = |(new, old): (&Vec<String>, &Vec<&str>)| {
                new.iter().zip(old).map(cell).collect::<Vec<_>>().join("|")
            };
            let merged: Vec<String> = rows.iter().zip(&old).map(row).collect();
            let is_same_shape = rows.len() == old.len()
                && rows.iter().zip(&old).all(|(new, old)| new.len() == old.len());
            let merged = is_same_shape.then(|| merged.join(" / "));
            merged.into_iter().chain([shown(outcome)]).collect()
        }
        Err(fault) => {
            let group = |old: &str| {
                let is_said = |text: String| says(fault, "", &format!(" {text}"));
                match filled(old.trim()).map(is_said) {
                    Ok(true) => old.trim().to_owned(),
                    _ => message_or_field(fault, old),
                }
            };
            let merged = old.strip_prefix(&*fault.sqlstate).map(|words| {
                let groups: Vec<String> = words.split('…').map(group).collect();
                format!("{} {}", fault.sqlstate, groups.join(" … "))
            });
            let new = format!("{} {}", fault.sqlstate, message_or_field(fault, ""));
            merged.into_iter().chain([new]).collect()
        }
    }
}

/// Returns the field that the old words name, or the message.
fn message_or_field(fault: &Fault, old: &str) -> String {
    let named = fields(fault).into_iter().find(|(name, _)| old.contains(&format!("{name}:")));
    let text = named.map_or(fault.message.clone(), |(name, text)| format!("{name}: {text}"));
    text.replace('\n', "\\n")
}

/// Returns what is expected of these notices.
pub(super) fn proposal_of(notices: &[Fault]) -> Vec<String> {
    let notice = |fault: &Fault| {
        format!("{} {} {}", fault.severity, fault.sqlstate, message_or_field(fault, ""))
    };
    let all: Vec<String> = notices.iter().map(notice).collect();
    vec![if all.is_empty() { "none".to_owned() } else { all.join(" / ") }]
}

/// Returns true if the outcome meets an expectation in which variables are still to be replaced.
pub(super) fn meets(outcome: &Outcome, filled: Result<String>) -> bool {
    filled.is_ok_and(|wanted| is(outcome, &wanted.replace('\n', " ")))
}

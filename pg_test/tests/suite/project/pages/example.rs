//! The SQL blocks of a Markdown text, parsed into statements with their expected answers.
//!
//! A comment line right below a statement is its result (`-- 34`, columns between ` | `, one line for each row), its
//! error (`-- ERROR:  PF001: …`, then `-- DETAIL:  …`, `-- HINT:  …`) or `-- waits`: it is blocked until a later
//! statement. `…` stands for any text. `-- worker B` continues in another session. All other comments are prose, and
//! `\set`, which is for people, is skipped. A block that begins with `-- From PostgreSQL 17 on` is for that version and
//! newer.

use pg_test::markdown::{self, code};
use pg_test::{Context, Fault, Result, Rows, bail, ensure};

/// A statement and its expected answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Statement {
    /// The number of its line in the text, for error messages.
    pub line: usize,
    /// The worker whose session runs it.
    pub worker: String,
    pub sql: String,
    /// What is done with its result.
    pub then: ResultUse,
    /// True if the statement must be blocked at first.
    pub waits: bool,
    /// The comment lines with the expected answer. If there are none, any answer but an error is accepted.
    pub answer: Vec<String>,
}

/// What is done with a result.
#[derive(Debug, Clone, PartialEq)]
pub enum ResultUse {
    /// It is only shown.
    Show,
    /// `\gset`: it is stored under this name.
    Keep(String),
    /// `\gexec`: it is run as statements.
    Run,
}

/// Returns the text's SQL blocks for that major version.
pub fn blocks(text: &str, major: u32) -> Result<Vec<Vec<Statement>>> {
    let mut found = Vec::new();
    for block in markdown::blocks(text).into_iter().filter(|block| block.mark == "sql") {
        let lines = block.code.lines().map(str::trim_end);
        let of_block = statements(&(block.line..).zip(lines).collect::<Vec<_>>())?;
        let from = block.code.lines().next().and_then(first_version);
        if from.is_none_or(|from| from <= major) {
            found.push(of_block);
        }
    }
    Ok(found)
}

/// Parses `-- From PostgreSQL 17 on`.
fn first_version(line: &str) -> Option<u32> {
    line.strip_prefix("-- From PostgreSQL ")?.split_once(' ')?.0.parse().ok()
}

fn statements(lines: &[(usize, &str)]) -> Result<Vec<Statement>> {
    let mut statements: Vec<Statement> = Vec::new();
    let mut worker = "A".to_owned();
    let mut begun: Option<(usize, String)> = None;
    let mut just_ended = false;
    for (n, line) in lines {
        let (start, text) = match begun.take() {
            Some((start, text)) => (start, text + "\n" + line),
            None if line.is_empty() || line.starts_with("\\set ") => {
                just_ended = false;
                continue;
            }
            None => match line.strip_prefix("--").map(str::trim) {
                Some(comment) => {
                    if let Some(name) = comment.strip_prefix("worker ") {
                        worker = name.chars().take_while(char::is_ascii_alphanumeric).collect();
                    } else if let Some(statement) = statements.last_mut().filter(|_| just_ended) {
                        match comment {
                            "waits" => statement.waits = true,
                            _ => statement.answer.push(comment.to_owned()),
                        }
                    }
                    continue;
                }
                None => (*n, (*line).to_owned()),
            },
        };
        match ended(&text)? {
            None => begun = Some((start, text)),
            Some((sql, then)) => {
                let worker = worker.clone();
                statements.push(Statement {
                    line: start,
                    worker,
                    sql,
                    then,
                    waits: false,
                    answer: vec![],
                });
                just_ended = true;
            }
        }
    }
    ensure!(begun.is_none(), "a statement has no end: {begun:?}");
    Ok(statements)
}

/// Returns the statement and what is done with its result, if the text is complete.
fn ended(text: &str) -> Result<Option<(String, ResultUse)>> {
    let Some(end) = code(text).find(|(_, c)| matches!(c, ';' | '\\')).map(|(at, _)| at) else {
        return Ok(None);
    };
    let (sql, rest) = (text[..end].trim().to_owned(), text[end..].trim_end());
    let command = rest.split("--").next().unwrap_or("").trim();
    // psql takes a comment for arguments of its command.
    let is_commented = command.starts_with('\\') && rest.contains("--");
    ensure!(!is_commented, "nothing stands behind {command}: {rest}");
    let then = match command {
        ";" => ResultUse::Show,
        r"\gexec" => ResultUse::Run,
        r"\gset" => {
            let (_, name) = sql.rsplit_once(" AS ").context("\\gset needs AS and a name")?;
            // A FROM may follow the name.
            let name = name.split_whitespace().next().context("AS needs a name")?;
            ResultUse::Keep(name.to_owned())
        }
        other => bail!("one statement a line, please: {other}"),
    };
    Ok(Some((sql, then)))
}

/// Checks that the outcome is the expected one.
pub fn check(statement: &Statement, outcome: &Result<Rows, Fault>) -> Result<()> {
    let wants_error = statement.answer.first().is_some_and(|line| line.starts_with("ERROR:"));
    match outcome {
        Err(fault) if wants_error => {
            let shown = [
                Some(format!("ERROR:  {}: {}", fault.sqlstate, fault.message)),
                fault.detail.as_ref().map(|text| format!("DETAIL:  {text}")),
                fault.hint.as_ref().map(|text| format!("HINT:  {text}")),
            ];
            for wanted in &statement.answer {
                ensure!(
                    shown.iter().flatten().any(|line| fits(wanted, line)),
                    "the text says\n  {wanted}\nbut it was\n  {fault}"
                );
            }
            Ok(())
        }
        Err(fault) => bail!("it should succeed, but: {fault}"),
        Ok(rows) if wants_error => bail!("it should be refused, but: {rows:?}"),
        Ok(_) if statement.answer.is_empty() => Ok(()),
        Ok(rows) => {
            let mut shown: Vec<String> = rows
                .iter()
                .map(|row| {
                    let cells = row.iter().map(|cell| cell.as_deref().unwrap_or("NULL"));
                    cells.collect::<Vec<_>>().join(" | ")
                })
                .collect();
            if shown.is_empty() {
                shown.push("(0 rows)".to_owned());
            }
            let fit = shown.len() == statement.answer.len()
                && statement.answer.iter().zip(&shown).all(|(wanted, line)| fits(wanted, line));
            ensure!(fit, "the text says {:?}, but it was {shown:?}", statement.answer);
            Ok(())
        }
    }
}

/// Returns true if the text matches the pattern, in which `…` stands for any text.
fn fits(pattern: &str, text: &str) -> bool {
    match pattern.split_once('…') {
        None => pattern == text,
        Some((head, tail)) => text.strip_prefix(head).is_some_and(|rest| {
            rest.char_indices()
                .map(|(at, _)| at)
                .chain([rest.len()])
                .any(|at| fits(tail, &rest[at..]))
        }),
    }
}

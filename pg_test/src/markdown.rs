//! Markdown, parsed by a library: sections, links, code blocks, tables.

use anyhow::{Context, Result};
use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};
use std::collections::BTreeSet;
use std::ops::Range;

fn events(text: &str) -> impl Iterator<Item = (Event<'_>, Range<usize>)> {
    Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter()
}

/// A heading: its level, its text without markup, and its position.
struct Heading {
    level: usize,
    title: String,
    place: Range<usize>,
}

fn headings(text: &str) -> Vec<Heading> {
    let mut found: Vec<Heading> = Vec::new();
    let mut inside = false;
    for (event, place) in events(text) {
        match event {
            Event::Start(Tag::Heading { level, .. }) => {
                inside = true;
                found.push(Heading { level: level as usize, title: String::new(), place });
            }
            Event::End(TagEnd::Heading(_)) => inside = false,
            Event::Text(part) | Event::Code(part) if inside => {
                found.last_mut().expect("it has begun").title.push_str(&part);
            }
            _ => {}
        }
    }
    found
}

/// Returns the text below a heading such as `## Locks`, up to the next heading of the same or a higher level.
pub fn section<'a>(text: &'a str, heading: &str) -> Result<&'a str> {
    let all = headings(text);
    let is_it = |one: &&Heading| text[one.place.clone()].trim_end() == heading;
    let it = all.iter().find(is_it).with_context(|| format!("no {heading}"))?;
    let later = all.iter().filter(|other| other.place.start > it.place.start);
    let next = later.filter(|other| other.level <= it.level).map(|other| other.place.start).min();
    Ok(&text[it.place.end..next.unwrap_or(text.len())])
}

/// Returns the anchors of a page's sections, as GitHub makes them.
pub fn anchors(text: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for heading in headings(text) {
        let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
        let name: String = heading.title.chars().filter(kept).collect();
        let name = name.to_lowercase().replace(' ', "-");
        let same = (1..).map(|n| format!("{name}-{n}"));
        let free = std::iter::once(name.clone()).chain(same).find(|name| !names.contains(name));
        names.extend(free);
    }
    names
}

/// Returns the targets of a page's links and images, in their order.
pub fn links(text: &str) -> Vec<String> {
    let target = |(event, _)| match event {
        Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
            Some(dest_url.into_string())
        }
        _ => None,
    };
    events(text).filter_map(target).collect()
}

/// A code block.
#[derive(Debug)]
pub struct Block {
    /// The language: the word after the opening marks.
    pub mark: String,
    /// The line number of the block's first line, from 1.
    pub line: usize,
    pub code: String,
}

/// Returns the fenced code blocks.
pub fn blocks(text: &str) -> Vec<Block> {
    let mut found: Vec<Block> = Vec::new();
    let mut inside = false;
    for (event, place) in events(text) {
        match event {
            Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(mark))) => {
                inside = true;
                let line = text[..place.start].matches('\n').count() + 2;
                found.push(Block { mark: mark.into_string(), line, code: String::new() });
            }
            Event::End(TagEnd::CodeBlock) => inside = false,
            Event::Text(part) if inside => {
                found.last_mut().expect("it has begun").code.push_str(&part);
            }
            _ => {}
        }
    }
    found
}

/// A table cell.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Cell {
    /// Its text, without markup.
    pub text: String,
    /// Its code spans.
    pub codes: Vec<String>,
}

/// Returns the rows of all tables in a text, without their headers.
pub fn rows(text: &str) -> Vec<Vec<Cell>> {
    let mut rows: Vec<Vec<Cell>> = Vec::new();
    let mut cell: Option<Cell> = None;
    let mut in_row = false;
    for (event, _) in events(text) {
        match (event, &mut cell) {
            (Event::Start(Tag::TableRow), _) => {
                in_row = true;
                rows.push(Vec::new());
            }
            (Event::End(TagEnd::TableRow), _) => in_row = false,
            (Event::Start(Tag::TableCell), _) if in_row => cell = Some(Cell::default()),
            (Event::End(TagEnd::TableCell), _) => {
                rows.last_mut().into_iter().for_each(|row| row.extend(cell.take()));
            }
            (Event::Text(part), Some(cell)) => cell.text.push_str(&part),
            (Event::Code(part), Some(cell)) => {
                cell.text.push_str(&part);
                cell.codes.push(part.into_string());
            }
            _ => {}
        }
    }
    rows
}

/// Returns the characters of SQL that are neither in quotes nor in comments.
pub fn code(text: &str) -> impl Iterator<Item = (usize, char)> + '_ {
    let mut quote: Option<char> = None;
    let mut comment = false;
    text.char_indices().filter(move |(at, c)| {
        match (quote, c) {
            (_, '\n') if comment => comment = false,
            _ if comment => {}
            (Some(q), c) if q == *c => quote = None,
            (Some(_), _) => {}
            (None, '\'' | '"') => quote = Some(*c),
            (None, '-') if text[*at..].starts_with("--") => comment = true,
            (None, _) => return true,
        }
        false
    })
}

/// Replaces each `:name` in SQL by its value, as psql does.
pub fn filled(sql: &str, value_of: impl Fn(&str) -> Option<String>) -> Result<String> {
    let mut result = String::new();
    let mut done = 0;
    for (at, c) in code(sql) {
        let name: String =
            sql[at + 1..].chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
        if c != ':' || name.is_empty() || sql[..at].ends_with(':') {
            continue;
        }
        result.push_str(&sql[done..at]);
        result.push_str(&value_of(&name).with_context(|| format!("nothing is kept as {name}"))?);
        done = at + 1 + name.len();
    }
    result.push_str(&sql[done..]);
    Ok(result)
}

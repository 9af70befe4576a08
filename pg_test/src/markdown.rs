//! Markdown, read by a library: sections, links, blocks of code, tables.

use anyhow::{Context, Result};
use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};
use std::collections::BTreeSet;
use std::ops::Range;

fn events(text: &str) -> impl Iterator<Item = (Event<'_>, Range<usize>)> {
    Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter()
}

/// A heading: its level, its text without marks, and where it stands.
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

/// The text below a heading, as `## Locks`, up to the next heading of its level or above.
pub fn section<'a>(text: &'a str, heading: &str) -> Result<&'a str> {
    let all = headings(text);
    let is_it = |one: &&Heading| text[one.place.clone()].trim_end() == heading;
    let it = all.iter().find(is_it).with_context(|| format!("no {heading}"))?;
    let later = all.iter().filter(|other| other.place.start > it.place.start);
    let next = later.filter(|other| other.level <= it.level).map(|other| other.place.start).min();
    Ok(&text[it.place.end..next.unwrap_or(text.len())])
}

/// The names by which a page's sections can be linked to, as GitHub makes them.
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

/// Where the links and pictures of a page lead to, in their order.
pub fn links(text: &str) -> Vec<String> {
    let target = |(event, _)| match event {
        Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
            Some(dest_url.into_string())
        }
        _ => None,
    };
    events(text).filter_map(target).collect()
}

/// A block of code.
#[derive(Debug)]
pub struct Block {
    /// The word behind its opening marks: its language.
    pub mark: String,
    /// The line in the text that its first one is, from 1.
    pub line: usize,
    pub code: String,
}

/// The blocks of code between marks.
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

/// A cell of a table.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Cell {
    /// Its text, without marks.
    pub text: String,
    /// The pieces of code in it.
    pub codes: Vec<String>,
}

/// The rows of the tables in a text, without their heads.
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

/// The lines, from 1, at which an empty line tears a table or a list apart: a row that is in no table, and a list whose
/// items stand apart though none has more than one block.
pub fn torn(text: &str) -> Vec<usize> {
    let line_of = |offset: usize| text[..offset].matches('\n').count() + 1;
    let (mut covered, mut torn) = (Vec::new(), Vec::new());
    // Of each open list: where it begins, whether an item has a paragraph, and the most blocks of an item.
    let mut lists: Vec<(usize, bool, usize)> = Vec::new();
    let mut blocks: Vec<usize> = Vec::new();
    for (event, place) in events(text) {
        let Event::Start(tag) = &event else {
            match event {
                Event::End(TagEnd::Item) => {
                    let had = blocks.pop().unwrap_or_default();
                    lists.iter_mut().last().into_iter().for_each(|list| list.2 = list.2.max(had));
                }
                Event::End(TagEnd::List(_)) => {
                    torn.extend(lists.pop().filter(|l| l.1 && l.2 < 2).map(|l| line_of(l.0)));
                }
                _ => {}
            }
            continue;
        };
        if matches!(tag, Tag::Table(_) | Tag::CodeBlock(_)) {
            covered.push(place.clone());
        }
        let is_block =
            matches!(tag, Tag::Paragraph | Tag::CodeBlock(_) | Tag::List(_) | Tag::Table(_));
        match (tag, blocks.last_mut()) {
            (Tag::Item, _) => blocks.push(0),
            (_, Some(count)) if is_block => *count += 1,
            _ => {}
        }
        match tag {
            Tag::List(_) => lists.push((place.start, false, 0)),
            Tag::Paragraph => lists.iter_mut().last().into_iter().for_each(|list| list.1 = true),
            _ => {}
        }
    }
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        if line.starts_with('|') && !covered.iter().any(|range| range.contains(&start)) {
            torn.push(line_of(start));
        }
        start += line.len();
    }
    torn
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_code_is_no_link_and_no_heading() {
        let text = "[a](b)\n```sql\nSELECT '[c](d)';\n```\n`[e](f)` [`g`](h#i)\n[j\nk](l) ![m](n)";
        assert_eq!(links(text), ["b", "h#i", "l", "n"]);
        let titles = anchors("# A `b_c`, d\n## E\n```sh\n# no title\n```\n## E\n");
        assert_eq!(titles, ["a-b_c-d", "e", "e-1"].map(str::to_owned).into());
    }

    #[test]
    fn a_section_ends_with_the_next_heading_of_its_level() {
        let text = "# A\na\n## B `c`\nb\n### C\n```sh\n## D\n```\nc\n## D\nd\n";
        let below = section(text, "## B `c`").unwrap();
        assert_eq!(below.trim(), "b\n### C\n```sh\n## D\n```\nc");
        assert_eq!(section(text, "## D").unwrap().trim(), "d");
        assert!(section(text, "## E").is_err());
    }

    #[test]
    fn a_block_knows_its_line_though_it_is_indented() {
        let found = blocks("a\n\n- b\n\n  ```sql\n  SELECT\n    1;\n  ```\n");
        let [block] = &found[..] else { panic!("{found:?}") };
        assert_eq!((&*block.mark, block.line, &*block.code), ("sql", 6, "SELECT\n  1;\n"));
    }

    #[test]
    fn an_empty_line_in_a_table_or_a_list_is_seen() {
        assert_eq!(torn("| a |\n| - |\n| b |\n\n| c |\n"), [5]);
        assert_eq!(torn("a\n\n- b\n\n- c\n"), [3]);
        let whole = "| a |\n| - |\n| b |\n\n- b\n- c\n\n```\n| d |\n```\n\n- e\n\n  f\n\n- g\n";
        assert_eq!(torn(whole), [] as [usize; 0]);
    }

    #[test]
    fn a_row_has_its_cells_and_their_code() {
        let found = rows(
            "| a | b |\n| - | - |\n| c `d` | `e`, `f\\|g` |\n\nh `i`\n\n| j |\n| - |\n| k |\n",
        );
        let cell = |text: &str, codes: &[&str]| Cell {
            text: text.to_owned(),
            codes: codes.iter().map(|code| (*code).to_owned()).collect(),
        };
        assert_eq!(
            found,
            [vec![cell("c d", &["d"]), cell("e, f|g", &["e", "f|g"])], vec![cell("k", &[])]]
        );
    }
}

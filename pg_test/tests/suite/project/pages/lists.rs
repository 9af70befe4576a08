//! The lists on the pages are complete: errors, locks, the directories of the source.

use super::{page, section};
use pg_test::process::output_of;
use pg_test::{Context, Harness, Result};
use pg_test::{bail, edition, ensure, harness_test, markdown, promises, test_case};
use std::collections::BTreeSet;
use std::process::Command;

/// Returns the SQLSTATEs in a text.
fn codes(text: &str) -> BTreeSet<String> {
    text.split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|word| word.len() == 5 && word.chars().all(|c| !c.is_ascii_lowercase()))
        .filter(|word| {
            word.starts_with("PF")
                || word.chars().all(|c| c.is_ascii_digit() || c == 'P' || c == 'A')
        })
        .map(str::to_owned)
        .collect()
}

/// Returns the texts of all files in a source folder and below.
fn texts_below(folder: &str) -> Result<String> {
    let mut find = Command::new("find");
    find.args([folder, "-type", "f", "-exec", "cat", "{}", "+"]);
    output_of(find.current_dir(pg_test::source_tree::source_root()))
}

#[harness_test]
fn every_error_is_listed(_: &Harness) -> Result<()> {
    let text = page("docs/reference/errors.md")?;
    let table = section(&text, "## By SQLSTATE")?;
    let listed = codes(table);
    let rust = texts_below("src")?;
    let all = rust.clone() + &texts_below("sql")?;
    // Only quoted words are SQLSTATEs.
    let quoted = all.split(['"', '\'']).filter(|word| word.len() == 5);
    let mut raised: BTreeSet<String> = quoted.flat_map(codes).collect();
    // The lite edition leaves one of its own blocks with it, so it reaches no caller.
    raised.remove("PF999");
    let missing: Vec<_> = raised.difference(&listed).collect();
    ensure!(missing.is_empty(), "not listed: {missing:?}");
    for code in listed.iter().filter(|code| code.starts_with("PF")) {
        ensure!(raised.contains(code), "nothing raises {code}");
    }
    let (_, detail) = rust.split_once("pub struct Detail {").context("no struct Detail")?;
    let keys = detail.split("\n}").next().unwrap_or_default().lines().filter_map(|line| {
        line.trim().strip_prefix("pub ").and_then(|field| field.split(':').next())
    });
    for key in keys {
        ensure!(text.contains(&format!("`{key}`")), "key {key} of DETAIL is not listed");
    }
    Ok(())
}

#[harness_test]
fn the_first_page_lists_the_errors_of_the_fence(_: &Harness) -> Result<()> {
    let (first, all) = (page("README.md")?, page("docs/reference/errors.md")?);
    let own = |text: &str| -> BTreeSet<String> {
        codes(text).into_iter().filter(|code| code.starts_with("PF")).collect()
    };
    let (first, all) = (own(section(&first, "## Errors")?), own(section(&all, "## By SQLSTATE")?));
    ensure!(first == all && all.len() >= 5, "{first:?}, not {all:?}");
    Ok(())
}

#[harness_test]
fn the_locks_have_the_numbers_that_are_listed(_: &Harness) -> Result<()> {
    let text = page("docs/internals/locking.md")?;
    let table = section(&text, "## The locks")?;
    let source = page("src/pg/locks/lock.rs")?;
    let numbers = source
        .lines()
        .filter_map(|line| line.split_once(" => 0x").or_else(|| line.split_once(" = 0x")));
    let mut found = 0;
    for (name, hex) in numbers {
        let name = name.trim().trim_start_matches("Lock::");
        let hex = hex.trim_end_matches(',');
        let number = u16::from_str_radix(hex, 16)?;
        ensure!(table.contains(&format!("| {number} (0x{hex}) | {name} | ")), "{name} = {number}");
        found += 1;
    }
    let listed = table.lines().filter(|line| line.contains(" (0x")).count();
    ensure!(found == listed && found >= 5, "{found} kinds of locks, {listed} are listed");
    let source = page("src/pg/locks/session_lock.rs")?;
    let (_, hex) = source.split_once("const KIND: u16 = 0x").context("no KIND of session locks")?;
    let (hex, _) = hex.split_once(';').context("no number of session locks")?;
    let number = u16::from_str_radix(hex, 16)?;
    let sessions = section(&text, "## Sessions")?;
    ensure!(sessions.contains(&format!("{number} (0x{hex})")), "session locks are {number}");
    Ok(())
}

#[harness_test]
fn every_room_of_the_source_is_on_the_map(_: &Harness) -> Result<()> {
    let map = page("docs/internals/architecture.md")?;
    for entry in std::fs::read_dir(pg_test::source_tree::source_root().join("src"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        ensure!(map.contains(&name), "{name} is not on the map");
    }
    Ok(())
}

/// Returns true if the name in a table is that of a test, or of a file or folder with tests (`guards::`).
pub fn is_there(name: &str, tests: &BTreeSet<String>) -> bool {
    match name.strip_suffix("::") {
        Some(_) => tests.iter().any(|test| test.starts_with(name)),
        None => tests.contains(name),
    }
}

/// Each requirement names existing tests: this program lists its own tests, the others are found in their source. Each
/// test of this program is named.
#[harness_test]
fn the_tests_that_show_each_promise_are_there(_: &Harness) -> Result<()> {
    let (promises, tests) = (promises::all()?, test_case::names()?);
    for promise in &promises {
        for name in &promise.tests {
            promises::place(name).with_context(|| promise.text.clone())?;
            let elsewhere = ["model::", "rules::"].iter().any(|program| name.starts_with(program));
            ensure!(elsewhere || is_there(name, &tests), "{}: no test {name}", promise.text);
        }
    }
    ensure!(promises.len() > 150, "only {} promises were found", promises.len());
    // A test that no requirement names shows nothing that was promised.
    let named = |test: &String| {
        let mut names = promises.iter().flat_map(|promise| &promise.tests);
        names.any(|name| name == test || name.ends_with("::") && test.starts_with(name))
    };
    let unnamed: Vec<_> = tests.iter().filter(|test| !named(test)).collect();
    ensure!(unnamed.is_empty(), "no promise of {} names {unnamed:?}", promises::PAGE);
    Ok(())
}

/// The table of what the lite edition keeps names existing tests, all of which run on that edition.
#[harness_test]
fn the_tests_that_show_what_lite_keeps_are_there(_: &Harness) -> Result<()> {
    let text = page("docs/reference/lite.md")?;
    let (table, tests) = (
        markdown::rows(section(&text, "## Promises, and the tests that show them")?),
        test_case::names()?,
    );
    for row in &table {
        let [promise, shown_by] = &row[..] else { bail!("two cells: {row:?}") };
        let promise = &promise.text;
        for name in &shown_by.codes {
            ensure!(is_there(name, &tests), "{promise}: there is no test {name}");
            ensure!(edition::reason(name).is_none(), "{promise}: {name} is left out");
        }
    }
    ensure!(table.len() > 10, "only {} promises were found", table.len());
    Ok(())
}

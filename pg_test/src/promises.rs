//! The requirements and the tests that show them: `pg_test/promises.md`, with the location of each test.

use crate::markdown::{self, Cell};
use crate::source_tree::source_root;
use anyhow::{Context, Result, ensure};
use std::fmt::Debug;
use std::fs;
use std::path::{Path, PathBuf};

/// The page that lists the requirements.
pub const PAGE: &str = "pg_test/promises.md";

/// A requirement, and the tests that show it.
#[derive(Debug)]
pub struct Promise {
    pub text: String,
    /// Names of tests. A name that ends in `::` means all tests of a file or folder.
    pub tests: Vec<String>,
}

/// Returns all requirements of the page. A requirement without a test is an error.
pub fn all() -> Result<Vec<Promise>> {
    of(&fs::read_to_string(source_root().join(PAGE))?)
}

fn of(page: &str) -> Result<Vec<Promise>> {
    let promise = |row: Vec<Cell>| {
        let [text, tests]: [Cell; 2] = row.try_into().ok().context("a row has two cells")?;
        ensure!(!tests.codes.is_empty(), "no test shows it: {}", text.text);
        Ok(Promise { text: text.text, tests: tests.codes })
    };
    markdown::rows(page).into_iter().map(promise).collect()
}

/// Returns where a test is: its file, and for a single test the line.
pub fn place(name: &str) -> Result<String> {
    let (folder, below) = name.split_once("::").context("a test is named folder::file::test")?;
    match (folder, below.rsplit_once("::")) {
        // The tests of these two are separate programs.
        ("model", _) => line_with(&["pg_test/tests/model"], below),
        ("rules", _) => line_with(&["pg_test/tests/rules.rs", "src/rules"], below),
        (_, Some((file, ""))) => module(&format!("{folder}::{file}")).map(|files| files.join(", ")),
        (_, None) if below.is_empty() => module(folder).map(|files| files.join(", ")),
        (_, Some((file, test))) => line_with(&module(&format!("{folder}::{file}"))?, test),
        (_, None) => line_with(&module(folder)?, below),
    }
    .with_context(|| format!("there is no test {name}"))
}

/// Returns the files of a module: its Rust file and its scenarios. If it has no tests itself, returns those of its
/// folder.
fn module(path: &str) -> Result<Vec<String>> {
    let path = format!("pg_test/tests/suite/{}", path.replace("::", "/"));
    let mut files = Vec::new();
    for (ending, test) in [("rs", "fn "), ("script", "test ")] {
        let file = format!("{path}.{ending}");
        if fs::read_to_string(source_root().join(&file)).is_ok_and(|text| text.contains(test)) {
            files.push(file);
        }
    }
    if files.is_empty() {
        ensure!(source_root().join(format!("{path}.rs")).exists(), "there is no {path}.rs");
        files.push(path);
    }
    Ok(files)
}

/// Returns the line that defines a test, in these files and in those of these folders. Most tests are functions or
/// stand in a scenario file. A macro makes some from their names, or from the name of a spec.
fn line_with(places: &[impl AsRef<str> + Debug], test: &str) -> Result<String> {
    ensure!(!test.is_empty(), "it has no name");
    let is_made = |line: &str| {
        let line = line.trim();
        let named =
            |rest: &str| rest.strip_prefix(test).is_some_and(|end| !end.starts_with(is_word));
        let behind = |word: &str| line.strip_prefix(word).is_some_and(named);
        behind("fn ") || behind("test ") || named(line)
    };
    for file in places.iter().flat_map(|place| files(Path::new(place.as_ref()))) {
        let text = fs::read_to_string(source_root().join(&file))?;
        if let Some(n) = text.lines().position(is_made) {
            return Ok(format!("{}:{}", file.display(), n + 1));
        }
    }
    anyhow::bail!("no line in {places:?} makes it")
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Returns the file itself, or the files in a folder and below it.
fn files(path: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(source_root().join(path)) else { return vec![path.to_owned()] };
    let mut names: Vec<_> = entries.flatten().map(|entry| path.join(entry.file_name())).collect();
    names.sort();
    names
        .iter()
        .flat_map(|name| files(name))
        .filter(|name| name.extension().is_some_and(|end| end == "rs" || end == "script"))
        .collect()
}

/// Prints the table: each requirement, the tests that show it, and where they are.
pub fn run() -> Result<()> {
    println!("| promise | shown by |\n| --- | --- |");
    for promise in all()? {
        let places = promise.tests.iter().map(|test| Ok(format!("`{test}` ({})", place(test)?)));
        println!("| {} | {} |", promise.text, places.collect::<Result<Vec<_>>>()?.join(", "));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_promise_without_a_test_is_an_error() {
        let page =
            |tests: &str| format!("| promise | shown by |\n| - | - |\n| it holds | {tests} |\n");
        assert_eq!(of(&page("`rules::who_is_granted_what_beside_whom`")).unwrap().len(), 1);
        assert!(of(&page("somebody has looked")).is_err());
    }

    #[test]
    fn a_test_that_is_not_there_has_no_place() {
        let promised = place("rules::who_is_granted_what_beside_whom").unwrap();
        assert!(promised.starts_with("src/rules/grant.rs:"), "{promised}");
        for name in
            ["rules::who_is", "model::", "leases::no_such_test", "no_such_folder::", "leases"]
        {
            assert!(place(name).is_err(), "{name}");
        }
    }
}

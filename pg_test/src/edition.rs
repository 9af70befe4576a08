//! The edition under test: the extension, or `sql/pg_fence_lite.sql`.
//!
//! `cargo test --test suite -- --edition lite` runs the tests with the latter; `--edition lite --left-out` lists what it
//! lacks, with the reasons. The clients' scenarios and the chaos run read `PG_FENCE_EDITION`.

mod left_out;

use crate::environment;
use crate::source_tree::source_root;
use anyhow::{Context, Result, ensure};
use std::borrow::Cow;
use std::sync::OnceLock;

pub use left_out::{LEFT_OUT, reason, without_a_test};

/// The edition that is installed by `CREATE EXTENSION pg_fence` in a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Edition {
    /// The extension, with its library.
    Full,
    /// A file of SQL and PL/pgSQL.
    Lite,
}

/// The variable that chooses the edition for this process and its children: `full` or `lite`.
pub const VARIABLE: &str = "PG_FENCE_EDITION";

const CREATE: &str = "CREATE EXTENSION pg_fence";
/// The argument for the second check, which lite lacks: tests that fence a table with it do so without it in lite.
const VERIFY: &str = ", verify => true";
const CREATE_IF_MISSING: &str = "CREATE EXTENSION IF NOT EXISTS pg_fence";

/// The edition of this process.
pub fn chosen() -> Edition {
    static CHOSEN: OnceLock<Edition> = OnceLock::new();
    *CHOSEN.get_or_init(|| match std::env::var(VARIABLE).as_deref() {
        Ok("lite") => Edition::Lite,
        Ok("full") | Err(_) => Edition::Full,
        Ok(other) => panic!("{VARIABLE} is full or lite, not {other}"),
    })
}

/// The command line option that chooses the edition.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct Choice {
    /// Which edition to check: the extension, or sql/pg_fence_lite.sql
    #[arg(long, value_enum)]
    edition: Option<Edition>,
}

impl Choice {
    /// Sets the variable for this process and its children. Must be called before the edition is read.
    pub fn make(self) {
        match self.edition {
            Some(Edition::Full) => environment::set(VARIABLE, "full"),
            Some(Edition::Lite) => environment::set(VARIABLE, "lite"),
            None => {}
        }
    }
}

/// Returns true for the lite edition.
pub fn is_lite() -> bool {
    chosen() == Edition::Lite
}

/// Handles and removes `--edition lite` and `--left-out` in the arguments of a test program. Returns the arguments for
/// the test runner, or `None` if nothing is left to do.
pub fn take_arguments(given: impl Iterator<Item = String>) -> Result<Option<Vec<String>>> {
    let (mut rest, mut given, mut lists) = (Vec::new(), given, false);
    while let Some(argument) = given.next() {
        match argument.as_str() {
            "--edition" => {
                let name = given.next().context("--edition full, or --edition lite")?;
                ensure!(["full", "lite"].contains(&name.as_str()), "there is no edition {name}");
                environment::set(VARIABLE, name);
            }
            "--left-out" => lists = true,
            _ => rest.push(argument),
        }
    }
    if !lists {
        return Ok(Some(rest));
    }
    for (what, why) in LEFT_OUT.iter() {
        println!("{what}: {why}");
    }
    Ok(None)
}

/// The feature that the lite edition lacks, if a test's error says so. Such a test is ignored with this reason, so that
/// no list has to name each one.
pub fn refused_by_lite(error: &str) -> Option<String> {
    if !is_lite() {
        return None;
    }
    let words = |end: &str| {
        let before = error.split_once(end)?.0;
        Some(before.rsplit("ERROR 0A000: ").next().unwrap_or(before).to_owned())
    };
    if let Some(what) = words(" is not in pg_fence_lite") {
        return Some(format!("lite has no {what}"));
    }
    error
        .contains("extension \"pg_fence\" does not exist")
        .then(|| "of DROP or ALTER EXTENSION".to_owned())
}

/// Returns true if the page of the lite edition names this test as proof of a requirement.
pub fn is_proof_for_lite(test: &str) -> bool {
    let page = std::fs::read_to_string(source_root().join("docs/reference/lite.md"));
    page.is_ok_and(|text| text.contains(&format!("`{test}`")))
}

/// Returns true if this edition has what the call needs, for tests that go through several kinds of grants or fences.
pub fn has(call: &str) -> bool {
    let missing = ["verify =>", "slots =>", "shared =>", "session =>", "_all("];
    !is_lite() || !missing.iter().any(|word| call.contains(word))
}

/// The variable that plants a bug in the script for this process and its children.
pub const BUG_VARIABLE: &str = "PG_FENCE_LITE_BUG";

/// The text of `sql/pg_fence_lite.sql` and of the calls for rows; with `PG_FENCE_LITE_BUG`, of a copy with that bug.
pub fn lite_script() -> Result<String> {
    let mut text = String::new();
    for name in ["pg_fence_lite.sql", "3_row_leases.sql"] {
        let path = source_root().join("sql").join(name);
        text += &std::fs::read_to_string(&path)
            .with_context(|| format!("cannot read {}", path.display()))?;
    }
    match std::env::var(BUG_VARIABLE) {
        Ok(bug) => with_bug(&text, &bug),
        Err(_) => Ok(text),
    }
}

/// The text of the script that moves a database from lite to the extension.
pub fn move_up_script() -> Result<String> {
    let path = source_root().join("sql/pg_fence_lite--pg_fence.sql");
    std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// A text in the script, and its replacement.
type Change = (&'static str, &'static str);

/// Bugs that tests must catch.
pub const BUGS: &[(&str, &[Change])] = &[
    // A guard that excludes nobody, so that a concurrent take-over is not blocked.
    ("no-guard-lock", &[("speaks(l, token) FOR KEY SHARE", "speaks(l, token)")]),
    // A start of the server is not noticed, so that tokens lost in a crash are drawn again.
    (
        "no-start-advance",
        &[
            ("IF has_advanced IS NOT TRUE THEN", "IF false THEN"),
            ("(CASE WHEN was_set THEN 1 ELSE 60 END)", "60"),
        ],
    ),
    // The time of the transaction's start decides, instead of that after the lock.
    ("now", &[("clock_timestamp()", "now()")]),
    // An acquire decides by what it read before it waited for the lock, and overlooks a new holder.
    (
        "decision-before-lock",
        &[(
            "FOR UPDATE SKIP LOCKED;\n  IF NOT FOUND OR is_live(old)",
            "FOR UPDATE;\n  IF false AND is_live(old)",
        )],
    ),
];

/// The script with one of the bugs.
pub fn with_bug(script: &str, bug: &str) -> Result<String> {
    let known = BUGS.iter().find(|(name, ..)| *name == bug);
    let (_, changes) = known.with_context(|| format!("the lite edition has no bug {bug}"))?;
    let mut text = script.to_owned();
    for (right, wrong) in *changes {
        ensure!(text.contains(right), "the script has no place for the bug {bug}");
        text = text.replace(right, wrong);
    }
    Ok(text)
}

/// The statements for this edition: in lite, `CREATE EXTENSION pg_fence` is replaced by the script, and no table is
/// fenced with `verify`.
///
/// # Panics
/// If the script cannot be read.
pub fn statements(sql: &str) -> Cow<'_, str> {
    // A script of the lite edition may mention the extension, too.
    let is_script = sql.starts_with("-- ");
    if !is_lite() || is_script {
        return Cow::Borrowed(sql);
    } else if sql.contains(VERIFY) {
        return Cow::Owned(statements(&sql.replace(VERIFY, "")).into_owned());
    } else if !(sql.contains(CREATE) || sql.contains(CREATE_IF_MISSING)) {
        return Cow::Borrowed(sql);
    }
    let script = lite_script().expect("the script of the lite edition");
    let sql = sql.replace(CREATE_IF_MISSING, CREATE);
    let (mut text, mut rest) = (String::new(), sql.as_str());
    while let Some((before, after)) = rest.split_once(CREATE) {
        let (clause, others) = after.split_once(';').unwrap_or((after, ""));
        text.push_str(before);
        match clause.trim().strip_prefix("SCHEMA ") {
            None => text.push_str(&script),
            Some(schema) => {
                text.push_str(&format!("SET search_path = {schema};{script}RESET search_path;"));
            }
        }
        rest = others;
    }
    text.push_str(rest);
    Cow::Owned(text)
}

//! The clients by language: how each worker is built and started. A new language is a file beside `python.rs` and a
//! line in [`ALL`].

mod go;
pub mod java;
mod python;
pub mod rust;
pub mod typescript;

use crate::harness::Harness;
use crate::source_tree::source_root;
use anyhow::{Result, ensure};
use std::ffi::OsString;
use std::fs;
use std::process::Command;

/// The programs of a client.
#[derive(Debug, Clone)]
pub struct Programs {
    pub worker: Program,
    /// The example in its README, started with the URL to connect to.
    pub first_worker: Program,
    /// The client's own tests, started with `DATABASE_URL` for a database with the extension, as its superuser.
    pub tests: Option<Program>,
}

/// How to start a program.
#[derive(Debug, Clone, Default)]
pub struct Program {
    pub program: OsString,
    pub arguments: Vec<OsString>,
    pub environment: Vec<(OsString, OsString)>,
}

impl Program {
    /// A command for the program, which ends with the tests at the latest.
    pub fn command(&self, harness: &Harness) -> Command {
        let mut command = harness.rundir().command(&self.program);
        command.args(&self.arguments).envs(self.environment.iter().cloned());
        command
    }
}

/// A check of a client by a linter or a tool of its registry.
pub struct Check {
    pub name: &'static str,
    /// The command, which prints its findings and ends with a status other than 0.
    pub command: Command,
}

/// The checks of a client that another variant has already.
pub fn no_checks() -> Result<Vec<Check>> {
    Ok(Vec::new())
}

/// The examples in a client's README, in its language, without the first `but`.
fn examples(directory: &str, language: &str, but: usize) -> Result<Vec<String>> {
    let page = fs::read_to_string(source_root().join("clients").join(directory).join("README.md"))?;
    let fence = format!("```{language}\n");
    let blocks = page.split(&fence).skip(1 + but);
    let code = blocks.filter_map(|block| Some(block.split_once("```")?.0.to_owned()));
    let code: Vec<String> = code.collect();
    ensure!(code.len() + but > 5, "only {} examples were found", code.len());
    Ok(code)
}

/// A client or a variant of it: on another driver, or asynchronous.
pub struct Language {
    /// The name on the command line.
    pub name: &'static str,
    /// The directory in `clients`.
    pub directory: &'static str,
    /// Fetches and builds what is missing, in the target directory.
    pub prepare: fn() -> Result<Programs>,
    /// Its linters, and the checks of its registry; called after `prepare`. Fetches these tools, in pinned versions,
    /// into the target directory.
    pub checks: fn() -> Result<Vec<Check>>,
    /// The file with the example of its README.
    pub first_worker: &'static str,
    /// Returns true if `prepare` would fetch nothing.
    pub is_there: fn() -> bool,
}

/// All clients.
pub const ALL: &[Language] = &[
    python::LANGUAGE,
    python::ASYNCIO,
    python::ASYNCIO_ON_LIBPQ,
    typescript::ON_PG,
    typescript::ON_POSTGRES,
    java::LANGUAGE,
    java::ON_25,
    go::LANGUAGE,
    rust::LANGUAGE,
];

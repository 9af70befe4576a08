//! The clients, by language: how each one's worker is brought and started. A new language is a file beside
//! `python.rs` and a line in [`ALL`].

mod go;
pub mod java;
mod python;
pub mod rust;
pub mod typescript;

use crate::lab::Lab;
use crate::source_tree::source_root;
use anyhow::{ensure, Result};
use std::ffi::OsString;
use std::fs;
use std::process::Command;

/// A client, as the laboratory sees it.
#[derive(Debug, Clone)]
pub struct Programs {
    pub worker: Program,
    /// The example of its README, started with where to connect, as a URL.
    pub first_worker: Program,
    /// The client's own tests, started with `DATABASE_URL` set to a database with the extension, as its superuser.
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
    /// It ends with the laboratory at the latest.
    pub fn command(&self, lab: &Lab) -> Command {
        let mut command = lab.rundir().command(&self.program);
        command.args(&self.arguments).envs(self.environment.iter().cloned());
        command
    }
}

/// The verdict of a linter, or a tool of the registry, on a client.
pub struct Check {
    pub name: &'static str,
    /// It ends with another status than 0 where something is wrong, and prints what.
    pub command: Command,
}

/// The checks of a client whose other way has them already.
pub fn no_checks() -> Result<Vec<Check>> {
    Ok(Vec::new())
}

/// The examples in the README of a client, in its language, but for the first ones.
fn examples(directory: &str, language: &str, but: usize) -> Result<Vec<String>> {
    let page = fs::read_to_string(source_root().join("clients").join(directory).join("README.md"))?;
    let fence = format!("```{language}\n");
    let blocks = page.split(&fence).skip(1 + but);
    let code = blocks.filter_map(|block| Some(block.split_once("```")?.0.to_owned()));
    let code: Vec<String> = code.collect();
    ensure!(code.len() + but > 5, "only {} examples were found", code.len());
    Ok(code)
}

/// A client, or one of its ways: on another driver, asynchronous.
pub struct Language {
    /// As the command line calls it.
    pub name: &'static str,
    /// Where it is, below `clients`.
    pub directory: &'static str,
    /// Brings what is missing and builds what is to be built, below the target directory.
    pub prepare: fn() -> Result<Programs>,
    /// Its linters, and what its registry asks of a package; asked for after `prepare`. Brings these tools, in versions
    /// that are pinned, below the target directory.
    pub checks: fn() -> Result<Vec<Check>>,
    /// The file with the example of its README.
    pub first_worker: &'static str,
    /// Whether `prepare` would bring nothing.
    pub is_there: fn() -> bool,
}

/// All of them.
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

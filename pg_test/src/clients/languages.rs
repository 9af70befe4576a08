//! The clients, by language: how each one's worker is brought and started. A new language is a file beside
//! `python.rs` and a line in [`ALL`].

mod python;

use anyhow::Result;
use std::ffi::OsString;

/// How to start a worker: `program arguments… [--plant NAME]`.
#[derive(Debug, Clone, Default)]
pub struct Program {
    pub program: OsString,
    pub arguments: Vec<OsString>,
    pub environment: Vec<(OsString, OsString)>,
}

/// A client.
pub struct Language {
    /// As the command line calls it.
    pub name: &'static str,
    /// Brings what is missing and builds what is to be built, below the target directory.
    pub prepare: fn() -> Result<Program>,
    /// Whether that would bring nothing.
    pub is_there: fn() -> bool,
}

/// All of them.
pub const ALL: &[Language] = &[python::LANGUAGE];

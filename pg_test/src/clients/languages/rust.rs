//! The client in Rust, on tokio-postgres.

use super::{Language, Program, Programs};
use crate::extension::{cargo, source_root, target_dir};
use crate::process::output_of;
use anyhow::{Context, Result};
use std::path::PathBuf;

pub const LANGUAGE: Language = Language {
    name: "rust",
    directory: "rust",
    prepare,
    first_worker: "examples/first_worker.rs",
    // To fetch and build what it stands on takes a minute.
    is_there: || built().join("worker").exists(),
};

fn prepare() -> Result<Programs> {
    let mut build = cargo();
    build.args(["build", "--locked", "--workspace", "--bins", "--examples", "--manifest-path"]);
    build.arg(manifest()).env("CARGO_TARGET_DIR", home());
    output_of(&mut build).context("the client in Rust cannot be built")?;
    let program = |path: &str| Program { program: built().join(path).into(), ..Program::default() };
    let tests = Program {
        program: "cargo".into(),
        arguments: ["test", "--locked", "--workspace", "--manifest-path"]
            .map(Into::into)
            .into_iter()
            .chain([manifest().into()])
            .collect(),
        environment: vec![("CARGO_TARGET_DIR".into(), home().into())],
    };
    Ok(Programs {
        worker: program("worker"),
        first_worker: program("examples/first_worker"),
        tests: Some(tests),
    })
}

fn manifest() -> PathBuf {
    source_root().join("clients/rust/Cargo.toml")
}

/// A target directory of its own: other packages, and other features of the same.
fn home() -> PathBuf {
    target_dir().join("clients/rust")
}

fn built() -> PathBuf {
    home().join("debug")
}

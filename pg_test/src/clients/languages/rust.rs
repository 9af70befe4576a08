//! The client in Rust, on tokio-postgres, and the command `pg_fence`, which is built on it.

use super::{Language, Variables, out};
use crate::process::output_of;
use crate::source_tree::cargo;
use anyhow::{Context, Result};
use std::path::PathBuf;

pub const LANGUAGE: Language = Language {
    name: "rust",
    directory: "rust",
    // Fetching and building its dependencies takes a minute.
    is_there: || built("worker").exists(),
    bring,
    build: "",
    worker: "$OUT/debug/worker",
    first_worker: ("examples/first_worker.rs", "$OUT/debug/examples/first_worker"),
    tests: "cargo test --locked --all-features --package pg-fence-client --package pg-fence-cli",
    tools: &[],
    checks: &[
        "cargo fmt --check",
        "cargo clippy --locked --package pg-fence-client --package pg-fence-client-worker \
            --package pg-fence-cli --all-targets --all-features -- -D warnings",
        "RUSTDOCFLAGS='-D warnings' \
            cargo doc --locked --no-deps --all-features --package pg-fence-client",
        // It builds only what a registry would be sent. What cargo has unpacked and built of a local package it would
        // reuse for another package of the same version. (A registry on this machine has no host's name.)
        "rm -rf ${CARGO_HOME:-$HOME/.cargo}/registry/src/-*/pg-fence-client-*
         rm -rf $OUT/debug/.fingerprint/pg-fence-client-*
         RUSTDOCFLAGS='-D warnings' cargo publish --dry-run --locked --allow-dirty \
            --package pg-fence-client --package pg-fence-cli",
    ],
    page: None,
};

/// Builds the client, its worker, and the command. Cargo knows what has changed since the last time. It has a target
/// directory of its own, because running tests lock the other one.
fn bring() -> Result<Variables> {
    let mut build = cargo();
    build.args(["build", "--locked", "--bins", "--examples", "--package", "pg-fence-client"]);
    build.args(["--package", "pg-fence-client-worker", "--package", "pg-fence-cli"]);
    output_of(build.env("CARGO_TARGET_DIR", out("rust")))
        .context("the client in Rust cannot be built")?;
    Ok(vec![("CARGO_TARGET_DIR", out("rust").into())])
}

/// Builds the command `pg_fence`.
pub fn command() -> Result<PathBuf> {
    LANGUAGE.prepare().map(|_| built("pg_fence"))
}

/// Builds the command with a planted fault (`--cfg planted="<fault>"`), in a target directory of its own.
pub fn command_with(fault: &str) -> Result<PathBuf> {
    let planted = out("rust").join("planted");
    let mut build = cargo();
    build.args(["rustc", "--locked", "--package", "pg-fence-cli", "--bin", "pg_fence"]);
    build.args(["--", "--cfg", &format!("planted={fault:?}")]);
    // All variants have the same dependencies.
    build.env("CARGO_TARGET_DIR", planted.join(fault)).env("CARGO_BUILD_BUILD_DIR", &planted);
    output_of(&mut build).with_context(|| format!("{fault} cannot be built"))?;
    Ok(planted.join(fault).join("debug/pg_fence"))
}

fn built(program: &str) -> PathBuf {
    out("rust").join("debug").join(program)
}

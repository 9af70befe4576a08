//! The client in Go, on pgx.

use super::{Language, Program, Programs};
use crate::extension::{source_root, target_dir};
use crate::process::output_of;
use crate::setup::{self, Package};
use anyhow::{Context, Result};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

pub const LANGUAGE: Language = Language {
    name: "go",
    directory: "go",
    prepare,
    checks: super::no_checks,
    first_worker: "examples/first/main.go",
    is_there: || packages().iter().all(Package::is_installed),
};

/// Where Debian's packages put the sources of libraries.
const DEBIAN_LIBRARIES: &str = "/usr/share/gocode";

fn packages() -> [Package; 3] {
    let library = |path: &str| format!("{DEBIAN_LIBRARIES}/src/github.com/{path}");
    [
        Package::new("golang-go", "/usr/bin/go"),
        Package::new("golang-github-jackc-pgx-v4-dev", library("jackc/pgx/v4")),
        Package::new("golang-github-lib-pq-dev", library("lib/pq")),
    ]
}

fn prepare() -> Result<Programs> {
    setup::ensure(&packages())?;
    let programs = build().context("the client in Go cannot be built")?;
    let program =
        |name: &str| Program { program: programs.join(name).into(), ..Program::default() };
    Ok(Programs {
        worker: program("worker"),
        first_worker: program("first_worker"),
        tests: Some(program("tests")),
    })
}

/// The directory with the worker, the example and the tests.
fn build() -> Result<PathBuf> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let home = target_dir().join("clients/go");
    link(&source_root().join("clients/go"), &home.join("src/pgfence"))?;
    let programs = home.join("programs");
    let out = |name: &str| programs.join(name).display().to_string();
    // Go itself knows what has changed since the last time.
    go(&home, &["vet", "pgfence", "pgfence/lab", "pgfence/examples/first"])?;
    go(&home, &["build", "-o", &out("worker"), "pgfence/lab"])?;
    go(&home, &["build", "-o", &out("first_worker"), "pgfence/examples/first"])?;
    go(&home, &["test", "-c", "-o", &out("tests"), "pgfence"])?;
    Ok(programs)
}

/// Debian's libraries are no modules but a GOPATH, to which this client is added.
fn go(home: &Path, arguments: &[&str]) -> Result<()> {
    let mut go = Command::new("go");
    go.args(arguments)
        .env("GO111MODULE", "off")
        .env("GOFLAGS", "")
        .env("GOPATH", format!("{}:{DEBIAN_LIBRARIES}", home.display()))
        .env("GOCACHE", home.join("cache"));
    output_of(&mut go).map(drop)
}

fn link(to: &Path, at: &Path) -> Result<()> {
    fs::create_dir_all(at.parent().context("no parent")?)?;
    match fs::remove_file(at) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error.into()),
        _ => symlink(to, at).with_context(|| at.display().to_string()),
    }
}

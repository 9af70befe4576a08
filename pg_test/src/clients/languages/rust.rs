//! The client in Rust, on tokio-postgres.

use super::{Check, Language, Program, Programs};
use crate::process::output_of;
use crate::source_tree::{cargo, source_root, target_dir};
use anyhow::{Context, Result};
use std::fs::DirEntry;
use std::path::PathBuf;
use std::sync::Mutex;

pub const LANGUAGE: Language = Language {
    name: "rust",
    directory: "rust",
    prepare,
    checks,
    first_worker: "examples/first_worker.rs",
    // Fetching and building its dependencies takes a minute.
    is_there: || built().join("worker").exists(),
};

fn prepare() -> Result<Programs> {
    build()?;
    let program = |path: &str| Program { program: built().join(path).into(), ..Program::default() };
    let tests = Program {
        program: "cargo".into(),
        arguments: ["test", "--locked", "--all-features", "--package", "pg-fence-client"]
            .into_iter()
            .chain(["--package", "pg-fence-cli", "--manifest-path"])
            .map(Into::into)
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

/// The packages in the client's directory: the client, its worker, and the command built on it.
const PACKAGES: [&str; 3] = ["pg-fence-client", "pg-fence-client-worker", "pg-fence-cli"];

fn build() -> Result<()> {
    let mut build = cargo();
    build.args(["build", "--locked", "--bins", "--examples"]);
    build.args(PACKAGES.iter().flat_map(|package| ["--package", package])).arg("--manifest-path");
    build.arg(manifest()).env("CARGO_TARGET_DIR", home());
    output_of(&mut build).context("the client in Rust cannot be built").map(drop)
}

/// The last check builds only what a registry would be sent.
fn checks() -> Result<Vec<Check>> {
    forget_what_was_packaged();
    let check = |name, words: &str| {
        let mut command = cargo();
        let (words, of_tool) = words.split_once(" -- ").unwrap_or((words, ""));
        command.args(words.split_whitespace()).arg("--manifest-path").arg(manifest());
        command.env("CARGO_TARGET_DIR", home()).env("RUSTDOCFLAGS", "-D warnings");
        if !of_tool.is_empty() {
            command.arg("--").args(of_tool.split(' '));
        }
        Check { name, command }
    };
    Ok(vec![
        check("rustfmt", "fmt --check"),
        check(
            "clippy",
            "clippy --locked --package pg-fence-client --package pg-fence-client-worker --package pg-fence-cli \
             --all-targets --all-features -- -D warnings",
        ),
        check("rustdoc", "doc --locked --no-deps --all-features --package pg-fence-client"),
        check(
            "cargo publish",
            "publish --dry-run --locked --allow-dirty --package pg-fence-client --package pg-fence-cli",
        ),
    ])
}

/// Removes what cargo has unpacked and built of a local package, because it would reuse that for another package of the
/// same version.
fn forget_what_was_packaged() {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let listed = |directory: PathBuf| std::fs::read_dir(directory).into_iter().flatten().flatten();
    let begins =
        |entry: &DirEntry, with: &str| entry.file_name().to_string_lossy().starts_with(with);
    // A registry on this machine is a directory without a host's name.
    let registries = home.into_iter().flat_map(|home| listed(home.join("registry/src")));
    let registries = registries.filter(|one| begins(one, "-")).map(|one| one.path());
    for kept in registries.chain([built().join(".fingerprint")]).flat_map(listed) {
        if begins(&kept, "pg-fence-client-") {
            let _ = std::fs::remove_dir_all(kept.path());
        }
    }
}

/// The command `pg_fence`, which is built on this client. `None` if it was never built on this machine.
pub fn command() -> Result<Option<PathBuf>> {
    if !(LANGUAGE.is_there)() {
        return Ok(None);
    }
    // Tests run concurrently.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    build()?;
    Ok(Some(built().join("pg_fence")))
}

/// Builds the command with a planted fault (`--cfg planted="<fault>"`), in a target directory of its own.
pub fn command_with(fault: &str) -> Result<PathBuf> {
    let target = home().join("planted").join(fault);
    let mut build = cargo();
    build.args(["rustc", "--locked", "--package", "pg-fence-cli", "--bin", "pg_fence"]);
    build.arg("--manifest-path").arg(manifest());
    build.args(["--", "--cfg", &format!("planted={fault:?}")]);
    // All variants have the same dependencies.
    build.env("CARGO_TARGET_DIR", &target).env("CARGO_BUILD_BUILD_DIR", home().join("planted"));
    output_of(&mut build).with_context(|| format!("{fault} cannot be built"))?;
    Ok(target.join("debug/pg_fence"))
}

fn manifest() -> PathBuf {
    source_root().join("clients/rust/Cargo.toml")
}

/// A target directory of its own, because running tests lock the other one.
fn home() -> PathBuf {
    target_dir().join("clients/rust")
}

fn built() -> PathBuf {
    home().join("debug")
}

//! The source tree, and cargo commands in it.

use crate::process::output_of;
use crate::setup::{self, Package};
use anyhow::{Result, ensure};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the top of the source tree.
pub fn source_root() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().expect("the harness lies below the workspace")
}

/// Returns cargo's target directory.
pub fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => source_root().join(dir),
        None => source_root().join("target"),
    }
}

/// Returns a cargo command in the source tree.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    without_package(&mut command).current_dir(source_root());
    command
}

/// Removes the environment variables that an outer cargo has set for this crate.
pub fn without_package(command: &mut Command) -> &mut Command {
    let of_package = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_"];
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if of_package.iter().any(|prefix| name.starts_with(prefix)) {
            command.env_remove(name);
        }
    }
    command
}

/// Makes `copy` a copy of the source tree with a patch applied. Only `src` is copied, all else is linked.
pub fn copy_with_patch(copy: &Path, change: &Path) -> Result<()> {
    if copy.exists() {
        fs::remove_dir_all(copy)?;
    }
    fs::create_dir_all(copy)?;
    for entry in fs::read_dir(source_root())? {
        let (path, name) = entry.map(|entry| (entry.path(), entry.file_name()))?;
        if name == "src" {
            output_of(Command::new("cp").arg("-r").arg(path).arg(copy))?;
        } else if name != "target" && name != ".git" {
            symlink(path, copy.join(name))?;
        }
    }
    output_of(&mut patch(copy, change)?).map(drop)
}

/// Returns an error if a patch does not apply to the source tree.
pub fn check_patch(change: &Path) -> Result<()> {
    let said = output_of(patch(source_root(), change)?.arg("--dry-run"))?;
    ensure!(said.contains("checking file"), "{} changes nothing: {said}", change.display());
    Ok(())
}

/// Returns a command that applies a patch to a tree, with no fuzz: every context line must match.
fn patch(tree: &Path, change: &Path) -> Result<Command> {
    setup::ensure(&[Package::new("patch", "/usr/bin/patch")])?;
    let mut patch = Command::new("patch");
    patch.args(["--strip=1", "--fuzz=0", "--batch", "--forward", "--reject-file=-"]);
    patch.arg("--directory").arg(tree).arg("--input").arg(change);
    Ok(patch)
}

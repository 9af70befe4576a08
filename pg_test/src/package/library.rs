//! The library as packaged: without debug symbols and without traces of the build's paths.

use crate::extension::{self, BuildPlace, NAME};
use crate::source_tree;
use anyhow::{Context, Result, ensure};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// Builds the library of a source tree below `target`. It is separate from other builds: its flags rebuild all crates.
pub fn build(source: &Path, pg_config: &Path, target: &Path) -> Result<PathBuf> {
    let major = extension::major_of(pg_config)?;
    let output = target.join(format!("pg{major}"));
    // Most crates are the same for each major version.
    let place = BuildPlace::new(output.clone(), target.join("build"));
    eprintln!("building {NAME} for packages (pg{major})");
    // pgrx formats the code it generates, and panics contain line numbers. Without this file rustfmt would use a
    // configuration from above the target directory.
    fs::create_dir_all(target)?;
    fs::write(target.join("rustfmt.toml"), "")?;
    place.prepare()?;
    let status = place
        .tell(&mut source_tree::cargo())
        .current_dir(source)
        .args([
            "rustc",
            "--release",
            "--locked",
            "--package",
            NAME,
            "--lib",
            "--no-default-features",
        ])
        .args(["--features", &format!("pg{major}")])
        .env("PGRX_PG_CONFIG_PATH", pg_config)
        .env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
        // The separator of this variable cannot occur in a path.
        .env("CARGO_ENCODED_RUSTFLAGS", remapped(source, target)?.join("\u{1f}"))
        .env_remove("RUSTFLAGS")
        .stdin(Stdio::null())
        .status()
        .context("cannot run cargo")?;
    ensure!(status.success(), "building {NAME} failed ({status})");
    Ok(output.join(format!("release/lib{NAME}.so")))
}

/// Returns the compiler flags that replace the beginnings of paths in the library (panics contain them), so that they
/// are the same wherever it is built.
pub fn remapped(source: &Path, target: &Path) -> Result<Vec<String>> {
    let home = |name: &str, usual: &str| -> Result<PathBuf> {
        let below_home = || -> Option<OsString> {
            Some(Path::new(&std::env::var_os("HOME")?).join(usual).into())
        };
        Ok(std::env::var_os(name).or_else(below_home).with_context(|| format!("no {name}"))?.into())
    };
    // rustc tries the last one first, and the target directory is usually inside the source tree.
    let places = [
        (home("CARGO_HOME", ".cargo")?, "/cargo"),
        (source.to_owned(), "/source"),
        (target.to_owned(), "/target"),
    ];
    let flag = |(from, to): (PathBuf, &str)| format!("--remap-path-prefix={}={to}", from.display());
    Ok(places.into_iter().map(flag).collect())
}

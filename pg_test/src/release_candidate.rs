//! The next PostgreSQL, which is not released yet, and what is needed to build the extension for it (and on demand for
//! the others): a newer pgrx than that of `Cargo.toml`, which needs a newer Rust. Missing parts are fetched into the
//! target directory.
//!
//! This module is removed when `Cargo.toml` names that pgrx (CONTRIBUTING says when).

use crate::debian_binary::Libraries;
use crate::debian_releases::{PackageKind, RELEASES, Releases};
use crate::process::output_of;
use crate::source_tree::{self, source_root, target_dir};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

/// The major version.
pub const MAJOR: &str = "19";
/// The first pgrx that supports the version, and the newest.
pub const PGRX: &str = "0.19.3";
/// If set, the extension is built with that pgrx for the other versions, too.
pub const PGRX_VARIABLE: &str = "PG_FENCE_NEXT_PGRX";
/// The minor version of the Rust that this pgrx needs: 1.96.
const RUST_MINOR: u32 = 96;

/// Returns true if the extension is built for a version with the newer pgrx.
pub fn builds(major: &str) -> bool {
    major == MAJOR || std::env::var_os(PGRX_VARIABLE).is_some()
}

/// Cargo in a copy of the source tree that names the newer pgrx, with a Rust that is new enough.
pub fn cargo() -> Result<Command> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let home = target_dir().join("candidate");
    let mut cargo = source_tree::cargo();
    cargo.current_dir(tree(&home.join("tree"))?);
    let own = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    if minor_of(&output_of(Command::new(own).arg("--version"))?)? < RUST_MINOR {
        // Cargo itself may be older.
        cargo.env("RUSTC", Toolchain { home: home.join("rust") }.rustc()?);
    }
    Ok(cargo)
}

/// The minor version in `rustc 1.95.0 (59807616e 2026-04-14)`.
fn minor_of(version: &str) -> Result<u32> {
    let minor = version.split(['.', ' ']).nth(2).and_then(|minor| minor.parse().ok());
    minor.with_context(|| format!("no version of Rust in {version:?}"))
}

/// A copy of the source tree: the same files, but another manifest and cargo's files.
fn tree(dir: &Path) -> Result<&Path> {
    fs::create_dir_all(dir)?;
    for name in ["src", "sql"] {
        let link = dir.join(name);
        if fs::read_link(&link).ok() != Some(source_root().join(name)) {
            let _ = fs::remove_file(&link);
            symlink(source_root().join(name), &link)?;
        }
    }
    let lock = fs::read_to_string(source_root().join("Cargo.lock"))?;
    let manifest = manifest(&fs::read_to_string(source_root().join("Cargo.toml"))?)?;
    // Cargo starts from the tree's versions of all other crates, and keeps those that it has found.
    let from = format!("{manifest}{lock}");
    if fs::read_to_string(dir.join("made-from")).ok() != Some(from.clone()) {
        fs::write(dir.join("Cargo.toml"), manifest)?;
        fs::write(dir.join("Cargo.lock"), lock)?;
        fs::write(dir.join("made-from"), from)?;
    }
    Ok(dir)
}

/// The workspace's manifest with the newer pgrx, for the extension only.
fn manifest(own: &str) -> Result<String> {
    let mut manifest: toml::Value = toml::from_str(own)?;
    manifest["workspace"]["members"] = vec![".", "src/rules"].into();
    manifest["workspace"]["default-members"] = vec!["."].into();
    manifest["workspace"]["package"]["rust-version"] = format!("1.{RUST_MINOR}").into();
    manifest["dependencies"]["pgrx"]["version"] = format!("={PGRX}").into();
    let table = |value: &mut toml::Value, name: &str| -> Result<toml::Table> {
        value.get(name).and_then(|value| value.as_table()).cloned().context(name.to_owned())
    };
    let mut features = table(&mut manifest, "features")?;
    features.insert(format!("pg{MAJOR}"), vec![format!("pgrx/pg{MAJOR}")].into());
    manifest["features"] = features.into();
    // They belong to crates of the tests.
    let mut profile = table(&mut manifest["profile"], "dev")?;
    profile.remove("package");
    manifest["profile"]["dev"] = profile.into();
    Ok(toml::to_string(&manifest)?)
}

/// Debian's newest Rust with the libraries that it needs, because the machine's own may be too old.
struct Toolchain {
    home: PathBuf,
}

impl Toolchain {
    /// The compiler, fetched if it is missing.
    fn rustc(&self) -> Result<PathBuf> {
        let rustc = self.home.join("rustc");
        if rustc.exists() {
            return Ok(rustc);
        }
        let debian = self.home.join("debian");
        let _ = fs::remove_dir_all(&debian);
        fs::create_dir_all(&self.home)?;
        let releases = Releases::of(PackageKind::Binary, &self.home, RELEASES)?;
        let mut packages = releases.libraries_of("libstd-rust-dev")?;
        packages.push("rustc".to_owned());
        releases.unpack(&packages, &debian)?;
        // The compiler is started by the loader of its own libraries, but the processes that it starts are not.
        let (own, usr) = (Libraries::of(&debian)?, debian.join("usr"));
        let script = format!(
            "#!/bin/sh\nexec '{}' --library-path '{}' '{}' --sysroot '{}' \"$@\"\n",
            own.loader.display(),
            own.dir.display(),
            usr.join("bin/rustc").display(),
            usr.display()
        );
        fs::write(&rustc, script)?;
        fs::set_permissions(&rustc, fs::Permissions::from_mode(0o755))?;
        let version = output_of(Command::new(&rustc).arg("--version"));
        let is_new =
            version.and_then(|version| minor_of(&version)).map(|minor| minor >= RUST_MINOR);
        if !matches!(is_new, Ok(true)) {
            fs::remove_file(&rustc)?;
        }
        ensure!(is_new?, "Debian has no Rust 1.{RUST_MINOR}");
        Ok(rustc)
    }
}

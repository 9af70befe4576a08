//! A PostgreSQL that is not released yet, and what the extension is built for it with, and on demand for the others: a
//! newer pgrx than that of `Cargo.toml`, which wants a newer Rust. All of it is brought where it is missing, below the
//! target directory.
//!
//! When `Cargo.toml` names that pgrx (CONTRIBUTING says when), all of this goes.

use crate::debian_binary::Libraries;
use crate::debian_releases::{Kind, Releases, RELEASES};
use crate::process::output_of;
use crate::source_tree::{self, source_root, target_dir};
use anyhow::{ensure, Context, Result};
use std::fs;
use std::os::unix::fs::{symlink, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

/// Its major version.
pub const MAJOR: &str = "19";
/// The first pgrx that knows it is the newest that there is.
pub const PGRX: &str = "0.19.3";
/// Set: the extension is built with that one for the other versions, too.
pub const PGRX_VARIABLE: &str = "PG_FENCE_NEXT_PGRX";
/// The Rust that it asks for: 1.96.
const RUST_MINOR: u32 = 96;

/// Whether the extension is built for a version with the other pgrx.
pub fn builds(major: &str) -> bool {
    major == MAJOR || std::env::var_os(PGRX_VARIABLE).is_some()
}

/// Cargo, in a tree of the same sources that names the other pgrx, with a Rust that is new enough.
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

/// The sources are the same files; the manifest is another, and what cargo makes of it.
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
    // Cargo goes on from the tree's own versions of all other crates, and keeps what it has found.
    let from = format!("{manifest}{lock}");
    if fs::read_to_string(dir.join("made-from")).ok() != Some(from.clone()) {
        fs::write(dir.join("Cargo.toml"), manifest)?;
        fs::write(dir.join("Cargo.lock"), lock)?;
        fs::write(dir.join("made-from"), from)?;
    }
    Ok(dir)
}

/// The workspace's manifest with the other pgrx, for the extension alone.
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
    // They are of crates that only the lab needs.
    let mut profile = table(&mut manifest["profile"], "dev")?;
    profile.remove("package");
    manifest["profile"]["dev"] = profile.into();
    Ok(toml::to_string(&manifest)?)
}

/// Debian's newest Rust, with all that it is linked to: the machine's own libraries may be too old for it.
struct Toolchain {
    home: PathBuf,
}

impl Toolchain {
    /// Its compiler, fetched where it is missing.
    fn rustc(&self) -> Result<PathBuf> {
        let rustc = self.home.join("rustc");
        if rustc.exists() {
            return Ok(rustc);
        }
        let debian = self.home.join("debian");
        let _ = fs::remove_dir_all(&debian);
        fs::create_dir_all(&self.home)?;
        let releases = Releases::of(Kind::Binary, &self.home, RELEASES)?;
        let mut packages = releases.libraries_of("libstd-rust-dev")?;
        packages.push("rustc".to_owned());
        releases.unpack(&packages, &debian)?;
        // It is started by its loader, of which it tells nothing to what it starts in turn.
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

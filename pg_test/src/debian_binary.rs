//! A PostgreSQL or a Python out of Debian's packages, also of a release whose libc the machine's own is too old for:
//! unpacked in the target directory, with the libraries that it wants.

use crate::debian_releases::{PackageKind, Releases, WITH_EXPERIMENTAL};
use crate::process::output_of;
use crate::setup::{self, Package};
use crate::source_tree::target_dir;
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The `pg_config` of a major version, unpacked in `dir` if it is not there yet.
pub fn server(dir: &Path, major: &str) -> Result<PathBuf> {
    let (root, ready) = (dir.join("root"), dir.join("ready"));
    let home = root.join(format!("usr/lib/postgresql/{major}"));
    if !ready.exists() {
        setup::ensure(&[Package::new("patchelf", "/usr/bin/patchelf")])?;
        let _ = fs::remove_dir_all(&root);
        fs::create_dir_all(dir)?;
        let releases = Releases::of(PackageKind::Binary, dir, WITH_EXPERIMENTAL)?;
        let mut packages = releases.libraries_of(&format!("postgresql-{major}"))?;
        for part in ["", "client-", "server-dev-"] {
            packages.push(format!("postgresql-{part}{major}"));
        }
        // pg_repack cannot be built for this server: that takes the static libraries of its release.
        let repack = setup::repack(major).name;
        if !releases.versions(&repack)?.is_empty() {
            packages.push(repack);
        }
        releases.unpack(&packages, &root)?;
        let own = Libraries::of(&root)?;
        own.tell_programs(&home.join("bin"))?;
        fs::write(ready, "")?;
    }
    Ok(home.join("bin/pg_config"))
}

/// The version of the Python that [`python`] brings, which is that of Debian 13.
pub const PYTHON: &str = "3.13";

/// A Python for packages that want a newer one than Debian 12's, and the directory with its headers; it is unpacked where
/// it is not there yet.
pub fn python() -> Result<(PathBuf, PathBuf)> {
    let dir = target_dir().join("python");
    let (root, ready) = (dir.join("root"), dir.join("ready"));
    let programs = root.join("usr/bin");
    let name = format!("python{PYTHON}");
    if !ready.exists() {
        setup::ensure(&[Package::new("patchelf", "/usr/bin/patchelf")])?;
        let _ = fs::remove_dir_all(&root);
        fs::create_dir_all(&dir)?;
        let releases = Releases::of(PackageKind::Binary, &dir, &["trixie"])?;
        let mut packages = releases.libraries_of(&name)?;
        packages.extend([format!("{name}-minimal"), format!("lib{name}-dev")]);
        releases.unpack(&packages, &root)?;
        Libraries::of(&root)?.tell_programs(&programs)?;
        fs::write(ready, "")?;
    }
    Ok((programs.join(name), root.join("usr/include")))
}

/// The libraries among unpacked packages, with a loader that finds them.
pub struct Libraries {
    pub dir: PathBuf,
    pub loader: PathBuf,
}

impl Libraries {
    pub fn of(root: &Path) -> Result<Libraries> {
        let dir = root.join(format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH));
        let is_loader = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("ld-linux-") && name.contains(".so.")
        };
        let mut files = fs::read_dir(&dir)?.flatten().map(|entry| entry.path());
        let loader = files.find(is_loader);
        Ok(Libraries { loader: loader.with_context(|| format!("no loader in {dir:?}"))?, dir })
    }

    /// Makes all programs in a directory start with that loader.
    fn tell_programs(&self, programs: &Path) -> Result<()> {
        for program in fs::read_dir(programs)?.flatten().map(|entry| entry.path()) {
            let patchelf = || Command::new("patchelf");
            // Some programs are scripts.
            if output_of(patchelf().arg("--print-interpreter").arg(&program)).is_err() {
                continue;
            }
            let mut patch = patchelf();
            patch.arg("--set-interpreter").arg(&self.loader);
            // RPATH is used, because it also applies to modules that a server loads.
            patch.args(["--force-rpath", "--set-rpath"]).arg(&self.dir);
            output_of(patch.arg(&program))?;
        }
        Ok(())
    }
}

//! The built extension: its library, control file and scripts, ready to be installed.

use crate::installation::Installation;
use crate::release_candidate;
use crate::source_tree::{self, cargo, source_root, target_dir};
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

/// The extension's name, with which its files begin.
pub const NAME: &str = "pg_fence";
/// The extension's version, which all packages of the workspace share.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Returns true if a file belongs to the extension: its library, its control file or one of its scripts.
pub fn is_file_of(extension: &str, name: &str) -> bool {
    name.strip_prefix(extension).is_some_and(|rest| rest.starts_with(['.', '-']))
}

/// Everything that an installation needs.
#[derive(Debug, Clone)]
pub struct Extension {
    /// The shared library as built by cargo.
    pub library: PathBuf,
    control: PathBuf,
    /// Scripts by file name.
    scripts: BTreeMap<String, String>,
}

impl Extension {
    /// Builds the extension for a PostgreSQL. If `PG_FENCE_SKIP_BUILD` is set, uses the library of the last build
    /// instead.
    pub fn build(installation: &Installation) -> Result<Extension> {
        let place = BuildPlace::of(installation);
        let library = if std::env::var_os("PG_FENCE_SKIP_BUILD").is_some() {
            last_library(&place.target)?
        } else {
            build_library(&installation.pg_config, &place, source_root())?
        };
        Extension::around(library)
    }

    /// Builds the extension from a copy of the sources with a patch, in a target directory of its own, so that it is
    /// not taken for the normal one.
    pub fn build_with_patch(installation: &Installation, patch: &Path) -> Result<Extension> {
        let BuildPlace { target, build } = BuildPlace::of(installation);
        let place = BuildPlace { target: target.join("planted"), build: build.join("planted") };
        let copy = place.target.join("source");
        source_tree::copy_with_patch(&copy, patch)?;
        Extension::around(build_library(&installation.pg_config, &place, &copy)?)
    }

    /// The extension of this source tree with an existing library.
    pub fn around(library: PathBuf) -> Result<Extension> {
        let control = source_root().join(format!("{NAME}.control"));
        let text = fs::read_to_string(&control)
            .with_context(|| format!("cannot read {}", control.display()))?;
        ensure!(
            text.contains(&format!("default_version = '{VERSION}'")),
            "{} does not name version {VERSION}",
            control.display()
        );
        Ok(Extension { library, control, scripts: scripts()? })
    }

    /// The same with another library.
    pub fn with_library(self, library: PathBuf) -> Extension {
        Extension { library, ..self }
    }

    /// The same with an additional or replaced script.
    pub fn with_script(mut self, name: String, text: String) -> Extension {
        self.scripts.insert(name, text);
        self
    }

    /// The scripts by file name.
    pub fn scripts(&self) -> &BTreeMap<String, String> {
        &self.scripts
    }

    /// Installs the extension: the library into `lib`, the rest into `extension` (a directory of that name). Returns
    /// the files written.
    pub fn install(&self, lib: &Path, extension: &Path) -> Result<Vec<PathBuf>> {
        let mut written = Vec::new();
        let mut write = |path: PathBuf, bytes: &[u8], mode: u32| -> Result<()> {
            // Always a new file, because a server may have mapped the old library.
            let fresh = path.with_extension("new");
            fs::write(&fresh, bytes)
                .with_context(|| format!("cannot write {}", fresh.display()))?;
            fs::set_permissions(&fresh, fs::Permissions::from_mode(mode))?;
            fs::rename(&fresh, &path)?;
            written.push(path);
            Ok(())
        };
        let library = fs::read(&self.library)
            .with_context(|| format!("cannot read {}", self.library.display()))?;
        write(lib.join(format!("{NAME}.so")), &library, 0o755)?;
        let control = fs::read(&self.control)?;
        write(extension.join(format!("{NAME}.control")), &control, 0o644)?;
        for (name, text) in &self.scripts {
            write(extension.join(name), text.as_bytes(), 0o644)?;
        }
        Ok(written)
    }
}

/// The install and upgrade scripts of the source tree, by file name.
pub fn scripts() -> Result<BTreeMap<String, String>> {
    scripts_in(&source_root().join("sql"))
}

/// The install script, assembled from its numbered parts, and the upgrade scripts.
fn scripts_in(dir: &Path) -> Result<BTreeMap<String, String>> {
    let mut parts = BTreeMap::new();
    let mut scripts = BTreeMap::new();
    let entries = fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !name.ends_with(".sql") {
            continue;
        }
        let text = fs::read_to_string(&path)?;
        if name.starts_with(|c: char| c.is_ascii_digit()) {
            parts.insert(name, text);
        } else if name.starts_with(&format!("{NAME}--")) {
            scripts.insert(name, text);
        }
    }
    ensure!(!parts.is_empty(), "there is no install script in {}", dir.display());
    let whole = parts.into_values().collect::<Vec<_>>().join("\n");
    let name = format!("{NAME}--{VERSION}.sql");
    ensure!(
        !scripts.contains_key(&name),
        "{name} is made from its parts, and there is one already"
    );
    scripts.insert(name, whole);
    Ok(scripts)
}

/// The directories in which cargo builds for a PostgreSQL.
#[derive(Debug)]
pub struct BuildPlace {
    /// The directory of the results.
    target: PathBuf,
    /// The directory of intermediate files.
    build: PathBuf,
}

impl BuildPlace {
    pub fn of(installation: &Installation) -> BuildPlace {
        let top = target_dir();
        let below = |name: Option<&str>| name.map_or(top.clone(), |name| top.join(name));
        let Installation { target, build, .. } = installation;
        BuildPlace { target: below(target.as_deref()), build: below(*build) }
    }

    /// Directories for results and for intermediate files.
    pub(crate) fn new(target: PathBuf, build: PathBuf) -> BuildPlace {
        BuildPlace { target, build }
    }

    /// Restores the library of the last build in these directories to where cargo left it.
    ///
    /// All builds in a directory write their library to the same file, whose name has no hash. A build with nothing to
    /// do copies that file, which may be of another PostgreSQL.
    pub(crate) fn prepare(&self) -> Result<()> {
        let file = format!("lib{NAME}.so");
        let (ours, shared) =
            (self.target.join("release").join(&file), self.build.join("release/deps").join(&file));
        if !shared.exists() {
            return Ok(());
        }
        if ours.exists() && fs::read(&ours)? == fs::read(&shared)? {
            return Ok(());
        }
        // If the file is missing, cargo links again.
        fs::remove_file(&shared)?;
        if ours.exists() {
            fs::copy(&ours, &shared)?;
        }
        Ok(())
    }

    /// Makes a cargo build in these directories.
    pub fn tell<'a>(&self, cargo: &'a mut Command) -> &'a mut Command {
        // cargo before 1.91 knows no build directory; then each version builds everything again.
        cargo.env("CARGO_TARGET_DIR", &self.target).env("CARGO_BUILD_BUILD_DIR", &self.build)
    }
}

fn last_library(target: &Path) -> Result<PathBuf> {
    let library = target.join(format!("release/lib{NAME}.so"));
    ensure!(library.exists(), "no library has been built yet: {}", library.display());
    Ok(library)
}

fn build_library(pg_config: &Path, place: &BuildPlace, sources: &Path) -> Result<PathBuf> {
    let major = major_of(pg_config)?;
    eprintln!("building {NAME} (pg{major}) in {}", sources.display());
    // Tests build concurrently, and no other build may come between these two steps.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    place.prepare()?;
    let mut command = cargo_for(&major)?;
    if sources != source_root() {
        ensure!(
            !release_candidate::builds(&major),
            "a copy of the sources names the pgrx of Cargo.toml"
        );
        command.current_dir(sources);
    }
    command
        .args(["rustc", "--release", "--package", NAME, "--lib", "--no-default-features"])
        .args(["--features", &format!("pg{major}"), "--message-format=json-render-diagnostics"])
        .env("PGRX_PG_CONFIG_PATH", pg_config)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit());
    place.tell(&mut command);
    let output = command.output().context("cannot run cargo")?;
    if !output.status.success() {
        bail!("building {NAME} failed ({})", output.status);
    }
    let messages = String::from_utf8_lossy(&output.stdout).into_owned();
    library_named_in(&messages).context("cargo named no library")
}

/// The cargo with which the extension is built for a major version.
pub fn cargo_for(major: &str) -> Result<Command> {
    if release_candidate::builds(major) {
        return release_candidate::cargo();
    }
    Ok(cargo())
}

/// Finds the library's path in cargo's messages, because the target directory may be anywhere.
fn library_named_in(messages: &str) -> Option<PathBuf> {
    let file = format!("lib{NAME}.so");
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["reason"] == "compiler-artifact")
        .filter_map(|message| message["filenames"].as_array().cloned())
        .flatten()
        .filter_map(|name| name.as_str().map(PathBuf::from))
        .find(|path| path.file_name().is_some_and(|name| *name == *file))
}

/// The major version of the PostgreSQL of `pg_config`.
pub fn major_of(pg_config: &Path) -> Result<String> {
    let version = crate::process::output_of(Command::new(pg_config).arg("--version"))?;
    let number = version.trim().trim_start_matches("PostgreSQL ");
    let major: String = number.chars().take_while(char::is_ascii_digit).collect();
    ensure!(!major.is_empty(), "no version in {version:?}");
    Ok(major)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_finds_its_own_library_again() {
        let dir = std::env::temp_dir().join(format!("pg_fence_place-{}", std::process::id()));
        let place = BuildPlace::new(dir.join("target"), dir.join("build"));
        let (ours, shared) = (
            dir.join("target/release/libpg_fence.so"),
            dir.join("build/release/deps/libpg_fence.so"),
        );
        for file in [&ours, &shared] {
            fs::create_dir_all(file.parent().unwrap()).unwrap();
        }
        place.prepare().unwrap();
        fs::write(&shared, "another's").unwrap();
        place.prepare().unwrap();
        assert!(!shared.exists(), "cargo would take another's for ours");
        fs::write(&ours, "ours").unwrap();
        fs::write(&shared, "another's").unwrap();
        place.prepare().unwrap();
        assert_eq!(fs::read_to_string(&shared).unwrap(), "ours");
        fs::remove_dir_all(&dir).unwrap();
    }
}

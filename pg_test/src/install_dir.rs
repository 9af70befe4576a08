//! A private copy of a PostgreSQL (usually Debian's) with the extension in it.
//!
//! PostgreSQL finds its own files relative to its program, so a copy with the same layout is an installation of its
//! own. The system's installation is never changed.

use crate::debian_source;
use crate::extension::{self, Extension};
use crate::installation::Installation;
use crate::majors;
use crate::process;
use crate::release_candidate;
use crate::rundir::{RunDir, make_dir};
use crate::setup::{self, Package};
use crate::source_tree;
use anyhow::{Context, Result};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// A copy of an installed PostgreSQL in the run directory, to which files may be added.
pub struct InstallDir {
    rundir: Arc<RunDir>,
    major: String,
    /// The `pg_config` of the installation that was copied.
    pg_config: PathBuf,
    bin: PathBuf,
    lib: PathBuf,
    extension: PathBuf,
    template: Mutex<Option<PathBuf>>,
}

/// The directories of a PostgreSQL.
struct Places {
    bin: PathBuf,
    lib: PathBuf,
    share: PathBuf,
}

impl Places {
    fn of(pg_config: &Path) -> Result<Places> {
        let place = |option: &str| -> Result<PathBuf> {
            let text = process::output_of(Command::new(pg_config).arg(option))?;
            Ok(fs::canonicalize(text.trim())?)
        };
        Ok(Places {
            bin: place("--bindir")?,
            lib: place("--pkglibdir")?,
            share: place("--sharedir")?,
        })
    }

    /// Returns the same directories below another root.
    fn below(self, root: &Path) -> Result<Places> {
        let moved = |place: PathBuf| Ok::<_, anyhow::Error>(root.join(place.strip_prefix("/")?));
        Ok(Places { bin: moved(self.bin)?, lib: moved(self.lib)?, share: moved(self.share)? })
    }
}

impl InstallDir {
    /// Copies a PostgreSQL into the run directory, leaving out an installed pg_fence.
    pub fn copy(rundir: Arc<RunDir>, installation: &Installation) -> Result<InstallDir> {
        let major = extension::major_of(&installation.pg_config)?;
        let from = Places::of(&installation.pg_config)?;
        let root = new_root(&rundir, &major)?;
        let mut all = vec![from.bin.clone(), from.lib.clone(), from.share.clone()];
        all.extend_from_slice(&installation.libraries);
        let common = common_ancestor(&all);
        let mut copies = Vec::new();
        for from in &all {
            let to = root.join(from.strip_prefix(&common)?);
            copy_tree(from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
            copies.push(to);
        }
        Ok(InstallDir {
            rundir,
            major,
            pg_config: installation.pg_config.clone(),
            bin: copies[0].clone(),
            lib: copies[1].clone(),
            extension: copies[2].join("extension"),
            template: Mutex::new(None),
        })
    }

    /// Copies the PostgreSQL of a major version and installs the extension built for it.
    pub fn of_major(rundir: Arc<RunDir>, major: &str) -> Result<InstallDir> {
        let installation = majors::of(major)?;
        let built = Extension::build(&installation)?;
        let install_dir = InstallDir::copy(rundir, &installation)?;
        install_dir.install(&built)?;
        Ok(install_dir)
    }

    /// Makes a copy with an extension built with a patch. `program` is this crate's binary.
    pub fn with_patch(program: &Path, patch: &Path) -> Result<Arc<InstallDir>> {
        // The patched extensions are built in the same directory.
        static TURN: Mutex<()> = Mutex::new(());
        let _turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
        let installation = majors::chosen()?;
        let extension = Extension::build_with_patch(&installation, patch)?;
        let rundir = Arc::new(RunDir::create(program)?);
        let install_dir = Arc::new(InstallDir::copy(rundir, &installation)?);
        install_dir.install(&extension)?;
        Ok(install_dir)
    }

    /// Installs the extension, replacing an installed one.
    pub fn install(&self, extension: &Extension) -> Result<()> {
        extension.install(&self.lib_dir(), &self.extension_dir())?;
        Ok(())
    }

    /// Copies another extension that the copy does not have: its scripts, and its programs and libraries by their paths
    /// (`bin/pg_repack`).
    fn bring(&self, from: &Places, extension: &str, files: &[&str]) -> Result<()> {
        for file in files {
            let (from, to) = match file.strip_prefix("bin/") {
                Some(name) => (from.bin.join(name), self.bin.join(name)),
                None => (from.lib.join(file), self.lib.join(file)),
            };
            bring_file(&from, &to)?;
        }
        let scripts = from.share.join("extension");
        for entry in fs::read_dir(&scripts)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if extension::is_file_of(extension, &name) {
                bring_file(&entry.path(), &self.extension.join(name))?;
            }
        }
        Ok(())
    }

    /// Returns true if pg_repack can be installed. It does not build for a candidate: it takes the compiler flags that
    /// PostgreSQL was built with, and this machine's compiler is too old for them.
    pub fn has_repack(&self) -> bool {
        self.major != release_candidate::MAJOR
    }

    /// Adds pg_repack if the copy does not have it: from Debian's package if there is one for this version, else built from
    /// its source.
    pub fn bring_repack(&self) -> Result<()> {
        if self.bin.join("pg_repack").exists() {
            return Ok(());
        }
        // Tests ask concurrently, and the first call may build it.
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
        let package = setup::repack(&self.major);
        let from = if package.is_installed() || majors::is_known(&package.name)? {
            setup::ensure(&[package])?;
            Places::of(format!("/usr/lib/postgresql/{}/bin/pg_config", self.major).as_ref())?
        } else {
            let dir = source_tree::target_dir().join(format!("postgresql/repack-{}", self.major));
            let root = debian_source::repack(&dir, &self.pg_config)?;
            Places::of(&self.pg_config)?.below(&root)?
        };
        self.bring(&from, "pg_repack", &["bin/pg_repack", "pg_repack.so"])
    }

    /// Adds the files that a Debian package has for the PostgreSQL of this version. The package is installed if it is
    /// missing.
    pub fn bring_package(&self, package: Package, extension: &str, files: &[&str]) -> Result<()> {
        setup::ensure(&[package])?;
        let pg_config = format!("/usr/lib/postgresql/{}/bin/pg_config", self.major);
        self.bring(&Places::of(pg_config.as_ref())?, extension, files)
    }

    /// Returns the directory of the extension's control file and scripts.
    pub fn extension_dir(&self) -> PathBuf {
        self.extension.clone()
    }

    /// Returns the library directory (`$libdir`).
    pub fn lib_dir(&self) -> PathBuf {
        self.lib.clone()
    }

    pub fn bin_dir(&self) -> PathBuf {
        self.bin.clone()
    }

    /// Returns a `PATH` on which that directory comes first, and then the programs of this copy.
    pub fn path(&self, first: Option<&Path>) -> OsString {
        let others = std::env::var_os("PATH").unwrap_or_default();
        let own = first.into_iter().chain([&*self.bin]).map(Path::to_owned);
        let path = std::env::join_paths(own.chain(std::env::split_paths(&others)));
        path.expect("no directory of ours has a colon in its name")
    }

    pub fn major(&self) -> &str {
        &self.major
    }

    /// Returns the major version as a number, for comparisons.
    pub fn major_number(&self) -> u32 {
        self.major.parse().unwrap_or(0)
    }

    /// Returns the run that this copy belongs to.
    pub fn rundir(&self) -> &Arc<RunDir> {
        &self.rundir
    }

    /// Returns a command for a program of this copy (`"pg_dump"`), run by the server's user.
    pub fn command(&self, program: &str) -> Result<Command> {
        let mut command = self.rundir.command(self.bin_dir().join(program));
        // The caller's own settings for clients must not reach this program.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("PG") && name != process::RUNDIR_VARIABLE {
                command.env_remove(name);
            }
        }
        command.env("LC_ALL", "C.UTF-8").env("TZ", "UTC");
        process::as_server_user(&mut command)?;
        Ok(command)
    }

    /// Makes a new directory of the server's user, for a cluster or a dump.
    pub fn new_dir(&self, kind: &str) -> Result<PathBuf> {
        // One counter for all copies: there may be several of one version.
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        self.rundir.server_dir(&format!("{kind}{}_{number}", self.major))
    }

    /// Makes a data directory with its own system identifier.
    pub fn initdb(&self, data: &Path) -> Result<()> {
        self.initdb_with(data, &[])
    }

    /// Makes a data directory with its own system identifier, with more options of `initdb`.
    pub fn initdb_with(&self, data: &Path, options: &[&str]) -> Result<()> {
        let mut command = self.command("initdb")?;
        command
            .args(["--no-sync", "--auth=trust", "--username=postgres", "--encoding=UTF8"])
            .args(["--locale=C.UTF-8", "--no-instructions"])
            .args(options)
            .arg("-D")
            .arg(data);
        process::output_of(&mut command)?;
        Ok(())
    }

    /// Makes a data directory by copying a template made once. It is quick, but all copies share their system
    /// identifier.
    pub fn clone_template(&self, data: &Path) -> Result<()> {
        let mut template = self.template.lock().unwrap_or_else(|e| e.into_inner());
        let from = match &*template {
            Some(path) => path.clone(),
            None => {
                let path = self.new_dir("template")?.join("data");
                self.initdb(&path)?;
                template.insert(path).clone()
            }
        };
        drop(template);
        let mut command = Command::new("cp");
        process::as_server_user(&mut command)?;
        process::output_of(command.arg("-a").arg(from).arg(data))?;
        Ok(())
    }
}

/// Returns the directory for another copy in a run.
fn new_root(rundir: &RunDir, major: &str) -> Result<PathBuf> {
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let name = match COUNTER.fetch_add(1, Ordering::Relaxed) {
        0 => format!("pg{major}"),
        number => format!("pg{major}_{number}"),
    };
    Ok(rundir.path().join(name))
}

/// Copies a file if it is missing, first under a temporary name: tests run concurrently.
fn bring_file(from: &Path, to: &Path) -> Result<()> {
    if to.exists() {
        return Ok(());
    }
    let mine = to.with_extension(format!("{:x}", rand::random::<u64>()));
    fs::copy(from, &mine).with_context(|| format!("cannot copy {}", from.display()))?;
    fs::rename(&mine, to)?;
    Ok(())
}

/// Returns the deepest common parent directory.
fn common_ancestor(places: &[PathBuf]) -> PathBuf {
    let is_common = |dir: &&Path| places.iter().all(|place| place.starts_with(dir));
    places[0].ancestors().find(is_common).unwrap_or(Path::new("/")).to_owned()
}

/// Copies a directory, following links. It leaves out what servers do not need, and any installed pg_fence, which may
/// be of any version.
fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    make_dir(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name());
        let target = to.join(&name);
        // A link may be dangling (dictionaries that are not installed).
        let Ok(meta) = fs::metadata(&path) else {
            continue;
        };
        if name == "bitcode" || name == "pgxs" || name == "man" {
            continue;
        }
        if extension::is_file_of(extension::NAME, &name.to_string_lossy()) {
            continue;
        }
        if meta.is_dir() {
            copy_tree(&path, &target)?;
        } else {
            fs::copy(&path, &target)?;
        }
    }
    Ok(())
}

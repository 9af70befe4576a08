//! A private copy of a PostgreSQL (mostly Debian's) with the extension in it.
//!
//! PostgreSQL finds its own files relative to its program, so a copy that keeps the layout is an
//! installation of its own: the one of the system is never touched.

use crate::extension::{self, Extension};
use crate::process;
use crate::rundir::{make_dir, RunDir};
use crate::setup;
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// A copy of an installed PostgreSQL in the run directory, to which files may be added.
pub struct Prefix {
    rundir: Arc<RunDir>,
    major: String,
    bin: PathBuf,
    lib: PathBuf,
    extension: PathBuf,
    template: Mutex<Option<PathBuf>>,
    counter: AtomicU32,
}

impl Prefix {
    /// Copies the PostgreSQL that `pg_config` describes into the run directory, without the extension.
    pub fn copy(rundir: Arc<RunDir>, pg_config: &Path) -> Result<Prefix> {
        let major = extension::major_of(pg_config)?;
        let root = rundir.path().join(format!("pg{major}"));
        let place = |option: &str| -> Result<PathBuf> {
            let text = process::output_of(Command::new(pg_config).arg(option))?;
            Ok(fs::canonicalize(text.trim())?)
        };
        let places = [place("--bindir")?, place("--pkglibdir")?, place("--sharedir")?];
        let common = common_ancestor(&places);
        let mut copies = Vec::new();
        for from in &places {
            let to = root.join(from.strip_prefix(&common)?);
            copy_tree(from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
            copies.push(to);
        }
        let [bin, lib, share] = <[PathBuf; 3]>::try_from(copies).expect("three were copied");
        Ok(Prefix::at(rundir, &major, bin, lib, &share))
    }

    /// A copy with a known bug in its extension (`src/plant.rs` names them). `program` is the lab's binary.
    pub fn with_bug(program: &Path, bug: &str) -> Result<Arc<Prefix>> {
        // One after another: they are built in the same place.
        static TURN: Mutex<()> = Mutex::new(());
        let _turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
        let pg_config = extension::default_pg_config();
        let extension = Extension::build_with_bug(&pg_config, bug)?;
        let rundir = Arc::new(RunDir::create(program)?);
        let prefix = Arc::new(Prefix::copy(rundir, &pg_config)?);
        prefix.install(&extension)?;
        Ok(prefix)
    }

    /// Copies a PostgreSQL that was built with a prefix of its own: `home`, below `from`. What else is named
    /// comes along, for its programs look for their libraries there.
    pub fn copy_of(
        rundir: Arc<RunDir>,
        major: &str,
        from: &Path,
        home: &str,
        libraries: &str,
    ) -> Result<Prefix> {
        let root = rundir.path().join(format!("pg{major}"));
        let places = ["bin", "lib", "share"].map(|place| format!("{home}/{place}"));
        for place in places.iter().map(String::as_str).chain([libraries]) {
            copy_tree(&from.join(place), &root.join(place))
                .with_context(|| format!("cannot copy {place} of {}", from.display()))?;
        }
        let home = root.join(home);
        let (bin, lib) = (home.join("bin"), home.join("lib/postgresql"));
        Ok(Prefix::at(rundir, major, bin, lib, &home.join("share/postgresql")))
    }

    fn at(rundir: Arc<RunDir>, major: &str, bin: PathBuf, lib: PathBuf, share: &Path) -> Prefix {
        Prefix {
            rundir,
            major: major.to_owned(),
            bin,
            lib,
            extension: share.join("extension"),
            template: Mutex::new(None),
            counter: AtomicU32::new(0),
        }
    }

    /// Installs the extension, over another one if there is one already.
    pub fn install(&self, extension: &Extension) -> Result<()> {
        extension.install(&self.lib_dir(), &self.extension_dir())?;
        Ok(())
    }

    /// Brings another extension along that Debian has installed since the copy was made: its scripts, and its
    /// programs and libraries by their place below PostgreSQL's own (`bin/pg_repack`).
    pub fn bring(&self, extension: &str, files: &[&str]) -> Result<()> {
        let system = Path::new("/usr/lib/postgresql").join(&self.major);
        for file in files {
            let to = if file.starts_with("bin/") { &self.bin } else { &self.lib };
            let from = system.join(file);
            let name = from.file_name().context("no file's name")?;
            bring_file(&from, &to.join(name))?;
        }
        let scripts = Path::new("/usr/share/postgresql").join(&self.major).join("extension");
        for entry in fs::read_dir(&scripts)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.strip_prefix(extension).is_some_and(|rest| rest.starts_with(['.', '-'])) {
                bring_file(&entry.path(), &self.extension.join(name))?;
            }
        }
        Ok(())
    }

    /// Brings pg_repack, of Debian's package, which is installed where it is missing.
    pub fn bring_repack(&self) -> Result<()> {
        setup::ensure(&setup::repack())?;
        self.bring("pg_repack", &["bin/pg_repack", "lib/pg_repack.so"])
    }

    /// Where the extension's control file and scripts are.
    pub fn extension_dir(&self) -> PathBuf {
        self.extension.clone()
    }

    /// Where libraries are (`$libdir`).
    pub fn lib_dir(&self) -> PathBuf {
        self.lib.clone()
    }

    pub fn bin_dir(&self) -> PathBuf {
        self.bin.clone()
    }

    pub fn major(&self) -> &str {
        &self.major
    }

    /// The run that this copy belongs to.
    pub fn rundir(&self) -> &Arc<RunDir> {
        &self.rundir
    }

    /// A command for a program of this copy (`"pg_dump"`), run by the server's user.
    pub fn command(&self, program: &str) -> Result<Command> {
        let mut command = self.rundir.command(self.bin_dir().join(program));
        // The caller's own settings for clients shall not reach ours.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("PG") && name != process::RUNDIR_VARIABLE {
                command.env_remove(name);
            }
        }
        command.env("LC_ALL", "C.UTF-8").env("TZ", "UTC");
        process::as_server_user(&mut command)?;
        Ok(command)
    }

    /// A new directory of the server's user, for a cluster or a dump.
    pub fn new_dir(&self, kind: &str) -> Result<PathBuf> {
        let number = self.counter.fetch_add(1, Ordering::Relaxed);
        self.rundir.server_dir(&format!("{kind}{}_{number}", self.major))
    }

    /// Makes a data directory with an identity (system identifier) of its own.
    pub fn initdb(&self, data: &Path) -> Result<()> {
        let mut command = self.command("initdb")?;
        command
            .args(["--no-sync", "--auth=trust", "--username=postgres", "--encoding=UTF8"])
            .args(["--locale=C.UTF-8", "--no-instructions", "-D"])
            .arg(data);
        process::output_of(&mut command)?;
        Ok(())
    }

    /// Makes a data directory by copying one that is made once: quick, but all that are made so
    /// share their system identifier.
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

/// Copies a file that is not there yet, by a name of its own first: tests run side by side.
fn bring_file(from: &Path, to: &Path) -> Result<()> {
    if to.exists() {
        return Ok(());
    }
    let mine = to.with_extension(format!("{:x}", rand::random::<u64>()));
    fs::copy(from, &mine).with_context(|| format!("cannot copy {}", from.display()))?;
    fs::rename(&mine, to)?;
    Ok(())
}

/// The deepest directory that all of them are below.
fn common_ancestor(places: &[PathBuf]) -> PathBuf {
    let is_common = |dir: &&Path| places.iter().all(|place| place.starts_with(dir));
    places[0].ancestors().find(is_common).unwrap_or(Path::new("/")).to_owned()
}

/// Copies a directory, following links, without what servers do not need.
fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    make_dir(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name());
        let target = to.join(&name);
        // A link may lead nowhere (dictionaries that are not installed).
        let Ok(meta) = fs::metadata(&path) else {
            continue;
        };
        if name == "bitcode" || name == "pgxs" || name == "man" {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_keeps_what_its_places_have_in_common() {
        let ancestor = |places: [&str; 3]| common_ancestor(&places.map(PathBuf::from));
        let debian = [
            "/usr/lib/postgresql/15/bin",
            "/usr/lib/postgresql/15/lib",
            "/usr/share/postgresql/15",
        ];
        assert_eq!(ancestor(debian), Path::new("/usr"));
        let own = ["/opt/pg/bin", "/opt/pg/lib/postgresql", "/opt/pg/share/postgresql"];
        assert_eq!(ancestor(own), Path::new("/opt/pg"));
        assert_eq!(ancestor(["/bin", "/lib", "/share"]), Path::new("/"));
    }
}

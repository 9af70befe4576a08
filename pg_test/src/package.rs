//! Packages: for installing where there is no Rust.
//!
//! For each PostgreSQL a Debian package and a `.tar.gz`; from PostgreSQL 18 on the directory in the `.tar.gz` is also
//! an image that `extension_control_path` can name. For all of them together the archive for PGXN and `SHA256SUMS`. And
//! a package and a `.tar.gz` of the command `pg_fence`. Two builds of the same commit have the same bytes, wherever the
//! source lies. (For the command this is not tested.)

pub mod command;
mod deb;
pub mod library;
mod licenses;
pub mod pgxn;
mod release;
mod tarball;

use crate::extension::{self, Extension, NAME};
use crate::majors;
use crate::process::output_of;
use crate::setup::{self, Package};
use crate::source_tree;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

pub use release::Release;

#[derive(Debug, Clone, Default, clap::Args)]
pub struct Options {
    /// Build for these major versions, which are fetched or built where the machine has them not. Without this and
    /// --pg-config: for each of Debian's that has its headers
    #[arg(long, value_delimiter = ',', value_parser = majors::parse)]
    majors: Vec<String>,
    /// Build for each major version that pg_fence is for
    #[arg(long, conflicts_with = "majors")]
    all_majors: bool,
    /// Build for the PostgreSQL with this pg_config
    #[arg(long, value_name = "PATH")]
    pg_config: Vec<PathBuf>,
}

/// Builds all packages and prints their checksums.
pub fn run(options: &Options) -> Result<()> {
    let output = directory().join("dist");
    let _ = fs::remove_dir_all(&output);
    fs::create_dir_all(&output)?;
    let output = fs::canonicalize(output)?;
    let release = Release::of_commit(source_tree::source_root())?;
    let mut done = BTreeSet::new();
    for pg_config in options.pg_configs()? {
        let major = extension::major_of(&pg_config)?;
        ensure!(done.insert(major.clone()), "PostgreSQL {major} is named twice");
        let library = library::build(source_tree::source_root(), &pg_config, &directory())?;
        Parts::new(release.clone(), &major, Extension::around(library)?).write(&output)?;
    }
    let program = command::build(source_tree::source_root(), &directory())?;
    command::write(&program, &release, &output)?;
    pgxn::archive(&release, &output)?;
    print!("{}", checksums(&output)?);
    println!("in {}", output.display());
    Ok(())
}

impl Options {
    fn pg_configs(&self) -> Result<Vec<PathBuf>> {
        let mut all = self.pg_config.clone();
        let every: Vec<String> = majors::ALL.map(str::to_owned).into();
        for major in if self.all_majors { &every } else { &self.majors } {
            all.push(majors::of(major)?.pg_config);
        }
        if all.is_empty() {
            all = installed()?;
        }
        Ok(all)
    }
}

/// Returns the directory in which packages are built.
pub fn directory() -> PathBuf {
    source_tree::target_dir().join("package")
}

/// The parts of the packages for one PostgreSQL.
pub struct Parts {
    release: Release,
    major: String,
    extension: Extension,
}

impl Parts {
    pub fn new(release: Release, major: &str, extension: Extension) -> Parts {
        Parts { release, major: major.to_owned(), extension }
    }

    /// Writes the Debian package and the tarball into `output` and returns their paths.
    pub fn write(&self, output: &Path) -> Result<Vec<PathBuf>> {
        setup::ensure(&tools())?;
        let scratch = output.join(format!(".pg{}", self.major));
        let _ = fs::remove_dir_all(&scratch);
        fs::create_dir_all(&scratch)?;
        let written =
            vec![deb::write(self, &scratch, output)?, tarball::write(self, &scratch, output)?];
        fs::remove_dir_all(&scratch)?;
        Ok(written)
    }
}

/// Returns the programs that find out which packages a library needs.
fn tools() -> Vec<Package> {
    vec![Package::new("dpkg-dev", "/usr/bin/dpkg-shlibdeps")]
}

/// Returns the pg_config of each of Debian's PostgreSQLs whose headers are installed.
fn installed() -> Result<Vec<PathBuf>> {
    let list = "cd /usr/include/postgresql && ls -d */server/postgres.h | cut -d/ -f1";
    let majors = output_of(Command::new("sh").args(["-c", list])).unwrap_or_default();
    let of = |major| Path::new("/usr/lib/postgresql").join(major).join("bin/pg_config");
    let found: Vec<PathBuf> = majors.lines().map(of).filter(|path| path.exists()).collect();
    ensure!(
        !found.is_empty(),
        "there is no PostgreSQL with headers below /usr/lib/postgresql: name one by --pg-config or --majors, or run `cargo run -- setup`"
    );
    Ok(found)
}

/// Writes `SHA256SUMS` for the files of a directory and returns its text.
pub fn checksums(dir: &Path) -> Result<String> {
    let sums = "LC_ALL=C; export LC_ALL; sha256sum *";
    let text = output_of(Command::new("sh").args(["-c", sums]).current_dir(dir))?;
    fs::write(dir.join("SHA256SUMS"), &text)?;
    Ok(text)
}

/// Returns the shell commands that put the library and the other files in place. Overwriting a library crashes the
/// sessions that have loaded it, and sessions that begin during the copy would load an incomplete one. So the library
/// is copied beside the old one and then renamed.
pub fn commands(library: &str, lib: &str, others: &str, extension: &str) -> [String; 3] {
    let place = format!("{lib}/{NAME}.so");
    [
        format!("install -m 755 {library} \"{place}.new\""),
        format!("mv -f \"{place}.new\" \"{place}\""),
        format!("install -m 644 {others} \"{extension}\""),
    ]
}

/// Writes a file of a package, and creates the directories above it.
fn put(path: &Path, bytes: impl AsRef<[u8]>) -> Result<()> {
    fs::create_dir_all(path.parent().context("a file lies in a directory")?)?;
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

/// Puts the pages on operations and the queries and alerts for Prometheus into a directory of a package.
fn operations(directory: &Path) -> Result<()> {
    fs::create_dir_all(directory)?;
    let pages = source_tree::source_root().join("docs/operations/.");
    output_of(Command::new("cp").arg("-r").arg(pages).arg(directory)).map(drop)
}

/// Installs the extension's files below a package's directories.
fn install(extension: &Extension, lib: &Path, share: &Path) -> Result<()> {
    fs::create_dir_all(lib)?;
    fs::create_dir_all(share)?;
    extension.install(lib, share).map(drop)
}

/// Gives everything below `root` the usual mode, whatever the umask, and the release's date.
fn settle(root: &Path, release: &Release) -> Result<()> {
    let date = format!("--date=@{}", release.epoch);
    for action in [
        &["-type", "d", "-exec", "chmod", "0755"][..],
        &["-type", "f", "-exec", "chmod", "0644"],
        &["-exec", "touch", &date],
    ] {
        output_of(Command::new("find").arg(root).args(action).args(["{}", "+"]))?;
    }
    Ok(())
}

/// Makes a program of a package executable: `settle` treats all files as data.
fn make_executable(path: &Path, release: &Release) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    let date = format!("--date=@{}", release.epoch);
    output_of(Command::new("touch").arg(date).arg(path)).map(drop)
}

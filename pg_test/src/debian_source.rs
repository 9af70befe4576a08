//! Programs built from Debian's source packages, possibly of other releases than the machine's own.
//!
//! The programs are in the target directory. The system's packages, and the lists of its apt, are not changed (see
//! [`crate::debian_releases`]).

use crate::debian_releases::{PackageKind, RELEASES, Releases};
use crate::process::output_of;
use crate::setup::{self, Package};
use anyhow::{Context, Result, bail};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The contrib modules that the tests need, and those useful for experiments on a server.
pub const CONTRIB: [&str; 10] = [
    "amcheck",
    "btree_gin",
    "dblink",
    "pageinspect",
    "pg_stat_statements",
    "pg_trgm",
    "pg_visibility",
    "pgstattuple",
    "postgres_fdw",
    "test_decoding",
];

/// How PostgreSQL is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flavour {
    /// As users run it.
    Plain,
    /// With assertions, which stop a server process.
    Assertions,
}

impl Flavour {
    fn options(self) -> &'static [&'static str] {
        match self {
            Flavour::Plain => &["CFLAGS=-O2 -fno-omit-frame-pointer"],
            Flavour::Assertions => {
                &["--enable-cassert", "--enable-debug", "CFLAGS=-O1 -fno-omit-frame-pointer"]
            }
        }
    }
}

/// The packages needed for compiling.
fn tools() -> Vec<Package> {
    vec![
        Package::new("build-essential", "/usr/share/build-essential"),
        Package::new("pkg-config", "/usr/bin/pkg-config"),
        Package::new("bison", "/usr/bin/bison"),
        Package::new("flex", "/usr/bin/flex"),
    ]
}

/// The `pg_config` of a PostgreSQL in `dir`, built if it is not there yet.
pub fn server(dir: &Path, major: &str, flavour: Flavour) -> Result<PathBuf> {
    let root = dir.join("root");
    let pg_config = root.join(format!("usr/lib/postgresql/{major}/bin/pg_config"));
    let ready = dir.join("ready");
    if ready.exists() {
        return Ok(pg_config);
    }
    setup::ensure(&tools())?;
    fs::create_dir_all(dir)?;
    let source = fetch(&format!("postgresql-{major}"), dir, Part::Whole)?;
    eprintln!("building PostgreSQL from {}: some minutes", source.display());
    build(dir, &source, &root, major, flavour)?;
    // Most of the space, and not needed any more.
    fs::remove_dir_all(dir.join("build"))?;
    fs::remove_dir_all(dir.join("source"))?;
    fs::write(ready, format!("{}\n", source.display()))?;
    Ok(pg_config)
}

/// Configures the same paths as Debian: its patches require some of them, and other packages' additions to a server
/// then fit. DESTDIR puts everything below `root`.
fn build(dir: &Path, source: &Path, root: &Path, major: &str, flavour: Flavour) -> Result<()> {
    let build = dir.join("build");
    for old in [&build, root] {
        let _ = fs::remove_dir_all(old);
    }
    fs::create_dir_all(&build)?;
    let places = [
        "--prefix=/usr".to_owned(),
        format!("--bindir=/usr/lib/postgresql/{major}/bin"),
        format!("--libdir=/usr/lib/postgresql/{major}/lib"),
        "--includedir=/usr/include/postgresql".to_owned(),
        "--datarootdir=/usr/share".to_owned(),
        format!("--datadir=/usr/share/postgresql/{major}"),
        "--with-system-tzdata=/usr/share/zoneinfo".to_owned(),
    ];
    let log = dir.join("build.log");
    let mut configure = niced(source.join("configure"));
    configure
        .args(places)
        .args(["--quiet", "--disable-rpath"])
        .args(["--without-readline", "--without-zlib", "--without-icu"])
        .args(flavour.options());
    logged(configure.current_dir(&build), &log)?;
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let make = |part: &str| {
        let mut make = niced("make");
        make.args(["--silent", &format!("--jobs={jobs}"), "--directory", part, "install"]);
        make.arg(format!("DESTDIR={}", root.display()));
        logged(make.current_dir(&build), &log)
    };
    // The whole is built first, because parts need headers that only it generates.
    let parts = CONTRIB.iter().map(|module| format!("contrib/{module}"));
    [".".to_owned()].into_iter().chain(parts).try_for_each(|part| make(&part))
}

/// Builds pg_repack for the PostgreSQL of `pg_config`, and installs it below `dir` as below `/`. That takes seconds.
pub fn repack(dir: &Path, pg_config: &Path) -> Result<PathBuf> {
    let (root, ready) = (dir.join("root"), dir.join("ready"));
    if ready.exists() {
        return Ok(root);
    }
    setup::ensure(&tools())?;
    fs::create_dir_all(dir)?;
    let source = fetch("pg-repack", dir, Part::Original)?;
    let mut make = niced("make");
    // An installation built elsewhere may require another awk, and its static libraries may not fit
    // position-independent programs.
    make.args(["--silent", "install", "AWK=awk", "LDFLAGS_EX=-no-pie"])
        .arg(format!("PG_CONFIG={}", pg_config.display()))
        .arg(format!("DESTDIR={}", root.display()));
    logged(make.current_dir(&source), &dir.join("build.log"))?;
    fs::remove_dir_all(dir.join("source"))?;
    fs::write(ready, "")?;
    Ok(root)
}

fn niced(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("nice");
    command.arg("-n10").arg(program);
    // `cargo run` may itself run under make, whose settings must not apply here.
    command.env_remove("MAKEFLAGS").env_remove("MAKELEVEL").env("LC_ALL", "C.UTF-8");
    // Programs and modules find the libpq of their version in a relative path, wherever they are copied, instead of the
    // system's, which may be older.
    command.env("LD_RUN_PATH", "$ORIGIN/../lib");
    command
}

/// Runs a command with its output in `log`; the error shows the end of that.
fn logged(command: &mut Command, log: &Path) -> Result<()> {
    let file = File::options().create(true).append(true).open(log)?;
    let status = command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).status();
    if status.with_context(|| format!("cannot run {command:?}"))?.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&fs::read(log)?).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    let end = lines[lines.len().saturating_sub(20)..].join("\n");
    bail!("{command:?} failed; {} ends:\n{end}", log.display())
}

/// The part of a source package that is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// With Debian's patches.
    Whole,
    /// The original of the authors.
    Original,
}

/// Downloads and unpacks the newest available version of a source package into `dir`.
fn fetch(package: &str, dir: &Path, part: Part) -> Result<PathBuf> {
    let source = dir.join("source");
    let _ = fs::remove_dir_all(&source);
    fs::create_dir_all(&source)?;
    let releases = Releases::of(PackageKind::Source, dir, RELEASES)?;
    let mut failure = None;
    for version in releases.versions(package)? {
        eprintln!("fetching the source of {package} {version}");
        let mut get = releases.apt("apt-get");
        get.args(["source", &format!("{package}={version}")]).current_dir(&source);
        if part == Part::Original {
            get.arg("--tar-only");
        }
        match output_of(&mut get) {
            Ok(_) => {
                if part == Part::Original {
                    unpack_archive(&source)?;
                }
                return unpacked(&source);
            }
            // Archives drop old versions, and a mirror may lack a new one.
            Err(error) => failure = Some(error),
        }
    }
    Err(failure.unwrap_or_else(|| anyhow::anyhow!("apt knows no source of {package}")))
}

/// Unpacks the one archive in a directory.
fn unpack_archive(source: &Path) -> Result<()> {
    let mut files = fs::read_dir(source)?.flatten().map(|entry| entry.path());
    let archive = files.find(|path| path.is_file()).context("no archive was downloaded")?;
    output_of(Command::new("tar").arg("xf").arg(archive).current_dir(source)).map(drop)
}

fn unpacked(source: &Path) -> Result<PathBuf> {
    let mut entries = fs::read_dir(source)?.flatten().map(|entry| entry.path());
    entries.find(|path| path.is_dir()).context("nothing was unpacked")
}

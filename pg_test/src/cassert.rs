//! A PostgreSQL with assertions (Debian's source, built with `--enable-cassert`), and the suite run on it.
//!
//! It lies in the target directory. The packages that are built, and the lists of packages that the system's
//! apt knows, stay as they are: the source comes through lists and settings of apt's that are the lab's own.

use crate::extension;
use crate::process::output_of;
use crate::setup::{self, Package};
use anyhow::{bail, ensure, Context, Result};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Names the file that clusters append their failed assertions to.
pub const FAILURES_VARIABLE: &str = "PG_FENCE_FAILED_ASSERTIONS";

#[derive(Debug, Clone, Default, clap::Args)]
pub struct Options {
    /// Only build the server and print the path of its pg_config, for PG_FENCE_PG_CONFIG
    #[arg(long)]
    build: bool,
    /// What follows `cargo test --test lab --`: names of tests, --test-threads
    #[arg(last = true)]
    tests: Vec<String>,
}

/// What the tests, and those who try things on this server, need beside the server.
const CONTRIB: [&str; 10] = [
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

/// Builds the server if it is not there yet, runs the suite on it, and fails where an assertion or a test did.
pub fn run(options: &Options) -> Result<()> {
    let pg_config = server()?;
    if options.build {
        println!("{}", pg_config.display());
        return Ok(());
    }
    let failures = directory().join("failures");
    fs::write(&failures, "")?;
    let status = extension::cargo()
        .args(["test", "--package", "pg_test", "--test", "lab", "--"])
        .args(&options.tests)
        .env("PG_FENCE_PG_CONFIG", &pg_config)
        .env(FAILURES_VARIABLE, &failures)
        .status()
        .context("cannot run cargo")?;
    let found = fs::read_to_string(&failures)?;
    let kinds = by_assertion(&found);
    for (assertion, (count, first)) in &kinds {
        println!("\n{count} × {assertion}\n{first}");
    }
    ensure!(
        kinds.is_empty(),
        "{} assertions failed; all of it: {}",
        kinds.len(),
        failures.display()
    );
    ensure!(status.success(), "no assertion failed, but tests did ({status})");
    println!("No assertion failed.");
    Ok(())
}

/// The `pg_config` of the server with assertions, which is built where it is not there yet.
fn server() -> Result<PathBuf> {
    let dir = directory();
    let root = dir.join("root");
    let pg_config = root.join(format!("usr/lib/postgresql/{}/bin/pg_config", setup::major()));
    if dir.join("ready").exists() {
        return Ok(pg_config);
    }
    let tools = [
        Package::new("build-essential", "/usr/share/build-essential"),
        Package::new("pkg-config", "/usr/bin/pkg-config"),
        Package::new("libxml2-dev", "/usr/include/libxml2/libxml/tree.h"),
    ];
    setup::ensure(&[setup::server(), setup::build(), tools.to_vec()].concat())?;
    fs::create_dir_all(&dir)?;
    let source = source(&dir)?;
    build(&dir, &source, &root)?;
    fs::remove_dir_all(dir.join("build"))?;
    fs::write(dir.join("ready"), format!("{}\n", source.display()))?;
    Ok(pg_config)
}

fn directory() -> PathBuf {
    extension::target_dir().join("cassert")
}

/// Configures as Debian does where files are to be found: its patches insist on some of it, and what other
/// packages of Debian's add to a server fits in then. DESTDIR puts all of that below `root`.
fn build(dir: &Path, source: &Path, root: &Path) -> Result<()> {
    let major = setup::major();
    let build = dir.join("build");
    let log = dir.join("build.log");
    let _ = fs::remove_dir_all(&build);
    fs::create_dir_all(&build)?;
    eprintln!("building PostgreSQL with assertions from {}: some minutes", source.display());
    let places = [
        "--prefix=/usr".to_owned(),
        format!("--bindir=/usr/lib/postgresql/{major}/bin"),
        format!("--libdir=/usr/lib/postgresql/{major}/lib"),
        "--includedir=/usr/include/postgresql".to_owned(),
        "--datarootdir=/usr/share".to_owned(),
        format!("--datadir=/usr/share/postgresql/{major}"),
        "--with-system-tzdata=/usr/share/zoneinfo".to_owned(),
    ];
    let mut configure = niced(source.join("configure"));
    configure
        .args(places)
        .args(["--quiet", "--enable-cassert", "--enable-debug", "--disable-rpath"])
        .args(["--with-libxml", "--without-readline", "--without-zlib"])
        .arg("CFLAGS=-O1 -fno-omit-frame-pointer");
    logged(configure.current_dir(&build), &log)?;
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let make = |part: &str, destination: &Path| {
        let mut make = niced("make");
        make.args(["--silent", &format!("--jobs={jobs}"), "--directory", part, "install"]);
        make.arg(format!("DESTDIR={}", destination.display()));
        logged(make.current_dir(&build), &log)
    };
    // The whole first: parts rely on headers that only it makes before it goes on.
    let parts = CONTRIB.iter().map(|module| format!("contrib/{module}"));
    [".".to_owned()].into_iter().chain(parts).try_for_each(|part| make(&part, root))
}

fn niced(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("nice");
    command.arg("-n10").arg(program);
    // A `cargo run` may itself be part of a make, whose jobs are not ours.
    command.env_remove("MAKEFLAGS").env_remove("MAKELEVEL").env("LC_ALL", "C.UTF-8");
    command
}

/// Runs a command whose output goes into `log`; where it fails, the error shows the end of that.
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

/// Fetches and unpacks the source of Debian's package, of any version that the archive still has.
fn source(dir: &Path) -> Result<PathBuf> {
    let package = format!("postgresql-{}", setup::major());
    let (apt, source) = (dir.join("apt"), dir.join("source"));
    for empty in [apt.join("parts"), apt.join("lists/partial"), source.clone()] {
        let _ = fs::remove_dir_all(&empty);
        fs::create_dir_all(&empty)?;
    }
    let known = madison(Command::new("apt-cache"), &package)?;
    let places: Vec<&str> = known.iter().filter_map(|(_, place)| place.split(' ').next()).collect();
    write_source_lists(Path::new("/etc/apt"), &apt, &places)?;
    let own = |program: &str| {
        let mut command = Command::new(program);
        command
            .args(["-o", &format!("Dir::Etc::sourcelist={}", apt.join("list").display())])
            .args(["-o", &format!("Dir::Etc::sourceparts={}", apt.join("parts").display())])
            .args(["-o", &format!("Dir::State::lists={}", apt.join("lists").display())])
            .args(["-o", &format!("Dir::Cache={}", apt.display())])
            // Root's apt would fetch as somebody who may not be able to reach the target directory.
            .args(["-o", "APT::Sandbox::User=root", "--quiet"])
            .current_dir(&source);
        command
    };
    output_of(own("apt-get").arg("update")).context("no list of source packages could be had")?;
    let mut failure = None;
    for (version, _) in madison(own("apt-cache"), &package)? {
        eprintln!("fetching the source of {package} {version}");
        match output_of(own("apt-get").args(["source", &format!("{package}={version}")])) {
            Ok(_) => return unpacked(&source),
            // Archives drop old versions, and a mirror may lack a new one.
            Err(error) => failure = Some(error),
        }
    }
    Err(failure.unwrap_or_else(|| anyhow::anyhow!("apt knows no source of {package}")))
}

fn unpacked(source: &Path) -> Result<PathBuf> {
    let mut entries = fs::read_dir(source)?.flatten().map(|entry| entry.path());
    entries.find(|path| path.join("configure").exists()).context("the source has no configure")
}

/// The versions of a package that apt knows of, each with the place where it is: `postgresql-15 | 15.18-0 |
/// http://deb.debian.org/debian bookworm/main amd64 Packages`.
fn madison(mut apt_cache: Command, package: &str) -> Result<Vec<(String, String)>> {
    let text = output_of(apt_cache.args(["madison", package]))?;
    let fields = |line: &str| {
        let mut fields = line.split('|').map(str::trim).skip(1);
        Some((fields.next()?.to_owned(), fields.next()?.to_owned()))
    };
    Ok(text.lines().filter_map(fields).collect())
}

/// Makes lists of source packages in `to` out of the lists of packages in `from`, of those archives only that
/// are at one of `places`. Whatever else is said there, as who has signed an archive, stays said.
fn write_source_lists(from: &Path, to: &Path, places: &[&str]) -> Result<()> {
    let is_wanted = |text: &str| places.iter().any(|place| text.contains(place));
    let mut files = vec![from.join("sources.list")];
    files.extend(
        fs::read_dir(from.join("sources.list.d")).into_iter().flatten().flatten().map(|e| e.path()),
    );
    let mut lines = String::new();
    for (number, file) in files.iter().enumerate() {
        let Ok(text) = fs::read_to_string(file) else { continue };
        if file.extension().is_some_and(|end| end == "sources") {
            let paragraphs: Vec<String> =
                text.split("\n\n").filter(|text| is_wanted(text)).map(of_sources).collect();
            fs::write(to.join(format!("parts/{number}.sources")), paragraphs.join("\n\n"))?;
        } else {
            let of_packages = |line: &&str| line.starts_with("deb ") || line.starts_with("deb\t");
            for line in text.lines().filter(of_packages).filter(|line| is_wanted(line)) {
                lines += &format!("deb-src{}\n", &line[3..]);
            }
        }
    }
    Ok(fs::write(to.join("list"), lines)?)
}

fn of_sources(paragraph: &str) -> String {
    let line = |line: &str| match line.to_ascii_lowercase().starts_with("types:") {
        true => "Types: deb-src\n".to_owned(),
        false => format!("{line}\n"),
    };
    paragraph.lines().map(line).collect()
}

/// The failed assertions in a server's log: each with the stack below it, and what was being run.
pub fn failures_in(log: &str) -> Vec<String> {
    let mut failures: Vec<String> = Vec::new();
    let mut lines = log.lines().peekable();
    while let Some(line) = lines.next() {
        if line.starts_with("TRAP: ") {
            let mut failure = line.to_owned();
            // A line that the server logs begins with the time.
            let is_frame = |line: &&str| {
                !line.starts_with(|c: char| c.is_ascii_digit()) && !line.starts_with("TRAP: ")
            };
            while let Some(frame) = lines.next_if(is_frame) {
                failure += &format!("\n    {}", frame.trim_start());
            }
            failures.push(failure);
        } else if let Some((_, statement)) = line.split_once("Failed process was running: ") {
            if let Some(last) = failures.last_mut() {
                *last += &format!("\n    running: {statement}");
            }
        }
    }
    failures
}

/// How often each assertion failed, and its first failure.
fn by_assertion(failures: &str) -> BTreeMap<String, (usize, String)> {
    let mut kinds = BTreeMap::new();
    for failure in failures_in(failures) {
        let (head, rest) = failure.split_once('\n').unwrap_or((&failure, ""));
        let assertion = head.split(", PID: ").next().unwrap_or(head).to_owned();
        let (count, _) = kinds.entry(assertion).or_insert_with(|| (0, rest.to_owned()));
        *count += 1;
    }
    kinds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_assertion_is_found_with_its_stack_and_its_statement() {
        let log = "2026-01-01 [1] LOG:  ready\n\
            TRAP: FailedAssertion(\"x\", File: \"a.c\", Line: 7, PID: 12)\n\
            postgres: u d SELECT(ExceptionalCondition+0x57)[0x1]\n\
            /lib/x.so(+0x2)[0x3]\n\
            2026-01-01 [1] LOG:  server process (PID 12) was terminated by signal 6: Aborted\n\
            2026-01-01 [1] DETAIL:  Failed process was running: COMMIT\n\
            2026-01-01 [1] LOG:  all server processes terminated; reinitializing\n\
            TRAP: FailedAssertion(\"x\", File: \"a.c\", Line: 7, PID: 99)\n";
        let failures = failures_in(log);
        assert_eq!(failures.len(), 2);
        assert!(failures[0].contains("ExceptionalCondition"), "{failures:?}");
        assert!(failures[0].ends_with("running: COMMIT"), "{failures:?}");
        let kinds = by_assertion(&failures.join("\n"));
        let counts: Vec<_> =
            kinds.iter().map(|(assertion, (count, _))| (assertion.as_str(), *count)).collect();
        assert_eq!(counts, [("TRAP: FailedAssertion(\"x\", File: \"a.c\", Line: 7", 2)]);
    }

    #[test]
    fn source_lists_keep_who_signed_and_leave_out_other_archives() {
        let dir = std::env::temp_dir().join(format!("pg_fence_apt-{}", std::process::id()));
        for part in ["etc/sources.list.d", "own/parts"] {
            fs::create_dir_all(dir.join(part)).unwrap();
        }
        let list = "# deb http://a.org/debian x main\ndeb [signed-by=/k] http://a.org/debian x main\ndeb http://b.org y z\n";
        fs::write(dir.join("etc/sources.list"), list).unwrap();
        let sources = "Types: deb\nURIs: http://a.org/debian\nSigned-By: /k\n\nTypes: deb\nURIs: http://b.org\n";
        fs::write(dir.join("etc/sources.list.d/c.sources"), sources).unwrap();
        write_source_lists(&dir.join("etc"), &dir.join("own"), &["http://a.org/debian"]).unwrap();
        let written = |file: &str| fs::read_to_string(dir.join("own").join(file)).unwrap();
        assert_eq!(written("list"), "deb-src [signed-by=/k] http://a.org/debian x main\n");
        assert_eq!(
            written("parts/1.sources"),
            "Types: deb-src\nURIs: http://a.org/debian\nSigned-By: /k\n"
        );
        fs::remove_dir_all(&dir).unwrap();
    }
}

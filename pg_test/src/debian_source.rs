//! Programs built from the source packages of Debian, also of other releases than the machine's own.
//!
//! What is built lies in the target directory. The packages that the system has, and the lists of packages that
//! its apt knows, stay as they are: the source comes through lists and settings of apt's that are the lab's own.

use crate::process::output_of;
use crate::setup::{self, Package};
use anyhow::{bail, Context, Result};
use std::cmp::Ordering;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Where a source package may be that the machine's own release does not have, or not in that version.
const RELEASES: [&str; 4] = ["bookworm", "trixie", "forky", "sid"];

/// The modules of PostgreSQL's contrib that the tests, and those who try things on a server, need.
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

/// How a PostgreSQL is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flavour {
    /// As users run it.
    Plain,
    /// With assertions that stop a server process.
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

/// What compiling takes.
fn tools() -> Vec<Package> {
    vec![
        Package::new("build-essential", "/usr/share/build-essential"),
        Package::new("pkg-config", "/usr/bin/pkg-config"),
        Package::new("bison", "/usr/bin/bison"),
        Package::new("flex", "/usr/bin/flex"),
    ]
}

/// The `pg_config` of a PostgreSQL in `dir`, which is built where it is not there yet.
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
    // Most of the space, and nobody looks at it again.
    fs::remove_dir_all(dir.join("build"))?;
    fs::remove_dir_all(dir.join("source"))?;
    fs::write(ready, format!("{}\n", source.display()))?;
    Ok(pg_config)
}

/// Configures as Debian does where files are to be found: its patches insist on some of it, and what other
/// packages of Debian's add to a server fits in then. DESTDIR puts all of that below `root`.
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
    // The whole first: parts rely on headers that only it makes before it goes on.
    let parts = CONTRIB.iter().map(|module| format!("contrib/{module}"));
    [".".to_owned()].into_iter().chain(parts).try_for_each(|part| make(&part))
}

/// Builds pg_repack for the PostgreSQL that `pg_config` describes, and installs it below `dir` as below `/`. It
/// is a matter of seconds.
pub fn repack(dir: &Path, pg_config: &Path) -> Result<PathBuf> {
    let (root, ready) = (dir.join("root"), dir.join("ready"));
    if ready.exists() {
        return Ok(root);
    }
    setup::ensure(&tools())?;
    fs::create_dir_all(dir)?;
    let source = fetch("pg-repack", dir, Part::Original)?;
    let mut make = niced("make");
    // An installation that was built elsewhere may ask for another awk, and its static libraries need not fit programs
    // that can be loaded anywhere.
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
    // A `cargo run` may itself be part of a make, whose jobs are not ours.
    command.env_remove("MAKEFLAGS").env_remove("MAKELEVEL").env("LC_ALL", "C.UTF-8");
    // Programs and modules find the libpq of their own version beside them, wherever they are copied to, and
    // not the system's, which may be older.
    command.env("LD_RUN_PATH", "$ORIGIN/../lib");
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

/// What of a source package is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// With Debian's patches.
    Whole,
    /// As its authors published it.
    Original,
}

/// Fetches and unpacks a source package into `dir`, of the newest version that can be had.
fn fetch(package: &str, dir: &Path, part: Part) -> Result<PathBuf> {
    let (apt, source) = (dir.join("apt"), dir.join("source"));
    for empty in [apt.join("parts"), apt.join("lists/partial"), source.clone()] {
        let _ = fs::remove_dir_all(&empty);
        fs::create_dir_all(&empty)?;
    }
    let mut known = madison(Command::new("apt-cache"), package)?;
    // It is in every release, so that its places are the mirrors.
    known.extend(madison(Command::new("apt-cache"), "postgresql-common")?);
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
    // A mirror may lack one of the releases: what counts is whether the package is found.
    let mut failure = output_of(own("apt-get").arg("update")).err();
    let mut versions = madison(own("apt-cache"), package)?;
    // Apt names them in the order of its lists.
    versions.sort_by(|(one, _), (other, _)| by_age(other, one));
    for (version, _) in versions {
        eprintln!("fetching the source of {package} {version}");
        let mut get = own("apt-get");
        get.args(["source", &format!("{package}={version}")]);
        if part == Part::Original {
            get.arg("--tar-only");
        }
        match output_of(&mut get) {
            Ok(_) => {
                fs::remove_dir_all(&apt)?;
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

/// Which of two of Debian's versions is older.
fn by_age(one: &str, other: &str) -> Ordering {
    let is = |relation: &str| {
        let mut dpkg = Command::new("dpkg");
        dpkg.args(["--compare-versions", one, relation, other]);
        dpkg.status().is_ok_and(|status| status.success())
    };
    match (is("lt"), is("gt")) {
        (true, _) => Ordering::Less,
        (_, true) => Ordering::Greater,
        _ => Ordering::Equal,
    }
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

/// The versions of a package that apt knows of, each with the place where it is: `postgresql-15 | 15.18-0 |
/// http://deb.debian.org/debian bookworm/main amd64 Packages`.
pub fn madison(mut apt_cache: Command, package: &str) -> Result<Vec<(String, String)>> {
    let text = output_of(apt_cache.args(["madison", package]))?;
    let fields = |line: &str| {
        let mut fields = line.split('|').map(str::trim).skip(1);
        Some((fields.next()?.to_owned(), fields.next()?.to_owned()))
    };
    Ok(text.lines().filter_map(fields).collect())
}

/// Makes lists of source packages in `to` out of the lists of packages in `from`, of those archives only that
/// are at one of `places`: of the release that is named there, and of the others. Whatever else is said there,
/// as who has signed an archive, stays said.
fn write_source_lists(from: &Path, to: &Path, places: &[&str]) -> Result<()> {
    let mut files = vec![from.join("sources.list")];
    files.extend(
        fs::read_dir(from.join("sources.list.d")).into_iter().flatten().flatten().map(|e| e.path()),
    );
    let mut lines = String::new();
    for (number, file) in files.iter().enumerate() {
        let Ok(text) = fs::read_to_string(file) else { continue };
        let is_at_one = |text: &str| {
            let mut words = text.split_whitespace().map(|word| word.trim_end_matches('/'));
            words.any(|word| places.iter().any(|place| word == place.trim_end_matches('/')))
        };
        if file.extension().is_some_and(|end| end == "sources") {
            let paragraphs: Vec<String> =
                text.split("\n\n").filter(|text| is_at_one(text)).map(of_sources).collect();
            fs::write(to.join(format!("parts/{number}.sources")), paragraphs.join("\n\n"))?;
        } else {
            let of_packages = |line: &&str| line.starts_with("deb ") || line.starts_with("deb\t");
            for line in text.lines().filter(of_packages).filter(|line| is_at_one(line)) {
                lines += &of_list(line, places);
            }
        }
    }
    Ok(fs::write(to.join("list"), lines)?)
}

/// A paragraph about packages, as one about sources of all releases.
fn of_sources(paragraph: &str) -> String {
    let line = |line: &str| match line.split_once(':') {
        Some((field, _)) if field.eq_ignore_ascii_case("types") => "Types: deb-src\n".to_owned(),
        Some((field, suites)) if field.eq_ignore_ascii_case("suites") => {
            let own = suites.split_whitespace().filter(|suite| !RELEASES.contains(suite));
            let suites: Vec<&str> = match suites.contains("-security") {
                true => suites.split_whitespace().collect(),
                false => own.chain(RELEASES).collect(),
            };
            format!("Suites: {}\n", suites.join(" "))
        }
        _ => format!("{line}\n"),
    };
    paragraph.lines().map(line).collect()
}

/// The same for the older form, in which a line is an archive: `deb [options] place suite components`.
fn of_list(line: &str, places: &[&str]) -> String {
    let of_source = format!("deb-src{}\n", &line[3..]);
    let mut words = line.split_whitespace();
    let at_place = |word: &&str| {
        places.iter().any(|place| place.trim_end_matches('/') == word.trim_end_matches('/'))
    };
    let suite = words.by_ref().find(at_place).and_then(|_| words.next()).unwrap_or_default();
    let is_release = RELEASES.contains(&suite);
    let others = RELEASES.iter().filter(|release| is_release && **release != suite);
    let other =
        |release: &&str| of_source.replacen(&format!(" {suite} "), &format!(" {release} "), 1);
    let others: String = others.map(other).collect();
    of_source + &others
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_debian_does() {
        assert_eq!(by_age("1.4.8-1+deb12u1", "1.5.2-1"), Ordering::Less);
        assert_eq!(by_age("1.10-1", "1.9-1"), Ordering::Greater);
        assert_eq!(by_age("17.11-0+deb13u1", "17.11-0+deb13u1"), Ordering::Equal);
    }

    #[test]
    fn source_lists_keep_who_signed_leave_out_other_archives_and_name_all_releases() {
        let dir = std::env::temp_dir().join(format!("pg_fence_apt-{}", std::process::id()));
        for part in ["etc/sources.list.d", "own/parts"] {
            fs::create_dir_all(dir.join(part)).unwrap();
        }
        let list = "# deb http://a.org/debian x main\n\
            deb [signed-by=/k] http://a.org/debian bookworm main\n\
            deb http://a.org/debian bookworm-updates main\n\
            deb http://a.org/debian-security bookworm-security main\n\
            deb http://b.org y z\n";
        fs::write(dir.join("etc/sources.list"), list).unwrap();
        let sources = "Types: deb\nURIs: http://a.org/debian/\nSuites: trixie trixie-updates\n\
            Signed-By: /k\n\nTypes: deb\nURIs: http://b.org\n";
        fs::write(dir.join("etc/sources.list.d/c.sources"), sources).unwrap();
        write_source_lists(&dir.join("etc"), &dir.join("own"), &["http://a.org/debian"]).unwrap();
        let written = |file: &str| fs::read_to_string(dir.join("own").join(file)).unwrap();
        assert_eq!(
            written("list"),
            "deb-src [signed-by=/k] http://a.org/debian bookworm main\n\
             deb-src [signed-by=/k] http://a.org/debian trixie main\n\
             deb-src [signed-by=/k] http://a.org/debian forky main\n\
             deb-src [signed-by=/k] http://a.org/debian sid main\n\
             deb-src http://a.org/debian bookworm-updates main\n"
        );
        assert_eq!(
            written("parts/1.sources"),
            "Types: deb-src\nURIs: http://a.org/debian/\n\
             Suites: trixie-updates bookworm trixie forky sid\nSigned-By: /k\n"
        );
        fs::remove_dir_all(&dir).unwrap();
    }
}

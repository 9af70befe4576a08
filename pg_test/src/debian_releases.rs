//! Packages of other releases of Debian than the machine's own, by separate lists and settings of apt. The system's
//! packages, and those known to its apt, are not changed.

use crate::process::output_of;
use anyhow::Result;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The releases that may have a package that the machine's own release lacks, or another version of it.
pub const RELEASES: &[&str] = &["bookworm", "trixie", "forky", "sid"];

/// The same, with packages that are not ready for any release.
pub const WITH_EXPERIMENTAL: &[&str] = &["bookworm", "trixie", "forky", "sid", "experimental"];

/// The part of a package that is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackageKind {
    /// The source that it is built from.
    Source,
    /// The files that would be installed.
    Binary,
}

impl PackageKind {
    /// The word for the part in apt's lists.
    fn word(self) -> &'static str {
        match self {
            PackageKind::Source => "deb-src",
            PackageKind::Binary => "deb",
        }
    }
}

/// The keys of all of Debian's archives.
const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// An apt with its own lists, which are removed with this value.
#[derive(Debug)]
pub struct Releases {
    apt: PathBuf,
}

impl Drop for Releases {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.apt);
    }
}

impl Releases {
    /// Fetches the lists of these releases into `dir`.
    pub fn of(kind: PackageKind, dir: &Path, names: &[&str]) -> Result<Releases> {
        let releases = Releases { apt: dir.join("apt") };
        let apt = &releases.apt;
        let _ = fs::remove_dir_all(apt);
        for empty in ["parts", "lists/partial", "archives/partial"] {
            fs::create_dir_all(apt.join(empty))?;
        }
        // This package is in every release, so its sources are the mirrors.
        let mirrored = || madison(Command::new("apt-cache"), "postgresql-common");
        let mut known = mirrored()?;
        if known.is_empty() {
            // Fresh images have no lists of packages.
            crate::setup::update()?;
            known = mirrored()?;
        }
        let places = known.iter().filter_map(|(_, place)| place.split(' ').next());
        let mirrors: BTreeSet<&str> = places.filter(|at| !at.ends_with("-security")).collect();
        let archive =
            |mirror, name| format!("{} [signed-by={KEYS}] {mirror} {name} main\n", kind.word());
        let archives =
            mirrors.iter().flat_map(|mirror| names.iter().map(|name| archive(*mirror, *name)));
        fs::write(apt.join("list"), archives.collect::<String>())?;
        // A mirror may lack one of the releases; it only matters whether a package is found.
        let updated = output_of(releases.apt("apt-get").arg("update"));
        let is_there = !releases.versions("postgresql-common")?.is_empty();
        match updated {
            Err(error) if !is_there => Err(error),
            _ => Ok(releases),
        }
    }

    /// One of apt's programs, with these lists.
    pub fn apt(&self, program: &str) -> Command {
        let at = |name: &str| self.apt.join(name).display().to_string();
        let mut command = Command::new(program);
        command
            .args(["-o", &format!("Dir::Etc::sourcelist={}", at("list"))])
            .args(["-o", &format!("Dir::Etc::sourceparts={}", at("parts"))])
            .args(["-o", &format!("Dir::State::lists={}", at("lists"))])
            .args(["-o", &format!("Dir::Cache={}", self.apt.display())])
            .args(["-o", "Acquire::Languages=none"])
            .args(["-o", "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false"])
            // apt, when run by root, would download as another user, who may not be able to reach the target directory.
            .args(["-o", "APT::Sandbox::User=root", "--quiet"]);
        command
    }

    /// The versions of a package, the newest first.
    pub fn versions(&self, package: &str) -> Result<Vec<String>> {
        let known = madison(self.apt("apt-cache"), package)?;
        let mut versions: Vec<String> = known.into_iter().map(|(version, _)| version).collect();
        // apt lists them in the order of its lists, some twice.
        versions.sort_by(|one, other| by_age(other, one));
        versions.dedup();
        Ok(versions)
    }

    /// The libraries on which a package depends, directly or indirectly.
    pub fn libraries_of(&self, package: &str) -> Result<Vec<String>> {
        let mut apt = self.apt("apt-cache");
        apt.args(["depends", "--recurse", package]);
        for other in ["recommends", "suggests", "enhances", "conflicts", "breaks", "replaces"] {
            apt.arg(format!("--no-{other}"));
        }
        // A line for each package, followed by indented lines with its dependencies.
        let is_library = |name: &&str| name.starts_with("lib") || name.starts_with("zlib");
        Ok(output_of(&mut apt)?.lines().filter(is_library).map(str::to_owned).collect())
    }

    /// Unpacks packages below `root` as they would be installed below `/`, without running any of their scripts.
    pub fn unpack(&self, packages: &[String], root: &Path) -> Result<()> {
        let archives = self.apt.join("archives");
        // Starting apt takes time, so all packages are downloaded at once.
        let mut all = self.apt("apt-get");
        all.arg("download").args(self.newest(packages)?).current_dir(&archives);
        if output_of(&mut all).is_err() {
            packages.iter().try_for_each(|package| self.download(package, &archives))?;
        }
        fs::create_dir_all(root)?;
        for file in fs::read_dir(&archives)?.flatten().map(|entry| entry.path()) {
            if file.extension().is_some_and(|end| end == "deb") {
                output_of(Command::new("dpkg-deb").arg("-x").arg(file).arg(root))?;
            }
        }
        Ok(())
    }

    /// The packages with their newest versions, as arguments of apt: `libc6=2.43-1`.
    fn newest(&self, packages: &[String]) -> Result<Vec<String>> {
        let text = output_of(self.apt("apt-cache").arg("madison").args(packages))?;
        let mut newest: BTreeMap<&str, &str> = BTreeMap::new();
        for line in text.lines() {
            let mut fields = line.split('|').map(str::trim);
            let (Some(package), Some(version)) = (fields.next(), fields.next()) else { continue };
            let known = newest.entry(package).or_insert(version);
            if by_age(known, version) == Ordering::Less {
                *known = version;
            }
        }
        Ok(newest.iter().map(|(package, version)| format!("{package}={version}")).collect())
    }

    /// Downloads the newest available version: archives drop old ones, and a mirror may lack a new one.
    fn download(&self, package: &str, to: &Path) -> Result<()> {
        let mut failure = None;
        for version in self.versions(package)? {
            eprintln!("fetching {package} {version}");
            let mut get = self.apt("apt-get");
            get.args(["download", &format!("{package}={version}")]).current_dir(to);
            match output_of(&mut get) {
                Ok(_) => return Ok(()),
                Err(error) => failure = Some(error),
            }
        }
        Err(failure.unwrap_or_else(|| anyhow::anyhow!("apt knows no {package}")))
    }
}

/// Compares two Debian versions by age.
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

/// The versions of a package that apt knows, each with its source: `postgresql-15 | 15.18-0 |
/// http://deb.debian.org/debian bookworm/main amd64 Packages`.
pub fn madison(mut apt_cache: Command, package: &str) -> Result<Vec<(String, String)>> {
    let text = output_of(apt_cache.args(["madison", package]))?;
    let fields = |line: &str| {
        let mut fields = line.split('|').map(str::trim).skip(1);
        Some((fields.next()?.to_owned(), fields.next()?.to_owned()))
    };
    Ok(text.lines().filter_map(fields).collect())
}

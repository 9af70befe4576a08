//! The Debian package, named as Debian names extensions: `postgresql-15-pg-fence`. It is made by hand, but for dpkg-deb
//! and dpkg-shlibdeps: cargo-deb and nFPM would need the same lists in their own files, one for each major version, and
//! would have to be built or fetched first.

use super::{Parts, Release, install, licenses, put, settle};
use crate::extension::NAME;
use crate::process::output_of;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The name of the source package of all major versions.
pub const SOURCE: &str = "pg-fence";

/// The contact for the package. Debian requires an address, and the project has none yet: who publishes a package names
/// theirs in the environment variables that Debian's own tools read.
const MAINTAINER: &str = "The pg_fence authors";

const DESCRIPTION: &str = "Leases with fencing tokens for PostgreSQL
 A worker takes a lease and gets a token, a number greater than every token
 before it, and shows it with each write. If the worker was frozen meanwhile and
 another one has taken over, a trigger refuses the late write, whatever the
 worker believes.
 .
 This package provides the extension pg_fence for PostgreSQL ";

/// Findings of lintian that are intended.
const OVERRIDES: &str = "\
# It says which compiler built the library.
PACKAGE: binary-has-unneeded-section .comment *
# These are functions of C compilers: the library is Rust.
PACKAGE: hardening-no-fortify-functions *
# It is not uploaded to Debian, whose list of wanted packages does not have it.
PACKAGE: initial-upload-closes-no-bugs *
";

pub fn write(parts: &Parts, scratch: &Path, output: &Path) -> Result<PathBuf> {
    let name = format!("postgresql-{}-{SOURCE}", parts.major);
    let root = scratch.join("deb");
    let lib = root.join(format!("usr/lib/postgresql/{}/lib", parts.major));
    let share = root.join(format!("usr/share/postgresql/{}/extension", parts.major));
    install(&parts.extension, &lib, &share)?;
    super::operations(&root.join("usr/share/doc").join(&name).join("operations"))?;
    let package = Package {
        name: &name,
        depends: &format!("postgresql-{}, ", parts.major),
        description: &format!("{DESCRIPTION}{}.", parts.major),
        overrides: OVERRIDES,
        third_party: licenses::third_party(&parts.major)?,
        binary: lib.join(format!("{NAME}.so")),
    };
    package.write(&parts.release, scratch, output, &[])
}

/// A package of the files in `deb` below the scratch directory.
pub struct Package<'a> {
    pub name: &'a str,
    /// Dependencies beside the libraries that the binary is linked with, each followed by a comma.
    pub depends: &'a str,
    pub description: &'a str,
    /// Findings of lintian that are intended.
    pub overrides: &'a str,
    pub third_party: String,
    pub binary: PathBuf,
}

impl Package<'_> {
    /// Builds the package. `programs` are the files to be made executable.
    pub fn write(
        &self,
        release: &Release,
        scratch: &Path,
        output: &Path,
        programs: &[&str],
    ) -> Result<PathBuf> {
        let name = self.name;
        let root = scratch.join("deb");
        let usr = root.join("usr");
        self.documents(release, &usr.join("share/doc").join(name))?;
        let overrides = usr.join("share/lintian/overrides").join(name);
        let meant = format!("{}{}", self.overrides, without_address());
        put(&overrides, meant.replace("PACKAGE", name))?;

        let libraries = needed_libraries(&self.binary, scratch, name)?;
        let control = self.control(release, &libraries, &usr)?;
        put(&root.join("DEBIAN/md5sums"), sums(&root)?)?;
        put(&root.join("DEBIAN/control"), control)?;
        settle(&root, release)?;
        for program in programs {
            super::make_executable(&root.join(program), release)?;
        }
        let path =
            output.join(format!("{name}_{}_{}.deb", release.debian_version(), architecture()?));
        let mut build = Command::new("dpkg-deb");
        // With several threads xz splits the data differently, so the bytes would depend on the machine.
        build.args(["--root-owner-group", "-Zxz", "--threads-max=1", "--build"]);
        build.arg(&root).arg(&path);
        output_of(build.env("SOURCE_DATE_EPOCH", release.epoch.to_string()))?;
        Ok(path)
    }

    fn documents(&self, release: &Release, doc: &Path) -> Result<()> {
        put(&doc.join("copyright"), copyright(&licenses::read("LICENSE")?))?;
        let changes = format!(
            "{SOURCE} ({}) unstable; urgency=medium\n\n  * Release {}: its changes are in changelog.gz.\n\n -- {}  {}\n",
            release.debian_version(),
            release.version,
            maintainer(),
            release.debian_date()?
        );
        put(&doc.join("changelog.Debian"), changes)?;
        put(&doc.join("changelog"), licenses::read("CHANGELOG.md")?)?;
        put(&doc.join("third-party-licenses"), &self.third_party)?;
        let names = ["changelog.Debian", "changelog", "third-party-licenses"];
        names.iter().try_for_each(|name| compress(&doc.join(name)))
    }

    fn control(&self, release: &Release, libraries: &str, usr: &Path) -> Result<String> {
        let size = output_of(
            Command::new("du").args(["--summarize", "--apparent-size", "--block-size=1K"]).arg(usr),
        )?;
        let size = size.split_whitespace().next().context("du says nothing")?.to_owned();
        let (name, description) = (self.name, self.description);
        let depends = match format!("{}{libraries}", self.depends) {
            none if none.is_empty() => none,
            some => format!("Depends: {some}\n"),
        };
        // The package named like the source needs no such field.
        let source = if name == SOURCE { String::new() } else { format!("Source: {SOURCE}\n") };
        Ok(format!(
            "Package: {name}
{source}Version: {}
Architecture: {}
Maintainer: {}
Installed-Size: {size}
{depends}Section: database
Priority: optional
Description: {description}
",
            release.debian_version(),
            architecture()?,
            maintainer(),
        ))
    }
}

/// Compresses a file as documents and manual pages are compressed.
pub fn compress(path: &Path) -> Result<()> {
    let packed = output_of(Command::new("gzip").args(["-9", "--no-name"]).arg(path));
    packed.map(drop).with_context(|| path.display().to_string())
}

/// Returns the licence in Debian's own format.
fn copyright(license: &str) -> String {
    let mut paragraphs = license.trim_end().lines().skip(1).skip_while(|line| line.is_empty());
    let holder = paragraphs.next().unwrap_or_default().trim_start_matches("Copyright (c) ");
    let indented: String = paragraphs
        .skip_while(|line| line.is_empty())
        .map(|line| if line.is_empty() { " .\n".to_owned() } else { format!(" {line}\n") })
        .collect();
    format!(
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: {NAME}
Comment: The library contains crates of others, under the licences MIT, Zlib,
 Unlicense and Unicode-3.0; their notices are in third-party-licenses.gz beside
 this file.

Files: *
Copyright: {holder}
License: PostgreSQL

License: PostgreSQL
{indented}"
    )
}

/// Returns the findings of lintian that are expected if no publisher has named an address.
fn without_address() -> &'static str {
    match std::env::var("DEBEMAIL") {
        Ok(_) => "",
        Err(_) => {
            "\
# Nobody publishes it yet who has an address.
PACKAGE: malformed-contact *
PACKAGE: bogus-mail-host-in-debian-changelog *
"
        }
    }
}

fn maintainer() -> String {
    let set = |variable: &str| std::env::var(variable).ok();
    let name = set("DEBFULLNAME").unwrap_or_else(|| MAINTAINER.to_owned());
    // Without an address the brackets are empty: dpkg's tools accept that.
    format!("{name} <{}>", set("DEBEMAIL").unwrap_or_default())
}

fn architecture() -> Result<String> {
    Ok(output_of(Command::new("dpkg").arg("--print-architecture"))?.trim().to_owned())
}

/// Returns the packages of the libraries that ours is linked with, each with the oldest version that suffices.
fn needed_libraries(library: &Path, scratch: &Path, package: &str) -> Result<String> {
    // The tool requires a source package around it.
    let control = format!("Source: {SOURCE}\n\nPackage: {package}\nArchitecture: any\n");
    put(&scratch.join("debian/control"), control)?;
    let mut tool = Command::new("dpkg-shlibdeps");
    let text =
        output_of(tool.arg("-O").arg(format!("-e{}", library.display())).current_dir(scratch))?;
    // The tool prints nothing for a binary without shared libraries.
    if text.trim().is_empty() {
        return Ok(String::new());
    }
    let needed = text.trim().strip_prefix("shlibs:Depends=");
    Ok(needed.with_context(|| format!("no dependencies in {text:?}"))?.to_owned())
}

/// Returns the checksums that dpkg keeps, by path.
fn sums(root: &Path) -> Result<String> {
    let sums = "find usr -type f -print0 | LC_ALL=C sort -z | xargs -0 md5sum";
    output_of(Command::new("sh").args(["-c", sums]).current_dir(root))
}

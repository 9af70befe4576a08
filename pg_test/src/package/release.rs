//! A release: its version, and the date of all its files.

use crate::extension;
use crate::process::output_of;
use anyhow::{Context, Result};
use std::path::Path;
use std::process::Command;

/// The Debian revision of a package's version.
const REVISION: &str = "1";

#[derive(Debug, Clone)]
pub struct Release {
    pub version: String,
    /// The commit's date, in seconds since 1970: the same wherever and whenever the package is built.
    pub epoch: u64,
}

impl Release {
    /// Returns the release of a source tree. The environment's `SOURCE_DATE_EPOCH` takes precedence over the commit's
    /// date: a tree without git needs it.
    pub fn of_commit(source: &Path) -> Result<Release> {
        let text = match std::env::var("SOURCE_DATE_EPOCH") {
            Ok(text) => text,
            Err(_) => output_of(
                Command::new("git").args(["log", "-1", "--format=%ct"]).current_dir(source),
            )
            .context(
                "the date of a release is that of its commit: without git, set SOURCE_DATE_EPOCH",
            )?,
        };
        let epoch = text.trim().parse().with_context(|| format!("no date: {text:?}"))?;
        Ok(Release { version: extension::VERSION.to_owned(), epoch })
    }

    /// Returns the version of the Debian packages.
    pub fn debian_version(&self) -> String {
        format!("{}-{REVISION}", self.version)
    }

    /// Returns the date in the format of Debian's changelogs.
    pub fn debian_date(&self) -> Result<String> {
        let date = format!("--date=@{}", self.epoch);
        let text = output_of(Command::new("date").args(["--utc", "-R", &date]).env("LC_ALL", "C"))?;
        Ok(text.trim().to_owned())
    }
}

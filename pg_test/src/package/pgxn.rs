//! The archive for PGXN: the commit's source, with `META.json` at its top.

use super::Release;
use crate::extension::NAME;
use crate::process::output_of;
use crate::source_tree::source_root;
use anyhow::{Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Writes the archive, ready for upload. It contains only committed files, so it needs git.
pub fn archive(release: &Release, output: &Path) -> Result<Option<PathBuf>> {
    if !source_root().join(".git").exists() {
        eprintln!("this source is no git repository: there is no archive for PGXN");
        return Ok(None);
    }
    let name = format!("{NAME}-{}", release.version);
    let path = output.join(format!("{name}.zip"));
    // A zip file stores local times.
    let mut git = Command::new("git");
    git.args(["archive", "--format=zip", &format!("--prefix={name}/"), "--output"])
        .arg(&path)
        .arg("HEAD");
    output_of(git.current_dir(source_root()).env("TZ", "UTC"))?;
    let listed = output_of(
        Command::new("git").args(["ls-tree", "--name-only", "HEAD"]).current_dir(source_root()),
    )?;
    ensure!(listed.lines().any(|file| file == "META.json"), "META.json is not committed");
    Ok(Some(path))
}

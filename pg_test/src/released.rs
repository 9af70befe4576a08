//! Versions that were released before, built as they were: sessions that have loaded the old library go on beside
//! those that load the new one.

use crate::extension::{self, BuildPlace, Extension, NAME};
use crate::installation::Installation;
use crate::process::output_of;
use anyhow::{Context, Result};
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;

/// A version, and the commit that it was released as.
#[derive(Debug, Clone, Copy)]
pub struct Released {
    pub version: &'static str,
    commit: &'static str,
}

/// All of them, oldest first.
pub const ALL: [Released; 1] =
    [Released { version: "0.1.0", commit: "7622d824d69635881d12c5163ac79f66dddb6197" }];

impl Released {
    /// Its source, taken from the repository once.
    pub fn source(&self) -> Result<PathBuf> {
        let dir = extension::target_dir().join("released").join(self.version);
        if dir.join("Cargo.toml").exists() {
            return Ok(dir);
        }
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir)?;
        let archive = dir.join("source.tar");
        let mut git = Command::new("git");
        git.args(["archive", "--format=tar", "--output"]).arg(&archive).arg(self.commit);
        output_of(git.current_dir(extension::source_root())).with_context(|| {
            format!("the repository with the commit of {} is needed", self.version)
        })?;
        // With the date of this moment: cargo compares dates, and may have built another state of that version.
        let mut tar = Command::new("tar");
        output_of(tar.args(["--extract", "--touch", "--file"]).arg(&archive).current_dir(&dir))?;
        fs::remove_file(archive)?;
        Ok(dir)
    }

    /// Builds it for a PostgreSQL.
    pub fn build(&self, installation: &Installation) -> Result<Extension> {
        // Tests ask side by side.
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
        let source = self.source()?;
        let place = BuildPlace::of(installation).below(&format!("released/built-{}", self.version));
        let library = extension::build_library(&source, &installation.pg_config, &place, None)?;
        Extension::of(&source, self.version, library)
            .with_context(|| format!("{NAME} {}", self.version))
    }
}

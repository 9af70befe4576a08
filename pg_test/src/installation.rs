//! An installed PostgreSQL.

use std::path::PathBuf;

/// An installed PostgreSQL, from which private copies are made.
#[derive(Debug, Clone)]
pub struct Installation {
    pub pg_config: PathBuf,
    /// The directories in which its programs look for libraries, relative to the programs.
    pub libraries: Vec<PathBuf>,
    /// The directory below the target directory for the extension built for this installation. `None` means the target
    /// directory itself.
    pub target: Option<String>,
    /// The directory for the build's intermediate files. The major versions share it: most of the crates are the same
    /// for all of them, and the others have a feature for each version.
    pub build: Option<&'static str>,
}

impl Installation {
    /// Returns any installation, by its `pg_config`.
    pub fn named(pg_config: PathBuf) -> Installation {
        // Another server of a supported version may have other headers under the same feature.
        let target = Some("other".to_owned());
        Installation { pg_config, libraries: Vec::new(), target, build: Some("other") }
    }
}

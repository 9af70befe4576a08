//! A PostgreSQL as it is installed.

use std::path::PathBuf;

/// A PostgreSQL that private copies are made of.
#[derive(Debug, Clone)]
pub struct Installation {
    pub pg_config: PathBuf,
    /// Directories that its programs look for libraries in, by the way there from themselves.
    pub libraries: Vec<PathBuf>,
    /// Below the target directory, where the extension that is built for it ends up. None: in the target directory
    /// itself.
    pub target: Option<String>,
    /// The same for what it is built from. Versions share it, for most of it is the same for all of them, and the rest
    /// does not meet: each has a feature of its own.
    pub build: Option<&'static str>,
}

impl Installation {
    /// Any, by its `pg_config`.
    pub fn named(pg_config: PathBuf) -> Installation {
        // It may be another server of a version that the lab has, with other headers under the same feature.
        let target = Some("other".to_owned());
        Installation { pg_config, libraries: Vec::new(), target, build: Some("other") }
    }
}

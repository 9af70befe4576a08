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
    /// Whether it is the one that the lab takes for its version, and no other.
    pub is_known: bool,
}

impl Installation {
    /// Any, by its `pg_config`.
    pub fn named(pg_config: PathBuf) -> Installation {
        let target = Some("other".to_owned());
        Installation { pg_config, libraries: Vec::new(), target, is_known: false }
    }
}

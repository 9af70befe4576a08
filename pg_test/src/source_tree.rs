//! The source tree, and cargo in it.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The top of the source tree.
pub fn source_root() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().expect("the lab lies below the workspace")
}

/// Where cargo builds.
pub fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => source_root().join(dir),
        None => source_root().join("target"),
    }
}

/// Cargo, in the source tree. It must not see what an outer cargo told the lab about the lab's own package.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let of_package = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_"];
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if of_package.iter().any(|prefix| name.starts_with(prefix)) {
            command.env_remove(name);
        }
    }
    command.current_dir(source_root());
    command
}

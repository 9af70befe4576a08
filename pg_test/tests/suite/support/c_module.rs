//! C libraries that a server loads, compiled on demand.

use pg_test::{Harness, Result, majors, process};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

/// Compiles a library for the test servers from its source.
pub fn build(harness: &Harness, name: &str, source: &str) -> Result<PathBuf> {
    let mut pg_config = Command::new(majors::chosen()?.pg_config);
    let include = process::output_of(pg_config.arg("--includedir-server"))?;
    let dir = harness.rundir().path();
    let (program, library) = (dir.join(format!("{name}.c")), dir.join(format!("{name}.so")));
    std::fs::write(&program, source)?;
    let mut compiler = Command::new("cc");
    compiler.args(["-O2", "-fPIC", "-shared", "-I", include.trim(), "-o"]);
    process::output_of(compiler.arg(&library).arg(&program))?;
    // The server may run as another user.
    std::fs::set_permissions(&library, std::fs::Permissions::from_mode(0o755))?;
    Ok(library)
}

//! C triggers to compare with, compiled when they are needed.

use anyhow::Result;
use pg_test::majors;
use pg_test::source_tree::source_root;
use pg_test::{Harness, Session, process};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

/// Compiles `bench/triggers.c` and creates its functions. The error says why that is impossible.
pub fn create(harness: &Harness, session: &mut Session) -> Result<()> {
    let include =
        process::output_of(Command::new(majors::chosen()?.pg_config).arg("--includedir-server"))?;
    let library = harness.rundir().path().join("triggers.so");
    if !library.exists() {
        let mut compiler = Command::new("gcc");
        compiler
            .args(["-O2", "-fPIC", "-shared", "-I", include.trim(), "-o"])
            .arg(&library)
            .arg(source_root().join("pg_test/bench/triggers.c"));
        process::output_of(&mut compiler)?;
        std::fs::set_permissions(&library, std::fs::Permissions::from_mode(0o755))?;
    }
    for name in ["bench_empty", "bench_check"] {
        session.run(&format!(
            "CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE c AS '{}', '{name}'",
            library.display()
        ))?;
    }
    Ok(())
}

//! The minimal C triggers, compiled when they are needed.

use crate::bench::bed::Bed;
use crate::extension::{default_pg_config, source_root};
use crate::process;
use anyhow::Result;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

/// Compiles `bench/triggers.c` and creates its functions; an error says why that cannot be.
pub fn create(bed: &Bed) -> Result<()> {
    let include = process::output_of(Command::new(default_pg_config()).arg("--includedir-server"))?;
    let library = bed.lab.rundir().path().join("triggers.so");
    let mut compiler = Command::new("gcc");
    compiler
        .args(["-O2", "-fPIC", "-shared", "-I", include.trim(), "-o"])
        .arg(&library)
        .arg(source_root().join("pg_test/bench/triggers.c"));
    process::output_of(&mut compiler)?;
    std::fs::set_permissions(&library, std::fs::Permissions::from_mode(0o755))?;
    for name in ["bench_empty", "bench_check"] {
        bed.connect()?.run(&format!(
            "CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE c AS '{}', '{name}'",
            library.display()
        ))?;
    }
    Ok(())
}

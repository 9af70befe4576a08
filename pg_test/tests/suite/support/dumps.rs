//! Dumps of a database, and their restoring.

use pg_test::{Cluster, Harness, Result};

/// Dumps a database in the custom format.
pub fn dump(harness: &Harness, cluster: &Cluster, dbname: &str) -> Result<String> {
    let file =
        harness.install_dir().new_dir("dump")?.join("db.dump").to_string_lossy().into_owned();
    harness.run("pg_dump", &["-Fc", "-f", &file, "-d", &cluster.conninfo(dbname).to_string()])?;
    Ok(file)
}

/// Restores a dump. `options` are further options, for example `--no-owner`.
pub fn restore(
    harness: &Harness,
    cluster: &Cluster,
    dbname: &str,
    file: &str,
    options: &[&str],
) -> Result<()> {
    let conninfo = cluster.conninfo(dbname).to_string();
    let args = [&["--exit-on-error", "-d", &conninfo], options, &[file]].concat();
    harness.run("pg_restore", &args).map(drop)
}

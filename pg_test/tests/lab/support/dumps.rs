//! Dumps of a database, and their restoring.

use pg_test::{Cluster, Lab, Result};

/// Dumps a database in the custom format.
pub fn dump(lab: &Lab, cluster: &Cluster, dbname: &str) -> Result<String> {
    let file = lab.install_dir().new_dir("dump")?.join("db.dump").to_string_lossy().into_owned();
    lab.run("pg_dump", &["-Fc", "-f", &file, "-d", &cluster.conninfo(dbname).to_string()])?;
    Ok(file)
}

/// Restores a dump. `options` are further options, for example `--no-owner`.
pub fn restore(
    lab: &Lab,
    cluster: &Cluster,
    dbname: &str,
    file: &str,
    options: &[&str],
) -> Result<()> {
    let conninfo = cluster.conninfo(dbname).to_string();
    let args = [&["--exit-on-error", "-d", &conninfo], options, &[file]].concat();
    lab.run("pg_restore", &args).map(drop)
}

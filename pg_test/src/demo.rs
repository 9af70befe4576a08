//! The demonstration.

use crate::client::Conninfo;
use crate::Lab;
use anyhow::Result;
use std::path::Path;

/// Plays the demonstration; with `keep` it leaves the server running for a look around.
pub fn run(program: &Path, keep: bool) -> Result<()> {
    let lab = Lab::start(program)?;
    let mut session = lab.cluster().connect("postgres")?;
    session.run("CREATE DATABASE demo")?;
    let conninfo = lab.cluster().conninfo("demo");
    conninfo.connect()?.run("CREATE EXTENSION pg_fence")?;
    println!("pg_fence {} is installed.", crate::extension::VERSION);
    if keep {
        lab.rundir().keep()?;
        print_way_in(&conninfo);
    }
    Ok(())
}

fn print_way_in(conninfo: &Conninfo) {
    println!("\nThe server keeps running. To look around:\n");
    println!("    psql \"{conninfo}\"\n");
    println!("To stop it and remove its files:\n\n    cargo run -- stop");
}

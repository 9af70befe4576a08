//! The archive for PGXN.

use super::{directory, this_release};
use pg_test::extension::VERSION;
use pg_test::package::pgxn;
use pg_test::process::output_of;
use pg_test::source_tree::source_root;
use pg_test::{Context, Harness, Result, ensure, harness_test};
use std::process::Command;

/// PGXN's own validator, a crate with a program.
const VALIDATOR: (&str, &str) = ("pgxn_meta", "0.7.0");

#[harness_test]
fn the_description_for_pgxn_is_of_this_version(_: &Harness) -> Result<()> {
    let text = std::fs::read_to_string(source_root().join("META.json"))?;
    let meta: serde_json::Value = serde_json::from_str(&text)?;
    let provided = &meta["provides"]["pg_fence"];
    for version in [&meta["version"], &provided["version"]] {
        ensure!(version == VERSION, "META.json is of version {version}");
    }
    for file in [&provided["file"], &provided["docfile"]] {
        let file = file.as_str().context("no path")?;
        ensure!(source_root().join(file).exists(), "META.json names {file}");
    }
    Ok(())
}

#[harness_test]
fn the_archive_for_pgxn_holds_the_source(harness: &Harness) -> Result<()> {
    let path = pgxn::archive(&this_release()?, &directory(harness, "pgxn")?)?.context("no git")?;
    let top = format!("pg_fence-{VERSION}");
    ensure!(path.ends_with(format!("{top}.zip")), "{path:?}");
    let list = output_of(Command::new("python3").args(["-m", "zipfile", "-l"]).arg(&path))?;
    for file in ["META.json", "Makefile", "pg_fence.control", "Cargo.lock", "src/lib.rs"] {
        ensure!(list.contains(&format!("{top}/{file} ")), "no {file} in:\n{list}");
    }
    Ok(())
}

#[harness_test(slow)]
fn pgxn_itself_finds_the_description_valid(_: &Harness) -> Result<()> {
    let (name, version) = VALIDATOR;
    let program = super::cargo_installs(name, version)?;
    output_of(Command::new(program).arg(source_root().join("META.json"))).map(drop)
}

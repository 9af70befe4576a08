//! Checks the install and upgrade scripts with pgspot, from PyPI: no object of another user may be found by their
//! unqualified names.

use crate::extension::{self, NAME};
use crate::process::output_of;
use crate::runtime::{self, Runtime};
use crate::source_tree::{self, source_root};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const PGSPOT: Runtime = Runtime::Python(&["pgspot==0.9.4", "pglast==7.21"]);

/// Checks all scripts of the extension. The findings are the error.
pub fn run() -> Result<()> {
    let scripts = extension::scripts()?;
    let dir = source_tree::target_dir().join("script_rules");
    fs::create_dir_all(&dir)?;
    for (name, text) in &scripts {
        fs::write(dir.join(name), text)?;
    }
    let versions = |name: &str| -> Vec<String> {
        let middle = name.trim_start_matches(NAME).trim_end_matches(".sql");
        middle.split("--").skip(1).map(str::to_owned).collect()
    };
    for name in scripts.keys() {
        // An upgrade script refers to objects that the earlier version's script has made.
        let run = match &versions(name)[..] {
            [_] => vec![dir.join(name)],
            [from, _] => vec![dir.join(format!("{NAME}--{from}.sql")), dir.join(name)],
            other => anyhow::bail!("{name} is of versions {other:?}"),
        };
        ensure!(run.iter().all(|path| path.exists()), "there is no script that {name} follows");
        check(&run).with_context(|| name.clone())?;
        println!("{name}: nothing found");
    }
    Ok(())
}

/// Checks scripts that run one after the other.
pub fn check(scripts: &[PathBuf]) -> Result<()> {
    let program: &Path = &source_root().join("pg_test/script_rules.py");
    let python = runtime::fetch(PGSPOT)?.join("bin/python");
    output_of(Command::new(python).arg(program).args(scripts)).map(drop)
}

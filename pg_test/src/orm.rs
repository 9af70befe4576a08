//! Libraries that map tables to objects, fetched from PyPI and npm and kept in the target directory, and the
//! programs of `orm/` that use them.

use crate::client::Conninfo;
use crate::extension::{source_root, target_dir};
use crate::process::output_of;
use crate::setup::{self, Package};
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

/// What runs a program, and from where its libraries come.
#[derive(Debug, Clone, Copy)]
pub enum Runtime {
    /// Python, with packages of PyPI.
    Python(&'static [&'static str]),
    /// Node.js, with packages of npm.
    Node(&'static [&'static str]),
}

/// All that the programs in Python use.
pub const PYTHON: Runtime =
    Runtime::Python(&["django==5.2.19", "sqlalchemy[asyncio]==2.1.9", "psycopg[binary]==3.3.9"]);

/// Runs a program of `orm/` against a database, and returns what it prints.
pub fn run(runtime: Runtime, program: &str, database: &Conninfo) -> Result<String> {
    let home = fetch(runtime).context("the libraries could not be fetched")?;
    let path = source_root().join("pg_test/orm").join(program);
    let mut command = match runtime {
        Runtime::Python(_) => Command::new(home.join("bin/python")),
        Runtime::Node(_) => Command::new("node"),
    };
    // Node.js looks for libraries beside the program, and then here.
    command.env("NODE_PATH", home.join("node_modules"));
    let (port, name) = database.place();
    output_of(command.arg(path).arg(port.to_string()).arg(name))
}

/// The directory with the runtime's libraries, made when it is first asked for.
pub fn fetch(runtime: Runtime) -> Result<PathBuf> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let home = home(runtime);
    let ready = home.join("ready");
    if !ready.exists() {
        fs::create_dir_all(&home)?;
        match runtime {
            Runtime::Python(packages) => python(&home, packages)?,
            Runtime::Node(packages) => node(&home, packages)?,
        }
        fs::write(ready, "")?;
    }
    Ok(home)
}

/// Whether they are there already.
pub fn is_there(runtime: Runtime) -> bool {
    home(runtime).join("ready").exists()
}

/// Other packages, or other versions, make another directory.
fn home(runtime: Runtime) -> PathBuf {
    let (name, packages) = match runtime {
        Runtime::Python(packages) => ("python", packages),
        Runtime::Node(packages) => ("node", packages),
    };
    target_dir().join("orm").join(format!("{name}-{}", packages.join("-")))
}

fn python(home: &Path, packages: &[&str]) -> Result<()> {
    if output_of(Command::new("python3").args(["-c", "import ensurepip, venv"])).is_err() {
        setup::ensure(&[Package::new("python3-venv", "/usr/lib/python3*/ensurepip/__init__.py")])?;
    }
    output_of(Command::new("python3").args(["-m", "venv"]).arg(home))?;
    let mut pip = Command::new(home.join("bin/pip"));
    output_of(pip.args(["install", "--quiet", "--only-binary=:all:"]).args(packages)).map(drop)
}

fn node(home: &Path, packages: &[&str]) -> Result<()> {
    if output_of(Command::new("npm").arg("--version")).is_err() {
        setup::ensure(&[
            Package::new("nodejs", "/usr/bin/node"),
            Package::new("npm", "/usr/bin/npm"),
        ])?;
    }
    let mut npm = Command::new("npm");
    npm.args(["install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix"]);
    output_of(npm.arg(home).args(packages)).map(drop)
}

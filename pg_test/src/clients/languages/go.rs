//! The client in Go, on pgx 5.
//!
//! Go and pgx are packages of newer releases of Debian than the machine's own may be, unpacked in the target directory;
//! no registry of Go is used.

use super::{Check, Language, Program, Programs};
use crate::debian_releases::{PackageKind, RELEASES, Releases};
use crate::process::output_of;
use crate::source_tree::{source_root, target_dir};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

pub const LANGUAGE: Language = Language {
    name: "go",
    directory: "go",
    prepare,
    checks,
    first_worker: "examples/first/main.go",
    is_there: || Tools::new().is_ready(),
};

/// The libraries, with their names in Go and in Debian.
const LIBRARIES: [(&str, &str); 7] = [
    ("github.com/jackc/pgpassfile", "golang-github-jackc-pgpassfile-dev"),
    ("github.com/jackc/pgservicefile", "golang-github-jackc-pgservicefile-dev"),
    ("github.com/jackc/pgx/v5", "golang-github-jackc-pgx-v5-dev"),
    ("github.com/jackc/puddle/v2", "golang-github-jackc-puddle-v2-dev"),
    ("github.com/lib/pq", "golang-github-lib-pq-dev"),
    ("golang.org/x/sync", "golang-golang-x-sync-dev"),
    ("golang.org/x/text", "golang-golang-x-text-dev"),
];

fn prepare() -> Result<Programs> {
    let programs = build().context("the client in Go cannot be built")?;
    let program =
        |name: &str| Program { program: programs.join(name).into(), ..Program::default() };
    Ok(Programs {
        worker: program("worker"),
        first_worker: program("first_worker"),
        tests: Some(program("tests")),
    })
}

fn checks() -> Result<Vec<Check>> {
    let tools = Tools::new();
    let check = |name, program: &str, arguments: &[&str]| {
        let mut command = tools.command(program);
        command.args(arguments);
        Check { name, command }
    };
    // gofmt lists badly formatted files but exits with 0.
    let gofmt = "found=$(gofmt -l .) && echo \"$found\" && test -z \"$found\"";
    let page = examples_of_the_page(&tools.home)?.display().to_string();
    Ok(vec![
        check("gofmt", "/bin/sh", &["-c", gofmt]),
        check("go vet", "go", &["vet", "./..."]),
        check("the page", "go", &["vet", &page]),
        check("staticcheck", &tools.staticcheck(), &["-checks", "all", "./..."]),
    ])
}

/// The code in its README, as a program that must compile.
fn examples_of_the_page(home: &Path) -> Result<PathBuf> {
    let function = |code: &String| {
        format!(
            "func _(ctx context.Context) (err error) {{\n{{\n{code}_, _ = ctx, err\n}}\nreturn err\n}}\n"
        )
    };
    let functions: String = super::examples("go", "go", 1)?.iter().map(function).collect();
    let program = home.join("page/main.go");
    fs::create_dir_all(home.join("page"))?;
    fs::write(&program, format!("{PRELUDE}{functions}"))?;
    Ok(program)
}

const PRELUDE: &str = r#"package main

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"pgfence.example/pgfence"
)

var (
	_                    = errors.Is
	fence                = pgfence.New("")
	pool                 *pgxpool.Pool
	db                   *sql.DB
	lease, first, second *pgfence.Lease
	names                []string
	work                 pgfence.PgxWork
	schedule             pgfence.Work
	report               func(context.Context) error
)

func main() {}
"#;

/// The directory with the worker, the example and the tests, in which a race of goroutines is a failure.
fn build() -> Result<PathBuf> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let tools = Tools::new();
    tools.bring()?;
    let programs = tools.home.join("programs");
    let out = |name: &str| programs.join(name).display().to_string();
    // Go itself knows what has changed since the last build.
    tools.go(&["build", "-o", &out("worker"), "./worker"])?;
    tools.go(&["build", "-o", &out("first_worker"), "./examples/first"])?;
    let mut tests = tools.command("go");
    tests.args(["test", "-race", "-c", "-o", &out("tests"), "."]).env("CGO_ENABLED", "1");
    output_of(&mut tests)?;
    Ok(programs)
}

/// Go, its libraries and its linter.
struct Tools {
    /// A directory in the target directory.
    home: PathBuf,
    /// The directory into which Debian's packages are unpacked, as if it were `/`.
    debian: PathBuf,
}

impl Tools {
    fn new() -> Tools {
        let home = target_dir().join("clients/go");
        Tools { debian: home.join("debian"), home }
    }

    /// The directory of Go itself, once it exists.
    fn root(&self) -> PathBuf {
        self.debian.join("usr/lib/go")
    }

    fn staticcheck(&self) -> String {
        self.debian.join("usr/bin/go-staticcheck").display().to_string()
    }

    fn is_ready(&self) -> bool {
        self.root().exists()
    }

    fn bring(&self) -> Result<()> {
        if !self.is_ready() {
            let _ = fs::remove_dir_all(&self.debian);
            fs::create_dir_all(&self.home)?;
            let releases = Releases::of(PackageKind::Binary, &self.home, RELEASES)?;
            // "2:1.27~1" depends on golang-1.27-go.
            let versions = releases.versions("golang-go")?;
            let newest = versions.first().context("apt knows no golang-go")?;
            let version = newest.trim_start_matches("2:").split('~').next().unwrap_or_default();
            let mut packages =
                vec![format!("golang-{version}-go"), format!("golang-{version}-src")];
            packages.push("go-staticcheck".to_owned());
            packages.extend(LIBRARIES.map(|(_, package)| package.to_owned()));
            releases.unpack(&packages, &self.debian)?;
            std::os::unix::fs::symlink(format!("go-{version}"), self.root())?;
        }
        self.write_module()
    }

    /// The client's go.mod, with the path of each of Debian's libraries. Some of these need a newer Go than the client.
    fn write_module(&self) -> Result<()> {
        let go = fs::read_link(self.root())?.display().to_string().replace("go-", "go ");
        let own = fs::read_to_string(client().join("go.mod"))?;
        let line = |line: &str| if line.starts_with("go ") { go.clone() } else { line.to_owned() };
        let mut text = own.lines().map(|text| line(text) + "\n").collect::<String>();
        for (module, _) in LIBRARIES {
            let at = self.debian.join("usr/share/gocode/src").join(module);
            ensure!(at.join("go.mod").exists(), "{} is no module", at.display());
            text += &format!("replace {module} => {}\n", at.display());
        }
        // Used by tests of the libraries, none of which are compiled.
        const TESTIFY: &str = "github.com/stretchr/testify";
        let testify = self.home.join("testify");
        fs::create_dir_all(&testify)?;
        fs::write(testify.join("go.mod"), format!("module {TESTIFY}\n"))?;
        text += &format!("replace {TESTIFY} => {}\n", testify.display());
        Ok(fs::write(self.module(), text)?)
    }

    fn module(&self) -> PathBuf {
        self.home.join("go.mod")
    }

    /// Runs Go in the client's directory.
    fn go(&self, arguments: &[&str]) -> Result<()> {
        output_of(self.command("go").args(arguments)).map(drop)
    }

    /// A command in the client's directory, in which it writes nothing.
    fn command(&self, program: &str) -> Command {
        // A program with a path is not changed.
        let mut command = Command::new(self.root().join("bin").join(program));
        let path = std::env::var("PATH").unwrap_or_default();
        command
            .current_dir(client())
            .env("PATH", format!("{}:{path}", self.root().join("bin").display()))
            .env("GOROOT", self.root())
            .env("GOPATH", self.home.join("path"))
            .env("GOCACHE", self.home.join("cache"))
            .env("GOENV", "off")
            .env("GOPROXY", "off")
            .env("GOTOOLCHAIN", "local")
            .env("CGO_ENABLED", "0")
            .env("GOFLAGS", format!("-mod=mod -modfile={}", self.module().display()));
        command
    }
}

fn client() -> PathBuf {
    source_root().join("clients/go")
}

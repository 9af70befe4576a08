//! The client in Go, on pgx 5.
//!
//! Go and pgx are packages of newer releases of Debian than the machine's own may be, unpacked in the target directory;
//! no registry of Go is used.

use super::{Language, Page, Variables, out};
use crate::debian_releases::{PackageKind, RELEASES, Releases};
use crate::source_tree::source_root;
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};

pub const LANGUAGE: Language = Language {
    name: "go",
    directory: "go",
    is_there: || root().exists(),
    bring,
    build: BUILD,
    worker: "$OUT/programs/worker",
    first_worker: ("examples/first/main.go", "$OUT/programs/first_worker"),
    tests: "$OUT/programs/tests",
    tools: &[],
    checks: &[
        // gofmt lists badly formatted files but exits with 0.
        "found=$($GOROOT/bin/gofmt -l .); echo \"$found\"; test -z \"$found\"",
        "$GOROOT/bin/go vet ./...",
        "$GOROOT/bin/go vet $OUT/page/main.go",
        "PATH=$GOROOT/bin:$PATH; $OUT/debian/usr/bin/go-staticcheck -checks all ./...",
    ],
    page: Some(Page {
        mark: "go",
        but: 1,
        file: "main.go",
        program: [PRELUDE, ""],
        example: [
            "func _(ctx context.Context) (err error) {\n{\n",
            "_, _ = ctx, err\n}\nreturn err\n}\n",
        ],
    }),
};

/// The worker, the example and the tests, in which a race of goroutines is a failure. The client's go.mod gets the path
/// of each of Debian's libraries, some of which need a newer Go than the client. `testify` is used by tests of the
/// libraries, none of which are compiled.
const BUILD: &str = r#"
    PATH=$GOROOT/bin:$PATH
    module() { GOFLAGS= go mod edit "$@" $OUT/go.mod; }
    cp go.mod $OUT/go.mod
    module -go=$(readlink $GOROOT | tr -d go-)
    mkdir -p $OUT/testify
    echo module github.com/stretchr/testify > $OUT/testify/go.mod
    module -replace=github.com/stretchr/testify=$OUT/testify
    sed -n 's/^\t\([^ ]*\) .*/\1/p' go.mod | while read -r library; do
        module -replace=$library=$OUT/debian/usr/share/gocode/src/$library
    done
    go build -o $OUT/programs/worker ./worker
    go build -o $OUT/programs/first_worker ./examples/first
    CGO_ENABLED=1 go test -race -c -o $OUT/programs/tests ."#;

/// The directory of Go itself, once it exists.
fn root() -> PathBuf {
    out("go").join("debian/usr/lib/go")
}

fn bring() -> Result<Variables> {
    let (home, root) = (out("go"), root());
    if !root.exists() {
        fetch(&home)?;
    }
    Ok(vec![
        ("GOROOT", root.into()),
        ("GOPATH", home.join("path").into()),
        ("GOCACHE", home.join("cache").into()),
        ("GOENV", "off".into()),
        ("GOPROXY", "off".into()),
        ("GOTOOLCHAIN", "local".into()),
        ("CGO_ENABLED", "0".into()),
        ("GOFLAGS", format!("-mod=mod -modfile={}", home.join("go.mod").display()).into()),
    ])
}

/// Fetches Go, its linter, and the libraries in the client's go.mod.
fn fetch(home: &Path) -> Result<()> {
    let debian = home.join("debian");
    let _ = fs::remove_dir_all(&debian);
    let releases = Releases::of(PackageKind::Binary, home, RELEASES)?;
    // "2:1.27~1" depends on golang-1.27-go.
    let versions = releases.versions("golang-go")?;
    let newest = versions.first().context("apt knows no golang-go")?;
    let version = newest.trim_start_matches("2:").split('~').next().unwrap_or_default();
    let mut packages = vec!["go-staticcheck".to_owned()];
    packages.extend(["go", "src"].map(|part| format!("golang-{version}-{part}")));
    // Debian calls github.com/jackc/pgx/v5 golang-github-jackc-pgx-v5-dev.
    let module = fs::read_to_string(source_root().join("clients/go/go.mod"))?;
    let required = module.lines().filter_map(|line| line.strip_prefix('\t')?.split(' ').next());
    packages.extend(required.map(|library| {
        let name = library.replace(".com", "").replace(".org", "").replace('/', "-");
        format!("golang-{name}-dev")
    }));
    releases.unpack(&packages, &debian)?;
    Ok(std::os::unix::fs::symlink(format!("go-{version}"), debian.join("usr/lib/go"))?)
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

//! Linters of what no compiler reads: the pages and the workflows.

use pg_test::process::output_of;
use pg_test::runtime::{self, Runtime};
use pg_test::source_tree::source_root;
use pg_test::{Harness, Result, harness_test};
use std::process::Command;

const LINTERS: Runtime = Runtime::Python(&["pymarkdownlnt==0.9.41", "zizmor==1.32.0"]);

/// Returns the command of a linter, in the root of the sources.
fn linter(program: &str) -> Result<Command> {
    let mut command = Command::new(runtime::fetch(LINTERS)?.join("bin").join(program));
    command.current_dir(source_root());
    Ok(command)
}

/// The rules that are left out: a table's row is longer than any limit (MD013), the README shows a picture in HTML
/// (MD033), the template of a pull request has no heading (MD041), and output of a program has no language (MD040). Go
/// is indented by tabs (MD010), and the book's summary has a heading for each part.
#[harness_test]
fn pages_pass_pymarkdown(_: &Harness) -> Result<()> {
    let mut pymarkdown = linter("pymarkdown")?;
    pymarkdown.args([
        "-d",
        "md013,md033,md040,md041",
        "--set",
        "plugins.md010.code_blocks=$!False",
    ]);
    pymarkdown.args(["scan", "--recurse", "--exclude", "docs/SUMMARY.md"]);
    // The page of the client in TypeScript has its reader run npm install there.
    pymarkdown.args(["--exclude", "clients/typescript/node_modules/**"]);
    pymarkdown.args(["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", ".github"]);
    output_of(pymarkdown.args(["docs", "clients", "pg_test"])).map(drop)
}

#[harness_test]
fn workflows_pass_zizmor(_: &Harness) -> Result<()> {
    output_of(linter("zizmor")?.args(["--offline", "--no-progress", ".github/workflows"])).map(drop)
}

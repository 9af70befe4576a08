//! The README and the pages in docs: their examples are run, their links are followed, and their lists are compared
//! with the source.

automod::dir!(pub "tests/suite/project/pages");

pub use examples::play;
use pg_test::markdown::section;

use pg_test::process::output_of;
use pg_test::{Context, Result};
use std::process::Command;

/// Returns the text of a page, by its path in the source tree.
pub fn page(path: &str) -> Result<String> {
    let path = pg_test::source_tree::source_root().join(path);
    std::fs::read_to_string(&path).with_context(|| path.display().to_string())
}

/// Returns the paths of all pages in the source tree: those at its root, in docs and its folders, and the clients'.
fn pages() -> Result<Vec<String>> {
    let all = "ls *.md clients/*.md clients/*/README.md; find docs -name '*.md'";
    let mut list = Command::new("sh");
    list.args(["-ec", all]).current_dir(pg_test::source_tree::source_root());
    Ok(output_of(&mut list)?.lines().map(str::to_owned).collect())
}

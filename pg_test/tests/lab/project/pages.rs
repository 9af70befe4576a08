//! The README and the pages in docs: their examples are run, their links are followed, and what they list is
//! compared with what there is.

automod::dir!(pub "tests/lab/project/pages");

pub use examples::play;
use pg_test::markdown::section;

use pg_test::process::output_of;
use pg_test::{Context, Result};
use std::process::Command;

/// The text of a page, by its path below the root of the source.
pub fn page(path: &str) -> Result<String> {
    let path = pg_test::source_tree::source_root().join(path);
    std::fs::read_to_string(&path).with_context(|| path.display().to_string())
}

/// The paths of all pages below the root of the source: its own, those in docs and in the folders there, and the clients'.
fn pages() -> Result<Vec<String>> {
    let all = "ls *.md clients/*.md clients/*/README.md; find docs -name '*.md'";
    let mut list = Command::new("sh");
    list.args(["-ec", all]).current_dir(pg_test::source_tree::source_root());
    Ok(output_of(&mut list)?.lines().map(str::to_owned).collect())
}

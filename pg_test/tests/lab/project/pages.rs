//! The README and the pages in docs: their examples are run, their links are followed, and what they list is
//! compared with what there is.

automod::dir!(pub "tests/lab/project/pages");

pub use examples::play;
use pg_test::markdown::section;

use pg_test::{Context, Result};
use std::path::PathBuf;

/// The text of a page, by its path below the root of the source.
pub fn page(path: &str) -> Result<String> {
    let path = pg_test::source_tree::source_root().join(path);
    std::fs::read_to_string(&path).with_context(|| path.display().to_string())
}

/// The paths of all pages below the root of the source: its own, and those in docs and in the folders there.
fn pages() -> Result<Vec<String>> {
    let root = pg_test::source_tree::source_root();
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::new(), PathBuf::from("docs")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(root.join(&folder))? {
            let path = folder.join(entry?.file_name());
            if path.extension().is_some_and(|ending| ending == "md") {
                found.push(path.to_string_lossy().into_owned());
            } else if folder.starts_with("docs") && root.join(&path).is_dir() {
                folders.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

/// The paths of the pages of the clients.
fn client_pages() -> Result<Vec<String>> {
    let shared = ["clients/README.md", "clients/scenarios.md", "clients/new-language.md"];
    let mut found = shared.map(str::to_owned).to_vec();
    for entry in std::fs::read_dir(pg_test::source_tree::source_root().join("clients"))? {
        let path = PathBuf::from("clients").join(entry?.file_name()).join("README.md");
        if pg_test::source_tree::source_root().join(&path).exists() {
            found.push(path.to_string_lossy().into_owned());
        }
    }
    Ok(found)
}

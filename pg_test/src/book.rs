//! The pages as a book, built by mdBook: those of `docs/SUMMARY.md` in their places, with the files to which they link.

use crate::markdown;
use crate::source_tree::source_root;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

const SUMMARY: &str = "docs/SUMMARY.md";

/// The paths of the book's pages, relative to the root of the source.
pub fn pages() -> Result<Vec<PathBuf>> {
    let summary = fs::read_to_string(source_root().join(SUMMARY))?;
    Ok(files(Path::new(SUMMARY), &summary))
}

/// The files to which a page links, relative to the root of the source.
pub fn files(page: &Path, text: &str) -> Vec<PathBuf> {
    let links = markdown::links(text).into_iter().filter(|link| !link.contains(':'));
    let links = links.filter_map(|link| Some(link.split('#').next()?.to_owned()));
    links.filter(|link| !link.is_empty()).map(|link| beside(page, &link)).collect()
}

/// The path to which a link of a page leads.
pub fn beside(page: &Path, link: &str) -> PathBuf {
    let mut target = page.parent().map(Path::to_path_buf).unwrap_or_default();
    for part in Path::new(link).components() {
        match part {
            Component::ParentDir => drop(target.pop()),
            Component::CurDir => {}
            other => target.push(other),
        }
    }
    target
}

/// Builds the book in `target/book`, and returns its first page.
pub fn build() -> Result<PathBuf> {
    let root = source_root();
    let book = root.join("target/book");
    let _ = fs::remove_dir_all(&book);
    let put = |path: &Path, text: &[u8]| -> Result<()> {
        let target = book.join("src").join(path);
        fs::create_dir_all(target.parent().context("a path below the book")?)?;
        Ok(fs::write(target, text)?)
    };
    for page in pages()? {
        let text =
            fs::read_to_string(root.join(&page)).with_context(|| page.display().to_string())?;
        put(&page, text.as_bytes())?;
        // Pictures, programs and specifications are copied unchanged.
        for target in files(&page, &text) {
            if root.join(&target).is_file()
                && target.extension().is_none_or(|ending| ending != "md")
            {
                put(&target, &fs::read(root.join(&target))?)?;
            }
        }
    }
    // mdBook expects the summary at the top.
    let summary = fs::read_to_string(root.join(SUMMARY))?;
    let summary =
        summary.replace("](../", "](@").replace("](", "](docs/").replace("](docs/@", "](");
    put(Path::new("SUMMARY.md"), summary.as_bytes())?;
    let built = Command::new("mdbook").args(["build"]).arg(root).status();
    let built = built.context("mdbook does not run: cargo install mdbook --locked")?;
    ensure!(built.success(), "mdbook: {built}");
    Ok(book.join("html/index.html"))
}

//! Every link of every page leads to an existing file or section. The book contains every page, and its links lead to
//! pages in it.

use super::{page, pages};
use pg_test::markdown::{anchors, links};
use pg_test::source_tree::source_root;
use pg_test::{Harness, Result, book, ensure, harness_test};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

#[harness_test]
fn every_link_has_a_target(_: &Harness) -> Result<()> {
    let (mut followed, mut broken) = (0, Vec::new());
    for path in pages()? {
        for link in links(&page(&path)?).iter().filter(|link| !link.starts_with("https://")) {
            followed += 1;
            if let Err(error) = follow(&path, link) {
                broken.push(format!("{path}: ({link}): {error:#}"));
            }
        }
    }
    ensure!(broken.is_empty(), "{}", broken.join("\n"));
    ensure!(followed > 100, "only {followed} links were found");
    Ok(())
}

fn follow(from: &str, link: &str) -> Result<()> {
    let (path, anchor) = link.split_once('#').map_or((link, None), |(p, a)| (p, Some(a)));
    let from = Path::new(from);
    let target = if path.is_empty() { from.to_owned() } else { book::beside(from, path) };
    let is_there = source_root().join(from.with_file_name(path)).exists();
    ensure!(target.is_relative() && is_there, "there is no {}", target.display());
    if let Some(anchor) = anchor {
        let titles = anchors(&page(&target.to_string_lossy())?);
        ensure!(titles.contains(anchor), "{} has no section #{anchor}", target.display());
    }
    Ok(())
}

/// A newcomer reads the whole first page, so it must be short.
#[harness_test]
fn the_first_page_is_short(_: &Harness) -> Result<()> {
    let lines = page("README.md")?.lines().count();
    ensure!(lines <= 300, "README.md has {lines} lines");
    Ok(())
}

#[harness_test]
fn every_page_is_in_the_book(_: &Harness) -> Result<()> {
    let listed = book::pages()?;
    let book: BTreeSet<&PathBuf> = listed.iter().collect();
    ensure!(book.len() == listed.len(), "a page is listed twice: {listed:?}");
    let mut missing: Vec<PathBuf> = Vec::new();
    for path in pages()?.into_iter().filter(|path| path != "docs/SUMMARY.md") {
        let linked = book::files(Path::new(&path), &page(&path)?);
        let linked = linked.into_iter().filter(|file| file.extension().is_some_and(|e| e == "md"));
        missing.extend(linked.chain([path.into()]).filter(|page| !book.contains(page)));
    }
    ensure!(missing.is_empty() && listed.len() > 40, "not in docs/SUMMARY.md: {missing:?}");
    Ok(())
}

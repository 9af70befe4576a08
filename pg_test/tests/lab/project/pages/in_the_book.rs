//! The book has every page, and only links to pages that it has.

use super::links::links_of;
use super::{client_pages, pages};
use pg_test::{book, ensure, lab_test, Lab, Result};
use std::collections::BTreeSet;

#[lab_test]
fn every_page_is_in_the_book(_: &Lab) -> Result<()> {
    let listed: Vec<String> =
        book::pages()?.iter().map(|path| path.to_string_lossy().into_owned()).collect();
    let book: BTreeSet<&String> = listed.iter().collect();
    ensure!(book.len() == listed.len(), "a page is listed twice: {listed:?}");
    let all: Vec<String> = pages()?.into_iter().chain(client_pages()?).collect();
    let missing: Vec<_> =
        all.iter().filter(|page| *page != "docs/SUMMARY.md" && !book.contains(page)).collect();
    ensure!(missing.is_empty() && listed.len() > 40, "not in docs/SUMMARY.md: {missing:?}");
    for page in &listed {
        for target in links_of(page)? {
            ensure!(
                !target.ends_with(".md") || book.contains(&target),
                "{page} links to {target}, which is not in docs/SUMMARY.md"
            );
        }
    }
    Ok(())
}

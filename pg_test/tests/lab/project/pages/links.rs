//! Every link of every page leads somewhere: to a file, or to a section of a page.

use super::{client_pages, page, pages};
use pg_test::markdown::{anchors, links};
use pg_test::{ensure, lab_test, Context, Lab, Result};
use std::path::{Component, Path, PathBuf};

#[lab_test]
fn every_link_has_a_target(_: &Lab) -> Result<()> {
    let (mut followed, mut broken) = (0, Vec::new());
    for path in pages()?.into_iter().chain(client_pages()?) {
        for link in links(&page(&path)?) {
            followed += 1;
            if let Err(error) = follow(&path, &link) {
                broken.push(format!("{path}: ({link}): {error:#}"));
            }
        }
    }
    ensure!(broken.is_empty(), "{}", broken.join("\n"));
    ensure!(followed > 100, "only {followed} links were found");
    Ok(())
}

/// A newcomer reads the first page as a whole.
#[lab_test]
fn the_first_page_is_short(_: &Lab) -> Result<()> {
    let lines = page("README.md")?.lines().count();
    ensure!(lines <= 300, "README.md has {lines} lines");
    Ok(())
}

/// The files that a page links to, below the root of the source.
pub fn links_of(path: &str) -> Result<Vec<String>> {
    let links = links(&page(path)?).into_iter().filter(|link| !link.starts_with("https://"));
    let files = links.filter_map(|link| link.split('#').next().map(str::to_owned));
    files
        .filter(|file| !file.is_empty())
        .map(|file| Ok(beside(path, &file)?.to_string_lossy().into_owned()))
        .collect()
}

fn follow(from: &str, link: &str) -> Result<()> {
    if link.starts_with("https://") {
        return Ok(());
    }
    let (path, anchor) = link.split_once('#').map_or((link, None), |(p, a)| (p, Some(a)));
    let target = if path.is_empty() { from.into() } else { beside(from, path)? };
    let file = pg_test::source_tree::source_root().join(&target);
    ensure!(file.exists(), "there is no {}", target.display());
    if let Some(anchor) = anchor {
        let titles = anchors(&page(&target.to_string_lossy())?);
        ensure!(titles.contains(anchor), "{} has no section #{anchor}", target.display());
    }
    Ok(())
}

/// The path that a link means, below the root of the source.
fn beside(from: &str, path: &str) -> Result<PathBuf> {
    let mut target = Path::new(from).parent().context("a page lies somewhere")?.to_path_buf();
    for part in Path::new(path).components() {
        match part {
            Component::Normal(name) => target.push(name),
            Component::ParentDir => ensure!(target.pop(), "outside of the source"),
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => pg_test::bail!("not relative"),
        }
    }
    Ok(target)
}

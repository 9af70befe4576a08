//! Every link of every page leads somewhere: to a file, or to a section of a page.

use super::{client_pages, page, pages};
use pg_test::{ensure, lab_test, Context, Lab, Result};
use std::collections::BTreeSet;
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

#[lab_test]
fn a_wrong_link_is_seen(_: &Lab) -> Result<()> {
    for good in ["LICENSE", "docs", "#install", "docs/tutorial/concepts.md#how-it-works"] {
        follow("README.md", good).context(good)?;
    }
    follow("docs/tutorial/concepts.md", "../../README.md#install")?;
    for bad in
        ["LICENCE", "#no-such-section", "docs/tutorial/concepts.md#install", "docs#install", "/etc"]
    {
        ensure!(follow("README.md", bad).is_err(), "followed: {bad}");
    }
    ensure!(
        follow("docs/tutorial/concepts.md", "docs/tutorial/concepts.md").is_err(),
        "links start at their page"
    );
    let text = "[a](b)\n```sql\nSELECT '[c](d)';\n```\n`[e](f)` [`g`](h#i)\n[j\nk](l)";
    ensure!(links(text) == ["b", "h#i", "l"], "{:?}", links(text));
    let titles = anchors("# A `b_c`, d\n## E\n```sh\n# no title\n```\n## E\n");
    ensure!(titles == ["a-b_c-d", "e", "e-1"].map(str::to_owned).into(), "{titles:?}");
    Ok(())
}

/// A newcomer reads the first page as a whole.
#[lab_test]
fn the_first_page_is_short(_: &Lab) -> Result<()> {
    let lines = page("README.md")?.lines().count();
    ensure!(lines <= 300, "README.md has {lines} lines");
    Ok(())
}

fn follow(from: &str, link: &str) -> Result<()> {
    if link.starts_with("https://") {
        return Ok(());
    }
    let (path, anchor) = link.split_once('#').map_or((link, None), |(p, a)| (p, Some(a)));
    let target = if path.is_empty() { from.into() } else { beside(from, path)? };
    let file = pg_test::extension::source_root().join(&target);
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

/// Where the links of a page lead to: not those in code.
fn links(text: &str) -> Vec<String> {
    let prose = prose(text).join("\n");
    // Within a line of prose, each second piece between backticks is code.
    let plain: String = prose.split('`').step_by(2).collect::<Vec<_>>().join("");
    plain
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')').map(|(link, _)| link.to_owned()))
        .collect()
}

/// The names by which a page's sections can be linked to, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for line in prose(text) {
        let title = line.trim_start_matches('#');
        if title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
        let name: String = title.trim().chars().filter(kept).collect();
        let name = name.to_lowercase().replace(' ', "-");
        let same = (1..).map(|n| format!("{name}-{n}"));
        let free = std::iter::once(name.clone()).chain(same).find(|name| !names.contains(name));
        names.extend(free);
    }
    names
}

/// The lines of a page that are not in a block of code.
fn prose(text: &str) -> Vec<&str> {
    let mut in_code = false;
    text.lines()
        .filter(|line| {
            let fence = line.trim_start().starts_with("```");
            in_code ^= fence;
            !in_code && !fence
        })
        .collect()
}

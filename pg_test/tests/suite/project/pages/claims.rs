//! The pages' claims on packages, on the lite edition, and on plots are true.

use super::{page, section};
use pg_test::{Context, Harness, Result, ensure, harness_test};

#[harness_test]
fn packages_are_offered_once_a_version_is_released(_: &Harness) -> Result<()> {
    let changelog = page("CHANGELOG.md")?;
    let latest = changelog.lines().find(|line| line.starts_with("## ")).context("no version")?;
    let none_yet = latest.contains("(unreleased)") && changelog.contains("nothing was released");
    for (path, says) in [
        ("README.md", "no packages to download yet"),
        ("docs/operations/installing.md", "No package is published yet"),
    ] {
        let said = page(path)?.split_whitespace().collect::<Vec<_>>().join(" ").contains(says);
        ensure!(said == none_yet, "{path}: {says:?}, and {latest}");
    }
    Ok(())
}

#[harness_test]
fn every_function_that_the_edition_without_a_library_lacks_is_named(_: &Harness) -> Result<()> {
    let (reference, lite) = (page("docs/reference/sql.md")?, page("docs/reference/lite.md")?);
    let differs = section(&lite, "## Which edition")?;
    let sql = page("sql/pg_fence_lite.sql")? + &page("sql/3_row_leases.sql")?;
    let names = reference.lines().filter_map(|line| line.strip_prefix("### "));
    let lacks: Vec<&str> = names
        .filter(|name| !name.contains('.') && !sql.contains(&format!("FUNCTION {name}(")))
        .collect();
    let missing: Vec<_> =
        lacks.iter().filter(|name| !differs.contains(&format!("`{name}`"))).collect();
    ensure!(missing.is_empty() && lacks.len() < 12, "not named: {missing:?} of {lacks:?}");
    Ok(())
}

/// Every figure that a page quotes from the plots is in one of them, and every plot is shown on a page.
#[harness_test]
fn the_plots_are_shown_and_say_what_is_quoted_from_them(_: &Harness) -> Result<()> {
    let (text, capacity) =
        (page("docs/operations/benchmarks.md")?, page("docs/operations/capacity.md")?);
    let (mut plots, mut unshown) = (String::new(), Vec::new());
    for entry in std::fs::read_dir(pg_test::source_tree::source_root().join("pg_test/bench/plots"))?
    {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if !text.contains(&name) && !capacity.contains(&name) {
            unshown.push(name.clone());
        }
        plots += &page(&format!("pg_test/bench/plots/{name}"))?;
    }
    ensure!(unshown.is_empty(), "shown on no page: {unshown:?}");
    let figures: Vec<&str> = section(&text, "## At a glance")?
        .lines()
        .filter(|line| !line.starts_with("![") && !line.starts_with("One run"))
        .flat_map(|line| line.split(|c: char| !c.is_ascii_digit() && c != '.' && c != ','))
        .map(|word| word.trim_matches(['.', ',']))
        .filter(|word| word.contains(['.', ',']))
        .collect();
    let wrong: Vec<_> =
        figures.iter().filter(|figure| !plots.contains(&format!(">{figure}<"))).collect();
    ensure!(wrong.is_empty() && figures.len() > 15, "in no plot: {wrong:?} of {figures:?}");
    Ok(())
}

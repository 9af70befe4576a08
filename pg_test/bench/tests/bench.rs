//! The bench works: every section measures, and says what it could not. How fast, no test asks.

use pg_fence_bench::{sections, Options};
use pg_test::{ensure, Lab, Result};
use std::path::Path;

#[test]
fn every_section_of_the_bench_has_figures() -> Result<()> {
    let lab = Lab::start(Path::new(env!("CARGO_BIN_EXE_pg_fence_bench")))?;
    let options = Options { short: true, ..Options::default() };
    let report = pg_fence_bench::run(&lab, &options)?;
    ensure!(report.sections.len() == sections::ALL.len());
    for section in &report.sections {
        // They need what another package or another build would bring; then they are among the skipped.
        if ["Instructions", "Counting"].contains(&&*section.title) && section.tables.is_empty() {
            let name = section.title.to_lowercase();
            ensure!(report.skipped.iter().any(|line| line.starts_with(&name)), "{section}");
            continue;
        }
        ensure!(!section.tables.is_empty() && !section.goals.is_empty(), "{section}");
        ensure!(!section.plots.is_empty(), "no plot: {}", section.title);
        for table in &section.tables {
            ensure!(!table.rows.is_empty(), "no rows: {}", table.title);
            ensure!(table.rows.iter().all(|row| row.len() == table.head.len()), "{table}");
        }
    }
    // Only what another package or another build would bring may be missing.
    let only_foreign = report.skipped.iter().all(|line| {
        ["Redis", "etcd", "ZooKeeper", "C triggers", "instructions", "counting"]
            .iter()
            .any(|name| line.starts_with(name))
    });
    ensure!(only_foreign, "{:?}", report.skipped);
    Ok(())
}

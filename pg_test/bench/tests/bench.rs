//! The bench works: every section measures, and reports what it could not. No test checks the speed.

use pg_fence_bench::{Options, sections};
use pg_test::{Harness, Result, ensure};
use std::path::Path;

#[test]
fn every_section_of_the_bench_has_figures() -> Result<()> {
    let harness = Harness::start(Path::new(env!("CARGO_BIN_EXE_pg_fence_bench")))?;
    let options = Options { short: true, ..Options::default() };
    let report = pg_fence_bench::run(&harness, &options)?;
    ensure!(report.sections.len() == sections::ALL.len());
    for section in &report.sections {
        ensure!(!section.tables.is_empty() && !section.goals.is_empty(), "{section}");
        for table in &section.tables {
            ensure!(!table.rows.is_empty(), "no rows: {}", table.title);
            ensure!(table.rows.iter().all(|row| row.len() == table.head.len()), "{table}");
        }
    }
    // Only measurements of other packages may be missing.
    let is_foreign = |line: &String| {
        ["Redis", "etcd", "ZooKeeper", "C triggers"].iter().any(|name| line.starts_with(name))
    };
    ensure!(report.skipped.iter().all(is_foreign), "{:?}", report.skipped);
    Ok(())
}

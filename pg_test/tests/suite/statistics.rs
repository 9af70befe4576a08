//! The columns of fence.stats. What they count is tested in statistics.script.

automod::dir!(pub "tests/suite/statistics");

use pg_test::{Harness, Result, ensure, harness_test};

#[harness_test]
fn each_counter_has_its_column(harness: &Harness) -> Result<()> {
    let source = pg_test::source_tree::source_root().join("src/statistics/counter.rs");
    let source = std::fs::read_to_string(source)?;
    let variants = source.lines().skip_while(|line| *line != "pub enum Counter {").skip(1);
    // `TriesLost` is the column tries_lost.
    let column = |variant: &str| -> String {
        let words = variant
            .chars()
            .flat_map(|c| c.is_uppercase().then_some('_').into_iter().chain(c.to_lowercase()));
        words.skip(1).collect()
    };
    let counters: Vec<String> = variants
        .take_while(|line| *line != "}")
        .filter_map(|line| line.trim().strip_suffix(','))
        .map(column)
        .collect();
    let shown = "SELECT string_agg(attname, ' ' ORDER BY attnum) FROM pg_attribute
                  WHERE attrelid = 'fence.stats'::regclass AND attname <> 'stats_reset'";
    let shown = harness.database()?.connect()?.text(shown)?.unwrap_or_default();
    ensure!(shown == counters.join(" "), "{shown}, not {counters:?}");
    Ok(())
}

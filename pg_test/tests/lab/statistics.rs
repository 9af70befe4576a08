//! fence.stats: its columns. What is counted is in statistics.script.

automod::dir!(pub "tests/lab/statistics");

use pg_test::{ensure, lab_test, Lab, Result, Session};

/// The counters that are not zero, without the time that was waited.
pub fn shown(session: &mut Session) -> Result<String> {
    let shown = session.text(
        "SELECT coalesce(string_agg(c.key || ' ' || c.value, ', ' ORDER BY c.key COLLATE \"C\"), '')
           FROM fence.stats s, jsonb_each_text(to_jsonb(s) - 'stats_reset' - 'wait_time') c
          WHERE c.value <> '0'",
    )?;
    Ok(shown.unwrap_or_default())
}

#[lab_test]
fn each_counter_has_its_column(lab: &Lab) -> Result<()> {
    let source = pg_test::source_tree::source_root().join("src/statistics/counter.rs");
    let source = std::fs::read_to_string(source)?;
    let counters = source.lines().filter_map(|line| line.split_once(" = \""));
    let mut counters: Vec<_> =
        counters.filter_map(|(_, column)| column.strip_suffix("\",")).collect();
    counters.sort_unstable();
    let shown = "SELECT string_agg(key, ' ' ORDER BY key COLLATE \"C\")
           FROM fence.stats s, jsonb_each(to_jsonb(s) - 'stats_reset') WHERE value <> 'null'";
    let shown = lab.database()?.connect()?.text(shown)?.unwrap_or_default();
    ensure!(shown == counters.join(" "), "{shown}, not {counters:?}");
    Ok(())
}

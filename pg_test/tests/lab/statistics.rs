//! fence.stats: its columns, and the time that was waited. The rest is in statistics.script.

automod::dir!(pub "tests/lab/statistics");

use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Background, Calls, Lab, Result, Session};
use std::time::Duration;

/// The counts since the last call, as `guards 1, releases 2`; it counts from zero then.
pub fn counted(session: &mut Session) -> Result<String> {
    let counted = shown(session)?;
    session.run("SELECT fence_stats_reset()")?;
    Ok(counted)
}

/// The counters that are not zero, without the time that was waited.
pub fn shown(session: &mut Session) -> Result<String> {
    let shown = session.text(
        "SELECT coalesce(string_agg(c.key || ' ' || c.value, ', ' ORDER BY c.key COLLATE \"C\"), '')
           FROM fence.stats s, jsonb_each_text(to_jsonb(s) - 'stats_reset' - 'wait_time') c
          WHERE c.value <> '0'",
    )?;
    Ok(shown.unwrap_or_default())
}

/// Fails unless exactly that was counted since the last look.
pub fn expect(session: &mut Session, what: &str, wanted: &str) -> Result<()> {
    let counted = counted(session)?;
    ensure!(counted == wanted, "{what}: counted {counted}, not {wanted}");
    Ok(())
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

#[lab_test]
fn a_wait_is_counted_with_its_time(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let wait_time =
        |session: &mut Session| session.one::<f64>("SELECT wait_time FROM fence.stats", &[]);
    let token = session.acquire("a", "1 h")?;
    session.granted("SELECT lease_acquire('free', wait => '1 h')")?;
    expect(&mut session, "no wait", "grants 2")?;
    session.nothing("SELECT lease_acquire('a', wait => '50 ms')")?;
    ensure!(wait_time(&mut session)? >= 50.0);
    expect(&mut session, "a wait in vain", "tries_lost 1, waits 1")?;
    ensure!(wait_time(&mut session)? == 0.0);

    let mut waiter = Background::connect(&db.conninfo())?;
    waiter.send("SELECT lease_acquire('a', wait => '1 h')")?;
    waiter.wait_until_blocked()?;
    session.release("a", token)?;
    waiter.rows()?;
    expect(&mut session, "a wait that won", "grants 1, releases 1, waits 1")?;

    for (end, sqlstate) in [("cancel", "57014"), ("terminate", "57P01")] {
        waiter.send("SELECT lease_acquire('a', wait => '1 h')")?;
        waiter.wait_until_blocked()?;
        std::thread::sleep(Duration::from_millis(20));
        if end == "cancel" {
            waiter.cancel()?;
        } else {
            waiter.terminate()?;
        }
        let fault = waiter.outcome(PATIENCE)?.expect_err("it was ended");
        ensure!(fault.sqlstate == sqlstate || fault.is_disconnect(), "{fault}");
        let over = "SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = $1 AND state = 'active'";
        let pid = waiter.pid();
        wait_until("it is over", PATIENCE, || session.one(over, &[&pid]).unwrap_or(false))?;
        ensure!(wait_time(&mut session)? >= 20.0, "{end}");
        expect(&mut session, end, "waits 1")?;
    }
    Ok(())
}

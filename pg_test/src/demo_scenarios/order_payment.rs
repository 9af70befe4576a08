//! One order, one payment, and a late write by a stale worker.

use super::DemoScenario;
use crate::demo_run::DemoRun;
use crate::timeline::Mark;
use anyhow::{Result, bail, ensure};

/// The scenario of the README's first screen, about a single row.
pub const ORDER_PAYMENT: DemoScenario = DemoScenario {
    title: "The order payment",
    summary: "A gives up on order 7 too late: B has been granted the lease and charged the card.",
    without: ("the fence", "the order would say 'failed' though the card was charged."),
    play,
};

fn play(scenario: &DemoRun) -> Result<String> {
    scenario.fenced_table("orders", "id int PRIMARY KEY, status text, charge text", "")?;
    scenario.run("INSERT INTO orders SELECT n, 'new' FROM generate_series(1, 7) AS n")?;
    handle_other_orders(scenario)?;
    scenario.table("order 7, before", ORDER)?;
    let (mut a, mut b) = (scenario.worker("A")?, scenario.worker("B")?);

    let old = a.acquires("order:7")?;
    a.tell(Mark::Note, "asks the payment provider about order 7, and waits, and waits");
    let late = format!("UPDATE orders SET status = 'failed', fence = {old} WHERE id = 7");
    a.freezes_before(&late)?;
    scenario.wait_until_expired("order:7")?;

    let new = b.acquires("order:7")?;
    let key = format!("order-7-{new}");
    b.tell(
        Mark::Note,
        format!("charges the card, with the idempotency key {key} (no fence there)"),
    );
    b.writes(&format!(
        "UPDATE orders SET status = 'paid', charge = '{key}', fence = {new} WHERE id = 7"
    ))?;
    let before = standing(scenario)?;
    if let Some(fault) = a.wakes_too_late(&late, "PF001")? {
        ensure!(fault.json()?["stored"] == new, "{fault}");
        ensure!(fault.table.as_deref() == Some("orders"), "which table? {fault:?}");
    }
    let rows = scenario.table("order 7, after", ORDER)?;
    let after = standing(scenario)?;
    if before.status != after.status {
        bail!("order 7 said {}, then {}", before.status, after.status);
    }
    ensure!(before == after, "the late write changed order 7: {}, then {}", before.row, after.row);

    let fence = new.to_string();
    let expected = ["7", "paid", &key, &fence].map(|text| Some(text.to_owned()));
    ensure!(rows == [expected], "{rows:?}");
    Ok(format!("order 7 is paid, as token {new} says; the late word with {old} changed nothing."))
}

const ORDER: &str = "SELECT id, status, charge, fence FROM orders WHERE id = 7";

fn handle_other_orders(scenario: &DemoRun) -> Result<()> {
    scenario.run(
        "DO $$BEGIN FOR n IN 1..6 LOOP
             PERFORM lease_release('order:' || n, lease_acquire('order:' || n));
         END LOOP; END$$",
    )?;
    scenario.note("orders 1 to 6 have been handled");
    Ok(())
}

/// The state of order 7.
#[derive(PartialEq)]
struct Standing {
    status: String,
    /// `ctid`, `xmin` and all columns: different for any two versions of the row.
    row: String,
}

fn standing(scenario: &DemoRun) -> Result<Standing> {
    let mut session = scenario.session()?;
    let row = session.query_one(
        "SELECT status, concat_ws(' ', ctid, xmin, o) FROM orders o WHERE id = 7",
        &[],
    )?;
    Ok(Standing { status: row.get(0), row: row.get(1) })
}

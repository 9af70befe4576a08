//! A batch of payouts, each to be paid once, whichever worker freezes.

use super::DemoScenario;
use crate::demo_run::DemoRun;
use anyhow::{Result, bail, ensure};

pub const PAYOUT_BATCH: DemoScenario = DemoScenario {
    title: "The payout batch",
    summary: "Worker A freezes in the middle of paying, B takes over, A wakes up none the wiser.",
    without: ("the fence", "Carla would be paid twice: A does not know that it lost the lease."),
    play,
};

fn play(scenario: &DemoRun) -> Result<String> {
    scenario.fenced_table("payouts", "id int PRIMARY KEY, payee text, due int, paid int", "")?;
    scenario.run(
        "INSERT INTO payouts VALUES (1, 'Anna', 100, 0), (2, 'Bela', 200, 0), (3, 'Carla', 300, 0)",
    )?;
    scenario.table("payouts, before", PAYOUTS)?;
    let (mut a, mut b) = (scenario.worker("A")?, scenario.worker("B")?);

    let old = a.acquires("payouts")?;
    b.finds_taken("payouts")?;
    a.writes(&pay(1, old))?;
    let late = pay(3, old);
    a.freezes_before(&late)?;
    scenario.wait_until_expired("payouts")?;

    let new = b.acquires("payouts")?;
    ensure!(new > old, "the later token is {new}, after {old}");
    b.writes(&pay(2, new))?;
    b.writes(&pay(3, new))?;

    if let Some(fault) = a.wakes_too_late(&late, "PF001")? {
        let detail = fault.json()?;
        ensure!(detail["presented"] == old && detail["stored"] == new, "{fault}");
    }
    let renewed = a.calls(&format!("lease_renew('payouts', {old})"))?;
    ensure!(renewed.is_none(), "a lost lease was renewed with {old}: {renewed:?}");
    b.calls(&format!("lease_release('payouts', {new})"))?;

    let rows = scenario.table("payouts, after", PAYOUTS)?;
    let fences: Vec<_> = rows.iter().map(|row| row[4].as_deref()).collect();
    let (old, new) = (old.to_string(), new.to_string());
    if let Some(row) = rows.iter().find(|row| row[2] != row[3]) {
        let [payee, due, paid] =
            [1, 2, 3].map(|column: usize| row[column].as_deref().unwrap_or("-"));
        bail!("{payee} was paid {paid} of {due}");
    }
    ensure!(fences == [Some(&*old), Some(&*new), Some(&*new)], "by whom: {fences:?}");
    Ok(format!("3 payouts, each paid once: 1 by A with token {old}, 2 by B with token {new}."))
}

const PAYOUTS: &str = "SELECT id, payee, due, paid, fence FROM payouts ORDER BY id";

fn pay(id: i32, token: i64) -> String {
    format!("UPDATE payouts SET paid = paid + due, fence = {token} WHERE id = {id}")
}

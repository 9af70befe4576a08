//! A short soak; `cargo run -- soak` runs longer ones.

use pg_test::soak::{self, Options};
use pg_test::{ensure, Lab, Result};
use std::time::Duration;

pg_test::trials![many_sessions_cross_on_a_few_leases];

fn many_sessions_cross_on_a_few_leases(lab: &Lab) -> Result<()> {
    let options = Options {
        length: Duration::from_secs(12),
        sessions: 60,
        seed: rand::random::<u32>().into(),
        handovers: 15,
    };
    let report = soak::on(lab, &options)?;
    ensure!(report.granted() > 50, "hardly anything happened:\n{report}");
    ensure!(report.handovers().len() == 5);
    Ok(())
}

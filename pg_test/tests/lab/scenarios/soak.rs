//! A short soak; `cargo run -- soak` runs longer ones.

use pg_test::soak::{self, Options};
use pg_test::{ensure, lab_test, Lab, Result};

#[lab_test]
fn many_sessions_cross_on_a_few_leases(lab: &Lab) -> Result<()> {
    let options = Options { minutes: 0.2, sessions: 60, seed: None, handovers: 15 };
    let report = soak::on(lab, &options)?;
    ensure!(report.granted() > 50, "hardly anything happened:\n{report}");
    ensure!(report.handovers().len() == 4);
    Ok(())
}

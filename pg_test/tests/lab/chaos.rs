//! The chaos run in its short form.

use pg_test::{chaos, ensure, Lab, Result};
use std::time::Duration;

pg_test::trials![half_a_minute_of_chaos_breaks_no_promise];

fn half_a_minute_of_chaos_breaks_no_promise(lab: &Lab) -> Result<()> {
    let seed = std::process::id().into();
    let summary = chaos::rage(lab.prefix(), Duration::from_secs(30), seed, None)?;
    ensure!(summary.violations().is_empty(), "{summary}");
    ensure!(summary.void().is_none(), "void: {:?}\n{summary}", summary.void());
    Ok(())
}

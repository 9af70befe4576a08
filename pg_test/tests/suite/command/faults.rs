//! Faults are planted in the command, and its scenarios must fail: a test that catches no fault proves nothing.

use pg_test::clients::command::catch_all;
use pg_test::clients::command::fixture::program;
use pg_test::{Harness, Result, harness_test};

#[harness_test(slow)]
fn planted_faults_are_caught(harness: &Harness) -> Result<()> {
    program()?;
    catch_all(harness)
}

//! Tests that cannot be run on this machine or with this server.

use anyhow::Result;
use std::fmt;

/// Why a test cannot be run here.
#[derive(Debug)]
pub(crate) struct LeftOut(pub(crate) String);

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "left out: {}", self.0)
    }
}

impl std::error::Error for LeftOut {}

/// Returns the error of a test that cannot be run here. The test counts as ignored, with that reason, and not as
/// passed.
pub fn left_out<T>(reason: &str) -> Result<T> {
    Err(LeftOut(reason.to_owned()).into())
}

/// Returns true if the error means that the test was left out.
pub fn is_left_out(error: &anyhow::Error) -> bool {
    error.is::<LeftOut>()
}

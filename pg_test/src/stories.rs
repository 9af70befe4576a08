//! The stories that the extension exists for, each played by real worker processes: the
//! demonstration tells them, and the tests hold them to their promise.

use crate::story_run::StoryRun;
use anyhow::Result;

mod daily_merge;
mod order_payment;
mod payout_batch;

/// What the extension is for, in one example.
pub struct Story {
    /// Its name in a word or two.
    pub title: &'static str,
    pub plot: &'static str,
    /// Without what it would have gone wrong, and how.
    pub without: (&'static str, &'static str),
    /// Plays it once, as [`StoryRun::play`] asks for: the outcome in a line, or the promise that was not kept.
    pub(crate) play: fn(&StoryRun) -> Result<String>,
}

pub use daily_merge::DAILY_MERGE;
pub use order_payment::ORDER_PAYMENT;
pub use payout_batch::PAYOUT_BATCH;

/// All of them, in the order in which the demonstration tells them. Each ends badly when tables are not fenced and
/// transactions not guarded.
pub const ALL: [Story; 3] = [PAYOUT_BATCH, ORDER_PAYMENT, DAILY_MERGE];

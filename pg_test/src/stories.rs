//! The stories that the extension exists for, each played by real worker processes: the
//! demonstration tells them, and the tests hold them to their promise.

mod daily_merge;
mod order_payment;
mod payout_batch;

pub use daily_merge::DAILY_MERGE;
pub use order_payment::ORDER_PAYMENT;
pub use payout_batch::PAYOUT_BATCH;

pub use crate::story_run::Story;

/// All of them, in the order in which the demonstration tells them. Each ends badly when tables are not fenced and
/// transactions not guarded.
pub const ALL: [Story; 3] = [PAYOUT_BATCH, ORDER_PAYMENT, DAILY_MERGE];

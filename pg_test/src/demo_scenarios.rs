//! The demo scenarios: what the extension is for, each run with real worker processes. The demonstration shows them,
//! and the tests check them.

mod daily_merge;
mod order_payment;
mod payout_batch;

pub use daily_merge::DAILY_MERGE;
pub use order_payment::ORDER_PAYMENT;
pub use payout_batch::PAYOUT_BATCH;

pub use crate::demo_run::DemoScenario;

/// All scenarios, in the order of the demonstration. Each ends badly without fenced tables and guarded transactions.
pub const ALL: [DemoScenario; 3] = [PAYOUT_BATCH, ORDER_PAYMENT, DAILY_MERGE];

//! What the laboratory and the command `pg_fence` watch, and where known faults are planted. No part of the API.

use crate::clock::Moment;
use crate::connected::BoxFuture;
use crate::error::{Error, LeaseLost};
use std::time::Duration;

/// Told of what happens to a lease. What answers something is for planting faults.
pub trait Hooks: Send + Sync {
    /// The heartbeat has renewed, and the lease is ours for so long.
    fn renewed(&self, _names: &[String], _token: i64, _remaining: Duration) {}

    /// The loss is told.
    fn lost(&self, _loss: &LeaseLost) {}

    /// Whether the heartbeat is to send nothing.
    fn starves(&self) -> bool {
        false
    }

    /// Whether anything but the heartbeat looks at the deadline, and at how long a call takes.
    fn watches(&self) -> bool {
        true
    }

    /// From when the ttl of a call counts that was begun at `before`.
    fn counts_from(&self, before: Moment) -> Moment {
        before
    }

    /// Whether a renewal that failed is a loss already.
    fn takes_failure_for_loss(&self) -> bool {
        false
    }

    /// Whether one lease of a batch that is gone is taken for the loss of all.
    fn takes_one_for_all(&self) -> bool {
        false
    }

    /// Whether a batch whose statement was refused is divided.
    fn divides(&self) -> bool {
        true
    }

    /// Whether a number is made known only by the first transaction that is guarded with it.
    fn adopts_late(&self) -> bool {
        false
    }

    /// Whether a number that is known is made known again, by each transaction that is guarded with it.
    fn adopts_again(&self) -> bool {
        true
    }

    /// Another way to renew.
    fn renews(&self, _name: &str, _token: i64) -> Option<BoxFuture<Result<Option<i64>, Error>>> {
        None
    }
}

/// As it is without a laboratory.
pub(crate) struct NoHooks;

impl Hooks for NoHooks {}

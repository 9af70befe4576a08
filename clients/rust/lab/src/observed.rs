//! A lease that says when it was renewed and lost, whose heartbeat can be starved, and known faults.

use crate::{lock, now_ms, say, until};
use pg_fence_client::hooks::Hooks;
use pg_fence_client::{Error, LeaseLost, Moment};
use serde_json::json;
use std::future::Future;
use std::pin::Pin;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// What renews within the transaction of the work: the only lease whose work has one is `job`.
pub const RENEW_IN_WORK: &str = "SELECT lease_renew('job', $1)";

/// A token, and who waits for the renewal.
pub type Renewal = (i64, oneshot::Sender<Result<Option<i64>, Error>>);

#[derive(Debug, Clone, Copy, PartialEq)]
enum Plant {
    None,
    DeadlineFromAnswer,
    ErrorIsLoss,
    RenewInWork,
    HangHidesLoss,
    OneNullLosesAll,
    OneLockStopsAll,
    AdoptsLate,
    AdoptsOnce,
}

pub struct Observed {
    plant: Plant,
    starved: AtomicBool,
    /// The lease of `acquire`, `resume` or `lead`, whose renewals are told.
    told: Mutex<Vec<String>>,
    /// The transaction that is open.
    work: Mutex<Option<mpsc::UnboundedSender<Renewal>>>,
}

impl Observed {
    pub fn new(plant: Option<&str>) -> Result<Observed, String> {
        let plant = match plant {
            None => Plant::None,
            Some("deadline-from-answer") => Plant::DeadlineFromAnswer,
            Some("error-is-loss") => Plant::ErrorIsLoss,
            Some("renew-in-work") => Plant::RenewInWork,
            Some("hang-hides-loss") => Plant::HangHidesLoss,
            Some("one-null-loses-all") => Plant::OneNullLosesAll,
            Some("one-lock-stops-all") => Plant::OneLockStopsAll,
            Some("adopts-late") => Plant::AdoptsLate,
            Some("adopts-once") => Plant::AdoptsOnce,
            Some(other) => return Err(format!("there is no plant {other}")),
        };
        let starved = AtomicBool::new(false);
        Ok(Observed { plant, starved, told: Mutex::default(), work: Mutex::default() })
    }

    /// From now on the heartbeat sends nothing.
    pub fn starve(&self) {
        self.starved.store(true, Ordering::Relaxed);
    }

    /// From now on that one's renewals are told; none but its own have been starved.
    pub fn acquired(&self, names: &[String]) {
        *lock(&self.told) = names.to_vec();
        self.starved.store(false, Ordering::Relaxed);
    }

    pub fn transaction_is_open(&self) -> mpsc::UnboundedReceiver<Renewal> {
        let (work, renewals) = mpsc::unbounded_channel();
        *lock(&self.work) = Some(work);
        renewals
    }

    pub fn transaction_has_ended(&self) {
        *lock(&self.work) = None;
    }
}

impl Hooks for Observed {
    fn renewed(&self, names: &[String], token: i64, remaining: Duration) {
        let wall = now_ms();
        if *lock(&self.told) == names {
            say("renewed", json!({ "token": token, "deadline": until(wall, remaining) }));
        }
    }

    fn lost(&self, loss: &LeaseLost) {
        say("lost", json!({ "name": loss.names()[0], "reason": loss.reason().as_str() }));
    }

    fn starves(&self) -> bool {
        self.starved.load(Ordering::Relaxed)
    }

    fn watches(&self) -> bool {
        self.plant != Plant::HangHidesLoss
    }

    fn counts_from(&self, before: Moment) -> Moment {
        if self.plant == Plant::DeadlineFromAnswer { Moment::now() } else { before }
    }

    fn takes_failure_for_loss(&self) -> bool {
        self.plant == Plant::ErrorIsLoss
    }

    fn takes_one_for_all(&self) -> bool {
        self.plant == Plant::OneNullLosesAll
    }

    fn divides(&self) -> bool {
        self.plant != Plant::OneLockStopsAll
    }

    fn adopts_late(&self) -> bool {
        self.plant == Plant::AdoptsLate
    }

    fn adopts_again(&self) -> bool {
        self.plant != Plant::AdoptsOnce
    }

    fn renews(
        &self,
        _name: &str,
        token: i64,
    ) -> Option<Pin<Box<dyn Future<Output = Result<Option<i64>, Error>> + Send>>> {
        let work = lock(&self.work).clone().filter(|_| self.plant == Plant::RenewInWork)?;
        Some(Box::pin(async move {
            let (answer, renewed) = oneshot::channel();
            let _ = work.send((token, answer));
            renewed.await.unwrap_or_else(|gone| Err(Error::other(gone)))
        }))
    }
}

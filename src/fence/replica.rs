//! The check under `session_replication_role = replica`: the publisher has checked the write, so only the order counts.

use super::plan::Plan;
use super::refusal::RefusedWrite;
use crate::errors::Report;
use crate::pg::fenced_table::trigger::TriggerCall;
use pg_fence_rules::fence::{Verdict, Write};
use pgrx::pg_sys;

/// Decides about a row before it is written. Errors: PF001, PF002.
#[inline(never)]
pub fn check(call: &TriggerCall, plan: &Plan, write: Write) -> Result<pg_sys::Datum, Report> {
    if let (Some(Some(stored)), Some(new)) = (write.old, write.new) {
        let verdict = match new {
            Some(presented) if plan.order.accepts(presented, Some(stored)) => None,
            Some(presented) => Some(Verdict::Stale { presented, stored }),
            None => Some(Verdict::Unfenced),
        };
        if let Some(verdict) = verdict {
            return Err(RefusedWrite { call, plan, write }.error(verdict));
        }
    }
    Ok(call.pass(call.new.or(call.old)))
}

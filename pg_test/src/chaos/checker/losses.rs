//! Checks for lost acknowledged transactions, and for uncommitted ones that exist.

use super::transaction::Transaction;
use super::{Findings, LOST_IN_FAILOVER};
use crate::chaos::history::History;
use crate::chaos::record::{Outcome, Purpose};
use std::collections::HashMap;

/// Each acknowledged transaction exists, except at the end of an era cut off by a failover. No uncommitted one exists.
pub fn nothing_lost(
    history: &History,
    transactions: &HashMap<i64, Transaction>,
    findings: &mut Findings,
) {
    let survivors = history.survivors();
    // The latest begin of a surviving transaction, by era.
    let mut latest: HashMap<u32, i64> = HashMap::new();
    for id in &survivors {
        if let Some(transaction) = transactions.get(id) {
            let requested = latest.entry(transaction.era).or_default();
            *requested = (*requested).max(transaction.requested);
        }
    }
    let cut_off = |(at, era): (i64, u32)| {
        era < history.era && latest.get(&era).is_none_or(|latest| *latest < at)
    };
    for (id, transaction) in transactions {
        if transaction.purpose == Purpose::Lazy {
            continue;
        }
        let survives = survivors.contains(id);
        match (&transaction.outcome, transaction.acknowledged) {
            (_, Some(acknowledged)) if !survives => {
                if cut_off(acknowledged) {
                    findings.count(LOST_IN_FAILOVER);
                } else {
                    findings.violated(format!("acknowledged, and lost: {transaction:?}"));
                }
            }
            (Some(Outcome::Prepared), _) if !survives => {
                let prepared = transaction.prepared.unwrap_or(transaction.ended);
                if !cut_off((prepared, transaction.era)) {
                    findings.violated(format!("prepared, and gone: {transaction:?}"));
                }
            }
            (Some(Outcome::Committed | Outcome::Unknown) | None, _) => {}
            (Some(_), _) if survives => {
                findings.violated(format!("not committed, and there: {transaction:?}"));
            }
            _ => {}
        }
    }
}

//! Checks session leases.

use super::transaction::Transaction;
use super::{Findings, PASSED_ON};
use crate::chaos::history::History;
use crate::chaos::nemesis::Disturbance;
use crate::chaos::record::{Event, Purpose, Record, TTL_MS};
use std::collections::HashMap;

/// After the end of a session was noticed, no later request is accepted with a token of its grants, and others get the
/// lease.
pub fn end_their_grants(
    history: &History,
    transactions: &HashMap<i64, Transaction>,
    findings: &mut Findings,
) {
    let mut ended: HashMap<i64, i64> = HashMap::new();
    for record in &history.records {
        if let Event::SessionEnded(firsts) = &record.event {
            for first in firsts {
                ended.entry(*first).or_insert(record.at);
            }
        }
    }
    for transaction in transactions.values() {
        let end = transaction.first.and_then(|first| ended.get(&first));
        if end.is_some_and(|at| transaction.requested > *at) && is_accepted(transaction) {
            findings.violated(format!("accepted after the end of its session: {transaction:?}"));
        }
    }
    let acquires = || transactions.values().filter(|t| t.purpose.acquires() && t.token.is_some());
    for acquired in acquires().filter(|t| t.session) {
        let first = acquired.token.map_or(0, |(token, _)| token);
        let Some(at) = ended.get(&first) else { continue };
        let over = |t: &&Transaction| t.purpose == Purpose::Release && t.first == Some(first);
        let until = acquired.requested + TTL_MS * 1000;
        let revoked = history.disturbances.iter().any(|disturbance| {
            disturbance.kind == Disturbance::Revoke
                && disturbance.lease == Some(acquired.lease)
                && disturbance.ended >= acquired.requested
                && disturbance.at <= until
        });
        let before_its_time = |t: &Transaction| {
            let seen = t.token.map_or(0, |(_, seen)| seen);
            t.worker != acquired.worker
                && t.lease == acquired.lease
                && t.requested > *at
                && seen < until
        };
        if !revoked && !transactions.values().any(|t| over(&t)) && acquires().any(before_its_time) {
            findings.count(PASSED_ON);
        }
    }
}

/// Returns true if a token of the transaction's grant was accepted.
pub fn is_accepted(transaction: &Transaction) -> bool {
    match transaction.purpose {
        Purpose::Guarded | Purpose::Bound => transaction.guarded.is_some(),
        Purpose::Renew | Purpose::Release => transaction.token.is_some(),
        _ => false,
    }
}

/// The time at which the session of this grant first released all its session locks.
pub fn first_unlock(history: &History, acquired: &Transaction) -> i64 {
    let unlocks = |record: &&Record| {
        record.event == Event::Unlock
            && record.worker == acquired.worker
            && record.at >= acquired.requested
    };
    history.records.iter().find(unlocks).map_or(i64::MAX, |record| record.at)
}

/// The time of the worker's last record.
pub fn last_sign_of(history: &History, worker: u32) -> i64 {
    let last = history.records.iter().rev().find(|record| record.worker == worker);
    last.map_or(i64::MAX, |record| record.at)
}

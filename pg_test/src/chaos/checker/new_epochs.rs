//! Checks that in a new epoch no older token is accepted before its holder has renewed.

use super::Findings;
use super::sessions::is_accepted;
use super::transaction::Transaction;
use crate::chaos::history::History;
use crate::chaos::lease_kind::LeaseKind;
use crate::chaos::nemesis::Disturbance;
use crate::chaos::record::Purpose;
use std::collections::HashMap;

/// Checks each write that was requested after the answer to a new epoch, under a grant from before, unless the grant
/// may have been renewed meanwhile.
pub fn invalidated_tokens(
    history: &History,
    transactions: &HashMap<i64, Transaction>,
    findings: &mut Findings,
) {
    let epochs = history.disturbances.iter().filter(|one| one.kind == Disturbance::NewEpoch);
    // The first tokens of the grants that were made or perhaps renewed, with the latest time at which that ended.
    let mut valid_until: HashMap<i64, i64> = HashMap::new();
    for transaction in transactions.values() {
        let first = match transaction.purpose {
            Purpose::Renew => transaction.first,
            purpose if purpose.acquires() => transaction.token.map(|(token, _)| token),
            _ => None,
        };
        if let Some(first) = first {
            let until = valid_until.entry(first).or_default();
            *until = (*until).max(transaction.ended);
        }
    }
    let writes =
        |t: &&Transaction| matches!(t.purpose, Purpose::Guarded | Purpose::Bound) && is_accepted(t);
    for epoch in epochs {
        for write in transactions.values().filter(writes).filter(|t| t.requested > epoch.ended) {
            let Some(first) =
                write.first.filter(|_| LeaseKind::of(write.lease) != LeaseKind::Adopted)
            else {
                continue;
            };
            if valid_until.get(&first).is_some_and(|until| *until < epoch.at) {
                findings.violated(format!(
                    "accepted after a new epoch at {} that made its token invalid: {write:?}",
                    epoch.at
                ));
            }
        }
    }
}

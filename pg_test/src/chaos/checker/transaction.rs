//! Transactions, assembled from their records.

use crate::chaos::history::History;
use crate::chaos::record::{Event, Outcome, Purpose};
use std::collections::HashMap;

/// The request of a transaction, and what is known of its end.
#[derive(Debug, Clone)]
pub struct Transaction {
    pub worker: u32,
    pub era: u32,
    pub purpose: Purpose,
    pub lease: i32,
    pub also: Option<i32>,
    /// The first token of the grant that the transaction relied on.
    pub first: Option<i64>,
    /// True if a grant that it makes ends with the session.
    pub session: bool,
    pub requested: i64,
    /// The first token that it saw, with the time.
    pub token: Option<(i64, i64)>,
    /// The time from which it guarded its lease.
    pub guarded: Option<i64>,
    /// The time at which its end was requested.
    pub committing: Option<i64>,
    /// True if its end was a PREPARE.
    preparing: bool,
    /// The time at which it was prepared.
    pub prepared: Option<i64>,
    /// The attempts to finish it after that, sorted by time.
    pub attempts: Vec<Attempt>,
    pub ended: i64,
    pub outcome: Option<Outcome>,
    /// The time and era in which a commit was acknowledged.
    pub acknowledged: Option<(i64, u32)>,
}

/// An attempt to finish a prepared transaction.
#[derive(Debug, Clone)]
pub struct Attempt {
    worker: u32,
    era: u32,
    pub requested: i64,
    ended: i64,
    /// `None` if the worker that tried was killed.
    outcome: Option<Outcome>,
}

impl Attempt {
    fn has_worked(&self) -> bool {
        matches!(self.outcome, Some(Outcome::Committed | Outcome::RolledBack))
    }

    fn is_unknown(&self) -> bool {
        matches!(self.outcome, Some(Outcome::Unknown) | None)
    }
}

/// All transactions by their ids.
pub fn all(history: &History) -> HashMap<i64, Transaction> {
    let mut all: HashMap<i64, Transaction> = HashMap::new();
    for record in &history.records {
        let (worker, era, at) = (record.worker, record.era, record.at);
        if let Event::Request { purpose, lease, also, first, session } = record.event {
            let new = Transaction {
                worker,
                era,
                purpose,
                lease,
                also,
                first,
                session,
                requested: at,
                token: None,
                guarded: None,
                committing: None,
                preparing: false,
                prepared: None,
                attempts: Vec::new(),
                ended: i64::MAX,
                outcome: None,
                acknowledged: None,
            };
            all.insert(record.id, new);
            continue;
        }
        let Some(transaction) = all.get_mut(&record.id) else { continue };
        match &record.event {
            Event::Request { .. } | Event::Unlock | Event::SessionEnded(_) => {}
            Event::Token(token) | Event::Adopted(token) => {
                transaction.token.get_or_insert((*token, at));
            }
            Event::Guarded => transaction.guarded = Some(at),
            Event::Commit => transaction.committing = Some(at),
            Event::Prepare => {
                transaction.committing = Some(at);
                transaction.preparing = true;
            }
            Event::Prepared => transaction.prepared = Some(at),
            Event::End(outcome) => {
                transaction.ended = at;
                transaction.outcome = Some(outcome.clone());
                if *outcome == Outcome::Committed {
                    transaction.acknowledged = Some((at, era));
                }
            }
            Event::Finish { .. } => {
                let (requested, ended, outcome) = (at, i64::MAX, None);
                transaction.attempts.push(Attempt { worker, era, requested, ended, outcome });
            }
            Event::Finished(outcome) => {
                let mut attempts = transaction.attempts.iter_mut().rev();
                if let Some(attempt) = attempts.find(|attempt| attempt.worker == worker) {
                    attempt.ended = at;
                    attempt.outcome = Some(outcome.clone());
                }
            }
        }
    }
    all.values_mut().filter(|transaction| transaction.preparing).for_each(Transaction::resolve);
    all
}

impl Transaction {
    /// The leases of the transaction.
    pub fn leases(&self) -> impl Iterator<Item = i32> {
        [Some(self.lease), self.also].into_iter().flatten()
    }

    /// Finds the outcome of a transaction that was to be prepared.
    fn resolve(&mut self) {
        let vague = matches!(self.outcome, Some(Outcome::Prepared | Outcome::Unknown) | None);
        if !vague {
            return;
        }
        let committed = |attempt: &&Attempt| attempt.outcome == Some(Outcome::Committed);
        let acknowledged = self.attempts.iter().rfind(committed);
        self.acknowledged = acknowledged.map(|attempt| (attempt.ended, attempt.era));
        let last = self.attempts.iter().rposition(Attempt::has_worked);
        let later = &self.attempts[last.map_or(0, |last| last + 1)..];
        self.outcome = match last {
            _ if later.iter().any(Attempt::is_unknown) => Some(Outcome::Unknown),
            Some(last) => {
                let last = &self.attempts[last];
                (self.ended, self.era) = (last.ended, last.era);
                last.outcome.clone()
            }
            None if self.prepared.is_some() => Some(Outcome::Prepared),
            None => Some(Outcome::Unknown),
        };
    }
}

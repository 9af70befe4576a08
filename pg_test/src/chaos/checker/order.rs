//! Checks the order of tokens, of grants and of writes.

use super::{Findings, TOKENS, stepped};
use crate::chaos::history::{History, Write};
use crate::chaos::lease_kind::LeaseKind;
use crate::chaos::record::{Event, TTL_MS};
use std::collections::HashMap;

/// No token is returned twice, and each is greater than all that had been seen before its request.
pub fn tokens_rise(history: &History, findings: &mut Findings) {
    let mut seen = HashMap::new();
    let mut greatest = 0;
    let mut greatest_at_request = HashMap::new();
    for record in &history.records {
        match record.event {
            Event::Request { .. } => {
                greatest_at_request.insert(record.id, greatest);
            }
            Event::Token(token) => {
                findings.count(TOKENS);
                if let Some(earlier) = seen.insert(token, record.id) {
                    // Releasing again in the same transaction would return the same token; no worker does that.
                    let (a, b) = (earlier, record.id);
                    findings.violated(format!("token {token} was seen twice: {a:x}, {b:x}"));
                }
                let before = greatest_at_request.get(&record.id).copied().unwrap_or(0);
                if token <= before {
                    findings.violated(format!(
                        "token {token} was drawn after {before} had been seen ({:x})",
                        record.id
                    ));
                }
                greatest = greatest.max(token);
            }
            _ => {}
        }
    }
}

/// The tokens of an exclusive lease, and adopted numbers, rise in the order of the lease's locks, and each grant lasts
/// for its time.
pub fn grants_in_order(history: &History, findings: &mut Findings) {
    for pair in history.grants.windows(2) {
        let [a, b] = pair else { continue };
        let one_by_one =
            matches!(LeaseKind::of(a.lease), LeaseKind::Exclusive | LeaseKind::Adopted);
        // A number that was adopted already has no position in the order.
        if !one_by_one || a.lease != b.lease || a.n == 0 {
            continue;
        }
        if b.n != a.n + 1 || b.token <= a.token {
            findings.violated(format!("lease {}: after {a:?} came {b:?}", a.lease));
        }
    }
    let mut requested = HashMap::new();
    let mut ended = HashMap::new();
    for record in &history.records {
        match record.event {
            Event::Request { .. } => drop(requested.insert(record.id, record.at)),
            Event::End(_) => drop(ended.insert(record.id, record.at)),
            _ => {}
        }
    }
    for grant in &history.grants {
        let (Some(id), Some(lasts_us)) = (grant.id, grant.lasts_us) else { continue };
        let from = requested.get(&id).copied().unwrap_or(0);
        let to = ended.get(&id).copied().unwrap_or(i64::MAX);
        if lasts_us < TTL_MS * 1000 && !stepped(history, from, to) {
            findings.violated(format!("a grant lasted {lasts_us} us only: {grant:?}"));
        }
    }
}

/// Each version of a row is made once; tokens rise with the versions; a bound row is written only under a grant that
/// was not replaced; the stored row is the last one written.
pub fn writes_in_order(history: &History, findings: &mut Findings) {
    let mut by_row: HashMap<(&str, i32), Vec<&Write>> = HashMap::new();
    for write in &history.writes {
        by_row.entry((&write.relation, write.row)).or_default().push(write);
    }
    for row in &history.rows {
        let writes = by_row.remove(&(row.relation.as_str(), row.row)).unwrap_or_default();
        let place = format!("{} {}", row.relation, row.row);
        for (i, write) in writes.iter().enumerate() {
            if write.version != i as i64 + 1 {
                findings.violated(format!(
                    "{place}: a write was overwritten unread, or lost: {write:?} is number {}",
                    i + 1
                ));
                break;
            }
        }
        for pair in writes.windows(2) {
            let (a, b) = (pair[0].token, pair[1].token);
            if b < a || row.relation == "free" && b == a {
                findings.violated(format!("{place}: {:?} landed upon {a}", pair[1]));
            }
        }
        if row.relation != "free" {
            for write in writes.iter().filter(|write| is_replaced(write)) {
                findings.violated(format!("{place}: written by a replaced grant: {write:?}"));
            }
        }
        let last = writes.last().map(|w| (w.version, Some(w.token)));
        if last.unwrap_or((0, None)) != (row.version, row.fence) {
            findings.violated(format!("{place}: {row:?} is not what was written: {last:?}"));
        }
    }
}

fn is_replaced(write: &Write) -> bool {
    match LeaseKind::of(write.lease) {
        LeaseKind::Exclusive | LeaseKind::Adopted => write.current != Some(write.first),
        _ => write.current.is_some_and(|current| current > write.first),
    }
}

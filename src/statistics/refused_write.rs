//! The refused writes, as shown in fence.refusals.

use super::ring::ENTRY_MAX;
use super::{Counter, add, flush, segment};
use crate::encoding::{in_server_encoding, to_utf8, within};
use crate::errors::{self, Report, SqlState};
use crate::pg::call::raise;
use crate::pg::session::client::{self, Client};
use crate::pg::session::clock;
use crate::pg::session::settings;
use pg_fence_rules::Token;
use serde_json::{Map, Value};

/// The longest holder that is stored, in bytes. Other texts are names, or short.
const HOLDER_MAX: usize = 256;

/// The facts about a refused write, whatever its writer may know: only administrators see them.
#[derive(Default)]
pub struct RefusalFacts {
    /// The row's key.
    pub key: Option<Map<String, Value>>,
    /// The lease that guards the row, in the database's encoding.
    pub lease: Option<Vec<u8>>,
    /// The holder of that lease, in the database's encoding.
    pub holder: Option<Vec<u8>>,
    /// The token that the write presented.
    pub presented: Option<Token>,
    /// The fence of the row.
    pub stored: Option<Token>,
}

/// An entry of the ring, stored as JSON: the time in microseconds, the process id, the presented and the stored token,
/// and as texts the SQLSTATE, relation, lease, holder, role, application_name, client_addr and key.
pub type RefusedWrite = (i64, i32, Option<i64>, Option<i64>, [Option<String>; 8]);

/// Counts a refused write and stores it for fence.refusals. `facts` finds facts that are missing in the error. An error
/// that is not the fence's is ignored.
pub fn refused(report: &Report, facts: impl FnOnce() -> RefusalFacts) {
    let Some(counter) = counter(report.sqlstate) else { return };
    if !settings::statistics() {
        return;
    }
    add(counter, 1);
    // Added now rather than at the end of the transaction, because the client sees the error earlier.
    flush();
    // Attempts to claim a held row are frequent and harmless; the ring is for stale writers.
    if report.sqlstate == SqlState::RowIsHeld {
        return;
    }
    // An error here must not replace the error that is about to be raised.
    let _ = raise::caught(|| {
        let client = client::client();
        let role = client.role_oid;
        let entry = written(describe(report, facts(), client));
        segment::with(|segment| segment.ring().put(role.to_u32(), &entry));
        Ok(())
    });
}

/// The counter of an SQLSTATE of the fence.
fn counter(sqlstate: SqlState) -> Option<Counter> {
    match sqlstate {
        SqlState::StaleToken => Some(Counter::RefusedPf001),
        SqlState::NoToken => Some(Counter::RefusedPf002),
        SqlState::TokenNeverIssued => Some(Counter::RefusedPf003),
        SqlState::TokenDoesNotSpeak => Some(Counter::RefusedPf004),
        SqlState::CannotBeFenced => Some(Counter::RefusedPf005),
        SqlState::RowIsHeld => Some(Counter::RefusedPf006),
        _ => None,
    }
}

fn describe(report: &Report, facts: RefusalFacts, client: Client) -> RefusedWrite {
    let detail = &report.details;
    let lease = facts.lease.map(|lease| to_utf8(&lease)).or_else(|| detail.lease.clone());
    let holder = facts.holder.or_else(|| detail.holder.clone().map(in_server_encoding));
    let key = detail.key.as_ref().or(facts.key.as_ref());
    let texts = [
        Some(report.sqlstate.code().to_owned()),
        detail.relation.clone(),
        lease,
        holder.map(|holder| to_utf8(within(&holder, HOLDER_MAX))),
        Some(to_utf8(&client.role)),
        Some(to_utf8(&client.application_name)),
        client.address.map(|address| to_utf8(&address)),
        key.and_then(|key| serde_json::to_string(&errors::abbreviated_key(key)).ok()),
    ];
    let [presented, stored] =
        [detail.presented.or(facts.presented), detail.stored.or(facts.stored)]
            .map(|token| token.map(Token::bigint));
    (clock::now().micros(), client.pid, presented, stored, texts)
}

/// The JSON of an entry. If it is too long, the last texts are omitted, beginning with the key.
fn written(mut refused: RefusedWrite) -> Vec<u8> {
    let json = |refused: &RefusedWrite| serde_json::to_vec(refused).unwrap_or_default();
    let mut entry = json(&refused);
    for n in (0..refused.4.len()).rev() {
        if entry.len() <= ENTRY_MAX {
            break;
        }
        refused.4[n] = None;
        entry = json(&refused);
    }
    entry
}

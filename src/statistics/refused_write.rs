//! A refused write, as fence.refusals shows it.

use super::ring::ENTRY_MAX;
use super::{add, flush, segment, Counter};
use crate::encoding::{in_server_encoding, to_utf8, within};
use crate::errors::{self, Refusal, SqlState};
use crate::pg::call::raise;
use crate::pg::session::client::{self, Client};
use crate::pg::session::clock;
use crate::pg::session::settings;
use pg_fence_rules::Token;
use serde_json::{Map, Value};

/// The most bytes of a holder that are kept; other texts are names, or as long as they may be.
const HOLDER_MAX: usize = 256;

/// The facts of a refused write, whatever its writer may know: only administrators see them.
#[derive(Default)]
pub struct Known {
    /// The row's key.
    pub key: Option<Map<String, Value>>,
    /// The lease that guards the row, in the database's encoding.
    pub lease: Option<Vec<u8>>,
    /// The holder of that lease, in the database's encoding.
    pub holder: Option<Vec<u8>>,
    /// The token that it presented.
    pub presented: Option<Token>,
    /// The fence of the row.
    pub stored: Option<Token>,
}

/// An entry of the ring, which has it as JSON: the time in microseconds, the process, the tokens presented and stored, and
/// as texts SQLSTATE, relation, lease, holder, role, application_name, client_addr and key.
pub type RefusedWrite = (i64, i32, Option<i64>, Option<i64>, [Option<String>; 8]);

/// Counts a refused write and keeps it for fence.refusals. `known` finds out what the error does not tell. A write that
/// is refused for another reason than the fence's is not counted.
pub fn refused(refusal: &Refusal, known: impl FnOnce() -> Known) {
    let Some(counter) = counter(refusal.sqlstate) else { return };
    if !settings::statistics() {
        return;
    }
    add(counter, 1);
    // Not at the transaction's end: the client hears of the error before that.
    flush();
    // Who asks for a row that is held is not late, and does so often: the ring is for those that are.
    if refusal.sqlstate == SqlState::RowIsHeld {
        return;
    }
    // An error here must not take the place of the refusal, which is about to be raised.
    let _ = raise::caught(|| {
        let client = client::client();
        let role = client.role_oid;
        let entry = written(describe(refusal, known(), client));
        segment::with(|segment| segment.ring().put(role.to_u32(), &entry));
        Ok(())
    });
}

/// Each SQLSTATE of the fence has a counter of its own.
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

fn describe(refusal: &Refusal, known: Known, client: Client) -> RefusedWrite {
    let detail = &refusal.details;
    let lease = known.lease.map(|lease| to_utf8(&lease)).or_else(|| detail.lease.clone());
    let holder = known.holder.or_else(|| detail.holder.clone().map(in_server_encoding));
    let key = detail.key.as_ref().or(known.key.as_ref());
    let texts = [
        Some(refusal.sqlstate.code().to_owned()),
        detail.relation.clone(),
        lease,
        holder.map(|holder| to_utf8(within(&holder, HOLDER_MAX))),
        Some(to_utf8(&client.role)),
        Some(to_utf8(&client.application_name)),
        client.address.map(|address| to_utf8(&address)),
        key.and_then(|key| serde_json::to_string(&errors::abbreviated_key(key)).ok()),
    ];
    let [presented, stored] =
        [detail.presented.or(known.presented), detail.stored.or(known.stored)]
            .map(|token| token.map(Token::bigint));
    (clock::now().micros(), client.pid, presented, stored, texts)
}

/// As it is kept. Where that is too long, the last texts are left out: the key goes first.
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

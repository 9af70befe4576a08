//! A refused write, as fence.refusals shows it.

use super::{add, flush, segment, Counter};
use crate::errors::{self, Refusal, SqlState};
use crate::pg::call::raise;
use crate::pg::encoding::{clip, in_server_encoding};
use crate::pg::session::server::{self, Client};
use crate::pg::session::settings;
use pg_fence_rules::ring::ENTRY_MAX;
use pg_fence_rules::{Instant, Token};
use serde_json::{Map, Value};

/// The most bytes of a holder that are kept; other texts are names, or as long as they may be.
const HOLDER_MAX: usize = 256;

/// What is known of a refused write, whatever its writer may know: only administrators see it.
#[derive(Default)]
pub struct Known {
    /// The row's key.
    pub key: Option<Map<String, Value>>,
    /// The lease that guards the row, in the database's encoding.
    pub lease: Option<Vec<u8>>,
    /// Who holds that lease, in the database's encoding.
    pub holder: Option<Vec<u8>>,
    /// What it presented.
    pub presented: Option<Token>,
    /// What the row has.
    pub stored: Option<Token>,
}

/// An entry of the ring; its texts are in the database's encoding, NULL is None.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RefusedWrite {
    pub at: Instant,
    pub pid: i32,
    pub presented: Option<Token>,
    pub stored: Option<Token>,
    /// SQLSTATE, relation, lease, holder, role, application_name, client_addr, key.
    pub texts: [Option<Vec<u8>>; TEXTS],
}

const TEXTS: usize = 8;
/// Stands for a text that is NULL in the place of its length.
const NULL: u16 = u16::MAX;

/// Counts a refused write and keeps it for fence.refusals. `known` finds out what the error does not tell. What is
/// refused for another reason than the fence's is not counted.
pub fn refused(refusal: &Refusal, known: impl FnOnce() -> Known) {
    let Some(counter) = counter(refusal.sqlstate) else { return };
    if !settings::statistics() {
        return;
    }
    add(counter, 1);
    // Not at the transaction's end: the client hears of the error before that.
    flush();
    // An error here must not take the place of the refusal, which is about to be raised.
    let _ = raise::caught(|| {
        let client = server::client();
        let role = client.role_oid;
        let entry = describe(refusal, known(), client).written();
        segment::with(|segment| segment.put_refusal(role, &entry));
        Ok(())
    });
}

/// Each SQLSTATE of the fence has a counter of its name.
fn counter(sqlstate: SqlState) -> Option<Counter> {
    Counter::of_column(&format!("refused_{}", sqlstate.code().to_ascii_lowercase()))
}

fn describe(refusal: &Refusal, known: Known, client: Client) -> RefusedWrite {
    let detail = &refusal.details;
    let text = |text: &Option<String>| text.clone().map(in_server_encoding);
    let key = detail.key.as_ref().or(known.key.as_ref());
    let key = key.and_then(|key| serde_json::to_string(&errors::abbreviated_key(key)).ok());
    RefusedWrite {
        at: server::now(),
        pid: client.pid,
        presented: detail.presented.or(known.presented),
        stored: detail.stored.or(known.stored),
        texts: [
            Some(refusal.sqlstate.code().as_bytes().to_vec()),
            text(&detail.relation),
            known.lease.or_else(|| text(&detail.lease)),
            known.holder.or_else(|| text(&detail.holder)).map(|holder| clip(holder, HOLDER_MAX)),
            Some(client.role),
            Some(client.application_name),
            client.address,
            key.map(in_server_encoding),
        ],
    }
}

impl RefusedWrite {
    /// As bytes: the numbers, then each text behind its length. What is left of the room is for the key, which comes
    /// last and is NULL where it does not fit.
    fn written(&self) -> Vec<u8> {
        let mut entry = Vec::with_capacity(512);
        let numbers = [
            self.at.micros(),
            self.pid.into(),
            self.presented.map_or(0, Token::bigint),
            self.stored.map_or(0, Token::bigint),
            // A stored token may be below 1 where somebody wrote it without the fence.
            i64::from(self.presented.is_some()) | i64::from(self.stored.is_some()) << 1,
        ];
        entry.extend(numbers.iter().flat_map(|n| n.to_le_bytes()));
        for (n, text) in self.texts.iter().enumerate() {
            let rest = 2 * (TEXTS - n);
            let fits = |text: &&Vec<u8>| entry.len() + rest + text.len() <= ENTRY_MAX;
            match text.as_ref().filter(fits) {
                Some(text) => {
                    entry.extend((text.len() as u16).to_le_bytes());
                    entry.extend(text);
                }
                None => entry.extend(NULL.to_le_bytes()),
            }
        }
        entry
    }

    /// Reads what `written` has made of it.
    pub fn read(entry: &[u8]) -> Option<Self> {
        let mut rest = entry;
        let mut number = || {
            let (bytes, after) = rest.split_first_chunk::<8>()?;
            rest = after;
            Some(i64::from_le_bytes(*bytes))
        };
        let (at, pid, presented, stored, given) =
            (number()?, number()?, number()?, number()?, number()?);
        let mut texts = [const { None }; TEXTS];
        for text in &mut texts {
            let (length, after) = rest.split_first_chunk::<2>()?;
            rest = after;
            let length = u16::from_le_bytes(*length);
            if length != NULL {
                let (bytes, after) = rest.split_at_checked(length.into())?;
                *text = Some(bytes.to_vec());
                rest = after;
            }
        }
        Some(RefusedWrite {
            at: Instant::from_micros(at),
            pid: pid as i32,
            presented: (given & 1 != 0).then(|| Token::from_bigint(presented)),
            stored: (given & 2 != 0).then(|| Token::from_bigint(stored)),
            texts,
        })
    }
}

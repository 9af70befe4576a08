//! The refusals of a write by what it presented: PF001 and PF002, with hints that say what the statement did
//! with the fence column. A client that writes every column back must not be told that a newer holder is at
//! work when it has only written its own older value.

use super::{quoted, Refusal};
use crate::protocol::Token;

/// What a refused write tried, for the hint.
pub struct Tried {
    /// The fence column's name.
    pub column: Vec<u8>,
    /// The column is managed: nothing that is written into it counts.
    pub managed: bool,
    /// What the statement wrote into the column.
    pub wrote: Wrote,
    /// The token that the transaction has beside the column.
    pub ambient: Option<Token>,
}

/// What a statement wrote into the fence column.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Wrote {
    /// It does not name the column.
    Nothing,
    /// It is a DELETE, which has no column to write.
    Deletes,
    /// NULL.
    Null,
    /// A value.
    Value,
}

/// What follows wherever no token was presented: the NULL may have come from a lost lease.
const LOST: &str =
    "A NULL often means that lease_renew or lease_release found the lease lost: stop.";

/// PF001: stale. Either token is None where the caller may not know it.
pub fn stale(presented: Option<Token>, stored: Option<Token>, tried: &Tried) -> Refusal {
    let message = match (presented, stored) {
        (Some(presented), Some(stored)) if presented == stored => {
            format!("stale fencing token: the row has already been written with token {stored}")
        }
        (Some(presented), Some(stored)) => {
            format!("stale fencing token {presented}: the row has already seen {stored}")
        }
        (Some(presented), None) => {
            format!("stale fencing token {presented}: the row has seen the same or a greater one")
        }
        (None, _) => "stale fencing token: the row has seen the same or a greater one".into(),
    };
    Refusal::new("PF001", message, stale_hint(presented, stored, tried)).detailed(|d| {
        d.presented = presented;
        d.stored = stored;
    })
}

fn stale_hint(presented: Option<Token>, stored: Option<Token>, tried: &Tried) -> String {
    let column = quoted(&tried.column);
    // Only who may read the stored token may learn how it compares with another.
    if presented.is_some() && presented == stored {
        return format!(
            "Nobody newer is at work: the row has this very token, and strict mode wants a greater one. \
             To write it again under one grant, use lease_renew's token, or monotonic mode; for a client \
             that writes column {column} back as it read it, managed mode."
        );
    }
    if !tried.managed && stored.is_some() && tried.ambient >= stored {
        return format!(
            "The statement wrote an older value into column {column}, which counts before the transaction's \
             own token: leave the column out, or use managed mode for a client that writes every column back."
        );
    }
    "A newer holder may have taken the lease over: stop, and do not retry with this token. To write a row again under one grant, use lease_renew's token, or monotonic mode.".into()
}

/// PF002: nothing, or NULL, was presented.
pub fn unfenced(stored: Option<Token>, tried: &Tried) -> Refusal {
    let hint = format!("{} {LOST}", unfenced_hint(tried));
    Refusal::new("PF002", "no fencing token presented".into(), hint).detailed(|d| d.stored = stored)
}

fn unfenced_hint(tried: &Tried) -> String {
    const DO: &str = "In this transaction, SET LOCAL pg_fence.token to the token of your lease, or call lease_guard";
    let column = quoted(&tried.column);
    match (tried.managed, tried.wrote, tried.ambient) {
        (_, Wrote::Deletes, _) => format!("{DO}: a DELETE writes no column {column}."),
        (true, Wrote::Value, _) => {
            format!("What was written into column {column} was ignored, for it is managed. {DO}.")
        }
        (true, Wrote::Null, _) => {
            format!("The NULL written into column {column} was ignored, for it is managed. {DO}.")
        }
        (true, Wrote::Nothing, _) => format!("Column {column} is managed. {DO}."),
        (false, Wrote::Null, Some(_)) => format!(
            "The statement wrote NULL into column {column}, which counts before the transaction's own token: \
             leave the column out, or use managed mode for a client that writes every column back."
        ),
        (false, Wrote::Null, None) => format!(
            "The statement wrote NULL into column {column}: set it to the token of your lease, or SET LOCAL \
             pg_fence.token."
        ),
        (false, ..) => format!(
            "Set column {column} to the token of your lease, or SET LOCAL pg_fence.token."
        ),
    }
}

/// PF002 or PF001 of the check that follows all BEFORE triggers.
pub fn changed_behind(stored: Option<Token>) -> Refusal {
    let (sqlstate, value) = match stored {
        None => ("PF002", "NULL".to_owned()),
        Some(token) => ("PF001", token.to_string()),
    };
    Refusal::new(
        sqlstate,
        format!("a later BEFORE trigger changed the row's fence to {value}, which this transaction did not present"),
        "Make the other trigger leave the fence column alone.",
    )
    .detailed(|d| d.presented = stored)
}

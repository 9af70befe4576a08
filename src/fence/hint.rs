//! The hints of PF001, PF002 and PF003, which depend on what the statement did with the fence column.
//!
//! A client that writes back every column must not be told of a newer holder if it has only written its own older
//! value.

use crate::errors::{literal, quoted};
use pg_fence_rules::Token;

/// What the hint needs to know of a refused write.
pub struct TriedWrite {
    /// The fence column's name.
    pub column: Vec<u8>,
    /// True if the column is managed, so that values written into it are ignored.
    pub managed: bool,
    /// True if the mode is strict, so that each write needs a greater token.
    pub strict: bool,
    /// True if the row is bound to a lease.
    pub bound: bool,
    /// The statement's value for the column.
    pub wrote: Wrote,
    /// The token set by `pg_fence.token` in this transaction, or that of its guard.
    pub ambient: Option<Token>,
    /// True if the transaction guards the row's lease with that token, but the statement presented another one in the
    /// column.
    pub guarded: bool,
}

/// A statement's value for the fence column.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Wrote {
    /// The statement does not name the column.
    Nothing,
    /// The statement is a DELETE, which writes no column.
    Deletes,
    /// The statement wrote NULL.
    Null,
    /// The statement wrote a value, which may be no token.
    Value,
    /// The statement inserted a row with a fence into a table where new rows need none: a restore, or a copy of rows.
    Loads,
}

/// The end of each hint about a write without a token: a NULL may come from a lost lease.
const LOST: &str =
    "A NULL often means that lease_renew or lease_release found the lease lost: stop.";

/// A part of the hint for sessions without a token. The server cannot tell whether pg_fence run started the client.
const REPLACED: &str = " (Under pg_fence run: options in the connection string replace PGOPTIONS, which has the token.)";

/// The hint of PF001. Either token is `None` if the caller may not know it.
pub fn of_stale(presented: Option<Token>, stored: Option<Token>, tried: &TriedWrite) -> String {
    let column = quoted(&tried.column);
    // A comparison with the stored token is shown only to callers that may read it.
    if presented.is_some() && presented == stored {
        return format!(
            "Nobody newer is at work: the row has this very token, and strict mode wants a greater one. \
             To write it again under one grant, use lease_renew's token, or monotonic mode; for a client \
             that writes column {column} back as it read it, managed mode."
        );
    }
    let would_land = tried.ambient >= stored || tried.guarded && !tried.strict;
    if !tried.managed && stored.is_some() && tried.wrote == Wrote::Value && would_land {
        return format!(
            "The statement wrote an older value into column {column}, which counts before the transaction's \
             own token: leave the column out, or use managed mode for a client that writes every column back."
        );
    }
    let stop =
        "A newer holder may have taken the lease over: stop, and do not retry with this token.";
    let own = match (tried.strict, tried.bound) {
        (true, _) => {
            " To write a row again under one grant, use lease_renew's token, or monotonic mode."
        }
        (false, false) => {
            " If it was a renewal of your own that wrote the row, use its token, or bind the table to its lease."
        }
        // In this case a token of a live grant is never stale.
        (false, true) => "",
    };
    format!("{stop}{own}")
}

/// The hint of PF003. The stored token is `None` if the caller may not read it.
pub fn of_never_issued(presented: Token, stored: Option<Token>, tried: &TriedWrite) -> String {
    let next = stored.and_then(|stored| stored.bigint().checked_add(1));
    if tried.wrote == Wrote::Value && next == Some(presented.bigint()) {
        return format!(
            "It is the row's own token + 1: an object mapper counts column {} as a version of the row. Give it a \
             version column of its own, and leave this one unmapped, or use managed mode (mode => 'managed').",
            quoted(&tried.column)
        );
    }
    "Tokens come from lease_acquire, lease_renew or the claim of a row. After a restore, fence_new_epoch() makes the sequence outrun tokens issued elsewhere.".into()
}

/// The hint of PF002, for a write without a token. `lease` is the row's lease, if the caller may know it.
pub fn of_unfenced(tried: &TriedWrite, lease: Option<&[u8]>) -> String {
    let what_to_do = what_to_do(tried);
    if tried.wrote == Wrote::Loads {
        // A load of rows has no lease to lose.
        return what_to_do;
    }
    let of_lease = lease.map(literal).map_or_else(String::new, |lease| {
        format!(" The row's lease is {lease}: guard it by lease_guard({lease}, token).")
    });
    let replaced = match tried.ambient {
        None if tried.managed || tried.wrote != Wrote::Null => REPLACED,
        _ => "",
    };
    format!("{what_to_do}{of_lease}{replaced} {LOST}")
}

fn what_to_do(tried: &TriedWrite) -> String {
    const DO: &str = "In this transaction, SET LOCAL pg_fence.token to the token of your lease, or call lease_guard";
    let column = quoted(&tried.column);
    match (tried.managed, tried.wrote, tried.ambient) {
        (_, Wrote::Deletes, _) => format!("{DO}: a DELETE writes no column {column}."),
        (_, Wrote::Loads, _) => format!(
            "The row brings a fence, and a new row has none yet in column {column}: it would be lost. To load rows with their \
             fences, have the triggers not fire (pg_restore: the sections pre-data, data, then post-data, or \
             --data-only with --disable-triggers; else SET session_replication_role = replica). To create rows, \
             leave the column out."
        ),
        (true, ..) => {
            format!(
                "Column {column} is managed: whatever a statement writes there is ignored. {DO}."
            )
        }
        (false, Wrote::Null, Some(_)) => format!(
            "The statement wrote NULL into column {column}, which counts before the transaction's own token: \
             leave the column out, or use managed mode for a client that writes every column back."
        ),
        (false, Wrote::Null, None) => format!(
            "The statement wrote NULL into column {column}: set it to the token of your lease, or SET LOCAL \
             pg_fence.token."
        ),
        (false, ..) => {
            format!("Set column {column} to the token of your lease, or SET LOCAL pg_fence.token.")
        }
    }
}

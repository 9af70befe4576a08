//! The hints of PF001, PF002 and PF003, which depend on what the statement did with the fence column.
//!
//! A client that writes back every column must not be told of a newer holder if it has only written its own older
//! value.

use super::plan::Task;
use super::refusal::RefusedWrite;
use crate::errors::{literal, quoted};
use crate::leases::guard;
use crate::pg::fenced_table::describe;
use crate::pg::fenced_table::trigger::Event;
use pg_fence_rules::Token;
use pg_fence_rules::fence::Order;

/// A statement's value for the fence column.
#[derive(PartialEq, Eq)]
enum WrittenValue {
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

impl RefusedWrite<'_> {
    /// The hint of PF001. Either token is `None` if the caller may not know it.
    pub fn hint_of_stale(&self, presented: Option<Token>, stored: Option<Token>) -> String {
        let (column, is_strict) = (self.column(), self.plan.order == Order::Strict);
        // A comparison with the stored token is shown only to callers that may read it.
        if presented.is_some() && presented == stored {
            return format!(
                "Nobody newer is at work: the row has this very token, and strict mode wants a greater one. \
                 To write it again under one grant, use lease_renew's token, or monotonic mode; for a client \
                 that writes column {column} back as it read it, managed mode."
            );
        }
        let is_guarded = || self.leases().iter().any(|name| guard::token_for(name).is_some());
        let would_land = || self.ambient() >= stored || !is_strict && is_guarded();
        let wrote_value = !self.plan.is_managed() && self.written_value() == WrittenValue::Value;
        if wrote_value && stored.is_some() && would_land() {
            return format!(
                "The statement wrote an older value into column {column}, which counts before the transaction's \
                 own token: leave the column out, or use managed mode for a client that writes every column back."
            );
        }
        let stop =
            "A newer holder may have taken the lease over: stop, and do not retry with this token.";
        let own = match (is_strict, self.plan.lease.is_some()) {
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
    pub fn hint_of_never_issued(&self, presented: Token, stored: Option<Token>) -> String {
        let next = stored.and_then(|stored| stored.bigint().checked_add(1));
        if self.written_value() == WrittenValue::Value && next == Some(presented.bigint()) {
            return format!(
                "It is the row's own token + 1: an object mapper counts column {} as a version of the row. Give it a \
                 version column of its own, and leave this one unmapped, or use managed mode (mode => 'managed').",
                self.column()
            );
        }
        "Tokens come from lease_acquire, lease_renew or the claim of a row. After a restore, fence_new_epoch() makes the sequence outrun tokens issued elsewhere.".into()
    }

    /// The hint of PF002, for a write without a token. `lease` is the row's lease, if the caller may know it.
    pub fn hint_of_unfenced(&self, lease: Option<&[u8]>) -> String {
        const DO: &str = "In this transaction, SET LOCAL pg_fence.token to the token of your lease, or call lease_guard";
        let (column, ambient, written) = (self.column(), self.ambient(), self.written_value());
        let is_managed = self.plan.is_managed();
        let what_to_do = match written {
            WrittenValue::Deletes => format!("{DO}: a DELETE writes no column {column}."),
            // A load of rows has no lease to lose.
            WrittenValue::Loads => {
                return format!(
                    "The row brings a fence, and a new row has none yet in column {column}: it would be lost. To load rows with their \
                     fences, have the triggers not fire (pg_restore: the sections pre-data, data, then post-data, or \
                     --data-only with --disable-triggers; else SET session_replication_role = replica). To create rows, \
                     leave the column out."
                );
            }
            // An UPDATE of such a row presents neither the setting nor a guard's token.
            WrittenValue::Null if matches!(self.plan.task, Task::RowLease { .. }) => {
                return format!(
                    "The statement wrote NULL into column {column}: set it to the token that the row's claim has \
                     returned. A NULL mostly means that the row was lost: stop."
                );
            }
            _ if is_managed => format!(
                "Column {column} is managed: whatever a statement writes there is ignored. {DO}."
            ),
            WrittenValue::Null if ambient.is_some() => format!(
                "The statement wrote NULL into column {column}, which counts before the transaction's own token: \
                 leave the column out, or use managed mode for a client that writes every column back."
            ),
            WrittenValue::Null => format!(
                "The statement wrote NULL into column {column}: set it to the token of your lease, or SET LOCAL \
                 pg_fence.token."
            ),
            WrittenValue::Nothing | WrittenValue::Value => {
                format!(
                    "Set column {column} to the token of your lease, or SET LOCAL pg_fence.token."
                )
            }
        };
        let of_lease = lease.map(literal).map_or_else(String::new, |lease| {
            format!(" The row's lease is {lease}: guard it by lease_guard({lease}, token).")
        });
        let may_be_replaced = ambient.is_none() && (is_managed || written != WrittenValue::Null);
        let replaced = if may_be_replaced { REPLACED } else { "" };
        format!("{what_to_do}{of_lease}{replaced} {LOST}")
    }

    /// The name of the fence column, in quotes.
    fn column(&self) -> String {
        quoted(&describe::column_name(self.call, self.plan.column.number))
    }

    fn written_value(&self) -> WrittenValue {
        let RefusedWrite { call, plan, ref write } = *self;
        let is_named = || write.column_presents() || plan.names_fence(call);
        match (call.event, write.new.flatten()) {
            (Event::Delete, _) => WrittenValue::Deletes,
            (Event::Update, _) if !is_named() => WrittenValue::Nothing,
            // An INSERT that omits the column looks like one that writes NULL.
            (Event::Insert, None) => WrittenValue::Nothing,
            (_, None) => WrittenValue::Null,
            (Event::Insert, Some(_)) if plan.insert_allows_no_token() && write.brings_fence() => {
                WrittenValue::Loads
            }
            (_, Some(_)) => WrittenValue::Value,
        }
    }

    /// The token of a guard, or of `pg_fence.token`, that counts where the column presents none. None does for an UPDATE
    /// of a row lease.
    fn ambient(&self) -> Option<Token> {
        match self.plan.task {
            Task::RowLease { .. } => None,
            _ => self.leases().ambient(),
        }
    }
}

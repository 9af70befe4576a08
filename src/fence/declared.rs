//! `fence_protect`, `fence_unprotect` and `fence_audit`. Their work is done by PL/pgSQL functions of the schema
//! `fence`, which get the parsed arguments of the tables' triggers from here. So only the trigger's own code interprets
//! arguments, placeholders and braces.

use crate::errors::{self, Report};
use crate::leases::adopt;
use crate::pg::call::args::{Answer, Args, text_datum};
use crate::pg::call::composite::{row_array, text_array, type_array};
use crate::pg::call::json;
use crate::pg::call::state_function::{self, StateFunction};
use crate::pg::fenced_table::trigger::PLACEHOLDER_TYPES;
use crate::pg::fenced_table::trigger_catalog::{Trigger, triggers_calling};
use crate::pg::fenced_table::{column, definition};
use crate::pg::session::clock;
use crate::pg::state::role_prefix;
use crate::tokens;
use pg_fence_rules::epochs;
use pg_fence_rules::template::{self, Piece, TEMPLATE_MAX};
use pg_fence_rules::trigger_arguments::TriggerArguments;
use pg_fence_rules::{NAME_MAX, Token};
use pgrx::pg_sys::{Datum, Oid};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CStr;

/// The comment that `fence_protect` puts on the fence column, by which it recognizes a renamed column.
const FENCE_COLUMN_COMMENT: &str = "fencing token of the latest write (pg_fence)";

/// The comment that `fence_protect` puts on the deadline column, for the same reason.
const DEADLINE_COLUMN_COMMENT: &str = "until when the row is held (pg_fence)";

/// `fence_protect(relation, fence_column, mode, lease, events, verify, always, deadline)`.
pub fn protect(args: Args) -> Result<Answer, Report> {
    let fenced = state_function::fenced()?;
    let lease = args.text(3, TEMPLATE_MAX).map_err(|_| errors::long_template())?;
    check_table(args, "fence_protect", fenced)?;
    let rule_for = StateFunction::find(c"rule_for", 13)?;
    let own: Vec<_> = (0..8).map(|n| args.datum(n)).collect();
    let rule = |all: &[Trigger], is_locked: bool| {
        let triggers = arguments_of(all, rule_for.argument_type(9));
        let leases = templates_of(all, lease.as_deref(), rule_for.argument_type(10));
        let types = type_array(&PLACEHOLDER_TYPES);
        let known = [fenced.into(), triggers, leases, types, is_locked.into()].map(Some);
        rule_for.call(args, &[&own[..], &known].concat())
    };
    rule(&triggers_calling(fenced, args.value::<Oid>(0)), false);
    // The table is locked now.
    require_snapshot_of(args)?;
    // The triggers of all tables are read, to find those that share its leases.
    let all = triggers_calling(fenced, None);
    let rule = rule(&all, true);
    let attach = StateFunction::find(c"attach_fence", 7)?;
    let triggers = arguments_of(&all, attach.argument_type(3));
    let leases = templates_of(&all, lease.as_deref(), attach.argument_type(4));
    let comments = [FENCE_COLUMN_COMMENT, DEADLINE_COLUMN_COMMENT];
    let [comment, deadline_comment] = comments.map(|comment| text_datum(comment.as_bytes()));
    let known = [fenced.into(), triggers, leases, comment, deadline_comment].map(Some);
    attach.call(args, &[&[args.datum(0), rule][..], &known].concat());
    Ok(Answer::Null)
}

/// `fence_unprotect(relation)`.
pub fn unprotect(args: Args) -> Result<Answer, Report> {
    let function = StateFunction::find(c"unprotect_table", 2)?;
    let fenced = state_function::fenced()?;
    check_table(args, "fence_unprotect", fenced)?;
    function.call(args, &[args.datum(0), Some(fenced.into())]);
    require_snapshot_of(args)?;
    Ok(Answer::Null)
}

/// Errors with 40001 if the transaction's snapshot is older than the definition of the call's table.
fn require_snapshot_of(args: Args) -> Result<(), Report> {
    match args.value::<Oid>(0).is_none_or(definition::is_shown) {
        true => Ok(()),
        false => Err(errors::table_changed()),
    }
}

/// Errors if the caller may not use this function on the table.
fn check_table(args: Args, function: &str, fenced: Oid) -> Result<(), Report> {
    let function = Some(text_datum(function.as_bytes()));
    StateFunction::find(c"check_table", 3)?
        .call(args, &[args.datum(0), function, Some(fenced.into())]);
    Ok(())
}

/// `fence_audit(relation)`: a row for each bypass of the fence of that table, or of all tables. (`sql/4_audit.sql`
/// lists the parts and their input.)
pub fn audit(args: Args) -> Result<Answer, Report> {
    let fenced = state_function::fenced()?;
    if args.value::<Oid>(0).is_some() {
        check_table(args, "fence_audit", fenced)?;
    }
    // The table's parents and children are audited, too.
    let all = triggers_calling(fenced, None);
    let tables = StateFunction::find(c"audit_tables", 3)?;
    let triggers = arguments_of(&all, tables.argument_type(1));
    let leases = templates_of(&all, None, tables.argument_type(2));
    let about = json::datum(&json!({
        "relation": args.value::<Oid>(0).map(Oid::to_u32),
        "fenced_oid": fenced.to_u32(),
        "placeholder_types": PLACEHOLDER_TYPES.map(Oid::to_u32),
        "column_comment": FENCE_COLUMN_COMMENT,
        "deadline_comment": DEADLINE_COLUMN_COMMENT,
        "has_adopted_leases": adopt::is_used_here(),
    }));
    let about = tables.call(args, &[about, triggers, leases].map(Some)).unwrap_or(about);
    let about = with_tokens(about)?;
    let findings = findings(args, about, triggers, leases)?;
    let answer = StateFunction::find(c"audit_answer", 2)?;
    answer.answer(args, &[Some(about), Some(findings)]);
    Ok(Answer::Null)
}

/// The findings of all parts of the audit.
fn findings(args: Args, about: Datum, triggers: Datum, leases: Datum) -> Result<Datum, Report> {
    let mut findings = json::datum(&json!([]));
    let mut add = |name: &CStr, arguments: &[Datum]| -> Result<(), Report> {
        let arguments: Vec<_> = arguments.iter().copied().map(Some).collect();
        let found = StateFunction::find(name, arguments.len())?.call(args, &arguments);
        findings = found.map_or(findings, |found| json::merged(findings, found));
        Ok(())
    };
    add(c"audit_findings", &[about])?;
    if args.value::<Oid>(0).is_none() {
        add(c"state_findings", &[about])?;
        if json::field(about, "last_token").is_some() && json::is_true(about, "reads_leases") {
            add(c"lease_findings", &[])?;
        }
        if role_prefix::may_be_read()? {
            add(c"name_findings", &[triggers, leases])?;
        }
    }
    Ok(findings)
}

/// Adds the highest fences and the last token to `about`.
fn with_tokens(about: Datum) -> Result<Datum, Report> {
    let highest_fences = highest_fences(about);
    // The fences are read first, so that a token drawn and written meanwhile does not appear to be ahead. The last
    // token is shown only to callers that may use leases.
    let last_token = if json::is_true(about, "uses_leases") { tokens::last()? } else { None };
    let (now, date) = (clock::now(), |at| clock::iso(at)[..10].to_owned());
    let more = json!({
        "highest_fences": highest_fences,
        "last_token": last_token.map(Token::bigint),
        "new_epoch_token": last_token.and_then(|last| epochs::target(last, now)).map(Token::bigint),
        "clock_catches_up": last_token.and_then(|last| epochs::far_ahead(last, now)).map(date),
    });
    Ok(json::merged(about, json::datum(&more)))
}

/// The highest fence of each table whose fences are to be read, and that the caller may read.
fn highest_fences(about: Datum) -> BTreeMap<String, i64> {
    let columns = json::field(about, "fence_columns").unwrap_or_default();
    let columns: Vec<(u32, i16)> = serde_json::from_str(&columns).unwrap_or_default();
    let highest = |(table, column): (u32, i16)| {
        Some((table.to_string(), column::max_value(Oid::from(table), column)?))
    };
    columns.into_iter().filter_map(highest).collect()
}

/// The arguments of the triggers, as an array of `fence.trigger_arguments`.
fn arguments_of(triggers: &[Trigger], array_type: Oid) -> Datum {
    let rows = triggers.iter().map(|trigger| {
        let arguments = read(trigger);
        [
            Some(trigger.oid.into()),
            Some(text_datum(arguments.fence_column)),
            Some(text_datum(arguments.mode)),
            arguments.lease.map(text_datum),
            arguments.events.map(text_datum),
            Some(arguments.has_unfenced_insert().into()),
            arguments.deadline.map(text_datum),
        ]
    });
    row_array(array_type, rows)
}

/// The templates of leases in the triggers and in the call, without duplicates, as an array of `fence.lease_template`.
fn templates_of(triggers: &[Trigger], requested: Option<&[u8]>, array_type: Oid) -> Datum {
    let leases = triggers.iter().filter_map(|trigger| read(trigger).lease);
    let leases: BTreeSet<&[u8]> = leases.chain(requested).collect();
    let rows = leases.into_iter().map(|lease| {
        let pieces = template::parse(lease);
        let (mut columns, mut literal_bytes) = (Vec::new(), 0);
        for piece in pieces.iter().flatten() {
            match piece {
                Piece::Column(column) => columns.push(column.clone()),
                Piece::Literal(text) => literal_bytes += text.len(),
            }
        }
        let beginning = match pieces.as_deref() {
            Ok([Piece::Literal(text), ..]) => text.as_slice(),
            _ => &[],
        };
        [
            Some(text_datum(lease)),
            Some(text_array(&columns)),
            Some(pieces.is_err().into()),
            Some((literal_bytes > NAME_MAX).into()),
            Some(text_datum(beginning)),
        ]
    });
    row_array(array_type, rows)
}

fn read(trigger: &Trigger) -> TriggerArguments<'_> {
    TriggerArguments::new(trigger.arguments())
}

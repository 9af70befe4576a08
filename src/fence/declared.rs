//! `fence_protect`, `fence_unprotect` and `fence_audit`: PL/pgSQL functions of the schema `fence`, which get from here what the triggers
//! of tables say. So what an argument, a placeholder or a brace means is known to the trigger's own code alone.

use crate::errors::{self, Refusal};
use crate::leases::adopt;
use crate::pg::call::args::{text_datum, Answer, Args};
use crate::pg::call::composite::{self, row_array, text_array, type_array, RowAnswer};
use crate::pg::call::state_function::{self, StateFunction};
use crate::pg::fenced_table::column;
use crate::pg::fenced_table::trigger::PLACEHOLDER_TYPES;
use crate::pg::fenced_table::trigger_catalog::{self, Trigger};
use crate::pg::session::clock;
use crate::pg::state::role_prefix;
use crate::tokens;
use pg_fence_rules::moves;
use pg_fence_rules::template::{self, Piece, TEMPLATE_MAX};
use pg_fence_rules::trigger_arguments::TriggerArguments;
use pg_fence_rules::{Token, NAME_MAX};
use pgrx::pg_sys::{Datum, Oid};
use std::collections::BTreeSet;

/// The comment that `fence_protect` puts on the fence column: by it the column is known again when somebody has renamed
/// it.
const FENCE_COLUMN_COMMENT: &str = "fencing token of the latest write (pg_fence)";

/// How many arguments `fence.protect_table` has: those of `fence_protect`, then what is told here.
const PROTECT: usize = 7;
/// As `PROTECT`, of `fence.audit_tables`.
const AUDIT: usize = 1;

/// `fence_protect(relation, fence_column, mode, lease, events, verify, always)`. Once to see what is to be done and to
/// lock the table for it, and once to do it: what was seen before the lock may have changed while waiting for it.
pub fn protect(args: Args) -> Result<Answer, Refusal> {
    let function = StateFunction::find(c"protect_table", PROTECT + Declared::ARGUMENTS + 1)?;
    let fenced = state_function::fenced()?;
    let lease = args.text(3, TEMPLATE_MAX).map_err(|_| errors::long_template())?;
    check_table(args, "fence_protect", fenced)?;
    for is_locked in [false, true] {
        // To tell of tables that share its leases, those of all tables are asked for.
        let table = args.oid(0).filter(|_| !is_locked);
        let triggers = trigger_catalog::triggers_calling(fenced, table);
        let declared = Declared { fenced, triggers, asked: lease.clone() };
        function
            .call(args, &declared.arguments(&function, args, PROTECT, &[Some(is_locked.into())]));
    }
    Ok(Answer::Null)
}

/// `fence_unprotect(relation)`.
pub fn unprotect(args: Args) -> Result<Answer, Refusal> {
    let function = StateFunction::find(c"unprotect_table", 2)?;
    let fenced = state_function::fenced()?;
    check_table(args, "fence_unprotect", fenced)?;
    function.call(args, &[args.datum(0), Some(fenced.into())]);
    Ok(Answer::Null)
}

/// Refuses a table with which the caller may not do what the function does.
fn check_table(args: Args, function: &str, fenced: Oid) -> Result<(), Refusal> {
    let function = Some(text_datum(function.as_bytes()));
    StateFunction::find(c"check_table", 3)?
        .call(args, &[args.datum(0), function, Some(fenced.into())]);
    Ok(())
}

/// `fence_audit(relation)`: a row for each way around the fence of that table, or of all.
pub fn audit(args: Args) -> Result<Answer, Refusal> {
    let function = StateFunction::find(c"audit_tables", AUDIT + Declared::ARGUMENTS + 3)?;
    let fenced = state_function::fenced()?;
    if args.oid(0).is_some() {
        check_table(args, "fence_audit", fenced)?;
    }
    // Parents and children of the table count as well.
    let triggers = trigger_catalog::triggers_calling(fenced, None);
    let declared = Declared { fenced, triggers, asked: None };
    let mut last = tokens::last()?;
    let drawn = last.map(|last| last.bigint().into());
    let far_ahead = last.and_then(|last| moves::far_ahead(last, clock::now()));
    let far_ahead = far_ahead.map(|then| then.micros().into());
    let adopts = Some(adopt::is_used_here().into());
    let arguments = declared.arguments(&function, args, AUDIT, &[drawn, far_ahead, adopts]);
    let answer = RowAnswer::begin(args);
    function.each_row(args, &arguments, |row| {
        let [relation, severity, finding, remedy, tables, columns, jump] = row;
        if finding.is_some() {
            answer.put([relation, severity, finding, remedy]);
            return Ok(());
        }
        let (Some(tables), Some(columns)) = (tables, columns) else {
            // The function keeps the view of the leases by oid.
            return add_findings(args, &answer, &StateFunction::find(c"lease_findings", 0)?, &[]);
        };
        let (tables, columns) =
            (composite::read_oid_array(tables), composite::read_int4_array(columns));
        let Some(highest) = highest(&tables, &columns).filter(|highest| Some(*highest) > last)
        else {
            return Ok(());
        };
        // What was drawn and written since the audit began is not ahead.
        last = tokens::last()?;
        let Some(last) = last.filter(|last| highest > *last) else { return Ok(()) };
        // Without one, a subscription brings the rows.
        let whose = if jump.is_some() {
            ""
        } else {
            " (the publisher's: all is well, until this server takes over; then call fence_new_epoch())"
        };
        let text = format!(
            "rows hold fences up to {highest}, above the last token drawn here, {last}{whose}"
        );
        let in_reach = moves::target(last, clock::now()).is_some_and(|target| highest <= target);
        let remedy = jump.filter(|_| in_reach).or(remedy);
        answer.put([relation, severity, Some(text_datum(text.as_bytes())), remedy]);
        Ok(())
    })?;
    if args.oid(0).is_none() {
        add_findings_beside_tables(args, &answer, &declared, fenced)?;
    }
    Ok(Answer::Null)
}

/// Adds what is found in the state, and in the names of leases.
fn add_findings_beside_tables(
    args: Args,
    answer: &RowAnswer,
    declared: &Declared,
    fenced: Oid,
) -> Result<(), Refusal> {
    let about_state = StateFunction::find(c"state_findings", 1)?;
    add_findings(args, answer, &about_state, &[Some(fenced.into())])?;
    if !role_prefix::may_be_read()? {
        return Ok(());
    }
    let about_names = StateFunction::find(c"name_findings", 2)?;
    let triggers = declared.triggers(about_names.argument_type(0));
    let leases = declared.leases(about_names.argument_type(1));
    add_findings(args, answer, &about_names, &[Some(triggers), Some(leases)])
}

/// Adds what the function finds.
fn add_findings(
    args: Args,
    answer: &RowAnswer,
    function: &StateFunction,
    arguments: &[Option<Datum>],
) -> Result<(), Refusal> {
    function.each_row(args, arguments, |row: [Option<Datum>; 4]| {
        answer.put(row);
        Ok(())
    })
}

/// The highest fence in the tables, each with the number of its fence column.
fn highest(tables: &[Oid], columns: &[i32]) -> Option<Token> {
    let column = |n: i32| i16::try_from(n).ok();
    let fences = tables.iter().zip(columns);
    fences
        .filter_map(|(table, n)| column::max_value(*table, column(*n)?))
        .max()
        .map(Token::from_bigint)
}

/// What the triggers of tables say.
struct Declared {
    /// The trigger function that they call.
    fenced: Oid,
    triggers: Vec<Trigger>,
    /// A template of leases that a call asks for.
    asked: Option<Vec<u8>>,
}

impl Declared {
    /// How many arguments it makes.
    const ARGUMENTS: usize = 5;

    /// As an array of `fence.trigger_arguments`.
    fn triggers(&self, array_type: Oid) -> Datum {
        let rows = self.triggers.iter().map(|trigger| {
            let arguments = read(trigger);
            [
                Some(trigger.oid.into()),
                Some(text_datum(arguments.fence_column)),
                Some(text_datum(arguments.mode)),
                arguments.lease.map(text_datum),
                arguments.events.map(text_datum),
                Some(arguments.has_unfenced_insert().into()),
            ]
        });
        row_array(array_type, rows)
    }

    /// The templates of leases, each once, as an array of `fence.lease_template`.
    fn leases(&self, array_type: Oid) -> Datum {
        let leases = self.triggers.iter().filter_map(|trigger| read(trigger).lease);
        let leases: BTreeSet<&[u8]> = leases.chain(self.asked.as_deref()).collect();
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

    /// The arguments of the function: the first ones of the call that is served, what the triggers say, and more.
    fn arguments(
        &self,
        function: &StateFunction,
        args: Args,
        own: usize,
        more: &[Option<Datum>],
    ) -> Vec<Option<Datum>> {
        let mut arguments: Vec<Option<Datum>> = (0..own).map(|n| args.datum(n)).collect();
        let triggers = self.triggers(function.argument_type(own + 1));
        let leases = self.leases(function.argument_type(own + 2));
        let types = type_array(&PLACEHOLDER_TYPES);
        let comment = text_datum(FENCE_COLUMN_COMMENT.as_bytes());
        arguments.extend([self.fenced.into(), triggers, leases, types, comment].map(Some));
        arguments.extend(more);
        arguments
    }
}

fn read(trigger: &Trigger) -> TriggerArguments<'_> {
    TriggerArguments::new(trigger.arguments())
}

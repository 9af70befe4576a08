//! `fence_protect` and `fence_audit`: PL/pgSQL functions of the schema `fence`, which get from here what the triggers
//! of tables say. So what an argument, a placeholder or a brace means is known to the trigger's own code alone.

use crate::pg::call::args::{text_datum, Answer, Args};
use crate::pg::call::composite::{row_array, text_array, type_array};
use crate::pg::call::errors::Refusal;
use crate::pg::call::state_function::{self, StateFunction};
use crate::pg::fenced_table::describe::PLACEHOLDER_TYPES;
use crate::pg::fenced_table::trigger_catalog::{self, Trigger};
use pg_fence_rules::template::{self, Piece};
use pg_fence_rules::trigger_arguments::TriggerArguments;
use pg_fence_rules::NAME_MAX;
use pgrx::pg_sys::{Datum, Oid};
use std::collections::BTreeSet;

/// How many arguments `fence.protect_table` has: those of `fence_protect`, then what is told here.
const PROTECT: usize = 7;
/// As `PROTECT`, of `fence.audit_tables`.
const AUDIT: usize = 1;

/// `fence_protect(relation, fence_column, mode, lease, events, verify, always)`. Once to see what is to be done and to
/// lock the table for it, and once to do it: what was seen before the lock may have changed while waiting for it.
pub fn protect(args: Args) -> Result<Answer, Refusal> {
    let function = StateFunction::find(c"protect_table", PROTECT + Declared::ARGUMENTS + 1)?;
    for is_locked in [false, true] {
        // Without a table there are no triggers to look at, and no lock: it is refused.
        let triggers = args.oid(0).map(|table| triggers(args, Some(table))).unwrap_or_default();
        let declared = Declared::new(triggers, args.text(3));
        call(&function, args, PROTECT, &declared, Some(is_locked.into()));
    }
    Ok(Answer::Null)
}

/// `fence_audit(relation)`: a row for each way around the fence of that table, or of all.
pub fn audit(args: Args) -> Result<Answer, Refusal> {
    let function = StateFunction::find(c"audit_tables", AUDIT + Declared::ARGUMENTS)?;
    // Parents and children of the table count as well.
    Ok(call(&function, args, AUDIT, &Declared::new(triggers(args, None), None), None))
}

fn triggers(args: Args, table: Option<Oid>) -> Vec<Trigger> {
    let fenced = state_function::fenced_beside(args);
    fenced.map(|fenced| trigger_catalog::triggers_calling(fenced, table)).unwrap_or_default()
}

/// What the triggers of tables say.
struct Declared {
    triggers: Vec<Trigger>,
    /// The templates of leases in them, each once.
    leases: BTreeSet<Vec<u8>>,
}

impl Declared {
    /// How many arguments it makes.
    const ARGUMENTS: usize = 3;

    /// Of these triggers, with a template that a call asks for.
    fn new(triggers: Vec<Trigger>, asked: Option<Vec<u8>>) -> Self {
        let leases = triggers.iter().filter_map(|trigger| read(trigger).lease.map(<[u8]>::to_vec));
        let leases = leases.chain(asked).collect();
        Declared { triggers, leases }
    }

    /// The rows of type `fence.trigger_arguments`.
    fn trigger_rows(&self) -> impl Iterator<Item = [Option<Datum>; 6]> + '_ {
        self.triggers.iter().map(|trigger| {
            let arguments = read(trigger);
            [
                Some(trigger.oid.into()),
                Some(text_datum(arguments.fence_column)),
                Some(text_datum(arguments.mode)),
                arguments.lease.map(text_datum),
                arguments.events.map(text_datum),
                Some(arguments.has_unfenced_insert().into()),
            ]
        })
    }

    /// The rows of type `fence.lease_template`.
    fn lease_rows(&self) -> impl Iterator<Item = [Option<Datum>; 4]> + '_ {
        self.leases.iter().map(|lease| {
            let pieces = template::parse(lease);
            let (mut columns, mut literal_bytes) = (Vec::new(), 0);
            for piece in pieces.iter().flatten() {
                match piece {
                    Piece::Column(column) => columns.push(column.clone()),
                    Piece::Literal(text) => literal_bytes += text.len(),
                }
            }
            [
                Some(text_datum(lease)),
                Some(text_array(&columns)),
                Some(pieces.is_err().into()),
                Some((literal_bytes > NAME_MAX).into()),
            ]
        })
    }
}

fn read(trigger: &Trigger) -> TriggerArguments<'_> {
    TriggerArguments::new(trigger.arguments.iter().map(Vec::as_slice))
}

/// Calls the function with the first arguments of the call that is served, and what the triggers say.
fn call(
    function: &StateFunction,
    args: Args,
    own: usize,
    declared: &Declared,
    last: Option<Datum>,
) -> Answer {
    let mut arguments: Vec<Option<Datum>> = (0..own).map(|n| args.datum(n)).collect();
    let triggers = row_array(function.argument_type(own), declared.trigger_rows());
    let leases = row_array(function.argument_type(own + 1), declared.lease_rows());
    arguments.extend([triggers, leases, type_array(&PLACEHOLDER_TYPES)].map(Some));
    arguments.extend(last.map(Some));
    function.call(args, &arguments)
}

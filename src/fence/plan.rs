//! The parsed arguments of a trigger, applied to its table once per statement.

use super::binding::Binding;
use super::row_moves;
use crate::errors::{self, Report};
use crate::pg::fenced_table::trigger::{Attribute, Columns, Event, TriggerCall};
use crate::statistics;
use crate::tokens;
use pg_fence_rules::fence::Order;
use pg_fence_rules::trigger_arguments::{MOST, TriggerArguments};
use pgrx::pg_sys;

/// The parsed arguments of a trigger, applied to its table.
pub struct Plan {
    /// The fence column.
    pub column: Attribute,
    pub task: Task,
    pub order: Order,
    /// The template of the rows' leases, if the table is bound.
    pub lease: Option<Binding>,
    /// The sequence from which tokens are drawn.
    pub tokens: pg_sys::Oid,
    /// True if the table is a partition, so that an UPDATE may move its rows.
    pub moves: bool,
    /// True if the trigger fires on DELETE, so that it sees rows that leave the partition.
    pub sees_leaving: bool,
    /// True if the table has a trigger that fires on INSERT, so that it sees rows that arrive.
    pub sees_arriving: bool,
    /// True if the table has a second trigger that verifies the row after all others.
    pub verified: bool,
    /// The nesting depth of triggers at this statement; used for partitions only.
    pub depth: usize,
}

/// The task of a trigger.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Task {
    /// Check the token given in the column, by a guard or in `pg_fence.token`.
    Check,
    /// Check the token presented to a row lease, with its deadline in this column. In managed mode only the setting
    /// presents a token.
    RowLease { deadline: Attribute, managed: bool },
    /// Fill the column, and check the token of the guard or the setting. With `unfenced_insert`, a new row needs no
    /// lease.
    Managed { unfenced_insert: bool },
    /// Check the row again after all BEFORE triggers. With `null_insert`, a new row may have no token.
    Verify { null_insert: NullInsert },
}

/// When the second check accepts a new row without a token.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum NullInsert {
    Never,
    /// If there was no token with which the row could have been stamped.
    WithoutToken,
    Always,
}

impl Drop for Plan {
    /// When the statement is over, none of its rows can still be on the way to another partition.
    fn drop(&mut self) {
        if self.moves {
            row_moves::forget(self.depth);
        }
    }
}

impl Plan {
    /// Returns true if the statement names the fence column, as an INSERT always does.
    #[inline]
    pub fn names_fence(&self, call: &TriggerCall) -> bool {
        call.event != Event::Update || call.names(&self.column)
    }

    /// Returns true if a row is created without its lease, even if the session has a token.
    pub fn insert_ignores_token(&self) -> bool {
        self.task == Task::Managed { unfenced_insert: true }
    }

    /// Returns true if rows may be inserted without a token, and then get no fence.
    pub fn insert_allows_no_token(&self) -> bool {
        match self.task {
            Task::Managed { .. } => self.insert_ignores_token() || self.lease.is_none(),
            Task::RowLease { .. } => true,
            _ => false,
        }
    }

    /// Returns true if values that a statement writes into the fence column are ignored.
    pub fn is_managed(&self) -> bool {
        matches!(self.task, Task::Managed { .. } | Task::RowLease { managed: true, .. })
    }

    /// Parses the trigger's arguments. Errors: 22023, 42703, 42804, 55000.
    pub fn new(call: &TriggerCall) -> Result<Self, Report> {
        let columns = call.columns;
        let declaration = call.declaration();
        if declaration.arguments.len() > MOST {
            return Err(errors::bad_trigger_argument(format!(
                "fenced() takes at most {MOST} arguments"
            )));
        }
        let arguments = TriggerArguments::new(declaration.arguments.iter().copied());
        let column = fence_column(&columns, arguments.fence_column)?;
        let (order, managed) = order(arguments.mode)?;
        let lease = arguments.lease.map(|text| Binding::new(text, &columns)).transpose()?;
        let task = match arguments.deadline {
            Some(name) => {
                Task::RowLease { deadline: deadline(&columns, name, &arguments)?, managed }
            }
            None => Task::new(&arguments, managed)?,
        };
        statistics::prepare();
        let moves = declaration.on_partition;
        Ok(Plan {
            column,
            task,
            order,
            lease,
            tokens: tokens::sequence()?,
            moves,
            sees_leaving: declaration.fires_on_delete,
            sees_arriving: declaration.has_insert_trigger,
            verified: declaration.has_twin,
            depth: if moves { call.depth() } else { 0 },
        })
    }
}

fn fence_column(columns: &Columns, name: &[u8]) -> Result<Attribute, Report> {
    let column = columns.find(name).ok_or_else(|| errors::no_column(name))?;
    if column.type_oid != pg_sys::INT8OID {
        return Err(errors::wrong_type(name, "a bigint"));
    }
    if column.generated {
        return Err(errors::wrong_type(name, "a plain column, not a generated one,"));
    }
    Ok(column)
}

/// The deadline column. Errors if its type is wrong, or if other arguments exclude a deadline.
fn deadline(
    columns: &Columns,
    name: &[u8],
    arguments: &TriggerArguments,
) -> Result<Attribute, Report> {
    let beside = [arguments.lease, arguments.verify, arguments.events];
    if arguments.mode == b"strict" || beside.iter().any(Option::is_some) {
        return Err(errors::bad_trigger_argument(
            "a deadline of fenced() goes without a lease, verify, events and the mode strict"
                .into(),
        ));
    }
    let column = columns.find(name).ok_or_else(|| errors::no_column(name))?;
    if column.type_oid != pg_sys::TIMESTAMPTZOID || column.generated {
        return Err(errors::wrong_type(name, "a plain timestamptz"));
    }
    Ok(column)
}

/// The comparison of a mode, and whether the mode is `managed`.
fn order(mode: &[u8]) -> Result<(Order, bool), Report> {
    match mode {
        b"strict" => Ok((Order::Strict, false)),
        b"monotonic" => Ok((Order::Monotonic, false)),
        b"managed" => Ok((Order::Monotonic, true)),
        other => Err(errors::bad_trigger_argument(format!(
            "unknown mode {} of fenced()",
            errors::quoted(other)
        ))),
    }
}

impl Task {
    fn new(arguments: &TriggerArguments, managed: bool) -> Result<Self, Report> {
        if !arguments.knows_its_events() {
            return Err(errors::bad_trigger_argument(
                "the sixth argument of fenced() can only be events: insert, update, delete, truncate"
                    .into(),
            ));
        }
        let unfenced_insert = arguments.has_unfenced_insert();
        let null_insert = match arguments.lease {
            _ if unfenced_insert => NullInsert::Always,
            None if managed => NullInsert::WithoutToken,
            _ => NullInsert::Never,
        };
        match arguments.verify {
            None if managed => Ok(Task::Managed { unfenced_insert }),
            None => Ok(Task::Check),
            Some(b"verify") => Ok(Task::Verify { null_insert }),
            Some(_) => Err(errors::bad_trigger_argument(
                "the fifth argument of fenced() can only be verify".into(),
            )),
        }
    }
}

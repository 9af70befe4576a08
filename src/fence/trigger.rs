//! The trigger function `fenced(fence_column, mode, lease, deadline, 'verify', events)`.
//!
//! For each row it reads the fence column, and those of the lease or the deadline, and decides. The trigger's arguments
//! are parsed once per statement, and a token is checked against a lease once per transaction.

use super::binding::WriteLeases;
use super::plan::{NullInsert, Plan, Task};
use super::refusal::{self, RefusedWrite};
use super::{replica, row_lease, row_moves, written};
use crate::errors::{self, Report};
use crate::leases::guard;
use crate::leases::lookup::Caller;
use crate::pg::call::args::{Answer, Args};
use crate::pg::fenced_table::describe;
use crate::pg::fenced_table::trigger::{Event, Timing, TriggerCall, Tuple};
use crate::pg::session::settings;
use crate::statistics::{self, RefusalFacts};
use crate::tokens;
use pg_fence_rules::Token;
use pg_fence_rules::fence::{self, Landing, Verdict, Write};
use pgrx::pg_sys;

/// `fenced()`, the trigger. Errors: PF001 to PF006, 22004, 22023, 39P01, 40001, 42501, 42703, 42804.
pub fn fenced(args: Args) -> Result<Answer, Report> {
    let Some(call) = TriggerCall::new(args) else {
        return Err(errors::misplaced("fenced() must be called as a trigger"));
    };
    if call.event == Event::Truncate {
        return truncate(&call);
    }
    if !call.for_row {
        return Err(errors::misplaced("fenced() must fire FOR EACH ROW, but for TRUNCATE"));
    }
    let plan =
        call.cache(|| Plan::new(&call)).map_err(|report| describe::at_table(report, &call))?;
    let row = match plan.task {
        Task::Verify { null_insert } => verify(&call, plan, null_insert),
        _ if call.timing != Timing::Before => {
            return Err(errors::misplaced("fenced() must fire BEFORE the write"));
        }
        Task::Check => before::<false>(&call, plan),
        Task::RowLease { deadline, managed } => row_lease::before(&call, plan, &deadline, managed),
        Task::Managed { .. } => before::<true>(&call, plan),
    };
    row.map(Answer::Value).map_err(|report| {
        let report = describe::at_row(report, &call, &plan.column);
        statistics::refused(&report, || refusal::facts(&call, plan, &report));
        report
    })
}

fn truncate(call: &TriggerCall) -> Result<Answer, Report> {
    // In an apply worker, the publisher has already checked the statement.
    if settings::is_replica() {
        return Ok(Answer::Value(call.pass(None)));
    }
    statistics::checked_row();
    let report = describe::at_table(errors::unfenceable(), call);
    statistics::refused(&report, RefusalFacts::default);
    Err(report)
}

/// Decides about a row before it is written. It is generic so that each mode is compiled without the code of the other.
fn before<const MANAGED: bool>(call: &TriggerCall, plan: &Plan) -> Result<pg_sys::Datum, Report> {
    let (old, new) = (call.old, call.new);
    let fence = |row| call.columns.token(row, &plan.column);
    // Other functions get copies of it, so that it can stay in registers.
    let mut write = Write { old: old.map(fence), new: new.map(fence), named: true, ambient: None };
    if settings::is_replica() {
        statistics::checked_row();
        write.named = plan.names_fence(call);
        return replica::check(call, plan, write);
    }
    let leaves = |old: Tuple| row_moves::leaves(plan.depth, old.id(call), plan.sees_arriving);
    if plan.moves && call.event == Event::Delete && old.is_some_and(leaves) {
        return Ok(call.pass(old));
    }
    let arriving = match plan.moves && call.event == Event::Insert {
        true => arriving::<MANAGED>(plan, write)?,
        false => None,
    };
    if arriving.is_none() {
        statistics::checked_row();
        let is_free = MANAGED && old.is_none() && plan.insert_ignores_token();
        if is_free && write.brings_fence() {
            return Err(RefusedWrite { call, plan, write }.error(Verdict::Unfenced));
        }
        if is_free {
            return Ok(call.pass(new.map(|row| without(call, plan, row))));
        }
    }
    let leases = match &plan.lease {
        Some(binding) => binding.leases(&call.columns, old, new)?,
        None => WriteLeases::default(),
    };
    // An arriving row was checked where it left.
    let landing = match arriving {
        Some(landing) => Some(landing),
        None => checked::<MANAGED>(call, plan, &mut write, &leases)?,
    };
    let Some(landing) = landing else {
        return Ok(call.pass(new.map(|row| without(call, plan, row))));
    };
    if plan.lease.is_some() {
        guard_leases(call, plan, write, &leases, landing)?;
    }
    Ok(land(call, plan, write, landing))
}

/// Decides about a write by the token that it presents. Returns `None` if the write lands without a token.
///
/// The row's leases are checked later. A token that speaks for one was drawn here or adopted, so whether a token was
/// ever issued matters only if the write is refused.
#[inline(always)]
fn checked<const MANAGED: bool>(
    call: &TriggerCall,
    plan: &Plan,
    write: &mut Write,
    leases: &WriteLeases,
) -> Result<Option<Landing>, Report> {
    if MANAGED || !write.column_presents() {
        write.named = plan.names_fence(call);
        write.ambient = leases.ambient();
    }
    tokens::ensure_advanced(plan.tokens)?;
    let (write, bound) = (*write, plan.lease.is_some());
    let issued = |token| bound || tokens::issued(plan.tokens, token);
    let verdict = match MANAGED {
        true => fence::check_managed(&write, bound, issued),
        false => fence::check(&write, plan.order, bound, issued),
    };
    match verdict {
        Verdict::Land(landing) => Ok(Some(landing)),
        Verdict::LandWithout => Ok(None),
        refused => Err(RefusedWrite { call, plan, write }.checked(leases, refused)),
    }
}

/// Returns the row with its fence, and remembers what later rows and triggers need.
#[inline(always)]
fn land(call: &TriggerCall, plan: &Plan, write: Write, landing: Landing) -> pg_sys::Datum {
    if plan.verified {
        written::note(call.table, landing);
    }
    if plan.moves
        && call.event == Event::Update
        && let Some(old) = call.old
    {
        row_moves::accept(plan.depth, old.id(call), landing);
    }
    match call.new {
        Some(row) if write.new != Some(Some(landing.fence)) => {
            call.pass(Some(stamped(call, plan, row, Some(landing.fence))))
        }
        Some(row) => call.pass(Some(row)),
        None => call.pass(call.old),
    }
}

/// The tokens of a row that has left its partition by an accepted update and is inserted into this one. A trigger in
/// between must not have changed its fence (in managed mode the fence is put back).
fn arriving<const MANAGED: bool>(plan: &Plan, write: Write) -> Result<Option<Landing>, Report> {
    let fence = write.new.flatten();
    let is_same = |landing: &Landing| fence == Some(landing.fence);
    if let Some(landing) = row_moves::take_under_way(plan.depth) {
        if !MANAGED && plan.verified && !is_same(&landing) {
            return Err(errors::changed_behind(fence));
        }
        return Ok(Some(landing).filter(|landing| MANAGED || is_same(landing)));
    }
    if plan.sees_leaving {
        return Ok(None);
    }
    // The DELETE was not seen, so the row can only be recognized by its greater fence.
    let last = row_moves::take_accepted(plan.depth);
    Ok(last.filter(|landing| landing.keeps_greater() && is_same(landing)))
}

/// Makes the transaction guard the row's leases. If the token does not speak for one, the error is PF001 if the row has
/// a greater token, and PF004 otherwise.
#[inline(always)]
fn guard_leases(
    call: &TriggerCall,
    plan: &Plan,
    write: Write,
    leases: &WriteLeases,
    landing: Landing,
) -> Result<(), Report> {
    let token = landing.token;
    let refused = || RefusedWrite { call, plan, write };
    let disclosure = || refused().disclosure();
    leases
        .iter()
        .try_for_each(|name| guard::require(name, token, Caller::Trigger(&disclosure)))
        .map_err(|unguarded| refused().unguarded(leases, token, unguarded))
}

/// The row with this fence.
fn stamped(call: &TriggerCall, plan: &Plan, row: Tuple, fence: Option<Token>) -> Tuple {
    call.with_values(row, [(&plan.column, fence.map(Token::bigint))])
}

/// The row with NULL in its fence column, whatever the statement wrote there.
#[cold]
fn without(call: &TriggerCall, plan: &Plan, row: Tuple) -> Tuple {
    match call.columns.value(row, &plan.column) {
        None => row,
        Some(_) => stamped(call, plan, row, None),
    }
}

/// The check after all BEFORE triggers: the stored fence must be an accepted one, with a token that speaks for the
/// row's lease.
fn verify(
    call: &TriggerCall,
    plan: &Plan,
    null_insert: NullInsert,
) -> Result<pg_sys::Datum, Report> {
    if call.timing != Timing::After || matches!(call.event, Event::Delete | Event::Truncate) {
        return Err(errors::misplaced("fenced(..., 'verify') must fire AFTER INSERT OR UPDATE"));
    }
    let passed = call.pass(call.new);
    let Some(new) = call.new.filter(|_| !settings::is_replica()) else { return Ok(passed) };
    let columns = call.columns;
    let fence = |row: Tuple| columns.token(row, &plan.column);
    let found = fence(new);
    let may_be_null = match null_insert {
        NullInsert::Never => false,
        // If there was a token, the row was stamped with it, so another trigger has written the NULL.
        NullInsert::WithoutToken => settings::token().is_none(),
        NullInsert::Always => true,
    };
    if found.is_none() && may_be_null && call.event == Event::Insert {
        return Ok(passed);
    }
    let Some(now) =
        found.filter(|now| written::token_that_wrote(call.table, *now, |_| true).is_some())
    else {
        return Err(errors::changed_behind(found));
    };
    if !plan.order.accepts(now, call.old.and_then(fence)) {
        return Err(errors::changed_behind(found));
    }
    if let Some(binding) = &plan.lease {
        let name = binding.lease(&columns, new)?;
        let token = written::token_that_wrote(call.table, now, |token| {
            guard::is_guarded_here(&name, token)
        });
        let disclosure = || refusal::disclosure(call, plan, true);
        guard::require(&name, token.unwrap_or(now), Caller::Trigger(&disclosure))?;
    }
    Ok(passed)
}

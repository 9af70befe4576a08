//! The trigger function `fenced(fence_column, mode, lease, 'verify', 'unfenced insert')`.
//!
//! Per row it reads two columns and decides; what the trigger's arguments mean is worked out once per
//! statement, and whether a token speaks for a lease once per transaction. A row that shows the token of the row before it
//! takes a short way.

use super::binding::WriteLeases;
use super::plan::{Duty, NullInsert, Plan};
use super::row_moves;
use crate::known_bugs;
use crate::leases::guard::{self, Caller, MaySee};
use crate::pg::call::args::{Answer, Args};
use crate::pg::call::errors::{self, Refusal, TriedWrite, Wrote};
use crate::pg::fenced_table::describe;
use crate::pg::fenced_table::trigger::{Attribute, Event, TriggerCall, Tuple};
use crate::pg::session::server;
use crate::pg::session::settings;
use crate::pg::state::relation;
use crate::statistics::{self, Known};
use crate::tokens;
use pg_fence_rules::fence::{self, Verdict, Write};
use pg_fence_rules::Token;
use pgrx::pg_sys;

/// Lets a row of an UPDATE through that shows the token with which the row before it has landed, as most do: that token was
/// drawn, and the transaction guards the lease. Left to be asked is whether it may replace the stored one. None where more
/// is to be asked.
///
/// It neither raises nor panics, so that it may be called where an error is not expected.
#[inline(always)]
pub fn lands_again(args: Args) -> Option<pg_sys::Datum> {
    let call = TriggerCall::new(args)?;
    let plan: &Plan = call.kept()?;
    let landed = plan.landed.get()?;
    if !plan.plain || call.event() != Event::Update || plan.offered.get().is_some() {
        return None;
    }
    let (columns, (old, new)) = (call.columns(), call.rows());
    let (stored, shown) = (columns.token(old?, &plan.column), columns.token(new?, &plan.column));
    let write = Write { old: Some(stored), new: Some(shown), named: false, ambient: None };
    match fence::judge(&write, plan.order, |token| token == landed) {
        Verdict::Land { stamp: false, .. } => {
            statistics::judged_row();
            Some(call.pass(new))
        }
        _ => None,
    }
}

/// `fenced()`, the trigger. Errors: PF001 to PF005, 22004, 22023, 39P01, 40001, 42501, 42703, 42804.
pub fn fenced(args: Args) -> Result<Answer, Refusal> {
    let Some(call) = TriggerCall::new(args) else {
        return Err(errors::misplaced("fenced() must be called as a trigger"));
    };
    if call.event() == Event::Truncate {
        return truncate(&call);
    }
    if !call.for_row() {
        return Err(errors::misplaced("fenced() must fire FOR EACH ROW, but for TRUNCATE"));
    }
    let plan =
        call.keep(|| Plan::new(&call)).map_err(|refusal| describe::at_table(refusal, &call))?;
    let row = match plan.duty {
        Duty::Verify { null_insert } => verify(&call, plan, null_insert),
        _ if !call.before() => {
            return Err(errors::misplaced("fenced() must fire BEFORE the write"));
        }
        Duty::Judge => before::<false>(&call, plan),
        Duty::Manage { .. } => before::<true>(&call, plan),
    };
    row.map(Answer::Value).map_err(|refusal| {
        let refusal = describe::at_row(refusal, &call, &plan.column);
        statistics::refused(&refusal, || known(&call, plan, &refusal));
        refusal
    })
}

fn truncate(call: &TriggerCall) -> Result<Answer, Refusal> {
    // Under apply, the publisher has judged.
    if server::replica() {
        return Ok(Answer::Value(call.pass(None)));
    }
    statistics::judged_row();
    let refusal = describe::at_table(errors::unfenceable(), call);
    statistics::refused(&refusal, Known::default);
    Err(refusal)
}

/// Judges a row before it is written. In two versions, so that a mode costs the other one nothing.
fn before<const MANAGED: bool>(call: &TriggerCall, plan: &Plan) -> Result<pg_sys::Datum, Refusal> {
    let columns = call.columns();
    let (old, new) = call.rows();
    // Most rows are updated or deleted by a statement that has inserted none.
    count(call, plan, old.is_none() || plan.offered.get().is_some());
    let fence = |row| columns.token(row, &plan.column);
    let named = || call.event() != Event::Update || call.names(&plan.column);
    // Others get copies of it, so that it need not lie in memory.
    let mut write = Write { old: old.map(fence), new: new.map(fence), named: true, ambient: None };
    if server::replica() {
        write.named = named();
        return replicated(call, plan, write);
    }
    if plan.moves && call.event() == Event::Delete && leaves(call, plan, old) {
        statistics::row_was_judged_before();
        return Ok(call.pass(old));
    }
    let moves_here = plan.moves && call.event() == Event::Insert;
    let arriving = if moves_here { arriving::<MANAGED>(plan, write)? } else { None };
    if MANAGED && old.is_none() && arriving.is_none() {
        if let Duty::Manage { unfenced_insert: true } = plan.duty {
            return Ok(call.pass(new.map(|row| without(call, plan, row))));
        }
    }
    let mut leases = WriteLeases::default();
    if let Some(binding) = &plan.lease {
        binding.find_leases(&columns, old, new, &mut leases)?;
    }
    if MANAGED || !write.column_presents() {
        write.named = named();
        // A row that moves keeps the token of its update.
        write.ambient =
            if MANAGED { arriving.or_else(|| ambient(&leases)) } else { ambient(&leases) };
    }
    let (token, stamp) = match judge::<MANAGED>(plan, write)? {
        Verdict::Land { token, stamp } => (token, stamp),
        Verdict::LandWithout => return Ok(call.pass(new.map(|row| without(call, plan, row)))),
        refused => return Err(refusal(call, plan, write, refused)),
    };
    if plan.lease.is_some() {
        guard_leases(call, plan, write, &leases, token)?;
    }
    plan.landed.set(Some(token));
    if plan.verified {
        guard::note_write(call.table(), token);
    }
    if plan.moves && call.event() == Event::Update {
        if let Some(old) = old {
            row_moves::accept(plan.depth, old.id(call), token);
        }
    }
    Ok(match new {
        Some(row) if stamp => call.pass(Some(call.stamped(row, &plan.column, Some(token)))),
        Some(row) => call.pass(Some(row)),
        None => call.pass(old),
    })
}

/// The token of a row that has left its partition by an accepted update, and arrives in this one by an INSERT. A trigger
/// in between must not have put another one in its place (in managed mode it is put back).
fn arriving<const MANAGED: bool>(plan: &Plan, write: Write) -> Result<Option<Token>, Refusal> {
    if !plan.judges_arrivals() {
        return Ok(None);
    }
    let arriving = row_moves::token_under_way(plan.depth);
    let fence = write.new.flatten();
    if !MANAGED && arriving.is_some() && arriving != fence {
        return Err(errors::changed_behind(fence));
    }
    Ok(arriving)
}

/// May the write land, as far as its token tells? (The leases of the row are asked after that.)
#[inline(always)]
fn judge<const MANAGED: bool>(plan: &Plan, write: Write) -> Result<Verdict, Refusal> {
    tokens::ensure_begun(plan.tokens)?;
    let issued = |t| tokens::issued(plan.tokens, t);
    Ok(if MANAGED {
        fence::judge_managed(&write, plan.lease.is_some(), issued)
    } else {
        fence::judge(&write, plan.order, issued)
    })
}

/// Makes the transaction guard the leases of the row; PF004 when the token does not speak for one.
#[inline(always)]
fn guard_leases(
    call: &TriggerCall,
    plan: &Plan,
    write: Write,
    leases: &WriteLeases,
    token: Token,
) -> Result<(), Refusal> {
    let shown = write.column_presents() || write.ambient.is_some();
    let may_see = || may_see(call, plan, shown);
    leases.iter().try_for_each(|name| guard::require(name, token, Caller::Trigger(&may_see)))
}

/// Counts a row that is judged, unless a closer look finds that it was counted before.
#[inline(always)]
fn count(call: &TriggerCall, plan: &Plan, look_closer: bool) {
    if !known_bugs::NO_COUNTING && (!look_closer || is_new(call, plan)) {
        statistics::judged_row();
    }
}

/// Has the row not been counted yet? One that arrives from another partition was when it was updated there. One that is
/// offered and then updated instead (ON CONFLICT) was when it was offered: nothing was inserted in between.
#[inline(never)]
fn is_new(call: &TriggerCall, plan: &Plan) -> bool {
    match call.event() {
        Event::Insert if plan.moves && row_moves::arrives(plan.depth) => false,
        Event::Insert => {
            plan.offered.set(Some(call.rows_inserted()));
            true
        }
        event => {
            let offered = plan.offered.take();
            event != Event::Update || offered != Some(call.rows_inserted())
        }
    }
}

/// What administrators may know of a refused write, whatever its writer may.
#[cold]
fn known(call: &TriggerCall, plan: &Plan, refusal: &Refusal) -> Known {
    let columns = call.columns();
    let fence = |row: Tuple| columns.token(row, &plan.column);
    let (old, new) = call.rows();
    let stored = old.and_then(fence);
    let presented = new.and_then(fence).filter(|_| refusal.sqlstate != "PF002");
    let leases = leases(call, plan);
    // Of two leases, the one for which the token does not speak.
    let stands = |name: &&[u8]| presented.is_some_and(|token| guard::is_guarded_here(name, token));
    let lease = leases.iter().find(|name| !stands(name)).or(leases.iter().next());
    let lease = lease.map(<[u8]>::to_vec);
    let holder = lease.as_deref().and_then(guard::holder);
    Known { key: describe::key(call), lease, holder, presented, stored }
}

/// The leases of a write, as far as they can be told.
#[cold]
fn leases<'a>(call: &TriggerCall, plan: &'a Plan) -> WriteLeases<'a> {
    let mut leases = WriteLeases::default();
    if let Some(binding) = &plan.lease {
        let (old, new) = call.rows();
        let _ = binding.find_leases(&call.columns(), old, new, &mut leases);
    }
    leases
}

/// The token that a transaction has beside the fence column.
#[inline]
fn ambient(leases: &WriteLeases) -> Option<Token> {
    leases.iter().find_map(guard::token_for).or_else(settings::token)
}

/// The row with NULL in its fence column, whatever the statement has put there.
#[cold]
fn without(call: &TriggerCall, plan: &Plan, row: Tuple) -> Tuple {
    match call.columns().value(row, &plan.column) {
        None => row,
        Some(_) => call.stamped(row, &plan.column, None),
    }
}

/// What its writer may know of a write whose token is judged for a lease.
#[cold]
fn may_see(call: &TriggerCall, plan: &Plan, shown: bool) -> MaySee {
    // A token that the statement has not shown itself may be one that its writer does not know.
    let token = shown || describe::readable(call, plan.column.number);
    MaySee { lease: may_see_lease(call, plan), token }
}

/// The refusal of a write that is not to land.
#[cold]
fn refusal(call: &TriggerCall, plan: &Plan, write: Write, verdict: Verdict) -> Refusal {
    let stored = visible(call, plan, write.old.flatten());
    let shown = write.column_presents() || write.ambient.is_some();
    match verdict {
        Verdict::NeverIssued { presented } => match leases(call, plan).iter().next() {
            // For those who may not see leases, each token that does not speak is like any other.
            Some(name) if !relation::may_see_leases() => {
                let may_see = || may_see(call, plan, shown);
                guard::not_speaking(name, presented, Caller::Trigger(&may_see))
            }
            _ => errors::never_issued(presented),
        },
        Verdict::Stale { presented, .. } => {
            // An equal value that is only named may be one that the caller does not know.
            let known = shown || stored.is_some();
            errors::stale(known.then_some(presented), stored, &refused_write(call, plan, &write))
        }
        _ => errors::unfenced(stored, &refused_write(call, plan, &write)),
    }
}

/// What a refused write has tried, for the hint.
fn refused_write(call: &TriggerCall, plan: &Plan, write: &Write) -> TriedWrite {
    let wrote = match (call.event(), write.new.flatten()) {
        (Event::Delete, _) => Wrote::Deletes,
        (Event::Update, _) if !write.column_presents() && !call.names(&plan.column) => {
            Wrote::Nothing
        }
        // An INSERT that leaves the column out is not to be told from one that writes NULL.
        (Event::Insert, None) => Wrote::Nothing,
        (_, None) => Wrote::Null,
        (_, Some(_)) => Wrote::Value,
    };
    let managed = matches!(plan.duty, Duty::Manage { .. });
    let column = describe::column_name(call, plan.column.number);
    TriedWrite { column, managed, wrote, ambient: ambient(&leases(call, plan)) }
}

/// Is this DELETE the first half of a move to another partition, whose UPDATE was just accepted?
fn leaves(call: &TriggerCall, plan: &Plan, old: Option<Tuple>) -> bool {
    old.is_some_and(|old| row_moves::leaves(plan.depth, old.id(call), plan.judges_arrivals()))
}

/// Under `session_replication_role = replica` the publisher has judged; only the order is checked here.
#[inline(never)]
fn replicated(call: &TriggerCall, plan: &Plan, write: Write) -> Result<pg_sys::Datum, Refusal> {
    if let (Some(Some(stored)), Some(new)) = (write.old, write.new) {
        let verdict = match new {
            Some(presented) if plan.order.accepts(presented, Some(stored)) => None,
            Some(presented) => Some(Verdict::Stale { presented, stored }),
            None => Some(Verdict::Unfenced),
        };
        if let Some(verdict) = verdict {
            return Err(refusal(call, plan, write, verdict));
        }
    }
    Ok(call.pass(call.new_row().or(call.old())))
}

/// The check that follows all BEFORE triggers: what is stored now must be what was accepted, and for the
/// lease that guards it.
fn verify(
    call: &TriggerCall,
    plan: &Plan,
    null_insert: NullInsert,
) -> Result<pg_sys::Datum, Refusal> {
    if !call.after() || matches!(call.event(), Event::Delete | Event::Truncate) {
        return Err(errors::misplaced("fenced(..., 'verify') must fire AFTER INSERT OR UPDATE"));
    }
    let passed = call.pass(call.new_row());
    let Some(new) = call.new_row().filter(|_| !server::replica()) else { return Ok(passed) };
    let columns = call.columns();
    let fence = |row: Tuple| columns.token(row, &plan.column);
    let found = fence(new);
    let may_be_null = match null_insert {
        NullInsert::Never => false,
        // With a token at hand the row was given it, so that a NULL is another trigger's doing.
        NullInsert::WithoutToken => settings::token().is_none(),
        NullInsert::Always => true,
    };
    if found.is_none() && may_be_null && call.event() == Event::Insert {
        return Ok(passed);
    }
    let Some(token) = found.filter(|t| guard::has_written_under(call.table(), *t)) else {
        return Err(errors::changed_behind(found));
    };
    let stored = call.old().and_then(fence);
    if !plan.order.accepts(token, stored) {
        let column = describe::column_name(call, plan.column.number);
        let refused_write =
            TriedWrite { column, managed: false, wrote: Wrote::Value, ambient: None };
        return Err(errors::stale(found, visible(call, plan, stored), &refused_write));
    }
    if let Some(binding) = &plan.lease {
        let name = binding.lease(&columns, new)?;
        let may_see = || MaySee { lease: may_see_lease(call, plan), token: true };
        guard::require(&name, token, Caller::Trigger(&may_see))?;
    }
    Ok(passed)
}

/// May the caller read the columns that the name of the row's lease is made of?
fn may_see_lease(call: &TriggerCall, plan: &Plan) -> bool {
    let readable = |attribute: &Attribute| describe::readable(call, attribute.number);
    plan.lease.as_ref().is_none_or(|binding| binding.columns().all(readable))
}

/// The stored token, where the caller may read it.
fn visible(call: &TriggerCall, plan: &Plan, stored: Option<Token>) -> Option<Token> {
    stored.filter(|_| describe::readable(call, plan.column.number))
}

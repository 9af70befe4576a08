//! Rows of the state written as the executor writes them, with all that belongs to a row of that table: row
//! triggers, constraints, indexes of any kind, generated columns and defaults. This is how logical
//! replication's apply writes; as there, statement triggers and rules are not applied, and no rights are asked.

use crate::pg::compat;
use crate::pg::state::row::{Fields, COLUMNS};
use pgrx::pg_sys;
use std::ffi::c_int;

/// Writes a row of which the first columns are given; the others get their defaults.
///
/// # Safety
/// The table must be open and locked for writing, the fields fit for its first columns.
pub unsafe fn insert(table: pg_sys::Relation, given: usize, fields: &Fields) {
    // SAFETY: the caller's promise.
    unsafe {
        execute(table, 0, |run| {
            let (mut values, mut nulls) = (fields.values, fields.nulls);
            for n in given..(*(*table).rd_att).natts as usize {
                let default = run.default_of(table, n);
                (values[n], nulls[n]) =
                    (default.unwrap_or(pg_sys::Datum::from(0)), default.is_none());
            }
            let slot = run.slot(table);
            fill(slot, &values, &nulls);
            pg_sys::ExecSimpleRelationInsert(run.result, run.state, slot);
        });
    }
}

/// Writes a new version of a row.
///
/// # Safety
/// As for `insert`; nobody else may be changing the row.
pub unsafe fn update(table: pg_sys::Relation, over: pg_sys::ItemPointerData, fields: &Fields) {
    // SAFETY: the caller's promise.
    unsafe {
        execute(table, fields.named, |run| {
            let (old, new) = (run.slot(table), run.slot(table));
            (*old).tts_tid = over;
            fill(new, &fields.values, &fields.nulls);
            let mut recheck = compat::recheck(run.state);
            recheck.origslot = new;
            pg_sys::ExecSimpleRelationUpdate(run.result, run.state, &mut recheck, old, new);
            pg_sys::EvalPlanQualEnd(&mut recheck);
        });
    }
}

/// Deletes a row.
///
/// # Safety
/// As for `update`.
pub unsafe fn delete(table: pg_sys::Relation, at: pg_sys::ItemPointerData) {
    // SAFETY: the caller's promise.
    unsafe {
        execute(table, 0, |run| {
            let old = run.slot(table);
            (*old).tts_tid = at;
            let mut recheck = compat::recheck(run.state);
            pg_sys::ExecSimpleRelationDelete(run.result, run.state, &mut recheck, old);
            pg_sys::EvalPlanQualEnd(&mut recheck);
        });
    }
}

/// One write under way.
struct Run {
    state: *mut pg_sys::EState,
    result: *mut pg_sys::ResultRelInfo,
}

/// Sets the executor up for one write of a table, and takes it down. `updated` are the columns, a bit each,
/// that an UPDATE would name: triggers and generated columns ask for them.
///
/// # Safety
/// The table must be open and locked for writing.
unsafe fn execute(table: pg_sys::Relation, updated: u32, work: impl FnOnce(&Run)) {
    // SAFETY: in the order of create_edata_for_relation and finish_edata in replication/logical/worker.c. An
    // error leaves all of it to the clean-up of the transaction or savepoint.
    unsafe {
        pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
        let state = pg_sys::CreateExecutorState();
        let context = pg_sys::MemoryContextSwitchTo((*state).es_query_cxt);
        compat::init_range_table(state, table, columns(updated));
        let result = compat::node::<pg_sys::ResultRelInfo>(pg_sys::NodeTag::T_ResultRelInfo);
        pg_sys::InitResultRelInfo(result, table, 1, std::ptr::null_mut(), 0);
        // Here AFTER triggers look for it.
        (*state).es_opened_result_relations =
            pg_sys::lappend((*state).es_opened_result_relations, result.cast());
        (*state).es_output_cid = pg_sys::GetCurrentCommandId(true);
        pg_sys::AfterTriggerBeginQuery();
        pg_sys::ExecOpenIndices(result, false);
        work(&Run { state, result });
        pg_sys::ExecCloseIndices(result);
        pg_sys::AfterTriggerEndQuery(state);
        pg_sys::ExecResetTupleTable((*state).es_tupleTable, false);
        pg_sys::MemoryContextSwitchTo(context);
        pg_sys::FreeExecutorState(state);
        pg_sys::PopActiveSnapshot();
    }
}

impl Run {
    /// A slot for a row, which goes with the run.
    ///
    /// # Safety
    /// The table must be the run's.
    unsafe fn slot(&self, table: pg_sys::Relation) -> *mut pg_sys::TupleTableSlot {
        // SAFETY: the caller's promise.
        unsafe {
            let virtual_slot = std::ptr::addr_of!(pg_sys::TTSOpsVirtual);
            pg_sys::ExecInitExtraTupleSlot(self.state, (*table).rd_att, virtual_slot)
        }
    }

    /// The default of a column (from 0), None for NULL; generated ones are computed later.
    ///
    /// # Safety
    /// The table must be the run's, and have such a column.
    unsafe fn default_of(&self, table: pg_sys::Relation, n: usize) -> Option<pg_sys::Datum> {
        // SAFETY: the caller's promise; the value lives as long as the run.
        unsafe {
            let column = &*compat::attribute((*table).rd_att, n);
            if column.attisdropped || column.attgenerated != 0 {
                return None;
            }
            let expression = pg_sys::build_column_default(table, n as c_int + 1);
            if expression.is_null() {
                return None;
            }
            let planned = pg_sys::expression_planner(expression.cast());
            let ready = pg_sys::ExecInitExpr(planned, std::ptr::null_mut());
            let context = match (*self.state).es_per_tuple_exprcontext {
                none if none.is_null() => pg_sys::MakePerTupleExprContext(self.state),
                context => context,
            };
            let evaluate = (*ready).evalfunc?;
            let mut null = false;
            let value = compat::guarded(|| evaluate(ready, context, &mut null));
            (!null).then_some(value)
        }
    }
}

/// # Safety
/// The slot must have no more columns than there are values.
unsafe fn fill(
    slot: *mut pg_sys::TupleTableSlot,
    values: &[pg_sys::Datum; COLUMNS],
    nulls: &[bool; COLUMNS],
) {
    // SAFETY: a virtual slot has a place for each column.
    unsafe {
        let columns = (*(*slot).tts_tupleDescriptor).natts as usize;
        std::ptr::copy_nonoverlapping(values.as_ptr(), (*slot).tts_values, columns);
        std::ptr::copy_nonoverlapping(nulls.as_ptr(), (*slot).tts_isnull, columns);
        pg_sys::ExecStoreVirtualTuple(slot);
    }
}

/// A set of columns as Postgres has it.
fn columns(bits: u32) -> *mut pg_sys::Bitmapset {
    (0..u32::BITS).filter(|n| bits & (1 << n) != 0).fold(std::ptr::null_mut(), |set, n| {
        let member = n as c_int + 1 - pg_sys::FirstLowInvalidHeapAttributeNumber;
        // SAFETY: a set of the current memory.
        unsafe { pg_sys::bms_add_member(set, member) }
    })
}

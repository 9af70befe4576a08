//! A call of the trigger: its table, its arguments and its rows.

use crate::pg::call::args::{Args, bytes_within};
use crate::pg::compat;
use crate::pg::raw;
use crate::pg::session::xact;
use crate::pg::state::row::RowVersion;
use pg_fence_rules::{Instant, NAME_MAX, Token};
use pgrx::pg_sys;
use std::ffi::{CStr, c_int};
use std::io::Write;

/// From catalog/pg_trigger.h, in the type of `tgtype`.
const BEFORE_BIT: i16 = pg_sys::TRIGGER_TYPE_BEFORE as i16;
const DELETE_BIT: i16 = pg_sys::TRIGGER_TYPE_DELETE as i16;
const BEFORE_INSERT: i16 = BEFORE_BIT | pg_sys::TRIGGER_TYPE_INSERT as i16;

/// The column types that may be part of a lease's name: no setting changes the text of their values.
pub const PLACEHOLDER_TYPES: [pg_sys::Oid; 7] = [
    pg_sys::INT2OID,
    pg_sys::INT4OID,
    pg_sys::INT8OID,
    pg_sys::TEXTOID,
    pg_sys::VARCHAROID,
    pg_sys::UUIDOID,
    pg_sys::BOOLOID,
];

/// The write that fires the trigger.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    Insert,
    Update,
    Delete,
    Truncate,
}

/// A row of the table, as passed to the trigger.
#[derive(Clone, Copy)]
pub struct Tuple(pg_sys::HeapTuple);

/// The columns of the table.
#[derive(Clone, Copy)]
pub struct Columns(pg_sys::TupleDesc);

/// The identity of a row version.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RowId {
    table: pg_sys::Oid,
    version: RowVersion,
}

impl RowId {
    /// Returns true if an UPDATE of this transaction has moved the row to another partition: the server marks the version
    /// that it deletes then. Returns false if another trigger has skipped that DELETE. (The mark of a move that was rolled
    /// back may still be there.) Always returns true if the table is no heap.
    pub fn has_moved(&self) -> bool {
        let snapshot_type = pg_sys::SnapshotType::SNAPSHOT_SELF;
        let mut now = pg_sys::SnapshotData { snapshot_type, ..Default::default() };
        let t_self = self.version.place();
        let mut tuple = pg_sys::HeapTupleData { t_self, ..Default::default() };
        let mut buffer = 0;
        // SAFETY: the statement that has updated this version has the table locked, and vacuum leaves a version that an
        // open transaction has deleted. The page is pinned while it is read.
        unsafe {
            compat::guarded(|| {
                let table = raw::relation_open(self.table, pg_sys::NoLock as c_int);
                let has_moved = if (*(*table).rd_rel).relam != pg_sys::HEAP_TABLE_AM_OID {
                    true
                } else {
                    let is_there = raw::heap_fetch(table, &mut now, &mut tuple, &mut buffer, true);
                    let mark = pg_sys::MovedPartitionsOffsetNumber;
                    let is_marked = !tuple.t_data.is_null()
                        && u32::from((*tuple.t_data).t_ctid.ip_posid) == mark;
                    if buffer != 0 {
                        raw::ReleaseBuffer(buffer);
                    }
                    is_marked && !is_there
                };
                raw::relation_close(table, pg_sys::NoLock as c_int);
                has_moved
            })
        }
    }
}

/// A column of the table, by its number, which is found faster than by its name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attribute {
    pub number: i32,
    pub type_oid: pg_sys::Oid,
    pub generated: bool,
}

impl Attribute {
    /// Returns true if the column may be part of a lease's name. A generated column has no value yet when the trigger
    /// fires.
    pub fn fits_placeholder(&self) -> bool {
        !self.generated && PLACEHOLDER_TYPES.contains(&self.type_oid)
    }

    /// Returns true for an integer type, which is passed by value.
    fn is_number(&self) -> bool {
        [pg_sys::INT2OID, pg_sys::INT4OID, pg_sys::INT8OID].contains(&self.type_oid)
    }
}

/// When the trigger fires.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Timing {
    Before,
    After,
    Instead,
}

/// A call of the trigger function, with its rows.
#[derive(Clone, Copy)]
pub struct TriggerCall {
    pub event: Event,
    pub timing: Timing,
    /// True if the trigger fires FOR EACH ROW.
    pub for_row: bool,
    /// The stored row of an UPDATE or DELETE.
    pub old: Option<Tuple>,
    /// The new row of an INSERT or UPDATE.
    pub new: Option<Tuple>,
    /// The written table.
    pub table: pg_sys::Oid,
    /// The columns of the table.
    pub columns: Columns,
    fcinfo: pg_sys::FunctionCallInfo,
    data: *mut pg_sys::TriggerData,
}

/// The declarations of the trigger and its table, which are the same for all rows of a statement.
pub struct Declaration<'a> {
    /// The arguments of CREATE TRIGGER.
    pub arguments: Vec<&'a [u8]>,
    /// True if the trigger fires on DELETE, too.
    pub fires_on_delete: bool,
    /// True if the table has a trigger of the same function that fires before an INSERT.
    pub has_insert_trigger: bool,
    /// True if the table has an AFTER ROW trigger of the same function, which checks rows after all others.
    pub has_twin: bool,
    /// True if the table is a partition.
    pub on_partition: bool,
}

impl TriggerCall {
    /// Returns `None` if the function was not called by the trigger manager.
    #[inline(always)]
    pub fn new(args: Args) -> Option<Self> {
        let fcinfo = args.raw();
        // SAFETY: the context of a call is a node or NULL; the trigger manager passes a TriggerData, whose relation is
        // open and locked as long as the call runs.
        unsafe {
            let context = (*fcinfo).context;
            if context.is_null() || (*context).type_ != pg_sys::NodeTag::T_TriggerData {
                return None;
            }
            let data: *mut pg_sys::TriggerData = context.cast();
            let (bits, first) = ((*data).tg_event, Tuple((*data).tg_trigtuple));
            let (event, old, new) = match bits & pg_sys::TRIGGER_EVENT_OPMASK {
                pg_sys::TRIGGER_EVENT_INSERT => (Event::Insert, None, Some(first)),
                pg_sys::TRIGGER_EVENT_DELETE => (Event::Delete, Some(first), None),
                pg_sys::TRIGGER_EVENT_UPDATE => {
                    (Event::Update, Some(first), Some(Tuple((*data).tg_newtuple)))
                }
                _ => (Event::Truncate, None, None),
            };
            let timing = match bits & pg_sys::TRIGGER_EVENT_TIMINGMASK {
                pg_sys::TRIGGER_EVENT_BEFORE => Timing::Before,
                pg_sys::TRIGGER_EVENT_AFTER => Timing::After,
                _ => Timing::Instead,
            };
            let for_row = bits & pg_sys::TRIGGER_EVENT_ROW != 0;
            let relation = (*data).tg_relation;
            let (table, columns) = ((*relation).rd_id, Columns((*relation).rd_att));
            Some(TriggerCall { event, timing, for_row, old, new, table, columns, fcinfo, data })
        }
    }

    /// The written table, open and locked as long as the call runs.
    #[inline]
    pub fn relation(&self) -> pg_sys::Relation {
        // SAFETY: `new` has checked that it is a TriggerData.
        unsafe { (*self.data).tg_relation }
    }

    /// The nesting depth of triggers: 1 if a client's statement fires this one.
    pub fn depth(&self) -> usize {
        // SAFETY: a function without arguments.
        let depth = unsafe { pgrx::direct_function_call::<i32>(pg_sys::pg_trigger_depth, &[]) };
        depth.map_or(0, |d| usize::try_from(d).unwrap_or(0))
    }

    /// The declarations of the trigger and its table.
    pub fn declaration(&self) -> Declaration<'_> {
        // SAFETY: as for `new`; the trigger's description lives as long as the call, and has tgnargs NUL-terminated strings.
        unsafe {
            let (relation, trigger) = ((*self.data).tg_relation, &*(*self.data).tg_trigger);
            let argument = |i| CStr::from_ptr(*trigger.tgargs.add(i)).to_bytes();
            let all = (*relation).trigdesc;
            let has_one = |fits: fn(&pg_sys::Trigger) -> bool| {
                let is_one =
                    |other: &pg_sys::Trigger| other.tgfoid == trigger.tgfoid && fits(other);
                !all.is_null()
                    && (0..(*all).numtriggers as usize).any(|i| is_one(&*(*all).triggers.add(i)))
            };
            Declaration {
                arguments: (0..trigger.tgnargs as usize).map(argument).collect(),
                fires_on_delete: trigger.tgtype & DELETE_BIT != 0,
                has_insert_trigger: has_one(|other| other.tgtype & BEFORE_INSERT == BEFORE_INSERT),
                has_twin: has_one(|other| other.tgtype & BEFORE_BIT == 0),
                on_partition: (*(*relation).rd_rel).relispartition,
            }
        }
    }

    /// Returns true if the UPDATE names this column; for a MERGE, if one of its actions does.
    #[inline]
    pub fn names(&self, attribute: &Attribute) -> bool {
        let bit = attribute.number - pg_sys::FirstLowInvalidHeapAttributeNumber;
        // SAFETY: the set is the trigger manager's, or NULL if empty; the function raises for negative bits only.
        unsafe { raw::bms_is_member(bit, (*self.data).tg_updatedcols) }
    }

    /// Data of this trigger, made at the first row of a statement and dropped when the statement ends.
    #[inline]
    pub fn cache<T, E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<&T, E> {
        // SAFETY: flinfo lives as long as the statement's trigger state; fn_extra belongs to this function.
        match unsafe { (*(*self.fcinfo).flinfo).fn_extra.cast::<T>().as_ref() } {
            Some(cached) => Ok(cached),
            None => self.make_and_cache(make),
        }
    }

    #[cold]
    fn make_and_cache<T, E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<&T, E> {
        let made = make()?;
        // SAFETY: fn_mcxt lives as long as flinfo, and the data is dropped with it.
        unsafe {
            let flinfo = (*self.fcinfo).flinfo;
            let mut memory = pgrx::PgMemoryContexts::For((*flinfo).fn_mcxt);
            let cached = memory.leak_and_drop_on_delete(made);
            (*flinfo).fn_extra = cached.cast();
            Ok(&*cached)
        }
    }

    /// Returns the row unchanged.
    #[inline]
    pub fn pass(&self, row: Option<Tuple>) -> pg_sys::Datum {
        pg_sys::Datum::from(row.map_or(std::ptr::null_mut(), |t| t.0))
    }

    /// The row with other values in some columns of type bigint or timestamptz; `None` stands for NULL.
    pub fn with_values<const N: usize>(
        &self,
        row: Tuple,
        values: [(&Attribute, Option<i64>); N],
    ) -> Tuple {
        let mut columns: [c_int; N] = values.map(|(attribute, _)| attribute.number);
        let mut nulls = values.map(|(_, value)| value.is_none());
        let mut values = values.map(|(_, value)| pg_sys::Datum::from(value.unwrap_or(0)));
        // SAFETY: these are columns of the table, and both types are passed by value in eight bytes.
        unsafe {
            Tuple(pg_sys::heap_modify_tuple_by_cols(
                row.0,
                (*(*self.data).tg_relation).rd_att,
                N as c_int,
                columns.as_mut_ptr(),
                values.as_mut_ptr(),
                nulls.as_mut_ptr(),
            ))
        }
    }
}

impl Columns {
    /// The column of this name, unless it was dropped.
    pub fn find(&self, name: &[u8]) -> Option<Attribute> {
        // SAFETY: attrs has natts entries.
        unsafe {
            (0..(*self.0).natts as usize).find_map(|i| {
                let a = &*compat::attribute(self.0, i);
                let same = CStr::from_ptr(a.attname.data.as_ptr()).to_bytes() == name;
                (same && !a.attisdropped).then(|| Attribute {
                    number: i32::from(a.attnum),
                    type_oid: a.atttypid,
                    generated: a.attgenerated != 0,
                })
            })
        }
    }

    /// A column's value; `None` for NULL.
    #[inline]
    pub fn value(&self, row: Tuple, attribute: &Attribute) -> Option<pg_sys::Datum> {
        let mut null = false;
        // SAFETY: the row is one of this table, and the number that of one of its columns.
        let value = unsafe { pg_sys::heap_getattr(row.0, attribute.number, self.0, &mut null) };
        (!null).then_some(value)
    }

    /// The token in a bigint column; `None` for NULL.
    #[inline]
    pub fn token(&self, row: Tuple, attribute: &Attribute) -> Option<Token> {
        self.value(row, attribute).map(|d| Token::from_bigint(d.value() as i64))
    }

    /// The time in a timestamptz column; `None` for NULL.
    #[inline]
    pub fn instant(&self, row: Tuple, attribute: &Attribute) -> Option<Instant> {
        self.value(row, attribute).map(|d| Instant::from_micros(d.value() as i64))
    }

    /// Appends the text of a column that may be part of a lease's name. Returns false if the column is NULL.
    pub fn append_text(&self, to: &mut Vec<u8>, row: Tuple, attribute: &Attribute) -> bool {
        let Some(value) = self.value(row, attribute) else { return false };
        match attribute.type_oid {
            // Writing into memory cannot fail.
            pg_sys::INT2OID => drop(write!(to, "{}", value.value() as i16)),
            pg_sys::INT4OID => drop(write!(to, "{}", value.value() as i32)),
            pg_sys::INT8OID => drop(write!(to, "{}", value.value() as i64)),
            pg_sys::BOOLOID => {
                to.extend_from_slice(if value.value() & 0xff != 0 { b"true" } else { b"false" });
            }
            pg_sys::UUIDOID => {
                // SAFETY: a uuid is 16 bytes, passed by reference.
                let bytes = unsafe { &*value.cast_mut_ptr::<[u8; 16]>() };
                for (i, byte) in bytes.iter().enumerate() {
                    let dash = if matches!(i, 4 | 6 | 8 | 10) { "-" } else { "" };
                    let _ = write!(to, "{dash}{byte:02x}");
                }
            }
            // SAFETY: the remaining types are text and varchar.
            _ => match unsafe { bytes_within(value, NAME_MAX) } {
                Some(bytes) => to.extend_from_slice(bytes),
                // A text longer than any name makes the whole too long.
                None => to.resize(to.len() + NAME_MAX + 1, b' '),
            },
        }
        true
    }

    /// Returns true if the column is a number, and the same one in both rows.
    pub fn same_number(&self, one: Tuple, other: Tuple, attribute: &Attribute) -> bool {
        attribute.is_number()
            && match (self.value(one, attribute), self.value(other, attribute)) {
                (Some(one), Some(other)) => one.value() == other.value(),
                _ => false,
            }
    }
}

impl Tuple {
    /// The identity of the row version.
    #[inline]
    pub fn id(&self, call: &TriggerCall) -> RowId {
        // SAFETY: a stored row.
        unsafe { RowId { table: call.table, version: RowVersion::of(self.0) } }
    }

    /// Returns true if the current transaction has written this version of a stored row.
    #[inline]
    pub fn is_own(&self) -> bool {
        // SAFETY: a stored row.
        unsafe { xact::is_own(self.0) }
    }
}

//! A call of the trigger: its table, its arguments, its rows.

use crate::encoding::push_number;
use crate::pg::call::args::{bytes_within, Args};
use crate::pg::compat;
use crate::pg::raw;
use crate::pg::session::xact;
use crate::pg::state::row::RowVersion;
use pg_fence_rules::{Instant, Token, NAME_MAX};
use pgrx::pg_sys;
use std::ffi::{c_int, CStr};

/// catalog/pg_trigger.h, as the type of `tgtype`.
const BEFORE_BIT: i16 = pg_sys::TRIGGER_TYPE_BEFORE as i16;
const DELETE_BIT: i16 = pg_sys::TRIGGER_TYPE_DELETE as i16;

/// The types of columns that a lease's name may have in it: no setting changes the text of their values.
pub const PLACEHOLDER_TYPES: [pg_sys::Oid; 7] = [
    pg_sys::INT2OID,
    pg_sys::INT4OID,
    pg_sys::INT8OID,
    pg_sys::TEXTOID,
    pg_sys::VARCHAROID,
    pg_sys::UUIDOID,
    pg_sys::BOOLOID,
];

/// Which write fires it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    Insert,
    Update,
    Delete,
    Truncate,
}

/// A row of the table, as the trigger got it.
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

/// A column of the table, as far as the trigger cares: by number, not by name, so that it is found quickly.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attribute {
    pub number: i32,
    pub type_oid: pg_sys::Oid,
    pub generated: bool,
}

impl Attribute {
    /// Can a lease's name have this column in it? (A generated one has no value yet when the trigger fires.)
    pub fn fits_placeholder(&self) -> bool {
        !self.generated && PLACEHOLDER_TYPES.contains(&self.type_oid)
    }

    /// Is it an integer, passed by value?
    fn is_number(&self) -> bool {
        [pg_sys::INT2OID, pg_sys::INT4OID, pg_sys::INT8OID].contains(&self.type_oid)
    }
}

/// When it fires.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Timing {
    Before,
    After,
    Instead,
}

/// A call of the trigger function, and what it is called with.
#[derive(Clone, Copy)]
pub struct TriggerCall {
    pub event: Event,
    pub timing: Timing,
    /// Does it fire FOR EACH ROW?
    pub for_row: bool,
    /// The stored row, of an UPDATE or DELETE.
    pub old: Option<Tuple>,
    /// The row to be, of an INSERT or UPDATE.
    pub new: Option<Tuple>,
    /// The table that is written.
    pub table: pg_sys::Oid,
    /// Its columns.
    pub columns: Columns,
    fcinfo: pg_sys::FunctionCallInfo,
    data: *mut pg_sys::TriggerData,
}

/// The trigger and its table as they are declared, the same for all rows of a statement.
pub struct Declaration<'a> {
    /// The arguments of CREATE TRIGGER.
    pub arguments: Vec<&'a [u8]>,
    /// Does the trigger fire on DELETE, too?
    pub fires_on_delete: bool,
    /// Has the table an AFTER ROW trigger of the same function (the check behind the others)?
    pub has_twin: bool,
    /// Is the table a partition?
    pub on_partition: bool,
}

impl TriggerCall {
    /// None when the function was not called by the trigger manager.
    #[inline(always)]
    pub fn new(args: Args) -> Option<Self> {
        let fcinfo = args.raw();
        // SAFETY: the context of a call is a node or NULL; what the trigger manager calls has a TriggerData, whose relation
        // is open and locked for as long as the call.
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

    /// The table that is written, open and locked for as long as the call.
    #[inline]
    pub fn relation(&self) -> pg_sys::Relation {
        // SAFETY: new has checked that it is a TriggerData.
        unsafe { (*self.data).tg_relation }
    }

    /// How many triggers deep: 1 for one that a client's statement fires.
    pub fn depth(&self) -> usize {
        // SAFETY: a function without arguments.
        let depth = unsafe { pgrx::direct_function_call::<i32>(pg_sys::pg_trigger_depth, &[]) };
        depth.map_or(0, |d| usize::try_from(d).unwrap_or(0))
    }

    /// The trigger and its table as they are declared.
    pub fn declaration(&self) -> Declaration<'_> {
        // SAFETY: as for `new`; the trigger's description lives as long as the call, and has tgnargs NUL-terminated strings.
        unsafe {
            let (relation, trigger) = ((*self.data).tg_relation, &*(*self.data).tg_trigger);
            let argument = |i| CStr::from_ptr(*trigger.tgargs.add(i)).to_bytes();
            let all = (*relation).trigdesc;
            let is_twin = |other: &pg_sys::Trigger| {
                other.tgfoid == trigger.tgfoid && other.tgtype & BEFORE_BIT == 0
            };
            Declaration {
                arguments: (0..trigger.tgnargs as usize).map(argument).collect(),
                fires_on_delete: trigger.tgtype & DELETE_BIT != 0,
                has_twin: !all.is_null()
                    && (0..(*all).numtriggers as usize).any(|i| is_twin(&*(*all).triggers.add(i))),
                on_partition: (*(*relation).rd_rel).relispartition,
            }
        }
    }

    /// Does the UPDATE name this column? (Of a MERGE: does one of its actions?)
    #[inline]
    pub fn names(&self, attribute: &Attribute) -> bool {
        let bit = attribute.number - pg_sys::FirstLowInvalidHeapAttributeNumber;
        // SAFETY: the set, or NULL for an empty one, is the trigger manager's; raises for negative bits only.
        unsafe { raw::bms_is_member(bit, (*self.data).tg_updatedcols) }
    }

    /// Data of this trigger, made at the statement's first row and dropped when the statement ends.
    #[inline]
    pub fn cache<T, E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<&T, E> {
        // SAFETY: flinfo lives as long as the statement's trigger state; fn_extra is this function's own.
        match unsafe { (*(*self.fcinfo).flinfo).fn_extra.cast::<T>().as_ref() } {
            Some(cached) => Ok(cached),
            None => self.make_and_cache(make),
        }
    }

    #[cold]
    fn make_and_cache<T, E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<&T, E> {
        let made = make()?;
        // SAFETY: fn_mcxt lives as long as flinfo, and what is put there is dropped when it goes.
        unsafe {
            let flinfo = (*self.fcinfo).flinfo;
            let mut memory = pgrx::PgMemoryContexts::For((*flinfo).fn_mcxt);
            let cached = memory.leak_and_drop_on_delete(made);
            (*flinfo).fn_extra = cached.cast();
            Ok(&*cached)
        }
    }

    /// Lets the row through as it is.
    #[inline]
    pub fn pass(&self, row: Option<Tuple>) -> pg_sys::Datum {
        pg_sys::Datum::from(row.map_or(std::ptr::null_mut(), |t| t.0))
    }

    /// The row with other values in some of its columns of type bigint or timestamptz; NULL for None.
    pub fn with_values<const N: usize>(
        &self,
        row: Tuple,
        values: [(&Attribute, Option<i64>); N],
    ) -> Tuple {
        let mut columns: [c_int; N] = values.map(|(attribute, _)| attribute.number);
        let mut nulls = values.map(|(_, value)| value.is_none());
        let mut values = values.map(|(_, value)| pg_sys::Datum::from(value.unwrap_or(0)));
        // SAFETY: the columns are the table's, and both types are passed by value in eight bytes.
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
    /// The column of this name, unless dropped.
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

    /// A column's value, None for NULL.
    #[inline]
    pub fn value(&self, row: Tuple, attribute: &Attribute) -> Option<pg_sys::Datum> {
        let mut null = false;
        // SAFETY: the row is one of this table, the number one of its columns.
        let value = unsafe { pg_sys::heap_getattr(row.0, attribute.number, self.0, &mut null) };
        (!null).then_some(value)
    }

    /// The token in a bigint column, None for NULL.
    #[inline]
    pub fn token(&self, row: Tuple, attribute: &Attribute) -> Option<Token> {
        self.value(row, attribute).map(|d| Token::from_bigint(d.value() as i64))
    }

    /// The time in a timestamptz column, None for NULL.
    #[inline]
    pub fn instant(&self, row: Tuple, attribute: &Attribute) -> Option<Instant> {
        self.value(row, attribute).map(|d| Instant::from_micros(d.value() as i64))
    }

    /// Appends the text of a column that fits a placeholder; false where it is NULL.
    pub fn append_text(&self, to: &mut Vec<u8>, row: Tuple, attribute: &Attribute) -> bool {
        use std::io::Write;
        let Some(value) = self.value(row, attribute) else { return false };
        match attribute.type_oid {
            pg_sys::INT2OID => push_number(to, i64::from(value.value() as i16)),
            pg_sys::INT4OID => push_number(to, i64::from(value.value() as i32)),
            pg_sys::INT8OID => push_number(to, value.value() as i64),
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
            // SAFETY: the types left are text and varchar.
            _ => match unsafe { bytes_within(value, NAME_MAX) } {
                Some(bytes) => to.extend_from_slice(bytes),
                // Longer than any name: so is the whole.
                None => to.resize(to.len() + NAME_MAX + 1, b' '),
            },
        }
        true
    }

    /// Have both rows the same number in a column, one that is a number?
    pub fn same_number(&self, one: Tuple, other: Tuple, attribute: &Attribute) -> bool {
        attribute.is_number()
            && match (self.value(one, attribute), self.value(other, attribute)) {
                (Some(one), Some(other)) => one.value() == other.value(),
                _ => false,
            }
    }
}

impl Tuple {
    /// Which version of which row it is.
    #[inline]
    pub fn id(&self, call: &TriggerCall) -> RowId {
        // SAFETY: a stored row.
        unsafe { RowId { table: call.table, version: RowVersion::of(self.0) } }
    }

    /// Was this version of a stored row written by the running transaction?
    #[inline]
    pub fn is_own(&self) -> bool {
        // SAFETY: a stored row.
        unsafe { xact::is_own(self.0) }
    }
}

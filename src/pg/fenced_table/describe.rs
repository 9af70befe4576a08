//! The description of a refused write: what an error may show of its table and row.

use crate::encoding::{to_utf8, within};
use crate::errors::{Location, Report};
use crate::pg::call::args::c_bytes;
use crate::pg::fenced_table::trigger::{Attribute, TriggerCall};
use crate::pg::session::role;
use crate::pg::state::relation::quoted_name;
use pgrx::pg_sys;
use serde_json::{Map, Value};
use std::ffi::CStr;

/// The number of bytes to read of a key's column: more than is shown of the whole key.
const KEY_TEXT_MAX: usize = 2048;

/// The schema and the table of the call.
fn location(call: &TriggerCall) -> Location {
    // SAFETY: an open relation has its catalog row.
    unsafe {
        let form = (*call.relation()).rd_rel;
        let schema = pg_sys::get_namespace_name((*form).relnamespace);
        Location {
            schema: c_bytes(schema),
            table: c_bytes((*form).relname.data.as_ptr()),
            column: Vec::new(),
        }
    }
}

/// Adds the table to an error.
pub fn at_table(report: Report, call: &TriggerCall) -> Report {
    // SAFETY: open as long as the call runs.
    let relation = unsafe { quoted_name(call.relation()) };
    report.at(location(call)).detailed(|d| d.relation = Some(relation))
}

/// Adds the table, the column and the key to an error, as far as the caller may see them.
pub fn at_row(report: Report, call: &TriggerCall, fence: &Attribute) -> Report {
    let location = Location { column: column_name(call, fence.number), ..location(call) };
    let key = key_for(call, |number| readable(call, number));
    at_table(report, call).at(location).detailed(|d| d.key = key)
}

/// Returns true if the caller may read this column of the table in every row. Both the current user and the session's
/// role must be allowed to: a cascading key runs as the table's owner, but its error goes to the client.
pub fn readable(call: &TriggerCall, number: i32) -> bool {
    // SAFETY: catalog look-ups.
    unsafe {
        let table = call.table;
        let select = pg_sys::ACL_SELECT as pg_sys::AclMode;
        let ok = pg_sys::AclResult::ACLCHECK_OK;
        [pg_sys::GetUserId(), pg_sys::GetOuterUserId()].into_iter().all(|user| {
            pg_sys::check_enable_rls(table, user, true)
                != pg_sys::CheckEnableRlsResult::RLS_ENABLED as i32
                && (role::may_select(user, table)
                    || pg_sys::pg_attribute_aclcheck(table, number as i16, user, select) == ok)
        })
    }
}

/// The primary key of the row; `None` if there is none. Not to be shown to the caller.
pub fn key(call: &TriggerCall) -> Option<Map<String, Value>> {
    key_for(call, |_| true)
}

/// The primary key of the row; `None` if there is none, or if one of its columns may not be shown.
fn key_for(call: &TriggerCall, may_show: impl Fn(i32) -> bool) -> Option<Map<String, Value>> {
    let row = call.old.or(call.new)?;
    let mut key = Map::new();
    for attribute in key_columns(call) {
        if !may_show(attribute.number) {
            return None;
        }
        let text = call.columns.value(row, &attribute).map_or(Value::Null, |v| json(&attribute, v));
        key.insert(to_utf8(&column_name(call, attribute.number)), text);
    }
    (!key.is_empty()).then_some(key)
}

fn json(attribute: &Attribute, value: pg_sys::Datum) -> Value {
    match attribute.type_oid {
        pg_sys::INT2OID => Value::from(value.value() as i16),
        pg_sys::INT4OID => Value::from(value.value() as i32),
        pg_sys::INT8OID => Value::from(value.value() as i64),
        // SAFETY: the type's own output function returns NUL-terminated text.
        _ => unsafe {
            let (mut output, mut varlena) = (pg_sys::InvalidOid, false);
            pg_sys::getTypeOutputInfo(attribute.type_oid, &mut output, &mut varlena);
            // Only the beginning of a long key is shown.
            let text = CStr::from_ptr(pg_sys::OidOutputFunctionCall(output, value)).to_bytes();
            Value::from(to_utf8(within(text, KEY_TEXT_MAX)))
        },
    }
}

fn key_columns(call: &TriggerCall) -> Vec<Attribute> {
    // SAFETY: the bitmap is a copy of the relation's own, with Postgres's offset.
    unsafe {
        let set = pg_sys::RelationGetIndexAttrBitmap(
            call.relation(),
            pg_sys::IndexAttrBitmapKind::INDEX_ATTR_BITMAP_PRIMARY_KEY,
        );
        let mut found = Vec::new();
        let mut member = -1;
        loop {
            member = pg_sys::bms_next_member(set, member);
            if member < 0 {
                return found;
            }
            let number = member + pg_sys::FirstLowInvalidHeapAttributeNumber;
            if number > 0 {
                found.extend(call.columns.find(&column_name(call, number)));
            }
        }
    }
}

/// The name of a column of the table.
pub fn column_name(call: &TriggerCall, number: i32) -> Vec<u8> {
    // SAFETY: a column of the table.
    unsafe { c_bytes(pg_sys::get_attname(call.table, number as i16, false)) }
}

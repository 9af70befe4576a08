//! What a table of the state is to look like, and what it looks like, found once for each change of its definition.

use crate::known_bugs;
use crate::pg::call::errors::{self, Refusal};
use crate::pg::compat;
use crate::pg::state::relation;
use crate::pg::state::row::COLUMNS;
use pgrx::pg_sys;
use std::cell::Cell;
use std::ffi::CStr;

/// How many tables the state has.
const TABLES: usize = 2;

/// What a table of the state is made of.
pub struct Spec {
    pub table: &'static CStr,
    /// Its primary key, on the first two columns.
    pub index: &'static CStr,
    /// The type of each column, and whether it may be NULL.
    pub columns: &'static [(pg_sys::Oid, bool)],
    /// A number of its own, from 0 on.
    pub number: usize,
}

/// What reading and writing a table takes.
#[derive(Clone, Copy)]
pub struct Form {
    /// The index of its primary key, by which rows are searched.
    pub index: pg_sys::Oid,
    /// Nothing belongs to a row but what the extension made, so that it may be written directly.
    pub plain: bool,
    /// Triggers may suppress or change what is written.
    pub triggers: bool,
    /// The table that this is the form of.
    pub table: pg_sys::Oid,
    generation: u64,
}

thread_local! {
    static FORMS: Cell<[Option<Form>; TABLES]> = const { Cell::new([None; TABLES]) };
}

/// What is known of a table that is locked, if anything.
pub fn known(spec: &Spec, table: pg_sys::Oid) -> Option<Form> {
    let generation = relation::generation();
    FORMS.get()[spec.number].filter(|f| f.generation == generation && f.table == table)
}

/// Looks at a table and its index.
///
/// # Safety
/// Both must be open.
pub unsafe fn look(
    spec: &Spec,
    table: pg_sys::Relation,
    index: pg_sys::Relation,
) -> Result<Form, Refusal> {
    // What is found out may itself notice a change: then it is found out again next time.
    let generation = relation::generation();
    // SAFETY: the caller's promise.
    let form = unsafe {
        let looked = Looked { spec, table, index };
        if !looked.is_known() {
            return Err(errors::state_differs(&spec.table.to_string_lossy()));
        }
        Form {
            table: (*table).rd_id,
            index: (*index).rd_id,
            generation,
            plain: known_bugs::DIRECT_WRITES || looked.is_plain(),
            // Not relhastriggers, which stays set until the next VACUUM after the last one went.
            triggers: !(*table).trigdesc.is_null(),
        }
    };
    let mut forms = FORMS.get();
    forms[spec.number] = Some(form);
    FORMS.set(forms);
    Ok(form)
}

/// A table and its index while both are open, to be looked at.
struct Looked<'a> {
    spec: &'a Spec,
    table: pg_sys::Relation,
    index: pg_sys::Relation,
}

impl Looked<'_> {
    /// Is it a heap with our columns first, and the index what we search by?
    ///
    /// # Safety
    /// Both must be open.
    unsafe fn is_known(&self) -> bool {
        // SAFETY: the caller's promise; the columns' number is checked first.
        unsafe {
            let class = &*(*self.table).rd_rel;
            let (key, columns) = (&*(*self.index).rd_index, (*self.table).rd_att);
            let natts = (*columns).natts as usize;
            class.relkind as u8 == pg_sys::RELKIND_RELATION
                && class.relam == pg_sys::HEAP_TABLE_AM_OID
                && (*(*self.index).rd_rel).relam == pg_sys::BTREE_AM_OID
                && key.indrelid == (*self.table).rd_id
                && key.indnatts >= 2
                && key.indkey.values.as_slice(2) == [1, 2]
                && (self.spec.columns.len()..=COLUMNS).contains(&natts)
                && self.spec.columns.iter().enumerate().all(|(n, (type_oid, _))| {
                    let column = &*compat::attribute(columns, n);
                    column.atttypid == *type_oid && !column.attisdropped
                })
        }
    }

    /// Does nothing belong to a write but the row and its key? Whatever a DBA has added is honoured by the
    /// executor's way of writing.
    ///
    /// # Safety
    /// Both must be open and known.
    unsafe fn is_plain(&self) -> bool {
        // SAFETY: the caller's promise; the lists are copies.
        unsafe {
            let class = &*(*self.table).rd_rel;
            let columns = (*self.table).rd_att;
            let constraints = (*columns).constr;
            let indexes = pg_sys::RelationGetIndexList(self.table);
            let only_ours =
                (*indexes).length == 1 && (*(*indexes).elements).oid_value == (*self.index).rd_id;
            pg_sys::list_free(indexes);
            let key = &*(*self.index).rd_index;
            only_ours
                && key.indnatts == 2
                && key.indisunique
                && key.indimmediate
                && key.indisvalid
                && key.indisready
                && (*self.table).trigdesc.is_null()
                && !class.relispartition
                && class.relreplident as u8 == pg_sys::REPLICA_IDENTITY_DEFAULT
                && (*columns).natts as usize == self.spec.columns.len()
                && (constraints.is_null()
                    || ((*constraints).num_check == 0 && !(*constraints).has_generated_stored))
                && self.spec.columns.iter().enumerate().all(|(n, (_, nullable))| {
                    !(*nullable && (*compat::attribute(columns, n)).attnotnull)
                })
                && self.publications_are_content()
        }
    }

    /// Can every publication that the table is in publish an update and a delete of it?
    ///
    /// # Safety
    /// The table must be open.
    unsafe fn publications_are_content(&self) -> bool {
        let mut published = pg_sys::PublicationDesc::default();
        // SAFETY: the caller's promise.
        unsafe { pg_sys::RelationBuildPublicationDesc(self.table, &mut published) };
        let of = published.pubactions;
        (!of.pubupdate || (published.rf_valid_for_update && published.cols_valid_for_update))
            && (!of.pubdelete || (published.rf_valid_for_delete && published.cols_valid_for_delete))
    }
}

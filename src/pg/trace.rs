//! fence.trace: that a guarded transaction has committed, for those whose snapshots do not see what it
//! wrote. A row of its own, not a new version of the grant's, so that it is in nobody's way.

use super::args::text_datum;
use super::lock::{Mode, Tag};
use super::relation::state_oid;
use super::{compat, raw, xact};
use crate::errors::Refusal;
use pgrx::pg_sys;

/// Leaves a trace; earlier ones say no more than it does, and go.
pub fn leave(name: &[u8]) -> Result<(), Refusal> {
    let table = Table::open()?;
    table.clear(name);
    let null = [false];
    let values = [text_datum(name)];
    // SAFETY: the table has one column, a text.
    unsafe {
        compat::guarded(|| {
            let columns = (*table.rel).rd_att;
            let tuple = raw::heap_form_tuple(columns, values.as_ptr(), null.as_ptr());
            raw::CatalogTupleInsert(table.rel, tuple);
        });
    }
    Ok(())
}

/// Forgets a lease.
pub fn clear(name: &[u8]) -> Result<(), Refusal> {
    Table::open()?.clear(name);
    Ok(())
}

/// Is there one that the transaction's snapshot does not see?
pub fn is_newer_than_snapshot(name: &[u8]) -> Result<bool, Refusal> {
    let table = Table::open()?;
    // SAFETY: either is a snapshot of this transaction, registered as long as the scan runs.
    let (now, then) = unsafe {
        (
            table.rows(name, || raw::GetLatestSnapshot()),
            table.rows(name, || raw::GetTransactionSnapshot()),
        )
    };
    Ok(now.iter().any(|(place, own)| !own && !then.iter().any(|(seen, _)| seen == place)))
}

struct Table {
    rel: pg_sys::Relation,
    index: pg_sys::Relation,
}

/// Block and item.
type Place = (u16, u16, u16);

impl Table {
    fn open() -> Result<Self, Refusal> {
        let open = |oid| {
            // SAFETY: opens and locks a relation; the reference is given back on drop.
            unsafe { compat::guarded(|| raw::relation_open(oid, pg_sys::RowExclusiveLock as i32)) }
        };
        let mut table = Table { rel: open(state_oid(c"trace")?), index: std::ptr::null_mut() };
        table.index = open(state_oid(c"trace_name")?);
        Ok(table)
    }

    /// Deletes those that are committed, unless another open transaction does.
    fn clear(&self, name: &[u8]) {
        // SAFETY: a snapshot of this transaction. Mostly there is none, and a lock that is kept would be too much.
        let none = unsafe { self.rows(name, || raw::GetLatestSnapshot()).is_empty() };
        if none || !Tag::trace(name).take(Mode::Own, false) {
            return;
        }
        // SAFETY: rows that are seen under the lock; nobody else deletes any.
        unsafe {
            for ((hi, lo, item), _) in self.rows(name, || raw::GetLatestSnapshot()) {
                let mut place = pg_sys::ItemPointerData {
                    ip_blkid: pg_sys::BlockIdData { bi_hi: hi, bi_lo: lo },
                    ip_posid: item,
                };
                pg_sys::CatalogTupleDelete(self.rel, &mut place);
            }
        }
        xact::see_own_changes();
    }

    /// Where they are, and whether this transaction wrote them.
    ///
    /// # Safety
    /// `snapshot` must give one of this transaction.
    unsafe fn rows(
        &self,
        name: &[u8],
        snapshot: impl FnOnce() -> pg_sys::Snapshot,
    ) -> Vec<(Place, bool)> {
        let mut found = Vec::new();
        let name = text_datum(name);
        let mut key = pg_sys::ScanKeyData::default();
        // SAFETY: the key's type and collation are those of the index's column.
        unsafe {
            compat::guarded(|| {
                let snapshot = raw::RegisterSnapshot(snapshot());
                let equal = pg_sys::BTEqualStrategyNumber as u16;
                raw::ScanKeyInit(&mut key, 1, equal, pg_sys::F_TEXTEQ.into(), name);
                let scan =
                    raw::systable_beginscan_ordered(self.rel, self.index, snapshot, 1, &mut key);
                loop {
                    let forward = pg_sys::ScanDirection::ForwardScanDirection;
                    let tuple = raw::systable_getnext_ordered(scan, forward);
                    if tuple.is_null() {
                        break;
                    }
                    let place = (*tuple).t_self;
                    let block = place.ip_blkid;
                    found.push(((block.bi_hi, block.bi_lo, place.ip_posid), xact::is_own(tuple)));
                }
                raw::systable_endscan_ordered(scan);
                raw::UnregisterSnapshot(snapshot);
            });
        }
        found
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        // An error's clean-up gives the references back by itself.
        if !std::thread::panicking() {
            for rel in [self.index, self.rel].into_iter().filter(|rel| !rel.is_null()) {
                // SAFETY: opened by `open`; the locks stay until the transaction ends.
                unsafe { compat::guarded(|| raw::relation_close(rel, pg_sys::NoLock as i32)) };
            }
        }
    }
}

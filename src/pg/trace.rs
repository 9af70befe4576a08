//! fence.trace: that a guarded transaction has committed, for those whose snapshots do not see what it
//! wrote. A row of its own, not a new version of the grant's, so that it is in nobody's way.

use super::args::text_datum;
use super::keyed::Keyed;
use super::lock::{Mode, Tag};
use super::version::Version;
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
            let table = table.0.table();
            let tuple = raw::heap_form_tuple((*table).rd_att, values.as_ptr(), null.as_ptr());
            raw::CatalogTupleInsert(table, tuple);
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
    Ok(now.iter().any(|(version, own)| !own && !then.iter().any(|(seen, _)| seen == version)))
}

struct Table(Keyed);

impl Table {
    fn open() -> Result<Self, Refusal> {
        Keyed::open(c"trace", c"trace_name", true).map(Table)
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
            for (version, _) in self.rows(name, || raw::GetLatestSnapshot()) {
                pg_sys::CatalogTupleDelete(self.0.table(), &mut version.pointer());
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
    ) -> Vec<(Version, bool)> {
        let mut found = Vec::new();
        let name = text_datum(name);
        // SAFETY: the snapshot is registered for as long as the scan runs.
        unsafe {
            compat::guarded(|| {
                let snapshot = raw::RegisterSnapshot(snapshot());
                self.0.each(name, snapshot, |tuple| {
                    found.push((Version::of(tuple), xact::is_own(tuple)));
                });
                raw::UnregisterSnapshot(snapshot);
            });
        }
        found
    }
}

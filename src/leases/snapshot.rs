//! At REPEATABLE READ and above a transaction reads the world of its snapshot, which may be the predecessor's. So it can
//! rely only on a grant that the snapshot shows: whoever had the lease before has then committed all of its guarded work
//! before that snapshot.
//!
//! Why: a grant is made under a lock that every guard of the predecessor excludes until its transaction has ended, and
//! whose changes are visible by then. A snapshot that shows the grant was taken later still.

use crate::pg::call::errors::{self, Refusal};
use crate::pg::call::raise;
use crate::pg::session::xact;
use crate::pg::state::lease_table::{AsOf, LeaseTable};
use crate::pg::state::row::Row;

/// May this transaction rely on the grant? `shown` gives the name of the lease, where an error may show it. Errors: 40001
/// where the grant was committed after the snapshot, 55000 where this transaction has made it.
pub fn check<'a>(
    table: &LeaseTable,
    name: &[u8],
    row: &Row,
    shown: impl FnOnce() -> Option<&'a [u8]>,
) -> Result<(), Refusal> {
    if !xact::keeps_snapshot() {
        return Ok(());
    }
    let shows = |as_of| table.rows(name, as_of).iter().any(|r| r.is_of_same_grant(row));
    if shows(AsOf::Snapshot) {
        Ok(())
    } else if shows(AsOf::Committed) {
        Err(errors::snapshot_too_early(shown()))
    } else {
        Err(errors::own_grant_after_snapshot(shown()))
    }
}

/// A grant was made: at REPEATABLE READ and above the transaction itself cannot rely on it, and is warned.
pub fn grant_made(name: &[u8]) {
    if xact::keeps_snapshot() {
        raise::warn(errors::reads_are_older(name));
    }
}

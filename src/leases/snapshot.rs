//! At REPEATABLE READ and above a transaction relies only on a grant that its snapshot shows. Why that is enough:
//! `pg_fence_rules::snapshot`.

use crate::errors::{self, Refusal};
use crate::pg::call::raise;
use crate::pg::session::xact;
use crate::pg::state::lease_table::{AsOf, LeaseTable};
use crate::pg::state::row::Row;
use pg_fence_rules::snapshot::{self, Age};

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
    match snapshot::age(shows(AsOf::Snapshot), || shows(AsOf::Committed)) {
        Age::Shown => Ok(()),
        Age::Later => Err(errors::snapshot_too_early(shown())),
        Age::Own => Err(errors::own_grant_after_snapshot(shown())),
    }
}

/// A grant was made: at REPEATABLE READ and above the transaction itself cannot rely on it, and is warned.
pub fn grant_made(name: &[u8]) {
    if xact::keeps_snapshot() {
        raise::warn(errors::reads_are_older(name));
    }
}

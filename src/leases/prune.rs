//! Deleting rows of grants that are long over.

use super::guard;
use super::locks::Locked;
use crate::errors::Refusal;
use crate::pg::session::commit;
use crate::pg::state::lease_table::LeaseTable;
use crate::pg::state::row::{Deleter, Row};
use pg_fence_rules::locks::PRUNE;

/// Deletes a row that is to go, unless somebody guards or changes it. The lock is given back at once, for
/// there may be millions of rows: an acquire sees by the row itself that it is being deleted.
pub fn prune_row(
    table: &LeaseTable,
    found: &Row,
    is_to_go: impl Fn(&Row) -> bool,
) -> Result<bool, Refusal> {
    let (name, slot) = (found.name(), found.grant.slot);
    if guard::guards_slot(name, slot) {
        return Ok(false);
    }
    let is_over = |row: &Row| is_to_go(row) && row.deleter() == Deleter::None;
    let Some(locked) = Locked::grant(table, name, slot, PRUNE, is_over)? else {
        return Ok(false);
    };
    // The next acquire finds no row that tells whether the end of this grant is on disk.
    commit::force();
    table.delete(&locked.row).map(|()| true)
}

//! Deleting rows of grants that have been over for long.

use super::guard;
use super::locks::Locked;
use crate::errors::Report;
use crate::pg::session::commit;
use crate::pg::state::lease_table::LeaseTable;
use crate::pg::state::row::{Deleter, Row};
use pg_fence_rules::locks::PRUNE;

/// Deletes a row for which `is_prunable` holds, unless another session guards or changes its grant. The lock is released
/// at once, because a prune may delete millions of rows; an acquire sees in the row that it is being deleted.
pub fn prune_row(
    table: &LeaseTable,
    found: &Row,
    is_prunable: impl Fn(&Row) -> bool,
) -> Result<bool, Report> {
    let (name, slot) = (found.name(), found.grant.slot);
    if guard::guards_slot(name, slot) {
        return Ok(false);
    }
    let is_over = |row: &Row| is_prunable(row) && row.deleter() == Deleter::None;
    let Some(locked) = Locked::grant(table, name, slot, PRUNE, is_over)? else {
        return Ok(false);
    };
    // The next acquire finds no row any more that shows whether this grant's end is on disk.
    commit::flush_at_commit();
    table.delete(&locked.row).map(|()| true)
}

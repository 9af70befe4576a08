//! Which version of a row.

use pgrx::pg_sys;

/// A version of a row, by where it is, and by who wrote it: once it is pruned, another one may be there.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RowVersion {
    block: (u16, u16),
    item: u16,
    written_by: pg_sys::TransactionId,
}

impl RowVersion {
    /// That of a tuple; a copy keeps it.
    ///
    /// # Safety
    /// The tuple must be valid.
    #[inline]
    pub unsafe fn of(tuple: pg_sys::HeapTuple) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let (at, written_by) = ((*tuple).t_self, (*(*tuple).t_data).t_choice.t_heap.t_xmin);
            let block = (at.ip_blkid.bi_hi, at.ip_blkid.bi_lo);
            RowVersion { block, item: at.ip_posid, written_by }
        }
    }

    /// Where in the table it is.
    pub fn tid(self) -> pg_sys::ItemPointerData {
        let (bi_hi, bi_lo) = self.block;
        pg_sys::ItemPointerData {
            ip_blkid: pg_sys::BlockIdData { bi_hi, bi_lo },
            ip_posid: self.item,
        }
    }
}

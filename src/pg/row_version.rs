//! Which version of a row.

use pgrx::pg_sys;

/// A version of a row, by where in its table it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowVersion {
    block: (u16, u16),
    item: u16,
}

impl RowVersion {
    /// That of a tuple; a copy keeps it.
    ///
    /// # Safety
    /// The tuple must be valid.
    #[inline]
    pub unsafe fn of(tuple: pg_sys::HeapTuple) -> Self {
        // SAFETY: the caller's promise.
        let tid = unsafe { (*tuple).t_self };
        RowVersion { block: (tid.ip_blkid.bi_hi, tid.ip_blkid.bi_lo), item: tid.ip_posid }
    }

    /// In which block of the table.
    pub fn block(self) -> u32 {
        u32::from(self.block.0) << 16 | u32::from(self.block.1)
    }

    /// As Postgres writes it.
    pub fn pointer(self) -> pg_sys::ItemPointerData {
        let (bi_hi, bi_lo) = self.block;
        pg_sys::ItemPointerData {
            ip_blkid: pg_sys::BlockIdData { bi_hi, bi_lo },
            ip_posid: self.item,
        }
    }
}

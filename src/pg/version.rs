//! Which version of a row, and where the versions of a row are found.

use pgrx::pg_sys;

/// A version of a row, by where in its table it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Version {
    block: (u16, u16),
    item: u16,
}

impl Version {
    /// That of a tuple; a copy keeps it.
    ///
    /// # Safety
    /// The tuple must be valid.
    #[inline]
    pub unsafe fn of(tuple: pg_sys::HeapTuple) -> Self {
        // SAFETY: the caller's promise.
        Version::at(unsafe { (*tuple).t_self })
    }

    /// What such a pointer leads to.
    pub fn at(tid: pg_sys::ItemPointerData) -> Self {
        Version { block: (tid.ip_blkid.bi_hi, tid.ip_blkid.bi_lo), item: tid.ip_posid }
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

/// Where an index entry points: from there on, the versions of a row that were updated in place follow one another.
/// It stays the same until VACUUM FULL or pg_repack moves the row, or until a version no longer fits into the page.
#[derive(Clone, Copy)]
pub struct Place {
    /// Where the index leads to.
    pub entry: Version,
    /// In which of the server's buffers its page was, or `NO_BUFFER`.
    pub buffer: pg_sys::Buffer,
}

/// InvalidBuffer of storage/buf.h: nobody knows, and nobody looks there.
pub const NO_BUFFER: pg_sys::Buffer = 0;

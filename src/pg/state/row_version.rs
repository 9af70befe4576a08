//! Which version of a row, and where the versions of a row are found.

use pgrx::pg_sys;

/// Where in its table something is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pointer {
    block: (u16, u16),
    item: u16,
}

impl Pointer {
    /// From one of Postgres's.
    pub fn of(tid: pg_sys::ItemPointerData) -> Self {
        Pointer { block: (tid.ip_blkid.bi_hi, tid.ip_blkid.bi_lo), item: tid.ip_posid }
    }

    /// In which block of the table.
    pub fn block(self) -> u32 {
        u32::from(self.block.0) << 16 | u32::from(self.block.1)
    }

    /// As Postgres writes it.
    pub fn tid(self) -> pg_sys::ItemPointerData {
        let (bi_hi, bi_lo) = self.block;
        pg_sys::ItemPointerData {
            ip_blkid: pg_sys::BlockIdData { bi_hi, bi_lo },
            ip_posid: self.item,
        }
    }
}

/// A version of a row, by where it is, and by who wrote it: once it is pruned, another one may be there.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RowVersion {
    at: Pointer,
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
            let written_by = (*(*tuple).t_data).t_choice.t_heap.t_xmin;
            RowVersion { at: Pointer::of((*tuple).t_self), written_by }
        }
    }

    /// Where in the table it is: block and line pointer.
    pub fn tid(self) -> pg_sys::ItemPointerData {
        self.at.tid()
    }
}

/// Where an index entry points: from there on, the versions of a row that were updated in place follow one another.
/// It stays the same until VACUUM FULL or pg_repack moves the row, or until a version no longer fits into the page.
#[derive(Clone, Copy)]
pub struct Location {
    /// Where the index leads to.
    pub entry: Pointer,
    /// In which of the server's buffers its page was, or `NO_BUFFER`.
    pub buffer: pg_sys::Buffer,
}

/// A version that was found at a place, to be known again.
#[derive(Clone, Copy)]
pub struct Seen {
    /// Where it was found.
    pub location: Location,
    /// The version that was found there.
    pub version: RowVersion,
}

/// InvalidBuffer of storage/buf.h: nobody knows, and nobody looks there.
pub const NO_BUFFER: pg_sys::Buffer = 0;

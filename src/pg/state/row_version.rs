//! Which version of a row, and where the versions of a row are found.

use crate::pg::compat;
use crate::pg::raw;
use crate::pg::state::relation;
use pgrx::pg_sys;
use std::ffi::c_int;

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

    /// The version as a tuple of that page, where it is there and nobody has marked it as replaced or deleted: then it is
    /// the latest of its row, if it ever was. (Who only locks it leaves a mark, too.)
    ///
    /// # Safety
    /// The page must be that of the version's block, and locked.
    pub unsafe fn unmarked_in(self, page: pg_sys::Page) -> Option<pg_sys::HeapTupleData> {
        // SAFETY: the caller's promise; the items of a table's page are tuples.
        unsafe {
            let t_data: pg_sys::HeapTupleHeader = compat::item(page, self.at.item)?.cast();
            let tuple = pg_sys::HeapTupleData { t_data, t_self: self.tid(), ..Default::default() };
            let unmarked = u32::from((*t_data).t_infomask) & pg_sys::HEAP_XMAX_INVALID != 0;
            (unmarked && (*t_data).t_choice.t_heap.t_xmin == self.written_by).then_some(tuple)
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

/// A version that was the latest of its row when it was seen, to be looked at again without its table.
#[derive(Clone, Copy)]
pub struct Sighting {
    version: RowVersion,
    /// In which of the server's buffers its page was, or `NO_BUFFER`.
    buffer: pg_sys::Buffer,
    /// The file of its table, as long as no definition changes.
    file: raw::File,
    generation: u64,
}

impl Sighting {
    /// To be made before a change of definitions is learned, or while the table is locked.
    pub fn new(version: RowVersion, buffer: pg_sys::Buffer, file: raw::File) -> Self {
        Sighting { version, buffer, file, generation: relation::generation() }
    }

    /// Is it still the latest? False also where a closer look is needed to tell.
    pub fn is_latest(&self) -> bool {
        let block = self.version.at.block();
        // SAFETY: the buffer is one that the page has been in; it is read while it is locked. Who puts the table into
        // another file has said so before anybody can write there.
        unsafe {
            compat::guarded(|| {
                raw::AcceptInvalidationMessages();
                if self.buffer == NO_BUFFER
                    || self.generation != relation::generation()
                    || !compat::pin_recent(self.file, block, self.buffer)
                {
                    return false;
                }
                raw::LockBuffer(self.buffer, pg_sys::BUFFER_LOCK_SHARE as c_int);
                let page = pg_sys::BufferGetPage(self.buffer);
                let found = self.version.unmarked_in(page).is_some();
                raw::UnlockReleaseBuffer(self.buffer);
                found
            })
        }
    }
}

/// InvalidBuffer of storage/buf.h: nobody knows, and nobody looks there.
pub const NO_BUFFER: pg_sys::Buffer = 0;

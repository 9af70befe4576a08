//! Postgres's functions without the guard that pgrx puts around each call. One such guard takes about 300
//! instructions; where a few calls follow each other, all run inside one `compat::guarded`.
//!
//! Each declaration is held against pgrx's own binding, which is made from the server's headers: where a major version
//! changes a function, this does not compile.

use pgrx::pg_sys::{
    AttrNumber, Bitmapset, BlockNumber, Buffer, Datum, ErrorData, HeapTuple, ItemPointer, Oid,
    RegProcedure, Relation, ScanDirection, ScanKey, Snapshot, StrategyNumber, SysScanDesc,
    TupleDesc, XLogRecPtr, LOCKMODE,
};
use std::ffi::c_int;

/// Declares functions, and pins each to pgrx's binding of the same name.
macro_rules! without_guard {
    ($($(#[$doc:meta])* pub fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?;)*) => {
        extern "C-unwind" {
            $($(#[$doc])* pub fn $name($($argument: $type),*) $(-> $result)?;)*
        }

        const _: () = {
            $(let _: unsafe fn($($type),*) $(-> $result)? = pgrx::pg_sys::$name;)*
        };
    };
}

/// The values of a row: until 16 the headers do not say that they are only read.
#[cfg(any(feature = "pg15", feature = "pg16"))]
type Values<T> = *mut T;
#[cfg(any(feature = "pg17", feature = "pg18"))]
type Values<T> = *const T;

without_guard! {
    // access/genam.h
    pub fn ScanKeyInit(
        entry: ScanKey,
        attribute: AttrNumber,
        strategy: StrategyNumber,
        procedure: RegProcedure,
        argument: Datum,
    );
    pub fn systable_beginscan_ordered(
        table: Relation,
        index: Relation,
        snapshot: Snapshot,
        nkeys: c_int,
        key: ScanKey,
    ) -> SysScanDesc;
    pub fn systable_getnext_ordered(scan: SysScanDesc, direction: ScanDirection::Type)
        -> HeapTuple;
    pub fn systable_endscan_ordered(scan: SysScanDesc);

    // access/relation.h
    pub fn relation_open(relation: Oid, mode: LOCKMODE) -> Relation;
    pub fn relation_close(relation: Relation, mode: LOCKMODE);

    // storage/lmgr.h
    pub fn ConditionalLockRelationOid(relation: Oid, mode: LOCKMODE) -> bool;

    // access/heapam.h, access/htup_details.h, catalog/indexing.h
    pub fn heap_fetch(
        table: Relation,
        snapshot: Snapshot,
        tuple: HeapTuple,
        buffer: *mut Buffer,
        keep_buffer: bool,
    ) -> bool;
    pub fn heap_copytuple(tuple: HeapTuple) -> HeapTuple;
    pub fn heap_form_tuple(
        columns: TupleDesc,
        values: Values<Datum>,
        nulls: Values<bool>,
    ) -> HeapTuple;
    pub fn CatalogTupleInsert(table: Relation, tuple: HeapTuple);
    pub fn CatalogTupleUpdate(table: Relation, over: ItemPointer, tuple: HeapTuple);

    // nodes/bitmapset.h; never raises
    pub fn bms_is_member(member: c_int, set: *const Bitmapset) -> bool;

    // utils/elog.h
    pub fn CopyErrorData() -> *mut ErrorData;
    pub fn FreeErrorData(error: *mut ErrorData);
    pub fn ThrowErrorData(error: *mut ErrorData);

    // utils/syscache.h
    pub fn SearchSysCache1(cache: c_int, key: Datum) -> HeapTuple;
    pub fn ReleaseSysCache(tuple: HeapTuple);

    // storage/bufmgr.h
    pub fn ReadBuffer(relation: Relation, block: BlockNumber) -> Buffer;
    pub fn LockBuffer(buffer: Buffer, mode: c_int);
    pub fn BufferGetLSNAtomic(buffer: Buffer) -> XLogRecPtr;
    pub fn ReleaseBuffer(buffer: Buffer);
    pub fn UnlockReleaseBuffer(buffer: Buffer);

    // utils/snapmgr.h
    pub fn GetLatestSnapshot() -> Snapshot;
    pub fn GetTransactionSnapshot() -> Snapshot;
    pub fn RegisterSnapshot(snapshot: Snapshot) -> Snapshot;
    pub fn UnregisterSnapshot(snapshot: Snapshot);
}

//! Postgres's functions without the guard that pgrx puts around each call. One such guard takes about 300
//! instructions; where a few calls follow each other, all run inside one `compat::guarded`.

use pgrx::pg_sys::{
    AttrNumber, BlockNumber, Buffer, Datum, HeapTuple, ItemPointer, Oid, RegProcedure, Relation,
    ScanDirection, ScanKey, Snapshot, StrategyNumber, SysScanDesc, TupleDesc, XLogRecPtr, LOCKMODE,
};
use std::ffi::c_int;

extern "C-unwind" {
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
        values: *const Datum,
        nulls: *const bool,
    ) -> HeapTuple;
    pub fn CatalogTupleInsert(table: Relation, tuple: HeapTuple);
    pub fn CatalogTupleUpdate(table: Relation, over: ItemPointer, tuple: HeapTuple);

    // storage/bufmgr.h
    pub fn ReadBuffer(relation: Relation, block: BlockNumber) -> Buffer;
    pub fn LockBuffer(buffer: Buffer, mode: c_int);
    pub fn MarkBufferDirty(buffer: Buffer);
    pub fn BufferGetLSNAtomic(buffer: Buffer) -> XLogRecPtr;
    pub fn ReleaseBuffer(buffer: Buffer);
    pub fn UnlockReleaseBuffer(buffer: Buffer);

    // utils/snapmgr.h
    pub fn GetLatestSnapshot() -> Snapshot;
    pub fn GetTransactionSnapshot() -> Snapshot;
    pub fn RegisterSnapshot(snapshot: Snapshot) -> Snapshot;
    pub fn UnregisterSnapshot(snapshot: Snapshot);
}

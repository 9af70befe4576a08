//! Postgres's functions without the guard that pgrx puts around each call. One such guard takes about 300
//! instructions; where a few calls follow each other, all run inside one `compat::guarded`.
//!
//! Each declaration is held against pgrx's own binding, which is made from the server's headers: where a major version
//! changes a function, this does not compile.

use pgrx::pg_sys::{
    AttrNumber, Bitmapset, BlockNumber, Buffer, Datum, ErrorData, ForkNumber, HeapTuple, IndexInfo,
    IndexScanDesc, IndexUniqueCheck, ItemPointer, Oid, RegProcedure, Relation, ScanDirection,
    ScanKey, Snapshot, StrategyNumber, SubTransactionId, TimestampTz, TransactionId, TupleDesc,
    VirtualTransactionId, XLogRecPtr, LOCKMODE, LOCKTAG,
};
use std::ffi::{c_char, c_int, c_void};

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

/// Where the files of relations are.
#[cfg(feature = "pg15")]
pub type File = pgrx::pg_sys::RelFileNode;
#[cfg(not(feature = "pg15"))]
pub type File = pgrx::pg_sys::RelFileLocator;

// What differs between major versions; called through `compat`.
#[cfg(not(feature = "pg18"))]
without_guard! {
    pub fn index_beginscan(
        table: Relation,
        index: Relation,
        snapshot: Snapshot,
        nkeys: c_int,
        norderbys: c_int,
    ) -> IndexScanDesc;
}
#[cfg(feature = "pg18")]
without_guard! {
    pub fn index_beginscan(
        table: Relation,
        index: Relation,
        snapshot: Snapshot,
        instrument: *mut pgrx::pg_sys::IndexScanInstrumentation,
        nkeys: c_int,
        norderbys: c_int,
    ) -> IndexScanDesc;
}
#[cfg(feature = "pg15")]
without_guard! {
    pub fn simple_heap_update(table: Relation, over: ItemPointer, tuple: HeapTuple);
}
#[cfg(not(feature = "pg15"))]
without_guard! {
    pub fn simple_heap_update(
        table: Relation,
        over: ItemPointer,
        tuple: HeapTuple,
        indexes: *mut pgrx::pg_sys::TU_UpdateIndexes::Type,
    );
}

without_guard! {
    // access/skey.h, access/genam.h, catalog/index.h
    pub fn ScanKeyInit(
        entry: ScanKey,
        attribute: AttrNumber,
        strategy: StrategyNumber,
        procedure: RegProcedure,
        argument: Datum,
    );
    pub fn index_rescan(
        scan: IndexScanDesc,
        keys: ScanKey,
        nkeys: c_int,
        orderbys: ScanKey,
        norderbys: c_int,
    );
    pub fn index_getnext_tid(scan: IndexScanDesc, direction: ScanDirection::Type) -> ItemPointer;
    pub fn index_endscan(scan: IndexScanDesc);
    pub fn index_insert(
        index: Relation,
        values: *mut Datum,
        nulls: *mut bool,
        row: ItemPointer,
        table: Relation,
        unique: IndexUniqueCheck::Type,
        unchanged: bool,
        info: *mut IndexInfo,
    ) -> bool;
    pub fn BuildIndexInfo(index: Relation) -> *mut IndexInfo;

    // access/relation.h, utils/relcache.h
    pub fn RelationIdGetRelation(relation: Oid) -> Relation;
    pub fn relation_open(relation: Oid, mode: LOCKMODE) -> Relation;
    pub fn relation_close(relation: Relation, mode: LOCKMODE);

    // storage/lmgr.h
    pub fn ConditionalLockRelationOid(relation: Oid, mode: LOCKMODE) -> bool;

    // storage/lock.h
    pub fn GetLockConflicts(
        tag: *const LOCKTAG,
        mode: LOCKMODE,
        count: *mut c_int,
    ) -> *mut VirtualTransactionId;

    // utils/palloc.h
    pub fn pfree(memory: *mut c_void);

    // miscadmin.h
    pub fn PreventCommandIfReadOnly(command: *const c_char);
    pub fn PreventCommandDuringRecovery(command: *const c_char);

    // access/heapam.h, access/htup_details.h
    pub fn heap_page_prune_opt(table: Relation, buffer: Buffer);
    pub fn heap_hot_search_buffer(
        first: ItemPointer,
        table: Relation,
        buffer: Buffer,
        snapshot: Snapshot,
        tuple: HeapTuple,
        all_dead: *mut bool,
        first_call: bool,
    ) -> bool;
    pub fn heap_copytuple(tuple: HeapTuple) -> HeapTuple;
    pub fn heap_form_tuple(
        columns: TupleDesc,
        values: Values<Datum>,
        nulls: Values<bool>,
    ) -> HeapTuple;
    pub fn simple_heap_insert(table: Relation, tuple: HeapTuple);

    // nodes/bitmapset.h; never raises
    pub fn bms_is_member(member: c_int, set: *const Bitmapset) -> bool;

    // utils/elog.h
    pub fn CopyErrorData() -> *mut ErrorData;
    pub fn FreeErrorData(error: *mut ErrorData);
    pub fn ThrowErrorData(error: *mut ErrorData);

    // utils/inval.h, utils/syscache.h
    pub fn AcceptInvalidationMessages();
    pub fn SearchSysCache1(cache: c_int, key: Datum) -> HeapTuple;
    pub fn ReleaseSysCache(tuple: HeapTuple);

    // storage/bufmgr.h
    pub fn ReadBuffer(relation: Relation, block: BlockNumber) -> Buffer;
    pub fn ReadRecentBuffer(
        file: File,
        fork: ForkNumber::Type,
        block: BlockNumber,
        buffer: Buffer,
    ) -> bool;
    pub fn LockBuffer(buffer: Buffer, mode: c_int);
    pub fn BufferGetLSNAtomic(buffer: Buffer) -> XLogRecPtr;
    pub fn UnlockReleaseBuffer(buffer: Buffer);

    // utils/snapmgr.h
    pub fn GetLatestSnapshot() -> Snapshot;
    pub fn GetTransactionSnapshot() -> Snapshot;
    pub fn RegisterSnapshot(snapshot: Snapshot) -> Snapshot;
    pub fn UnregisterSnapshot(snapshot: Snapshot);
}

// These never raise: they may be called without `compat::guarded`, too.
without_guard! {
    // access/htup_details.h
    pub fn heap_deform_tuple(
        tuple: HeapTuple,
        columns: TupleDesc,
        values: *mut Datum,
        nulls: *mut bool,
    );
    pub fn nocachegetattr(tuple: HeapTuple, number: c_int, columns: TupleDesc) -> Datum;

    // miscadmin.h, access/xact.h, utils/timestamp.h
    pub fn GetUserId() -> Oid;
    pub fn GetCurrentSubTransactionId() -> SubTransactionId;
    pub fn TransactionIdIsCurrentTransactionId(xid: TransactionId) -> bool;
    pub fn GetCurrentTimestamp() -> TimestampTz;

    // tcop/tcopprot.h
    pub fn StatementCancelHandler(signal: c_int);
}

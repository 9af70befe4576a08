//! Functions of Postgres without the guard that pgrx puts around each call. A guard takes about 300 instructions;
//! several calls in a row run inside of one `compat::guarded` instead.
//!
//! Each declaration is compared with pgrx's own binding, which is made from the server's headers. If a major version
//! changes a function, this does not compile.

use pgrx::pg_sys::{
    AttrNumber, Bitmapset, BlockNumber, Buffer, CmdType, Datum, ErrorData, HeapTuple, LOCKMODE,
    LOCKTAG, Oid, RegProcedure, Relation, ScanDirection, ScanKey, Snapshot, StrategyNumber,
    SubTransactionId, SysScanDesc, TimestampTz, TransactionId, TupleDesc, VirtualTransactionId,
    XLogRecPtr,
};
use std::ffi::{c_char, c_int, c_void};

/// Declares functions, and compares each with pgrx's binding of the same name.
macro_rules! without_guard {
    ($($(#[$only:meta])* pub fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?;)*) => {
        unsafe extern "C-unwind" {
            $($(#[$only])* pub fn $name($($argument: $type),*) $(-> $result)?;)*
        }

        const _: () = {
            $($(#[$only])* let _: unsafe fn($($type),*) $(-> $result)? = pgrx::pg_sys::$name;)*
        };
    };
}

without_guard! {
    // access/skey.h, access/genam.h
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
        keys: ScanKey,
    ) -> SysScanDesc;
    pub fn systable_getnext_ordered(
        scan: SysScanDesc,
        direction: ScanDirection::Type,
    ) -> HeapTuple;
    pub fn systable_endscan_ordered(scan: SysScanDesc);

    // access/htup_details.h
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    pub fn heap_form_tuple(columns: TupleDesc, values: *mut Datum, nulls: *mut bool) -> HeapTuple;
    #[cfg(not(any(feature = "pg15", feature = "pg16")))]
    pub fn heap_form_tuple(
        columns: TupleDesc,
        values: *const Datum,
        nulls: *const bool,
    ) -> HeapTuple;

    // catalog/indexing.h, executor/executor.h
    pub fn CatalogTupleInsert(table: Relation, tuple: HeapTuple);
    #[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18"))]
    pub fn CatalogTupleUpdate(
        table: Relation,
        place: *mut pgrx::pg_sys::ItemPointerData,
        tuple: HeapTuple,
    );
    #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18")))]
    pub fn CatalogTupleUpdate(
        table: Relation,
        place: *const pgrx::pg_sys::ItemPointerData,
        tuple: HeapTuple,
    );
    pub fn CheckCmdReplicaIdentity(table: Relation, command: CmdType::Type);

    // access/heapam.h
    pub fn heap_fetch(
        table: Relation,
        snapshot: Snapshot,
        tuple: HeapTuple,
        buffer: *mut Buffer,
        keeps_pin: bool,
    ) -> bool;

    // access/relation.h
    pub fn relation_open(relation: Oid, mode: LOCKMODE) -> Relation;
    pub fn relation_close(relation: Relation, mode: LOCKMODE);

    // storage/lmgr.h
    pub fn LockRelationOid(relation: Oid, mode: LOCKMODE);
    pub fn ConditionalLockRelationOid(relation: Oid, mode: LOCKMODE) -> bool;

    // storage/lock.h
    pub fn GetLockConflicts(
        tag: *const LOCKTAG,
        mode: LOCKMODE,
        count: *mut c_int,
    ) -> *mut VirtualTransactionId;

    // utils/palloc.h
    pub fn pfree(memory: *mut c_void);

    // access/xact.h
    pub fn CommandCounterIncrement();

    // miscadmin.h
    pub fn PreventCommandIfReadOnly(command: *const c_char);
    pub fn PreventCommandDuringRecovery(command: *const c_char);

    // access/htup_details.h
    pub fn heap_copytuple(tuple: HeapTuple) -> HeapTuple;

    // nodes/bitmapset.h; raises for a negative member only
    pub fn bms_is_member(member: c_int, set: *const Bitmapset) -> bool;

    // utils/elog.h
    pub fn geterrcode() -> c_int;
    pub fn CopyErrorData() -> *mut ErrorData;
    pub fn FreeErrorData(error: *mut ErrorData);
    pub fn ThrowErrorData(error: *mut ErrorData);

    // storage/bufmgr.h
    pub fn ReadBuffer(relation: Relation, block: BlockNumber) -> Buffer;
    #[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18"))]
    pub fn LockBuffer(buffer: Buffer, mode: c_int);
    #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18")))]
    pub fn LockBufferInternal(buffer: Buffer, mode: pgrx::pg_sys::BufferLockMode::Type);
    pub fn BufferGetLSNAtomic(buffer: Buffer) -> XLogRecPtr;
    pub fn ReleaseBuffer(buffer: Buffer);
    pub fn UnlockReleaseBuffer(buffer: Buffer);

    // utils/snapmgr.h
    pub fn GetLatestSnapshot() -> Snapshot;
    pub fn GetTransactionSnapshot() -> Snapshot;
    pub fn RegisterSnapshot(snapshot: Snapshot) -> Snapshot;
    pub fn UnregisterSnapshot(snapshot: Snapshot);
}

// These functions never raise, so they may be called without `compat::guarded`.
without_guard! {
    // access/htup_details.h
    pub fn heap_deform_tuple(
        tuple: HeapTuple,
        columns: TupleDesc,
        values: *mut Datum,
        nulls: *mut bool,
    );

    // miscadmin.h, access/xact.h, access/xlog.h, utils/timestamp.h
    pub fn GetUserId() -> Oid;
    pub fn GetMockAuthenticationNonce() -> *mut c_char;
    pub fn GetCurrentSubTransactionId() -> SubTransactionId;
    pub fn TransactionIdIsCurrentTransactionId(xid: TransactionId) -> bool;
    pub fn GetCurrentTimestamp() -> TimestampTz;
}

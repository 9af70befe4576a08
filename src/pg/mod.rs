//! PostgreSQL, by pointer: small safe wrappers, each unsafe block with its reason. The only modules with `unsafe`,
//! but for `encoding`; everything else in the extension is ordinary Rust over these.
//!
//! From the ground up: the modules of this folder, then [`call`], [`session`], [`locks`], [`state`] and
//! [`fenced_table`]; at last `load`, which starts them. None names one that comes after it,
//! but for `shared_memory`, which asks `call` for the message of an error.
#![allow(unsafe_code)]

pub mod compat;
pub mod memory;
pub mod own;
mod raw;
pub mod shared_memory;
mod table_scan;

/// A call from SQL, its answer, and how an error leaves.
pub mod call {
    pub mod args;
    pub mod composite;
    pub mod entry;
    pub mod evaluation;
    pub mod json;
    pub mod raise;
    mod reserve;
    pub mod rust_memory;
    pub mod state_function;
}

/// The session and its transaction: who calls, with which settings, what lasts until the transaction's end.
pub mod session {
    pub mod client;
    pub mod clock;
    pub mod commit;
    pub mod role;
    pub mod scope;
    pub mod server;
    pub mod settings;
    pub mod signal;
    pub mod xact;
}

/// Locks, and waiting for them.
pub mod locks {
    pub mod lock;
    pub mod lock_count;
    pub mod session_lock;
    mod time_limit;
    pub mod wait;
}

/// The state: its table and its sequences.
pub mod state {
    mod additions;
    pub mod lease_lock;
    pub mod lease_table;
    pub mod opened;
    pub mod relation;
    pub mod role_prefix;
    pub mod row;
    mod row_place;
    pub mod sequence;
}

/// The fence's trigger, and the table that it is on.
pub mod fenced_table {
    pub mod column;
    pub mod describe;
    pub mod trigger;
    pub mod trigger_catalog;
}

pub mod load;

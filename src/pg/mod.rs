//! PostgreSQL: small safe wrappers around its functions, with a reason for each unsafe block. Apart from `encoding`,
//! only these modules have `unsafe`; the rest of the extension is ordinary Rust on top of them.
//!
//! The order is from the ground up: the modules of this folder, then [`call`], [`session`], [`locks`], [`state`] and
//! [`fenced_table`], and finally `load`, which initialises them. None uses a later one, except that `shared_memory`
//! asks `call` for the message of an error.
#![allow(unsafe_code)]

pub mod compat;
pub mod memory;
pub mod own;
mod raw;
pub mod shared_memory;
mod table_scan;

/// Calls from SQL, their return values, and how errors are raised.
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

/// The session and its transaction: the calling role, the settings, and the state of the transaction.
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

/// The extension's own tables and sequences.
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

/// The fence's trigger and its table.
pub mod fenced_table {
    pub mod column;
    pub mod definition;
    pub mod describe;
    pub mod trigger;
    pub mod trigger_catalog;
}

pub mod load;

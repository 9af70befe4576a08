//! PostgreSQL, by pointer: small safe wrappers, each unsafe block with its reason. The only modules with `unsafe`;
//! everything else in the extension is ordinary Rust over these.
#![allow(unsafe_code)]

// A call from SQL, its answer, and how an error leaves.
pub mod args;
pub mod composite;
pub mod encoding;
pub mod entry;
pub mod errors;
pub mod raise;
pub mod state_function;

// The trigger, and the table that it is on.
pub mod column;
pub mod describe;
pub mod trigger;
pub mod trigger_catalog;

// The state: its tables, read and written, and its sequences.
mod executor;
mod form;
pub mod guarded_commits;
pub mod hash;
pub mod keyed;
pub mod lease_table;
mod places;
pub mod relation;
pub mod row;
pub mod row_version;
pub mod sequence;

// Locks, and waiting for them.
mod alarm;
pub mod lock;
pub mod lock_count;
pub mod relation_lock;
pub mod session_lock;
pub mod shared_memory;
pub mod wait;

// The transaction.
pub mod commit;
pub mod scope;
pub mod snapshot_age;
pub mod xact;

// The server and the session; what differs between its major versions is in `compat`.
pub mod compat;
pub mod load;
pub mod memory;
mod raw;
pub mod role;
pub mod server;
pub mod settings;

//! The only modules that touch Postgres by pointer: small safe wrappers, each unsafe block with its reason.
//!
//! Everything else in the extension is ordinary Rust over these.
#![allow(unsafe_code)]

mod alarm;
pub mod args;
pub mod column;
pub mod commit;
pub mod compat;
pub mod composite;
pub mod describe;
pub mod encoding;
pub mod entry;
pub mod errors;
mod executor;
pub mod guarded_commits;
pub mod keyed;
pub mod lease_table;
pub mod load;
pub mod lock;
pub mod lock_count;
pub mod memory;
pub mod raise;
mod raw;
pub mod relation;
pub mod relation_lock;
pub mod row;
pub mod row_version;
pub mod scope;
pub mod sequence;
pub mod server;
pub mod session_lock;
pub mod settings;
pub mod snapshot_age;
pub mod state_function;
pub mod trigger;
pub mod trigger_catalog;
pub mod wait;
pub mod xact;

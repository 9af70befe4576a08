//! Leases: who is granted one, and who changes, guards, waits for or prunes it.
//!
//! `try_acquire` makes one attempt to acquire, in the slot that `free_slot` chooses and locks. `change` is common to
//! `renew`, release and revoke; `keep` renews many, as heartbeats do; `adopt` writes a grant of another service; `prune`
//! deletes rows of grants long over. `session_leases` are those that end with their session. `guard` ties a transaction
//! to a grant. `lookup` reads what the rows say of a lease, and limits what a caller learns of it. `queue` and `wait`
//! serve waiting sessions, and `locks` holds the locks for all of them.

pub mod adopt;
pub mod change;
mod free_slot;
pub mod guard;
pub mod keep;
pub mod locks;
pub mod lookup;
pub mod prune;
pub mod queue;
pub mod renew;
pub mod request;
pub mod session_leases;
pub mod try_acquire;
pub mod wait;

//! Leases: who is granted one, who may change it, who relies on it, who waits for it.
//!
//! `try_acquire` is the way of a try; `free_slot` finds and locks the slot that it gets; `change` is what renew, release
//! and revoke have in common; `prune` deletes what is long over; `guard` is what a transaction relies on, as far as
//! its snapshot allows that. `known` is what is known of a lease, and who may know it. `queue` and `wait` are for those who wait. `locks` holds the locks for all of them.

pub mod adopt;
pub mod change;
mod free_slot;
pub mod guard;
pub mod keep;
pub mod known;
pub mod locks;
pub mod prune;
pub mod queue;
pub mod renew;
pub mod request;
pub mod session_leases;
pub mod try_acquire;
pub mod wait;

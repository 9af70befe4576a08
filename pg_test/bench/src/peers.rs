//! The ways to take a lease that are compared, each set up in one file.

pub mod advisory;
pub mod etcd;
pub mod insert_first;
pub mod notify;
pub mod ours;
pub mod plpgsql;
pub mod redis;
pub mod sql;
pub mod two_updates;
pub mod update_first;
pub mod zookeeper;

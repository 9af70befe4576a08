//! The systems that are compared: those in SQL are a list, the others have a file each.

pub mod etcd;
pub mod notify;
pub mod redis;
pub mod sql;
pub mod zookeeper;

use crate::peer::Peer;
use crate::workbench::Workbench;
use anyhow::{Result, bail};

/// Creates the tables or starts the server of a peer. The error says why the peer cannot take part.
pub fn prepare(bench: &Workbench, name: &str) -> Result<Box<dyn Peer>> {
    if let Some(sql) = sql::ALL.iter().find(|sql| sql.name == name) {
        return sql.prepare(bench);
    }
    match name {
        notify::NAME => notify::prepare(bench),
        notify::NAME_ALONE => notify::prepare_alone(bench),
        redis::NAME => redis::start(bench, false),
        redis::NAME_DURABLE => redis::start(bench, true),
        etcd::NAME => etcd::start(bench, false),
        etcd::NAME_WATCH => etcd::start(bench, true),
        zookeeper::NAME => zookeeper::start(bench),
        _ => bail!("there is no such peer"),
    }
}

/// Prepares several peers. Those that cannot take part are named in the report.
pub fn all(bench: &Workbench, names: &[&str]) -> Vec<Box<dyn Peer>> {
    let taking_part = |name: &&str| match prepare(bench, name) {
        Ok(peer) => Some(peer),
        Err(error) => {
            bench.skip(name, &error);
            None
        }
    };
    names.iter().filter_map(taking_part).collect()
}

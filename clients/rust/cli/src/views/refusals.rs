//! The command `refusals`: the latest refused writes.

use super::View;
use crate::failure::Result;
use crate::{connection, print};
use clap::Args;

#[derive(Debug, Args)]
pub struct Options {
    /// For programs
    #[arg(long)]
    json: bool,
}

const SHOWN: &str = "SELECT refused_at::text, sqlstate, relation, key::text, lease, presented::text, stored::text, \
     holder, role::text, application_name, client_addr::text, pid::text";

pub fn show(options: &Options, connection: &connection::Options) -> Result<u8> {
    let view = View::open(connection)?;
    let from = "FROM fence.refusals ORDER BY refused_at";
    if options.json {
        return print(&(view.json(&format!("SELECT * {from}"), &[])? + "\n"));
    }
    let table = view.table(&format!("{SHOWN} {from}"), &[])?;
    if table.is_empty() {
        return print("no write was refused\n");
    }
    print(&table.wide())
}

//! Ways around the fence.

use super::{View, print};
use crate::connection;
use crate::failure::Result;
use clap::Args;
use tokio_postgres::types::Type;

/// The exit status where there is a hole.
const HOLE: u8 = 1;

#[derive(Debug, Args)]
pub struct Options {
    /// Only this table; by default all that are fenced, and the state itself
    #[arg(value_name = "TABLE")]
    relation: Option<String>,
    /// For programs
    #[arg(long)]
    json: bool,
}

pub fn show(options: &Options, connection: &connection::Options) -> Result<u8> {
    let view = View::open(connection)?;
    let audit = view.function("fence_audit($1::text::regclass)");
    let sql = format!("SELECT relation::text, severity::text, finding, remedy FROM {audit}");
    let arguments: super::Arguments = &[(&options.relation, Type::TEXT)];
    let table = view.table(&sql, arguments)?;
    if options.json {
        print(&(view.json(&sql, arguments)? + "\n"))?;
    } else if table.is_empty() {
        print("no way around the fence was found\n")?;
    } else {
        print(&table.tall())?;
    }
    Ok(if table.column("severity").contains(&"hole") { HOLE } else { 0 })
}

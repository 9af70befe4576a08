//! The command `audit`: ways around the fence, and the number of tables that were checked.

use super::View;
use crate::failure::{Failure, Result};
use crate::{connection, print};
use clap::Args;
use tokio_postgres::types::Type;

/// The exit status if there is a hole.
const HOLE: u8 = 1;
/// The exit status if no table was checked.
const NOTHING: u8 = 2;

/// The number of tables that an audit checks: those of the caller, with each partitioned table counted once.
/// pg_fence_lite writes a trigger function for each table.
const LOOKED_AT: &str = "WITH fenced AS (
        SELECT DISTINCT t.tgrelid FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_proc p ON p.oid = t.tgfoid
         WHERE (t.tgfoid = to_regprocedure($1) OR p.pronamespace = to_regnamespace('fence_lite'))
           AND pg_has_role(c.relowner, 'USAGE'))
    SELECT count(*) FROM fenced f
     WHERE NOT EXISTS (SELECT FROM pg_inherits i JOIN fenced p ON p.tgrelid = i.inhparent WHERE i.inhrelid = f.tgrelid)";

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
    } else if !table.is_empty() {
        print(&table.tall())?;
    }
    if table.column("severity").contains(&"hole") {
        return Ok(HOLE);
    }
    let count: i64 = match &options.relation {
        // The table was checked: otherwise there would have been an error.
        Some(_) => 1,
        None => view.value(LOOKED_AT, &[(&view.function("fenced()"), Type::TEXT)])?,
    };
    if count == 0 {
        return Err(Failure::new(
            NOTHING,
            "nothing was looked at: this role owns no fenced table (ask as their owner, or as a superuser)",
        ));
    }
    if table.is_empty() && !options.json {
        let tables = if count == 1 { "table was" } else { "tables were" };
        print(&format!("no way around the fence was found: {count} {tables} looked at\n"))?;
    }
    Ok(0)
}

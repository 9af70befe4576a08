//! The commands that show, release and revoke leases.

use super::View;
use crate::failure::{Failure, Result, status};
use crate::{connection, print, printable};
use clap::Args;
use tokio_postgres::types::Type;

#[derive(Debug, Args)]
pub struct Options {
    /// Only names that begin with this
    #[arg(value_name = "PREFIX", default_value = "", hide_default_value = true)]
    prefix: String,
    /// Also leases that nobody has
    #[arg(short, long)]
    all: bool,
    /// For programs
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub struct OneOptions {
    /// The lease
    name: String,
    /// For programs
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub struct ReleaseOptions {
    /// The lease
    name: String,
    /// A token of the grant
    #[arg(env = "PG_FENCE_TOKEN")]
    token: i64,
}

const LISTED: &str = "SELECT name, state, mode, holder, date_trunc('second', remaining)::text AS remaining, \
     renewals::text, token::text, array_to_string(blocking_pids, ' ') AS blocked_by ";

pub fn list(options: &Options, connection: &connection::Options) -> Result<u8> {
    let view = View::open(connection)?;
    let from = "FROM fence.leases WHERE starts_with(name, $1) AND ($2 OR state <> 'free') ORDER BY name, first_token";
    let arguments: super::Arguments = &[(&options.prefix, Type::TEXT), (&options.all, Type::BOOL)];
    if options.json {
        return print(&(view.json(&format!("SELECT * {from}"), arguments)? + "\n"));
    }
    let table = view.table(&format!("{LISTED}{from}"), arguments)?;
    if table.is_empty() {
        return print("nobody has a lease\n");
    }
    print(&table.wide())
}

pub fn show(options: &OneOptions, connection: &connection::Options) -> Result<u8> {
    let view = View::open(connection)?;
    let from = format!("FROM {}", view.function("lease_info($1)"));
    let arguments: super::Arguments = &[(&options.name, Type::TEXT)];
    if options.json {
        return print(&(view.json(&format!("SELECT * {from}"), arguments)? + "\n"));
    }
    let columns = "SELECT name, state, mode, holder, role::text, token::text, first_token::text, \
         acquired_at::text, renewed_at::text, expires_at::text, remaining::text, renewals::text, metadata::text, \
         array_to_string(blocking_pids, ' ') AS blocked_by ";
    let table = view.table(&format!("{columns}{from}"), arguments)?;
    if table.is_empty() {
        let name = printable(&options.name);
        return print(&format!("nobody has, or had of late, the lease {name}\n"));
    }
    print(&table.tall())
}

pub fn release(options: &ReleaseOptions, connection: &connection::Options) -> Result<u8> {
    let view = View::open(connection)?;
    let sql = format!("SELECT {}", view.function("lease_release($1, $2)"));
    let arguments: super::Arguments = &[(&options.name, Type::TEXT), (&options.token, Type::INT8)];
    if view.value::<Option<i64>>(&sql, arguments)?.is_none() {
        let lost = format!("the lease {} is not held by {}", options.name, options.token);
        return Err(Failure::new(status::LOST, lost));
    }
    Ok(0)
}

pub fn revoke(options: &OneOptions, connection: &connection::Options) -> Result<u8> {
    let view = View::open(connection)?;
    let sql = format!("SELECT {}", view.function("lease_revoke($1)"));
    let closing: Option<i64> = view.value(&sql, &[(&options.name, Type::TEXT)])?;
    if options.json {
        let closing = closing.map_or("null".to_owned(), |token| token.to_string());
        return print(&format!("{{\"closing_token\":{closing}}}\n"));
    }
    print(match closing {
        Some(_) => "revoked\n",
        None => "nobody had it\n",
    })
}

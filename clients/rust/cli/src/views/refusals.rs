//! The latest refused writes.

use super::{View, show_again};
use crate::failure::Result;
use crate::{connection, print};
use clap::Args;
use tokio_postgres::types::Type;

#[derive(Debug, Args)]
pub struct Options {
    /// Show new ones as they come, until interrupted
    #[arg(short, long)]
    follow: bool,
    /// For programs: an array; with --follow one a line
    #[arg(long)]
    json: bool,
}

pub fn show(options: &Options, connection: &connection::Options) -> Result<u8> {
    let mut since = "-infinity".to_owned();
    if options.follow {
        return show_again(connection, |view| newer(options, view, &mut since));
    }
    let text = newer(options, &View::open(connection)?, &mut since)?;
    print(match text.as_str() {
        "" if options.json => "[]\n",
        "" => "no write was refused\n",
        text => text,
    })
}

/// The writes that were refused later; that moment then moves on.
fn newer(options: &Options, view: &View, since: &mut String) -> Result<String> {
    let columns = match options.json {
        true => "row_to_json(r)::text AS json",
        false => {
            "sqlstate, relation, key::text, lease, presented::text, stored::text, holder, role::text, application_name, \
             client_addr::text, pid::text"
        }
    };
    let sql = format!(
        "SELECT refused_at::text, {columns} FROM fence.refusals AS r \
         WHERE refused_at > $1::text::timestamptz ORDER BY refused_at"
    );
    let table = view.table(&sql, &[(since, Type::TEXT)])?;
    let Some(last) = table.column("refused_at").last().map(|last| (*last).to_owned()) else {
        return Ok(String::new());
    };
    *since = last;
    Ok(match options.json {
        true => format!("[{}]\n", table.column("json").join(", ")),
        false => table.wide(),
    })
}

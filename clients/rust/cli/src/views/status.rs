//! The command `status`: the state of pg_fence in the database, in one row.

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

/// The columns of fence.stats, without `jumps`: fence_status() has the number of all new epochs, counted or not.
const COUNTED: &str = "stats_reset, grants, tries_lost, waits, wait_time, renewals, renewals_lost, releases, \
     revocations, take_overs, guards, writes_checked, refused_pf001, refused_pf002, refused_pf003, refused_pf004, \
     refused_pf005, refused_pf006, row_claims, row_take_overs";

/// True unless the database has pg_fence_lite, which has no statistics.
const IS_COUNTED: &str = "SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'pg_fence') OR to_regnamespace('fence_lite') IS NULL";

pub fn show(options: &Options, connection: &connection::Options) -> Result<u8> {
    let view = View::open(connection)?;
    let held = "(SELECT count(*) FROM fence.leases WHERE state = 'held') AS leases_held";
    let status = view.function("fence_status()");
    let sql = match view.value(IS_COUNTED, &[])? {
        true => format!(
            "SELECT s.*, t.*, {held} FROM {status} AS s, (SELECT {COUNTED} FROM fence.stats) AS t"
        ),
        false => format!("SELECT s.*, {held} FROM {status} AS s"),
    };
    if options.json {
        let rows = view.json(&sql, &[])?;
        // The single row is shown as an object, not as an array.
        return print(&format!("{}\n", rows.trim_start_matches('[').trim_end_matches(']')));
    }
    let as_text = format!(
        "SELECT e.key AS name, e.value FROM ({sql}) AS r, json_each_text(row_to_json(r)) AS e"
    );
    print(&view.table(&as_text, &[])?.wide())
}

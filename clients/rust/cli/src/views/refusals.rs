//! The latest refused writes.

use super::{LOOK_AGAIN, View, print};
use crate::connection;
use crate::failure::Result;
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
    let view = View::open(connection)?;
    let mut since = "-infinity".to_owned();
    loop {
        let from =
            "FROM fence.refusals WHERE refused_at > $1::text::timestamptz ORDER BY refused_at";
        let arguments: super::Arguments = &[(&since, Type::TEXT)];
        let table = view.table(
            &format!(
                "SELECT refused_at::text, sqlstate, relation, key::text, lease, presented::text, stored::text, holder, \
                 role::text, application_name, client_addr::text, pid::text {from}"
            ),
            arguments,
        )?;
        let last = table.column("refused_at").last().map(|last| (*last).to_owned());
        let text = match (&last, options.json) {
            (None, true) if !options.follow => "[]\n".to_owned(),
            (None, false) if !options.follow => "no write was refused\n".to_owned(),
            (None, _) => String::new(),
            (Some(_), false) => table.wide(),
            (Some(last), true) => {
                // Those that the table has, and none that came since.
                let until =
                    from.replace("ORDER BY", "AND refused_at <= $2::text::timestamptz ORDER BY");
                let arguments: super::Arguments = &[(&since, Type::TEXT), (last, Type::TEXT)];
                view.json(&format!("SELECT * {until}"), arguments)? + "\n"
            }
        };
        print(&text)?;
        if !options.follow {
            return Ok(0);
        }
        since = last.unwrap_or(since);
        std::thread::sleep(LOOK_AGAIN);
    }
}

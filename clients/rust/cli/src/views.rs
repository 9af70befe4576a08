//! The views: tables for people, `--json` for programs.

pub mod audit;
pub mod leases;
pub mod refusals;
pub mod status;
mod table;

use crate::connection::{self, Server};
use crate::failure::{Failure, Result};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use pg_fence_client::Connected;
use std::io::stdout;
use std::os::fd::AsFd;
use table::Table;
use tokio::runtime::Builder;
use tokio_postgres::types::{FromSqlOwned, ToSql, Type};

/// Arguments of a statement, whose types are said: so nothing is prepared, which poolers do not stand.
pub type Arguments<'a> = &'a [(&'a (dyn ToSql + Sync), Type)];

/// A connection, and a runtime to wait in.
struct View {
    runtime: tokio::runtime::Runtime,
    server: Server,
    connected: Connected,
}

impl View {
    fn open(connection: &connection::Options) -> Result<View> {
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| Failure::system("the runtime", error))?;
        let server = connection.server()?;
        let connected = runtime.block_on(server.connect())?;
        Ok(View { runtime, server, connected })
    }

    /// A function of the extension, as statements name it.
    fn function(&self, call: &str) -> String {
        self.server.function(call)
    }

    /// All columns as text.
    fn table(&self, sql: &str, arguments: Arguments) -> Result<Table> {
        let rows = self.runtime.block_on(self.connected.query_typed(sql, arguments));
        Table::of(&rows.map_err(Failure::of_driver)?).map_err(Failure::of_driver)
    }

    /// The same rows as JSON, an array.
    fn json(&self, sql: &str, arguments: Arguments) -> Result<String> {
        let sql =
            format!("SELECT coalesce(json_agg(row_to_json(r)), '[]')::text FROM ({sql}) AS r");
        self.value(&sql, arguments)
    }

    /// The only value of the only row.
    fn value<T: FromSqlOwned>(&self, sql: &str, arguments: Arguments) -> Result<T> {
        let row = self.runtime.block_on(self.connected.query_typed_one(sql, arguments));
        row.and_then(|row| row.try_get(0)).map_err(Failure::of_driver)
    }
}

/// Between two looks of `--watch` and `--follow`.
const LOOK_AGAIN_MS: u16 = 1_000;

/// Shows what `look` answers, again and again, until nobody reads it any more. A server that is away is waited for.
fn show_again(
    connection: &connection::Options,
    mut look: impl FnMut(&View) -> Result<String>,
) -> Result<u8> {
    let mut view = Some(View::open(connection)?);
    let mut told = String::new();
    loop {
        let shown = match &view {
            Some(view) => look(view),
            None => View::open(connection).and_then(|opened| look(view.insert(opened))),
        };
        match shown {
            Ok(text) if crate::put(&text)? => told.clear(),
            Ok(_) => return Ok(0),
            Err(failure) if failure.is_passing() => {
                view = None;
                // The same is not told again and again.
                if failure.message != told {
                    crate::say(&format!("{failure}: it is tried again"));
                    told = failure.message;
                }
            }
            Err(failure) => return Err(failure),
        }
        let out = stdout();
        let mut reader = [PollFd::new(out.as_fd(), PollFlags::empty())];
        match poll(&mut reader, PollTimeout::from(LOOK_AGAIN_MS)) {
            // It has gone: nothing else was asked for.
            Ok(1..) => return Ok(0),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(Failure::system("cannot wait", error)),
        }
    }
}

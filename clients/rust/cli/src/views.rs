//! The commands that show something: as tables, or with `--json` for programs.

pub mod audit;
pub mod leases;
pub mod refusals;
pub mod status;
mod table;

use crate::connection::{self, Server};
use crate::failure::{Failure, Result};
use pg_fence_client::Connected;
use table::Table;
use tokio::runtime::Builder;
use tokio_postgres::types::{FromSqlOwned, ToSql, Type};

/// The arguments of a statement, with their types. Thus no statement is prepared, which poolers do not support.
pub type Arguments<'a> = &'a [(&'a (dyn ToSql + Sync), Type)];

/// A connection, and the runtime for its calls.
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

    /// Returns the call of a function of the extension, qualified by the schema if one is given.
    fn function(&self, call: &str) -> String {
        self.server.function(call)
    }

    /// Returns the rows of a statement whose columns are all text.
    fn table(&self, sql: &str, arguments: Arguments) -> Result<Table> {
        let rows = self.runtime.block_on(self.connected.query_typed(sql, arguments));
        Table::of(&rows.map_err(Failure::of_driver)?).map_err(Failure::of_driver)
    }

    /// Returns the rows of a statement as a JSON array.
    fn json(&self, sql: &str, arguments: Arguments) -> Result<String> {
        let sql =
            format!("SELECT coalesce(json_agg(row_to_json(r)), '[]')::text FROM ({sql}) AS r");
        self.value(&sql, arguments)
    }

    /// Returns the only value of the only row.
    fn value<T: FromSqlOwned>(&self, sql: &str, arguments: Arguments) -> Result<T> {
        let row = self.runtime.block_on(self.connected.query_typed_one(sql, arguments));
        row.and_then(|row| row.try_get(0)).map_err(Failure::of_driver)
    }
}

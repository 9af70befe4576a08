//! The views: tables for people, `--json` for programs.

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

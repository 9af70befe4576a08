//! Where to connect, found in the order of libpq: the command line, then the service file, then the environment, then
//! the default.

mod conninfo;
mod environment;
mod parameters;
mod passfile;
mod service;
mod settings;
mod tls;

use crate::failure::{Failure, Result};
use clap::Args;
use environment::Environment;
use pg_fence_client::{Connected, Fence, open};
use settings::Settings;
use std::time::Duration;
use tokio_postgres::Config;
use tokio_postgres_rustls::MakeRustlsConnect;

/// Where to connect. The rest comes from the service file, the PG* variables and ~/.pgpass.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Connection")]
pub struct Options {
    /// The database; or all of it: "host=… dbname=…", "service=…", "postgresql://…"
    #[arg(short, long, value_name = "NAME|STRING|URL", global = true)]
    dbname: Option<String>,
    /// The server's host, or the directory of its socket
    #[arg(short = 'h', long, global = true)]
    host: Option<String>,
    /// The server's port
    #[arg(short, long, global = true)]
    port: Option<String>,
    /// The role to log in as
    #[arg(short = 'U', long, value_name = "ROLE", global = true)]
    username: Option<String>,
    /// The schema that pg_fence was created in, where it is not in the search_path
    #[arg(long, value_name = "NAME", global = true)]
    schema: Option<String>,
}

/// A server, or several as in a connection string, to which any number of connections can be opened.
#[derive(Clone)]
pub struct Server {
    /// The servers in the order in which they are tried.
    configs: Vec<Config>,
    tls: MakeRustlsConnect,
    schema: Option<String>,
}

impl Options {
    /// Reads the environment and the files that it names. Nothing is connected yet.
    pub fn server(&self) -> Result<Server> {
        let settings = self.settings(&Environment::of_this_process()?)?;
        let (configs, tls) = settings.into_configs()?;
        Ok(Server { configs, tls, schema: self.schema.clone() })
    }

    fn settings(&self, environment: &Environment) -> Result<Settings> {
        let mut settings = Settings::default();
        let named = [
            ("host", &self.host),
            ("port", &self.port),
            ("user", &self.username),
            ("dbname", &self.dbname),
        ];
        for (name, value) in named {
            // As in psql, an empty option is ignored, and a connection string has precedence over the other options.
            let Some(value) = value.as_deref().filter(|value| !value.is_empty()) else { continue };
            match name {
                "dbname" if conninfo::is_one(value) => settings.add_all(conninfo::parse(value)?)?,
                _ => settings.add(name, value)?,
            }
        }
        settings.complete(environment)?;
        Ok(settings)
    }
}

impl Server {
    /// Returns a fence on these servers.
    pub fn fence(&self) -> Fence {
        let fence = Fence::at(self.configs.clone(), self.tls.clone());
        match &self.schema {
            Some(schema) => fence.in_schema(schema),
            None => fence,
        }
    }

    /// Opens a connection outside of the fence, for single statements.
    pub async fn connect(&self) -> Result<Connected> {
        let opened = open(&self.configs, self.tls.clone(), Duration::MAX).await;
        opened.map_err(|error| Failure::of_client(&error))
    }

    /// Fails as [`Server::connect`] does with these options instead of its own.
    pub async fn try_options(
        &self,
        options: &str,
    ) -> std::result::Result<(), pg_fence_client::Error> {
        let mut configs = self.configs.clone();
        for config in &mut configs {
            config.options(options);
        }
        open(&configs, self.tls.clone(), Duration::MAX).await.map(drop)
    }

    /// Returns the call of a function of the extension, qualified by the schema if one is given.
    pub fn function(&self, call: &str) -> String {
        match &self.schema {
            Some(schema) => format!("\"{}\".{call}", schema.replace('"', "\"\"")),
            None => call.to_owned(),
        }
    }
}

//! A database for one test, with roles that no other test uses.

use crate::client::{Conninfo, Session};
use crate::edition;
use crate::process::{PATIENCE, wait_until};
use anyhow::Result;
use std::sync::atomic::{AtomicU32, Ordering};

/// A database, which is dropped with this value.
pub struct Database {
    admin: Conninfo,
    conninfo: Conninfo,
    name: String,
}

static COUNTER: AtomicU32 = AtomicU32::new(0);

impl Database {
    /// Makes an empty database on the server of `admin`, a superuser's connection.
    pub fn create(admin: Conninfo) -> Result<Database> {
        Database::create_as(admin, "")
    }

    fn create_as(admin: Conninfo, options: &str) -> Result<Database> {
        let name = format!("t{}", COUNTER.fetch_add(1, Ordering::Relaxed));
        let sql = format!("CREATE DATABASE {name} {options}");
        let mut session = admin.connect()?;
        let mut made = Ok(());
        // A session that was just closed may still be ending, and autovacuum may be at work.
        wait_until("nobody else is connected to the template", PATIENCE, || {
            made = session.try_rows(&sql).map(drop);
            !made.as_ref().is_err_and(|fault| fault.sqlstate == "55006")
        })?;
        made?;
        Ok(Database { conninfo: admin.clone().dbname(&name), admin, name })
    }

    /// Makes a database with the extension, in schema public.
    pub fn with_extension(admin: Conninfo) -> Result<Database> {
        if edition::is_lite() {
            return Database::with_lite(admin);
        }
        let database = Database::create(admin)?;
        database.connect()?.run("CREATE EXTENSION pg_fence")?;
        Ok(database)
    }

    /// Makes a database with the lite edition, whichever edition is under test. As on a platform, the owner of the
    /// database, who is no superuser, installs it.
    pub fn with_lite(admin: Conninfo) -> Result<Database> {
        let database = Database::create(admin)?;
        let (name, owner) = (database.name(), database.role("lite_owner")?);
        database.connect()?.run(&format!("ALTER DATABASE {name} OWNER TO {owner}"))?;
        database.connect_as(&owner)?.run(&edition::lite_script()?)?;
        Ok(database)
    }

    /// Makes another database on the same server, with these options of `CREATE DATABASE`.
    pub fn another(&self, options: &str) -> Result<Database> {
        Database::create_as(self.admin.clone(), options)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The superuser's connection.
    pub fn conninfo(&self) -> Conninfo {
        self.conninfo.clone()
    }

    /// Opens a superuser's session.
    pub fn connect(&self) -> Result<Session> {
        self.conninfo.connect()
    }

    /// A session of another role.
    pub fn connect_as(&self, role: &str) -> Result<Session> {
        self.conninfo().user(role).connect()
    }

    /// Makes a role that may only log in, and returns its name, which needs no quotes.
    pub fn role(&self, what: &str) -> Result<String> {
        let name = format!("{}_{what}", self.name);
        self.connect()?.run(&format!("CREATE ROLE {name} LOGIN"))?;
        Ok(name)
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // If that fails, the databases are removed with their server, like those that a test has named after this one.
        let Ok(mut session) = self.admin.connect() else { return };
        let own = format!("SELECT datname FROM pg_database WHERE datname ~ '^{}(_|$)'", self.name);
        for name in session.rows(&own).into_iter().flatten().flatten().flatten() {
            let _ = session.run(&format!("DROP DATABASE {name} WITH (FORCE)"));
        }
    }
}

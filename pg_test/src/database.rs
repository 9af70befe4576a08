//! A database of a test's own, with roles that no other test uses.

use crate::client::{Conninfo, Session};
use crate::edition;
use crate::process::{wait_until, PATIENCE};
use anyhow::Result;
use std::sync::atomic::{AtomicU32, Ordering};

/// A database that is dropped with this value.
pub struct Database {
    admin: Conninfo,
    conninfo: Conninfo,
    name: String,
}

static COUNTER: AtomicU32 = AtomicU32::new(0);

impl Database {
    /// Makes an empty database on the server of `admin` (a superuser's way to it).
    pub fn create(admin: Conninfo) -> Result<Database> {
        Database::create_as(admin, "")
    }

    fn create_as(admin: Conninfo, options: &str) -> Result<Database> {
        let name = format!("t{}", COUNTER.fetch_add(1, Ordering::Relaxed));
        let sql = format!("CREATE DATABASE {name} {options}");
        let mut session = admin.connect()?;
        let mut made = Ok(());
        // A session that has just been closed may take its time, and autovacuum may be at work.
        wait_until("nobody else is connected to the template", PATIENCE, || {
            made = session.try_rows(&sql).map(drop);
            !made.as_ref().is_err_and(|fault| fault.sqlstate == "55006")
        })?;
        made?;
        Ok(Database { conninfo: admin.clone().dbname(&name), admin, name })
    }

    /// Makes a database with the extension in it, in schema public.
    pub fn with_extension(admin: Conninfo) -> Result<Database> {
        if edition::is_lite() {
            return Database::with_lite(admin);
        }
        let database = Database::create(admin)?;
        database.connect()?.run("CREATE EXTENSION pg_fence")?;
        Ok(database)
    }

    /// Makes a database with the lite edition, whichever is judged. As on a platform it is installed by the owner of the
    /// database, who is no superuser.
    pub fn with_lite(admin: Conninfo) -> Result<Database> {
        let database = Database::create(admin)?;
        let (name, owner) = (database.name(), database.role("lite_owner")?);
        database.connect()?.run(&format!("ALTER DATABASE {name} OWNER TO {owner}"))?;
        database.connect_as(&owner)?.run(&edition::lite_script()?)?;
        Ok(database)
    }

    /// Makes one more on its server, with these options of `CREATE DATABASE`.
    pub fn another(&self, options: &str) -> Result<Database> {
        Database::create_as(self.admin.clone(), options)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where to connect, as the superuser.
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

    /// Makes a role that may log in and nothing else, and returns its name, which needs no quotes.
    pub fn role(&self, what: &str) -> Result<String> {
        let name = format!("{}_{what}", self.name);
        self.connect()?.run(&format!("CREATE ROLE {name} LOGIN"))?;
        Ok(name)
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // Failing that, it goes with its server, and so do those that a test has named after it.
        let Ok(mut session) = self.admin.connect() else { return };
        let own = format!("SELECT datname FROM pg_database WHERE datname ~ '^{}(_|$)'", self.name);
        for name in session.rows(&own).into_iter().flatten().flatten().flatten() {
            let _ = session.run(&format!("DROP DATABASE {name} WITH (FORCE)"));
        }
    }
}

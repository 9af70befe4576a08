//! A database with the extension in it, and short words for what the tests of the fence do there.

use pg_test::{Database, Lab, Result, Session};
use std::ops::{Deref, DerefMut};

/// A table that most tests write to: one row, `id` 1.
pub const ORDERS: &str =
    "CREATE TABLE orders (id int PRIMARY KEY, v int NOT NULL DEFAULT 0, fence bigint); \
     INSERT INTO orders VALUES (1);";

/// A database and a superuser's session in it.
pub struct TestDatabase {
    session: Session,
    database: Database,
    drawn: u32,
}

impl TestDatabase {
    /// A database with the extension and nothing else.
    pub fn new(lab: &Lab) -> Result<TestDatabase> {
        let database = lab.database()?;
        Ok(TestDatabase { session: database.connect()?, database, drawn: 0 })
    }

    /// With the table `orders`, fenced by a call of `fence_protect` with these further arguments.
    pub fn orders(lab: &Lab, arguments: &str) -> Result<TestDatabase> {
        let mut db = TestDatabase::new(lab)?;
        db.run(ORDERS)?;
        db.protect(arguments)?;
        Ok(db)
    }

    /// Fences `orders`, again if it was.
    pub fn protect(&mut self, arguments: &str) -> Result<()> {
        let comma = if arguments.is_empty() { "" } else { ", " };
        self.run(&format!("SELECT fence_protect('orders'{comma}{arguments})"))
    }

    pub fn another(&self) -> Result<Session> {
        self.database.connect()
    }

    /// Acquires a lease, which must be free, for an hour.
    pub fn grant(&mut self, name: &str) -> Result<i64> {
        self.one("SELECT lease_acquire($1, 'test', '1 h')", &[&name])
    }

    /// A token of a lease that matters to no table.
    pub fn token(&mut self) -> Result<i64> {
        self.drawn += 1;
        self.grant(&format!("any:{}", self.drawn))
    }
}

impl Deref for TestDatabase {
    type Target = Session;
    fn deref(&self) -> &Session {
        &self.session
    }
}

impl DerefMut for TestDatabase {
    fn deref_mut(&mut self) -> &mut Session {
        &mut self.session
    }
}

//! A database with leases and fenced rows, and what must hold after it was restored, promoted or upgraded.

use pg_test::{Calls, Context, Fault, Result, Session, edition, ensure};

/// What clients know of the database.
pub struct History {
    /// The token of the lease `order:7`, held for an hour as `worker`.
    pub token: i64,
    /// The token with which the row of `parcels` was written.
    pub written: i64,
    /// The greatest token that any client has seen.
    pub seen: i64,
}

/// Returns the number of epochs that the sequence has begun.
pub fn epochs_begun(session: &mut Session) -> Result<i64> {
    session.one("SELECT jumps FROM fence_status()", &[])
}

fn says_to_renew(refusal: &Fault) -> bool {
    refusal.hint.as_deref().is_some_and(|hint| hint.contains("call lease_renew"))
}

impl History {
    /// Installs the extension if it is missing, and creates the leases and rows.
    pub fn begin(session: &mut Session) -> Result<History> {
        if !session.truth("SELECT to_regproc('fence_status') IS NOT NULL")? {
            session.run("CREATE EXTENSION pg_fence")?;
        }
        session.run(
            "SET client_min_messages = warning;
             CREATE TABLE orders (id int PRIMARY KEY, total int, fence bigint);
             CREATE TABLE parcels (id int PRIMARY KEY, total int, fence bigint);
             INSERT INTO orders VALUES (7, 0);
             INSERT INTO parcels VALUES (7, 0);
             SELECT fence_protect('orders', lease => 'order:{id}'), fence_protect('parcels')",
        )?;
        let token =
            session.one("SELECT lease_acquire('order:7', 'worker', ttl => '1 hour')", &[])?;
        let written = session.one("SELECT lease_acquire('parcel:7')", &[])?;
        session.run(&format!(
            "UPDATE orders SET total = 1, fence = {token}; UPDATE parcels SET total = 1, fence = {written}"
        ))?;
        Ok(History { token, written, seen: written })
    }

    /// Draws `count` further tokens, which the database's successor may not have.
    pub fn draw_more(&mut self, session: &mut Session, count: usize) -> Result<()> {
        for n in 0..count {
            self.see(
                session.one("SELECT lease_acquire($1)", &[&format!("more {} {n}", self.seen)])?,
            );
        }
        Ok(())
    }

    /// Checks that the holder may release the lease without renewing it first, and may not write under it.
    fn may_release(&self, session: &mut Session) -> Result<()> {
        let release = "SELECT lease_release('order:7', $1)";
        for last_write in [
            "SELECT lease_guard('order:7', $)",
            "UPDATE orders SET total = 2, fence = $",
            "UPDATE orders SET total = 2, fence = lease_release('order:7', $)",
        ] {
            session.run("BEGIN")?;
            let closing: Option<i64> = session.one(release, &[&self.token])?;
            let closing = closing.context("the holder could not release")?;
            ensure!(closing > self.seen, "{closing} was drawn after {} was seen", self.seen);
            let check = "SELECT lease_check('order:7', $1)";
            ensure!(!session.one::<bool>(check, &[&closing])?, "the closing token speaks");
            ensure!(session.one::<i64>(release, &[&closing])? == closing, "released again");
            let last_write = last_write.replace('$', &closing.to_string());
            let refusal = session.refused(&last_write, "PF004")?;
            ensure!(says_to_renew(&refusal), "no way out of this: {refusal}");
            session.run("ROLLBACK")?;
        }
        session.run("BEGIN")?;
        if edition::is_lite() {
            // The lite edition has no such call.
            return session.run("ROLLBACK");
        }
        session.run(&format!("SELECT lease_release_all('{{order:7}}', {})", self.token))?;
        let other: Option<i64> = session.one("SELECT lease_acquire('order:7')", &[])?;
        ensure!(other.is_some(), "it was not given back");
        session.run("ROLLBACK")
    }

    /// Records that a client has seen this token.
    pub fn see(&mut self, token: i64) {
        self.seen = self.seen.max(token);
    }

    /// Checks the database's successor: no earlier token is valid, the lease is still held, its holder may renew, and
    /// every token is greater than all before. Returns the greatest.
    pub fn goes_on(&self, session: &mut Session) -> Result<i64> {
        let token = self.token;
        let check = "SELECT lease_check('order:7', $1)";
        ensure!(!session.one::<bool>(check, &[&token])?, "{token} speaks before it is renewed");
        let taken: Option<i64> = session.one("SELECT lease_acquire('order:7')", &[])?;
        ensure!(taken.is_none(), "the lease was granted to another before its deadline");
        for write in ["SELECT lease_guard('order:7', $)", "UPDATE orders SET total = 2, fence = $"]
        {
            let refusal = session.refused(&write.replace('$', &token.to_string()), "PF004")?;
            ensure!(says_to_renew(&refusal), "no way out of this: {refusal}");
        }
        self.may_release(session)?;

        let renewed: Option<i64> = session.one("SELECT lease_renew('order:7', $1)", &[&token])?;
        let renewed = renewed.context("the holder could not renew")?;
        ensure!(renewed > self.seen, "{renewed} was drawn after {} was seen", self.seen);
        ensure!(session.one::<bool>(check, &[&renewed])?, "the renewed token does not speak");
        session.run(&format!("UPDATE orders SET total = 3, fence = {renewed}"))?;

        let fresh: i64 = session.one("SELECT lease_acquire($1)", &[&format!("fresh {renewed}")])?;
        ensure!(fresh > renewed, "{fresh} after {renewed}");
        // A row written before the change is still fenced by the token that wrote it.
        let stale = format!("UPDATE parcels SET total = 4, fence = {}", self.written);
        session.refused(&stale, "PF001")?;
        session.run(&format!("UPDATE parcels SET total = 5, fence = {fresh}"))?;
        let totals = session
            .text("SELECT (SELECT total FROM orders) || ' ' || (SELECT total FROM parcels)")?;
        ensure!(totals.as_deref() == Some("3 5"), "{totals:?}");
        Ok(fresh)
    }
}

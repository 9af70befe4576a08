//! Prefixes count byte by byte. The rest is in prefixes.script.

use crate::errors::encodings::Encoded;
use crate::roles::{not_given, role_of, takes, takes_not};
use pg_test::{ensure, lab_test, Lab, Result};

#[lab_test]
fn bytes_count_not_letters(lab: &Lab) -> Result<()> {
    let (composed, decomposed) = ("caf\u{e9}:", "cafe\u{301}:");
    let db = lab.database()?;
    let role = role_of(&db, "tenant", &[("worker", composed)])?;
    let mut session = db.connect_as(&role)?;
    takes(&mut session, &format!("{composed}1"))?;
    takes_not(&mut session, &format!("{decomposed}1"))?;
    takes_not(&mut session, "CAFÉ:1")?;
    // The same text in another encoding of the client's, and of the database.
    session.run("SET client_encoding = 'LATIN1'")?;
    session.run("SELECT lease_acquire(U&'caf\\00e9:latin')")?;
    not_given(&mut session, "SELECT lease_acquire('caf:latin')")?;
    let latin = Encoded::create(lab, "enc_latin1_prefixes", "LATIN1")?;
    let mut owner = latin.connect()?;
    owner.run(&format!("SELECT fence_grant('{role}', 'worker', '{composed}')"))?;
    owner.run(&format!("SET ROLE {role}"))?;
    takes(&mut owner, &format!("{composed}1"))?;
    let fault = not_given(&mut owner, "SELECT lease_acquire('cafe:1')")?;
    ensure!(fault.hint.as_deref().is_some_and(|h| h.contains("\"café:\"")), "{fault}");
    drop(owner);
    latin.connect()?.run(&format!("SELECT fence_revoke('{role}')"))
}

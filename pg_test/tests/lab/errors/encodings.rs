//! Databases that are not in UTF-8: names, holders, metadata and errors.

use pg_test::{edition, ensure, lab_test, Calls, Conninfo, Lab, Result, Session};

/// A database in another encoding with the extension, dropped at the end.
pub struct Encoded {
    admin: Conninfo,
    name: String,
}

impl Encoded {
    pub fn create(lab: &Lab, name: &str, encoding: &str) -> Result<Encoded> {
        let admin = lab.cluster().conninfo("postgres");
        let encoded = Encoded { admin, name: name.to_owned() };
        encoded.admin.connect()?.run(&format!(
            "CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0"
        ))?;
        encoded.connect()?.run("CREATE EXTENSION pg_fence")?;
        Ok(encoded)
    }

    pub fn connect(&self) -> Result<Session> {
        self.admin.clone().dbname(&self.name).connect()
    }
}

impl Drop for Encoded {
    fn drop(&mut self) {
        if let Ok(mut session) = self.admin.connect() {
            let _ = session.run(&format!("DROP DATABASE {} WITH (FORCE)", self.name));
        }
    }
}

#[lab_test]
fn a_latin1_database_has_its_names_in_its_bytes(lab: &Lab) -> Result<()> {
    let db = Encoded::create(lab, "enc_latin1_names", "LATIN1")?;
    let mut session = db.connect()?;
    let token = session
        .granted("SELECT lease_acquire('café', 'Zoë', metadata => '{\"wer\": \"Jürgen\"}')")?;
    ensure!(session.is_taken("café")? && !session.is_taken("cafe")?);
    ensure!(session.speaks("café", token)? && session.renew("café", token)?.is_some());
    let row = session.rows("SELECT name, holder, metadata FROM lease_info('café')")?;
    let texts: Vec<_> = row[0].iter().flatten().map(String::as_str).collect();
    ensure!(texts == ["café", "Zoë", "{\"wer\": \"Jürgen\"}"], "{texts:?}");
    session.granted("SELECT lease_acquire('café', 'Zoë', reclaim => true)")?;
    // 512 bytes here are 512 letters.
    session.acquire(&"é".repeat(512), "1 h")?;
    session.refused(&format!("SELECT lease_acquire('{}')", "é".repeat(513)), "22023")?;
    Ok(())
}

#[lab_test]
fn a_latin1_database_shows_its_errors_in_the_client_s_encoding(lab: &Lab) -> Result<()> {
    let db = Encoded::create(lab, "enc_latin1_errors", "LATIN1")?;
    let mut session = db.connect()?;
    session.granted("SELECT lease_acquire('café', 'Zoë', '1 h')")?;
    let fault = session.refused("SELECT lease_guard('café', 1000000)", "PF004")?;
    ensure!(fault.message.contains("café"), "{fault}");
    let detail = fault.json()?;
    ensure!(detail["lease"] == "café" && detail["holder"] == "Zoë", "{fault}");
    ensure!(fault.hint.is_some());
    session.run(
        "CREATE TABLE t (v int, clé bigint); INSERT INTO t VALUES (0); SELECT fence_protect('t', 'clé')",
    )?;
    let fault = session.refused("UPDATE t SET v = 1", "PF002")?;
    ensure!(fault.hint.as_deref().is_some_and(|hint| hint.contains("\"clé\"")), "{fault}");
    for call in ["lease_acquire('')", "lease_renew('café', 0)", "lease_renew('café', NULL)"] {
        let fault = session.try_rows(&format!("SELECT {call}")).expect_err(call);
        ensure!(fault.sqlstate.starts_with("220") && fault.hint.is_some(), "{fault}");
        fault.json()?;
    }
    Ok(())
}

#[lab_test]
fn a_database_without_an_encoding_takes_any_bytes(lab: &Lab) -> Result<()> {
    let db = Encoded::create(lab, "enc_ascii_names", "SQL_ASCII")?;
    let mut session = db.connect()?;
    // Bytes that are no UTF-8, each its own name.
    let names = [r"E'\xff'", r"E'\xfe'", r"E'caf\xe9'", r"E'caf\xc3\xa9'", r"E'\xc3'"];
    let mut tokens = Vec::new();
    for name in names {
        tokens.push(session.granted(&format!("SELECT lease_acquire({name}, {name}, '1 h')"))?);
    }
    for (name, token) in names.into_iter().zip(tokens) {
        session.nothing(&format!("SELECT lease_acquire({name})"))?;
        ensure!(session.truth(&format!("SELECT lease_check({name}, {token})"))?, "{name}");
        session.granted(&format!("SELECT lease_renew({name}, {token})"))?;
        let same = format!("SELECT name = {name} AND holder = {name} FROM lease_info({name})");
        ensure!(session.truth(&same)?, "{name}");
        session.granted(&format!("SELECT lease_acquire({name}, {name}, reclaim => true)"))?;
        session.granted(&format!("SELECT lease_revoke({name})"))?;
    }
    session.granted(r"SELECT lease_acquire(repeat(E'\xe9', 512))")?;
    session.refused(r"SELECT lease_acquire(repeat(E'\xe9', 513))", "22023")?;
    Ok(())
}

#[lab_test]
fn a_database_without_an_encoding_has_readable_errors(lab: &Lab) -> Result<()> {
    let db = Encoded::create(lab, "enc_ascii_errors", "SQL_ASCII")?;
    let mut session = db.connect()?;
    for name in [r"E'caf\xe9'", r"E'\xff\xfe'", "'café'", r"E'\x01'"] {
        session.granted(&format!("SELECT lease_acquire({name}, {name}, '1 h')"))?;
        // The client reads UTF-8 and would break off at anything else.
        let fault = session.refused(&format!("SELECT lease_guard({name}, 1000000)"), "PF004")?;
        let detail = fault.json()?;
        ensure!(detail["lease"].is_string() && detail["holder"].is_string(), "{name}: {fault}");
    }
    let fault = session.refused("SELECT lease_guard('café', 1000000)", "PF004")?;
    ensure!(fault.json()?["lease"] == "café", "{fault}");
    Ok(())
}

#[lab_test]
fn a_euc_database_counts_bytes(lab: &Lab) -> Result<()> {
    let db = Encoded::create(lab, "enc_euc", "EUC_JP")?;
    let mut session = db.connect()?;
    let name = "締".repeat(256);
    let token = session.acquire(&name, "1 h")?;
    ensure!(session.is_taken(&name)? && session.speaks(&name, token)?);
    session.refused(&format!("SELECT lease_acquire('{name}x')"), "22023")?;
    let fault = session.refused("SELECT lease_guard('締切', 1)", "PF004")?;
    ensure!(fault.json()?["lease"] == "締切" && fault.message.contains("締切"), "{fault}");
    Ok(())
}

#[lab_test]
fn a_long_name_is_cut_between_letters_in_every_encoding(lab: &Lab) -> Result<()> {
    for (encoding, letter) in [("LATIN1", "'é'"), ("EUC_JP", "'締'"), ("SQL_ASCII", r"E'\xe9'")] {
        if encoding == "SQL_ASCII" && edition::is_lite() {
            // PostgreSQL makes no JSON of bytes in no encoding: 22021, and refused all the same.
            continue;
        }
        let db = Encoded::create(lab, &format!("enc_cut_{}", encoding.to_lowercase()), encoding)?;
        let mut session = db.connect()?;
        // Out of step with what is cut: by letters of one byte, two or three.
        for before in ["", "a", "ab"] {
            let name = format!("'{before}' || repeat({letter}, 250)");
            session.granted(&format!("SELECT lease_acquire({name}, {name}, '1 h')"))?;
            let fault =
                session.refused(&format!("SELECT lease_guard({name}, 1000000)"), "PF004")?;
            let detail = fault.json()?;
            for shown in [&detail["lease"], &detail["holder"]] {
                let begin = shown.as_str().and_then(|s| s.strip_suffix("...")).unwrap_or_default();
                let rest = begin.strip_prefix(before).unwrap_or_default();
                let first = rest.chars().next();
                ensure!(rest.len() > 200 && rest.chars().all(|c| Some(c) == first), "{fault}");
            }
        }
    }
    Ok(())
}

#[lab_test]
fn refused_writes_are_kept_in_the_database_s_encoding(lab: &Lab) -> Result<()> {
    for (name, encoding) in [("enc_refused_latin1", "LATIN1"), ("enc_refused_eucjp", "EUC_JP")] {
        let db = Encoded::create(lab, name, encoding)?;
        let mut session = db.connect()?;
        let (letter, holder) =
            if encoding == "LATIN1" { ("é", "Zoë") } else { ("京", "東京") };
        session.run(&format!(
            "CREATE TABLE \"{letter}t\" (\"{letter}\" text PRIMARY KEY, fence bigint);
             SELECT fence_protect('\"{letter}t\"', lease => '{letter}:{{{letter}}}');
             SELECT lease_acquire('{letter}:{letter}', '{}', '1 h')",
            holder.repeat(50)
        ))?;
        session.refused(&format!("INSERT INTO \"{letter}t\" VALUES ('{letter}', 1)"), "PF004")?;
        let row = session.rows(&format!(
            "SELECT relation, key ->> '{letter}', lease, holder FROM fence.refusals"
        ))?;
        let texts: Vec<&str> = row[0].iter().flatten().map(String::as_str).collect();
        let table = format!("public.\"{letter}t\"");
        ensure!(texts[..3] == [&*table, letter, &*format!("{letter}:{letter}")], "{texts:?}");
        ensure!(texts[3] == holder.repeat(50), "{texts:?}");
    }
    Ok(())
}

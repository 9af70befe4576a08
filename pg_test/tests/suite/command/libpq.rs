//! The command reads a connection string as psql does, or refuses it: it never connects elsewhere in silence.

use pg_test::clients::command::fixture::program;
use pg_test::{Harness, Result, ensure, harness_test};
use std::collections::BTreeMap;
use std::fs;
use std::io::{Error, ErrorKind, Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

/// The arguments of both; variables and files, which are named by a capital or by a dot, after a bar each. `$A` and `$B`
/// are the ports of servers at 127.0.0.1, `$A` also at ::1 and of a socket in `$D`, which is the home directory, too.
const CASES: &[&str] = &[
    // A value that is empty means what is usual, and not what the environment or the service says.
    "-d|user=me host='' port=$A|PGHOST=127.0.0.1",
    "-d|user=me host=127.0.0.1 port=''|PGPORT=$A",
    "-d|user=me host=127.0.0.1 port=$A dbname=|PGDATABASE=other",
    "-d|user=me host=127.0.0.1 port=$A hostaddr=|PGHOSTADDR=127.0.0.2",
    "-d|user=me host=127.0.0.1 port=$A options=|PGOPTIONS=-c a.b=1",
    "-d|user=me host=127.0.0.1 port=$A password=|PGPASSWORD=env|.pgpass=*:*:*:*:file",
    "-d|user=me host=127.0.0.1 port=$A password=''|PGPASSWORD=env|.pgpass=*:*:*:*:file",
    "-d|user=me host=127.0.0.1 port=$A passfile=''|PGPASSFILE=$D/other|other=*:*:*:*:o|.pgpass=*:*:*:*:file",
    "-d|user=me host=127.0.0.1 port=$A sslmode=|PGSSLMODE=disable",
    "-d|user=me host=127.0.0.1 port=$A connect_timeout=''",
    "-d|user=me host=127.0.0.1 port=$A target_session_attrs=''",
    "-d|user=me host=127.0.0.1 port=$A service=''|PGSERVICE=shop|.pg_service.conf=[shop]",
    "-d|user=me host=127.0.0.1 port=$A|PGSSLMODE=",
    "-d|user=me host=127.0.0.1 port=$A|PGSERVICE=",
    "-d|user=me|PGHOST=127.0.0.1|PGPORT=",
    "-d|postgres://me@127.0.0.1:$A/shop?host=",
    "-d|postgres://me@127.0.0.1:$A/shop?port=",
    "-d|postgres://me@127.0.0.1:$A/shop?dbname=",
    "-d|postgres:///shop?host=&user=me|PGHOST=127.0.0.1|PGPORT=$A",
    // A connection string goes before the other options, and an option that is empty says nothing.
    "-d|user=me host=127.0.0.1 port=$A|-h|127.0.0.2|-p|$B|-U|you",
    "-d|service=shop|-p|$A|.pg_service.conf=[shop]\nhost=127.0.0.1\nport=$B\nuser=me",
    "-d||-h|127.0.0.1|-p||-U||PGPORT=$A|PGUSER=me|PGDATABASE=shop",
    // URLs.
    "-d|postgres://me:p%40w@127.0.0.1:$A/shop?application_name=a&",
    "-d|postgres://me@127.0.0.1:$A/shop |PGDATABASE=other",
    "-d|postgres://me:p w@127.0.0.1:$A/shop",
    "-d|postgres://me@127.0.0.1:$A/a%20b?options=%20-c%20a.b%3D1",
    "-d|postgres://me@127.0.0.1:$A/shop%zz",
    "-d|postgres://me@127.0.0.1:$A/shop%2",
    "-d|postgres://me@127.0.0.1:$A/sh%00op",
    "-d|postgres://me:p?w@127.0.0.1:$A/shop",
    "-d|postgres://me:p@w@127.0.0.1:$A/shop",
    "-d|postgres://127.0.0.1:$A/shop?user=a@b",
    "-d|postgres://127.0.0.1:$A?user=a@b",
    "-d|postgres://me@127.0.0.1:$A/shop?options=-c a=1",
    "-d|postgres://me@127.0.0.1:$A/shop?options=-c+a",
    "-d|postgres://me@127.0.0.1:$A/shop?&user=you",
    "-d|postgres://me@127.0.0.1:$A/shop?user=you&user=they",
    "-d|postgres://me@127.0.0.1:$A/shop?us%65r=you&host=127.0.0.1",
    "-d|postgres://me@127.0.0.1:$A/shop?ssl=1",
    "-d|postgres://me@127.0.0.1:$A//shop/a",
    "-d|postgres://me@[::1]:$A/shop",
    "-d|postgres://me@[]:$A/shop",
    "-d|postgres://me@[::1:$A/shop",
    "-d|postgres://me@[::1]x:$A/shop",
    "-d|postgres://me@::1:$A/shop",
    "-d|postgres://me@127.0.0.1:$A:$B/shop",
    "-d|postgres://me@127.0.0.1:1,127.0.0.1:$A/shop",
    "-d|postgres://me@$H:$A/shop",
    "-d|postgres://me@127.0.0.1/shop|PGPORT=$A",
    "-d|postgres://me@127.0.0.1:/shop|PGPORT=$A",
    // Keywords and values.
    "-d|host = 127.0.0.1 port =$A user= 'me'dbname=x",
    "-d|host=127.0.0.1 port=$A user=m'e dbname='a \\' b'",
    "-d|host=127.0.0.1 port=$A user=a\u{a0}b dbname=x\u{3000}host=127.0.0.2",
    "-d|host=127.0.0.1 port=$A user=a\u{b}dbname=x",
    "-d|host=127.0.0.1 port=$A user=me user=you",
    "-d|host=127.0.0.1 port=$A user=me dbname='host=127.0.0.2'",
    "-d|host=127.0.0.1 port=$A user=me HOST=127.0.0.2",
    "-d|host=127.0.0.1 port=' $A ' user=me",
    "-d|host=127.0.0.1 port=0 user=me",
    // Places.
    "-d|host=$D port=$A user=me",
    "-d|host=$D port=$A user=me sslmode=prefer",
    "-d|host=@abstract port=$A user=me",
    "-d|host=' 127.0.0.1' port=$A user=me",
    "-d|host=::1 port=$A user=me",
    "-d|host=::1%lo port=$A user=me",
    "-d|hostaddr=127.0.0.1 port=$A user=me|.pgpass=127.0.0.1:*:*:*:file",
    "-d|host=nowhere.invalid hostaddr=127.0.0.1 port=$A user=me|.pgpass=127.0.0.1:*:*:*:a\nnowhere.invalid:*:*:*:h",
    "-d|host=127.0.0.1,127.0.0.1 port=1,$A user=me",
    "-d|host=127.0.0.1,$D port=1,$A user=me",
    "-d|host=127.0.0.1,127.0.0.1 port=$A, user=me",
    "-d|host=127.0.0.1 port=$A,$B user=me",
    "-d|port=$A,$B user=me",
    "-d|host=a,b hostaddr=127.0.0.1 port=$A user=me",
    "-d|host=a,127.0.0.1 hostaddr=127.0.0.1, port=1,$A user=me",
    "-d|user=me|PGHOST=127.0.0.1,127.0.0.1|PGPORT=1,$B",
    "-d|user=me|PGHOSTADDR=127.0.0.1|PGPORT=$A|PGOPTIONS=-c x.y=1|PGDATABASE=d=1",
    // Services.
    "-d|service=shop|.pg_service.conf= [shop] x\n# c\n host=127.0.0.1\nport=$A\nport=$B\nuser=me  \n[shop]\ndbname=x",
    "-d|service=shop|.pg_service.conf=[shop]\nhost = 127.0.0.1\nport=$A\nuser=me",
    "-d|service=shop|.pg_service.conf=[shop]\nhost=127.0.0.1\nport=$A\nuser= me",
    "-d|service=shop|.pg_service.conf=[shop]\nhost=127.0.0.1\nport=\nuser=me|PGPORT=$A",
    "-d|service=shop port=''|.pg_service.conf=[shop]\nhost=127.0.0.1\nport=$A\nuser=me",
    "-d|service=shop|.pg_service.conf=[shop]\nhost=127.0.0.1\nport=$A\nservice=x\nuser=me",
    "-d|service=shop|PGSERVICEFILE=/none|.pg_service.conf=[shop]\nhost=127.0.0.1\nport=$A\nuser=me",
    "-d|service=shop|PGSERVICEFILE=/none|PGSYSCONFDIR=$D|pg_service.conf=[shop]\nhost=127.0.0.1\nport=$A\nuser=me",
    "-d|service=shop|PGSYSCONFDIR=$D|pg_service.conf=[shop]\nhost=127.0.0.1\nport=$A\nuser=me",
    "-d|user=me|PGSERVICE=shop|PGPORT=$B|.pg_service.conf=[shop]\nhost=127.0.0.1\nport=$A\nuser=you",
    // Passwords.
    "-d|host=127.0.0.1 port=$A user=me|.pgpass=#*:*:*:*:x\n\\*:*:*:*:y\n*:$A:me:m\\e:a\\:b\\\\c:d",
    "-d|host=127.0.0.1 port=$A user=me|.pgpass=127.0.0.1:$A:me:me:a\\",
    "-d|host=127.0.0.1 port=$A user=me|.pgpass=127.0.0.1:$A:me:me:\n*:*:*:*:second",
    "-d|host=127.0.0.1 port=0$A user=me|.pgpass=*:$A:*:*:x\n*:*:*:*:y",
    "-d|host=$D port=$A user=me|.pgpass=localhost:*:*:*:x\n*:*:*:*:y",
];

/// What programs have sent when they connected.
type Seen = Arc<Mutex<Vec<String>>>;

/// Logs a client in, and ends its session.
fn log_in(mut client: impl Read + Write, server: &str, seen: &Seen) -> std::io::Result<()> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let startup = loop {
        let mut length = [0; 4];
        client.read_exact(&mut length)?;
        let mut message = vec![0; u32::from_be_bytes(length) as usize - 4];
        client.read_exact(&mut message)?;
        // Anything but a request for encryption.
        if message.len() > 4 {
            break message;
        }
        client.write_all(b"N")?;
    };
    let words: Vec<String> = startup[4..].split(|byte| *byte == 0).map(text).collect();
    let mut sent: BTreeMap<&str, &str> =
        words.chunks(2).filter_map(|pair| Some((&**pair.first()?, &**pair.get(1)?))).collect();
    // These are each program's own.
    sent.retain(|key, _| ["user", "database", "options"].contains(key));
    client.write_all(b"R\0\0\0\x08\0\0\0\x03")?;
    let mut head = [0; 5];
    client.read_exact(&mut head)?;
    let mut password =
        vec![0; u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize - 4];
    client.read_exact(&mut password)?;
    let sent = format!("{server}: {sent:?}, password {:?}", text(&password));
    seen.lock().map_err(|_| Error::from(ErrorKind::Other))?.push(sent);
    client.write_all(b"R\0\0\0\x08\0\0\0\0Z\0\0\0\x05I")
}

fn serve<S: Read + Write + Send + 'static>(
    clients: impl Iterator<Item = std::io::Result<S>> + Send + 'static,
    server: &'static str,
    seen: &Seen,
) {
    let seen = seen.clone();
    thread::spawn(move || {
        for client in clients.flatten() {
            // A client may go at any moment.
            let _ = log_in(client, server, &seen);
        }
    });
}

/// Returns a listener for each family of addresses, and their port.
fn listeners() -> Result<(TcpListener, TcpListener, u16)> {
    loop {
        let four = TcpListener::bind("127.0.0.1:0")?;
        let port = four.local_addr()?.port();
        if let Ok(six) = TcpListener::bind(("::1", port)) {
            return Ok((four, six, port));
        }
    }
}

type Variables = Vec<(String, String)>;

/// Splits off what is a variable or a file, and writes the files.
fn prepared(case: &str, home: &Path) -> Result<(Vec<String>, Variables)> {
    for entry in fs::read_dir(home)?.flatten() {
        if entry.file_type()?.is_file() {
            fs::remove_file(entry.path())?;
        }
    }
    let (mut arguments, mut variables) = (Vec::new(), Vec::new());
    for part in case.split('|') {
        match part.split_once('=') {
            Some((name, value)) if name.starts_with("PG") => {
                variables.push((name.to_owned(), value.to_owned()));
            }
            Some((name, text))
                if [".pgpass", ".pg_service.conf", "pg_service.conf", "other"].contains(&name) =>
            {
                fs::write(home.join(name), format!("{text}\n"))?;
                fs::set_permissions(home.join(name), fs::Permissions::from_mode(0o600))?;
            }
            _ => arguments.push(part.to_owned()),
        }
    }
    if !case.contains(".pgpass") {
        fs::write(home.join(".pgpass"), "*:*:*:*:usual\n")?;
        fs::set_permissions(home.join(".pgpass"), fs::Permissions::from_mode(0o600))?;
    }
    Ok((arguments, variables))
}

#[harness_test]
fn a_connection_string_means_what_it_means_to_psql_or_is_refused(harness: &Harness) -> Result<()> {
    let program = program()?;
    let home = harness.install_dir().new_dir("home")?;
    let seen = Seen::default();
    let (four, six, a) = listeners()?;
    let (other, _six, b) = listeners()?;
    let socket = UnixListener::bind(home.join(format!(".s.PGSQL.{a}")))?;
    let accepted = |listener: TcpListener| {
        std::iter::from_fn(move || Some(listener.accept().map(|(client, _)| client)))
    };
    serve(accepted(four), "A", &seen);
    serve(accepted(six), "A on ::1", &seen);
    serve(accepted(other), "B", &seen);
    serve(
        std::iter::from_fn(move || Some(socket.accept().map(|(client, _)| client))),
        "socket",
        &seen,
    );

    let own = std::env::vars()
        .map(|(name, _)| name)
        .filter(|name| name.starts_with("PG") && !name.starts_with("PG_"));
    let own: Vec<String> = own.collect();
    let mut wrong = Vec::new();
    for case in CASES {
        let directory = home.display().to_string();
        let case = case.replace("$H", &directory.replace('/', "%2F")).replace("$D", &directory);
        let case = case.replace("$A", &a.to_string()).replace("$B", &b.to_string());
        let (arguments, variables) = prepared(&case, &home)?;
        let run = |mut command: Command| -> Result<(Option<i32>, Vec<String>, String)> {
            for name in &own {
                command.env_remove(name);
            }
            command.env("PATH", harness.install_dir().path(None)).env("HOME", &home);
            let output =
                command.args(&arguments).envs(variables.clone()).stdin(Stdio::null()).output()?;
            let mut found = std::mem::take(&mut *seen.lock().expect("no thread panics with it"));
            found.dedup();
            Ok((output.status.code(), found, String::from_utf8_lossy(&output.stderr).into_owned()))
        };
        let mut psql = harness.rundir().command("psql");
        psql.args(["-wXc", "SELECT 1"]);
        let mut ours = harness.rundir().command(&program);
        ours.arg("leases");
        let ((_, of_psql, words), (status, of_ours, own_words)) = (run(psql)?, run(ours)?);
        let is_refused = status == Some(64) && of_ours.is_empty();
        if of_ours != of_psql && !is_refused || status == Some(101) {
            wrong.push(format!(
                "{case:?}\n  psql: {of_psql:?} {words}  pg_fence: {of_ours:?} {own_words}"
            ));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

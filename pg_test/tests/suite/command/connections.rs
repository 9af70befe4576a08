//! Connections with a service file, a password file and verified TLS, and to several servers. The rest is in
//! connections.script.

use pg_test::clients::command::fixture::{CommandFixture, Run, program};
use pg_test::clients::scenario_servers::ScenarioServers;
use pg_test::clients::tcp_proxy::BOTH;
use pg_test::process::{PATIENCE, as_server_user, output_of, wait_until};
use pg_test::runtime;
use pg_test::setup::{self, Package};
use pg_test::skipped::left_out;
use pg_test::source_tree::source_root;
use pg_test::{Cluster, Context, Harness, Result, ensure, harness_test};
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Returns a server that requires TLS and a password, and the directory with its certificates.
fn guarded_server(harness: &Harness) -> Result<(Cluster, PathBuf)> {
    setup::ensure(&[Package::new("openssl", "/usr/bin/openssl")])?;
    let dir = harness.install_dir().new_dir("certificates")?;
    let new = "-newkey rsa:2048 -nodes";
    for arguments in [
        format!("req -x509 {new} -days 2 -subj /CN=ours -keyout ca.key -out ca.crt"),
        format!("req -x509 {new} -days 2 -subj /CN=other -keyout other.key -out other.crt"),
        format!(
            "req -new {new} -subj /CN=server -addext subjectAltName=DNS:localhost \
             -keyout server.key -out server.csr"
        ),
        "x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 \
         -copy_extensions copy -out server.crt"
            .to_owned(),
    ] {
        let mut command = Command::new("openssl");
        as_server_user(&mut command)?;
        output_of(command.args(arguments.split(' ')).current_dir(&dir))?;
    }
    let file = |name: &str| dir.join(name).display().to_string();
    let cluster = harness
        .builder()
        .set("ssl", "on")
        .set("ssl_cert_file", &file("server.crt"))
        .set("ssl_key_file", &file("server.key"))
        .create()?;
    let rules = "host all postgres 127.0.0.1/32 trust\nhostssl all all all scram-sha-256\n";
    fs::write(cluster.data().join("pg_hba.conf"), rules)?;
    cluster.start()?;
    Ok((cluster, dir))
}

#[harness_test]
fn a_service_a_password_file_and_a_certificate_that_is_verified(harness: &Harness) -> Result<()> {
    let mut session = harness.cluster().connect("postgres")?;
    if session.text("SHOW ssl_library")?.is_none_or(|library| library.is_empty()) {
        return left_out("this server was built without TLS");
    }
    let (cluster, certificates) = guarded_server(harness)?;
    let port = cluster.port();
    let servers = ScenarioServers::on(harness, Some(cluster))?;
    let fixture = CommandFixture::with(servers, program()?)?;
    let role = &fixture.servers.role;
    fixture.admin()?.run(&format!("ALTER ROLE {role} PASSWORD 'it''s : a \\secret'"))?;
    let dbname = fixture.servers.database.name();
    let passwords = fixture.dir.join("pgpass");
    fs::write(&passwords, format!("*:{port}:{dbname}:{role}:it's \\: a \\\\secret\n"))?;
    fs::set_permissions(&passwords, fs::Permissions::from_mode(0o600))?;
    let services = fixture.dir.join("services");
    fs::write(
        &services,
        format!("[shop]\nhost=localhost\nport={port}\ndbname={dbname}\nuser={role}\n"),
    )?;

    let run = |target: &str, root: &str, options: &[&str]| -> Result<std::process::Output> {
        let mut command = harness.rundir().command(program()?);
        command.args(["-d", target, "run", "job"]).args(options).args(["--", "echo", "ran"]);
        command.env("PGSERVICEFILE", &services).env("PGPASSFILE", &passwords);
        command.env("PGSSLROOTCERT", certificates.join(root)).env("HOME", &fixture.dir);
        Ok(command.output()?)
    };
    let url = format!("postgresql://{role}@127.0.0.1:{port}/{dbname}?sslmode");
    let by_url = |mode: &str| format!("{url}={mode}");
    for (target, root, refused) in [
        ("service=shop sslmode=verify-full", "ca.crt", ""),
        ("service=shop", "ca.crt", ""),
        (&by_url("verify-ca"), "ca.crt", ""),
        (&by_url("require"), "ca.crt", ""),
        // The certificate is for another name, its issuer is not trusted, or the connection is not encrypted.
        (&by_url("verify-full"), "ca.crt", "certificate"),
        ("service=shop sslmode=verify-full", "other.crt", "certificate"),
        ("service=shop sslmode=verify-ca", "other.crt", "certificate"),
        ("service=shop sslmode=require", "other.crt", "certificate"),
        ("service=shop sslmode=verify-full", "none.crt", "none.crt"),
        ("service=shop sslmode=disable", "ca.crt", "pg_hba.conf"),
        ("service=none", "ca.crt", "no service \"none\""),
        ("service=shop passfile=/dev/null", "ca.crt", "~/.pgpass"),
    ] {
        let output = run(target, root, &[])?;
        let is_run = output.stdout == b"ran\n" && output.status.success();
        let said = String::from_utf8_lossy(&output.stderr);
        let is_refused = output.stdout.is_empty() && said.contains(refused);
        let fits = if refused.is_empty() { is_run } else { is_refused };
        ensure!(fits, "{target}, {root}: {output:?}");
    }
    // Waiting cannot help here, so the command ends at once, without a prompt.
    for (target, root) in [("passfile=/dev/null", "ca.crt"), ("sslmode=verify-full", "other.crt")] {
        let output = run(&format!("service=shop {target}"), root, &["--wait", "1h"])?;
        ensure!(output.status.code() == Some(78), "{output:?}");
    }
    Ok(())
}

/// Every parameter of libpq is known to the command. The command's own tests show that an unsupported one is refused by
/// its name.
#[harness_test(slow)]
fn every_parameter_of_libpq_has_its_meaning_here(_: &Harness) -> Result<()> {
    let libraries = runtime::fetch(runtime::PYTHON)?;
    // psycopg's wheel contains the newest libpq.
    let script = "from psycopg import pq\nassert pq.version() >= 180000\n\
                  for o in pq.Conninfo.get_defaults(): print(o.keyword.decode(), (o.envvar or b'').decode())";
    let known = output_of(Command::new(libraries.join("bin/python")).args(["-c", script]))?;
    let path = source_root().join("clients/rust/cli/src/connection/parameters.rs");
    let text = fs::read_to_string(path)?;
    let ours: Vec<String> = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("parameter(\"")?.split_once("\", \""))
        .map(|(keyword, rest)| format!("{keyword} {}", rest.split('"').next().unwrap_or_default()))
        .collect();
    let libpq: Vec<&str> = known.lines().collect();
    ensure!(ours == libpq, "libpq has {libpq:?}, and the command {ours:?}");
    Ok(())
}

/// A server that accepts connections and never answers uses up its own share of the time, not the next server's.
#[harness_test]
fn a_silent_server_leaves_time_for_the_next_one(harness: &Harness) -> Result<()> {
    let fixture = CommandFixture::new(harness)?;
    let silent = TcpListener::bind("127.0.0.1:0")?;
    let (port, dbname) = (harness.cluster().port(), fixture.servers.database.name());
    let both = format!(
        "host=127.0.0.1,127.0.0.1 port={},{port} user={} dbname={dbname}",
        silent.local_addr()?.port(),
        fixture.servers.role
    );
    for (options, given) in
        [(" connect_timeout=2", "--ttl 30s"), ("", "--ttl 9s"), (" connect_timeout=60", "--ttl 9s")]
    {
        let mut command = harness.rundir().command(program()?);
        command.args(["-d", &format!("{both}{options}"), "run", "job"]);
        let output = command.args(given.split(' ')).args(["--", "true"]).output()?;
        ensure!(output.status.success(), "{options} {given}: {output:?}");
    }
    Ok(())
}

/// The first of two servers stops answering while the program runs: a renewal reaches the second one in time.
#[harness_test]
fn a_renewal_finds_the_next_server_in_time(harness: &Harness) -> Result<()> {
    let fixture = CommandFixture::new(harness)?;
    let link = &fixture.link;
    let (port, dbname) = (harness.cluster().port(), fixture.servers.database.name());
    let both = format!(
        "host=127.0.0.1,127.0.0.1 port={},{port} user={} dbname={dbname}",
        link.port(),
        fixture.servers.role
    );
    for options in ["", " connect_timeout=2"] {
        let mut command = harness.rundir().command(program()?);
        command.args(["-d", &format!("{both}{options}"), "run", "job", "--ttl", "15s", "--"]);
        command.args([
            "sh",
            "-c",
            "echo $$ > $DIR/pid; until [ -e $DIR/go ]; do sleep 0.05; done; exit 6",
        ]);
        command.env("DIR", &fixture.dir).stdout(Stdio::piped()).stderr(Stdio::piped());
        let run = Run::start(command)?;
        fixture.pid("pid")?;
        link.swallow(BOTH);
        let before = fixture.renewals()?;
        // The second renewal goes to the second server.
        wait_until("it is renewed twice", PATIENCE, || {
            fixture.renewals().is_ok_and(|now| now > before + 1)
        })?;
        fixture.touch("go")?;
        run.ends_with(6)?;
        link.restore();
        for file in ["pid", "go"] {
            fs::remove_file(fixture.dir.join(file))?;
        }
    }
    Ok(())
}

/// Tests all of it in a root directory with nothing but the program and the files that it is given.
pub fn in_an_empty_root(harness: &Harness, program: &Path) -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        return left_out("chroot takes root");
    }
    let (cluster, certificates) = guarded_server(harness)?;
    let port = cluster.port();
    let servers = ScenarioServers::on(harness, Some(cluster))?;
    let fixture = CommandFixture::with(servers, program.to_owned())?;
    let role = &fixture.servers.role;
    fixture.admin()?.run(&format!("ALTER ROLE {role} PASSWORD 'secret'"))?;
    let root = harness.install_dir().new_dir("root")?;
    for directory in ["etc", "home", "proc", "dev"] {
        fs::create_dir(root.join(directory))?;
    }
    fs::copy(program, root.join("pg_fence"))?;
    fs::copy(certificates.join("ca.crt"), root.join("home/ca.crt"))?;
    let write = |name: &str, text: &str| fs::write(root.join(name), text);
    write("etc/hosts", "127.0.0.1 localhost db.internal\n")?;
    write("home/pgpass", &format!("*:*:*:{role}:secret\n"))?;
    fs::set_permissions(root.join("home/pgpass"), fs::Permissions::from_mode(0o600))?;
    let dbname = fixture.servers.database.name();
    write(
        "home/services",
        &format!("[shop]\nhost=localhost\nport={port}\ndbname={dbname}\nuser={role}\n"),
    )?;
    // A container has /proc and /dev, too.
    let script = "mount -t proc proc \"$1/proc\" && mount --bind /dev \"$1/dev\" \
                  && shift && exec chroot \"$@\"";
    for (target, arguments) in [
        ("service=shop sslmode=verify-full", &["leases"][..]),
        ("service=shop sslmode=verify-full", &["run", "job", "--", "/pg_fence", "--version"]),
        ("service=shop host=db.internal sslmode=verify-ca", &["leases"]),
    ] {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script, "alone"]).arg(&root).arg(&root);
        command.args(["/pg_fence", "-d", target]).args(arguments).env_clear();
        command.env("PATH", std::env::var("PATH").unwrap_or_default());
        command.envs([
            ("HOME", "/home"),
            ("PGSERVICEFILE", "/home/services"),
            ("PGPASSFILE", "/home/pgpass"),
            ("PGSSLROOTCERT", "/home/ca.crt"),
        ]);
        output_of(&mut command).with_context(|| format!("{target} {arguments:?}"))?;
    }
    Ok(())
}

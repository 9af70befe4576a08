//! Adopted locks of other systems: etcd, ZooKeeper, Redis, NATS, MariaDB, an object or an item in a cloud, a message of
//! RabbitMQ, and a lease of another pg_fence. A real holder is frozen until its lock has been granted to another, and
//! then resumes. The programs are those of the pages in `docs/recipes/adopt`.

use crate::project::pages::page;
use crate::support::program::{Holder, Shown};
use pg_test::clients::tcp_proxy::TcpProxy;
use pg_test::orm;
use pg_test::process::{PATIENCE, output_of, wait_until};
use pg_test::runtime::{self, Runtime};
use pg_test::service::{self, Service};
use pg_test::setup::{self, Package};
use pg_test::{Conninfo, Context, Database, Harness, Result, Session, ensure, harness_test};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const REDIS: Runtime = Runtime::Python(&["redis==8.1.0", "psycopg[binary]==3.3.9"]);
const NATS: Runtime = Runtime::Python(&["nats-py==2.16.0", "psycopg[binary]==3.3.9"]);
const MARIADB: Runtime = Runtime::Python(&["pymysql==1.2.4", "psycopg[binary]==3.3.9"]);
const PIKA: Runtime = Runtime::Python(&["pika==1.4.4", "psycopg[binary]==3.3.9"]);
const BOTO: Runtime = Runtime::Python(&[
    "moto[server,s3,dynamodb]==5.2.5",
    "boto3==1.44.8",
    "psycopg[binary]==3.3.9",
]);
const KAZOO: Runtime = Runtime::Python(&["kazoo==2.11.0", "psycopg[binary]==3.3.9"]);

const ETCD: Shown = Shown("docs/recipes/adopt/etcd.md", "sh", "");
const REDIS_LOCK: Shown = Shown("docs/recipes/adopt/redis.md", "python", "");
const ZOOKEEPER: Shown = Shown("docs/recipes/adopt/zookeeper.md", "python", "");
const SCHEDULER: Shown = Shown("docs/recipes/adopt/pg-fence.md", "sh", "");

/// The databases with the rows, and how to start a program that takes the lock and writes to them.
struct Scene<'a> {
    harness: &'a Harness,
    lease: &'static str,
    databases: Vec<Database>,
    command: Start<'a>,
}

/// Returns the program for these databases, with that file as its work.
type Start<'a> = Box<dyn Fn(&[Conninfo], &Path) -> Result<Command> + 'a>;

impl<'a> Scene<'a> {
    fn set(
        harness: &'a Harness,
        lease: &'static str,
        databases: usize,
        command: impl Fn(&[Conninfo], &Path) -> Result<Command> + 'a,
    ) -> Result<Scene<'a>> {
        let mut scene = Scene { harness, lease, databases: Vec::new(), command: Box::new(command) };
        for _ in 0..databases {
            let database = harness.database()?;
            database.connect()?.run(&format!(
                "CREATE TABLE reports (id bigint PRIMARY KEY, body text NOT NULL);
                 INSERT INTO reports VALUES (1, 'empty');
                 SELECT fence_protect('reports', lease => '{lease}')"
            ))?;
            scene.databases.push(database);
        }
        Ok(scene)
    }

    fn conninfos(&self) -> Vec<Conninfo> {
        self.databases.iter().map(Database::conninfo).collect()
    }

    /// Starts a program that takes the lock, or waits for it.
    fn holder(&self) -> Result<Holder> {
        Holder::start(self.harness, |work| (self.command)(&self.conninfos(), work))
    }

    /// Starts a program and waits until it has the lock and has adopted its number in all databases.
    fn at_work(&self) -> Result<Holder> {
        let mut holder = self.holder()?;
        holder.is_at_work().map(|()| holder)
    }

    /// Starts a program that gets the lock and cannot reach that database.
    fn kept_from(&self, number: usize) -> Result<(Holder, TcpProxy)> {
        let mut databases = self.conninfos();
        let (port, _) = databases[number].place();
        let link = TcpProxy::start(port)?;
        link.hold(true);
        databases[number] = databases[number].clone().port(link.port());
        let mut holder = Holder::start(self.harness, |work| (self.command)(&databases, work))?;
        wait_until("it has the lock, and connects", PATIENCE, || {
            link.connections() > 0 || holder.program.has_ended()
        })
        .with_context(|| holder.program.said())?;
        ensure!(link.connections() > 0, "it has ended: {}", holder.program.said());
        Ok((holder, link))
    }

    fn sessions(&self) -> Result<Vec<Session>> {
        self.databases.iter().map(Database::connect).collect()
    }

    /// Returns the number that was adopted last, the same in all databases.
    fn number(&self) -> Result<i64> {
        let mut numbers = Vec::new();
        for mut session in self.sessions()? {
            let token = "SELECT token FROM fence.leases WHERE name = $1 AND adopted";
            numbers.push(session.one::<i64>(token, &[&self.lease])?);
        }
        ensure!(numbers.windows(2).all(|pair| pair[0] == pair[1]), "{numbers:?}");
        numbers.first().copied().context("no database")
    }

    fn shows(&self, body: &str) -> Result<()> {
        for mut session in self.sessions()? {
            let found: String = session.one("SELECT body FROM reports", &[])?;
            ensure!(found == body, "not {body:?}, but {found:?}");
        }
        Ok(())
    }

    /// Checks that a write is refused whose client asks no lock service and only shows this number.
    fn refuses(&self, number: i64, sqlstate: &str) -> Result<()> {
        for mut session in self.sessions()? {
            let write = format!("UPDATE reports SET body = 'late', fence = {number}");
            session.refused(&write, sqlstate)?;
        }
        Ok(())
    }

    /// Lets a program finish its work, and checks that only its result is stored.
    fn ends(&self, holder: &mut Holder, body: &str) -> Result<()> {
        holder.reads(body)?;
        holder.program.ends_well()?;
        self.shows(body)
    }

    /// Lets a program finish its work, which must come too late.
    fn comes_late(&self, holder: &mut Holder, words: &str) -> Result<()> {
        let said = holder.program.leaves_with_failure()?;
        ensure!(said.contains("PF001") && said.contains(words), "{said}");
        self.shows("empty")
    }
}

/// The holder is frozen in the middle of its work until its lock has been granted to another, and resumes while the
/// next holder is at work.
fn a_frozen_holder_writes_nothing(scene: &Scene) -> Result<()> {
    let mut old = scene.at_work()?;
    let stale = scene.number()?;
    old.program.freeze()?;
    let mut new = scene.at_work()?;
    let number = scene.number()?;
    ensure!(number > stale, "{number} after {stale}");

    old.reads("by the frozen one")?;
    old.program.thaw()?;
    scene.comes_late(&mut old, "has had")?;
    scene.refuses(stale, "PF004")?;
    scene.ends(&mut new, "by the next")?;
    scene.refuses(stale, "PF001")
}

/// The holder is frozen after it was granted the lock and before it has adopted its number everywhere.
fn a_holder_frozen_before_it_adopts_writes_nothing(scene: &Scene) -> Result<()> {
    let (mut old, link) = scene.kept_from(scene.databases.len() - 1)?;
    old.program.freeze()?;
    let mut new = scene.at_work()?;
    link.hold(false);
    old.program.thaw()?;
    scene.comes_late(&mut old, "has had")?;
    scene.ends(&mut new, "by the next")
}

/// Until the next holder has adopted its number, the database does not know of it.
fn until_the_next_holder_adopts_the_older_one_writes(scene: &Scene) -> Result<()> {
    let (mut old, to_adopt) = scene.kept_from(0)?;
    old.program.freeze()?;
    let (mut new, next_to_adopt) = scene.kept_from(0)?;
    to_adopt.hold(false);
    old.program.thaw()?;
    old.is_at_work()?;
    scene.ends(&mut old, "by the frozen one")?;
    // It has read nothing yet.
    next_to_adopt.hold(false);
    new.is_at_work()?;
    scene.ends(&mut new, "by the next")
}

/// The holder is frozen in a transaction that has written: the next holder waits until that transaction has ended.
fn the_next_holder_waits_for_a_frozen_transaction(scene: &Scene) -> Result<()> {
    let [mut row, mut watcher] = [scene.databases[0].connect()?, scene.databases[0].connect()?];
    row.run("BEGIN; SELECT FROM reports FOR UPDATE")?;
    let mut old = scene.at_work()?;
    old.reads("by the frozen one")?;
    seen(&mut watcher, "active", "%UPDATE reports%", row.pid())?;
    old.program.freeze()?;
    row.run("COMMIT")?;
    let frozen = seen(&mut watcher, "idle in transaction", "%UPDATE reports%", row.pid())?;
    let mut new = scene.holder()?;
    seen(&mut watcher, "active", "%lease_adopt%", frozen)?;
    scene.shows("empty")?;
    // As idle_in_transaction_session_timeout would.
    watcher.run(&format!("SELECT pg_terminate_backend({frozen})"))?;
    new.is_at_work()?;
    old.program.thaw()?;
    old.program.leaves_with_failure()?;
    scene.shows("empty")?;
    scene.ends(&mut new, "by the next")
}

/// Waits for a session in that state whose latest statement matches, and returns its pid.
fn seen(watcher: &mut Session, state: &str, like: &str, but: i32) -> Result<i32> {
    let backend = "SELECT min(pid) FROM pg_stat_activity WHERE datname = current_database()
                      AND state = $1 AND query LIKE $2 AND pid NOT IN (pg_backend_pid(), $3)";
    let mut pid = None;
    wait_until(&format!("a session is {state} in {like}"), PATIENCE, || {
        pid = watcher.one::<Option<i32>>(backend, &[&state, &like, &but]).ok().flatten();
        pid.is_some()
    })?;
    pid.context("it was seen")
}

const SCENARIOS: [fn(&Scene) -> Result<()>; 4] = [
    a_frozen_holder_writes_nothing,
    a_holder_frozen_before_it_adopts_writes_nothing,
    until_the_next_holder_adopts_the_older_one_writes,
    the_next_holder_waits_for_a_frozen_transaction,
];

/// Returns a shell command that uses the private psql.
fn in_shell(harness: &Harness, program: &str) -> Command {
    let mut command = harness.rundir().command(program);
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{}:{path}", harness.install_dir().bin_dir().display()));
    command
}

/// The scheduler's lease is in one database, its rows are in two others. A lease ends after a second.
fn schedulers<'a>(harness: &'a Harness, changes: &[(&str, &str)]) -> Result<Scene<'a>> {
    let (leases, program) = (harness.database()?, SCHEDULER.source(changes)?);
    Scene::set(harness, "scheduler", 2, move |shards, work| {
        let mut command = in_shell(harness, "sh");
        command.args(["-c", &program, "sh"]).arg(work).arg(leases.conninfo().to_string());
        command.args(shards.iter().map(Conninfo::to_string)).env("LEASE_SECONDS", "1");
        Ok(command)
    })
}

fn of_schedulers(harness: &Harness, scenario: fn(&Scene) -> Result<()>) -> Result<()> {
    scenario(&schedulers(harness, &[])?)
}

cases![
    a_frozen_scheduler_writes_to_no_shard => of_schedulers(a_frozen_holder_writes_nothing),
    a_scheduler_frozen_between_two_shards_writes_to_none => of_schedulers(a_holder_frozen_before_it_adopts_writes_nothing),
    a_scheduler_writes_until_the_next_one_has_adopted => of_schedulers(until_the_next_holder_adopts_the_older_one_writes),
    the_next_scheduler_waits_for_a_frozen_transaction => of_schedulers(the_next_holder_waits_for_a_frozen_transaction),
];

/// This is what adopting prevents.
#[harness_test]
fn a_frozen_scheduler_that_adopts_nothing_writes_over_its_successor(
    harness: &Harness,
) -> Result<()> {
    let adopts = r#"$(sql --dbname "$shard" --command "SELECT lease_adopt('scheduler', $number, wait => '1 min')")"#;
    let guards = "SELECT lease_guard('scheduler', lease_adopt('scheduler', $number));\n";
    let scene = schedulers(harness, &[(adopts, "$number"), (guards, "")])?;
    for mut session in scene.sessions()? {
        session.run("SELECT fence_unprotect('reports')")?;
    }
    let mut old = scene.at_work()?;
    old.program.freeze()?;
    scene.ends(&mut scene.at_work()?, "by the next")?;
    old.program.thaw()?;
    scene.ends(&mut old, "by the frozen one")
}

#[harness_test(slow)]
fn a_frozen_holder_of_etcd_s_lock_writes_nothing(harness: &Harness) -> Result<()> {
    setup::ensure(&[Package::new("etcd-client", "/usr/bin/etcdctl")])?;
    let (etcd, program) = (service::etcd(harness.rundir(), &[])?, ETCD.source(&[])?);
    let command = |databases: &[Conninfo], work: &Path| {
        let mut command = in_shell(harness, "etcdctl");
        command
            .args(["lock", "--ttl", "5", "--", "report-writer", "sh", "-c", &program, "sh"])
            .arg(databases[0].to_string())
            .arg(work)
            .env("ETCDCTL_ENDPOINTS", format!("http://127.0.0.1:{}", etcd.port()));
        Ok(command)
    };
    SCENARIOS
        .iter()
        .try_for_each(|scenario| scenario(&Scene::set(harness, "report-writer", 1, command)?))
}

/// Returns a program in Python that gets the database, the service, and its work as arguments.
fn in_python(
    harness: &Harness,
    runtime: Runtime,
    program: String,
    service: String,
    seconds: u32,
) -> Result<Scene<'_>> {
    of_lease_in_python(harness, "report-writer", runtime, program, service, seconds)
}

fn of_lease_in_python<'a>(
    harness: &'a Harness,
    lease: &'static str,
    runtime: Runtime,
    program: String,
    service: String,
    seconds: u32,
) -> Result<Scene<'a>> {
    Scene::set(harness, lease, 1, move |databases, work| {
        let mut python = orm::command(harness.rundir(), runtime, &program)?;
        python.arg(databases[0].to_string()).arg(&service).arg(work);
        python.env("LEASE_SECONDS", seconds.to_string()).envs(CREDENTIALS);
        Ok(python)
    })
}

#[harness_test(slow)]
fn a_frozen_holder_of_zookeeper_s_lock_writes_nothing(harness: &Harness) -> Result<()> {
    let zookeeper = service::zookeeper(harness.rundir(), Duration::from_secs(1))?;
    let place = format!("127.0.0.1:{}", zookeeper.port());
    let scene = || in_python(harness, KAZOO, ZOOKEEPER.source(&[])?, place.clone(), 5);
    SCENARIOS.iter().try_for_each(|scenario| scenario(&scene()?))
}

/// Reads a program in a file beside the pages.
fn program(name: &str) -> Result<String> {
    page(&format!("docs/recipes/adopt/{name}"))
}

#[harness_test(slow)]
fn a_frozen_holder_of_a_key_in_nats_writes_nothing(harness: &Harness) -> Result<()> {
    let nats = service::nats(harness.rundir())?;
    let place = format!("nats://127.0.0.1:{}", nats.port());
    let scene = || in_python(harness, NATS, program("nats_lock.py")?, place.clone(), 5);
    SCENARIOS.iter().try_for_each(|scenario| scenario(&scene()?))
}

#[harness_test(slow)]
fn a_frozen_holder_of_mariadb_s_lock_writes_nothing(harness: &Harness) -> Result<()> {
    let mariadb = service::mariadb(harness.rundir())?;
    let place = format!("127.0.0.1:{}", mariadb.port());
    let scene = || in_python(harness, MARIADB, program("mariadb_lock.py")?, place.clone(), 5);
    SCENARIOS.iter().try_for_each(|scenario| scenario(&scene()?))
}

/// Each test has its own message, in a queue that counts deliveries. A consumer is disconnected after it has been
/// silent for two heartbeats.
#[harness_test(slow)]
fn a_frozen_consumer_of_a_message_in_rabbitmq_writes_nothing(harness: &Harness) -> Result<()> {
    let rabbitmq = service::rabbitmq(harness.rundir())?;
    let place = format!("amqp://guest:guest@127.0.0.1:{}", rabbitmq.port());
    SCENARIOS.iter().try_for_each(|scenario| {
        wait_until("the message is published", PATIENCE, || {
            orm::command(harness.rundir(), PIKA, PUBLISHES)
                .is_ok_and(|mut python| output_of(python.arg(&place)).is_ok())
        })?;
        let program = program("rabbitmq_message.py")?;
        scenario(&of_lease_in_python(harness, "message:7", PIKA, program, place.clone(), 4)?)
    })
}

const PUBLISHES: &str = r#"
import pika, sys
channel = pika.BlockingConnection(pika.URLParameters(sys.argv[1])).channel()
channel.queue_delete("reports")
channel.queue_declare("reports", durable=True, arguments={"x-queue-type": "quorum"})
channel.confirm_delivery()
channel.basic_publish("", "reports", b"", pika.BasicProperties(message_id="7", delivery_mode=2), mandatory=True)
"#;

/// Tests a program for a cloud service, which moto emulates.
fn of_a_cloud(harness: &Harness, name: &str) -> Result<()> {
    let moto = service::moto(harness.rundir(), &runtime::fetch(BOTO)?)?;
    let place = format!("http://127.0.0.1:{}", moto.port());
    output_of(orm::command(harness.rundir(), BOTO, LOCKS)?.arg(&place).envs(CREDENTIALS))?;
    let scene = || in_python(harness, BOTO, program(name)?, place.clone(), 5);
    SCENARIOS.iter().try_for_each(|scenario| scenario(&scene()?))
}

/// Credentials that boto3 requires and moto ignores.
const CREDENTIALS: [(&str, &str); 3] = [
    ("AWS_ACCESS_KEY_ID", "a"),
    ("AWS_SECRET_ACCESS_KEY", "b"),
    ("AWS_DEFAULT_REGION", "us-east-1"),
];

/// Creates the bucket and the table.
const LOCKS: &str = r#"
import boto3, sys
boto3.client("s3", endpoint_url=sys.argv[1]).create_bucket(Bucket="locks")
boto3.client("dynamodb", endpoint_url=sys.argv[1]).create_table(
    TableName="locks", BillingMode="PAY_PER_REQUEST", KeySchema=[{"AttributeName": "name", "KeyType": "HASH"}],
    AttributeDefinitions=[{"AttributeName": "name", "AttributeType": "S"}])
"#;

cases![
    slow:
    a_frozen_holder_of_an_object_s_lock_writes_nothing => of_a_cloud("s3_lock.py"),
    a_frozen_holder_of_an_item_s_lock_writes_nothing => of_a_cloud("dynamodb_lock.py"),
];

fn redis_lock<'a>(
    harness: &'a Harness,
    redis: &Service,
    changes: &[(&str, &str)],
) -> Result<Scene<'a>> {
    let place = format!("redis://127.0.0.1:{}", redis.port());
    in_python(harness, REDIS, REDIS_LOCK.source(changes)?, place, 3)
}

fn redis_cli(redis: &Service, command: &str) -> Result<()> {
    let mut cli = Command::new("redis-cli");
    let said = output_of(cli.args(["-p", &redis.port().to_string()]).args(command.split(' ')))?;
    ensure!(said.trim() == "OK", "{command}: {said}");
    Ok(())
}

/// Sets the counter as after a failover to a replica that has missed the later grants.
fn counts(redis: &Service, number: u32) -> Result<()> {
    redis_cli(redis, "FLUSHALL")?;
    redis_cli(redis, &format!("SET {{report-writer}}:number {number}"))
}

#[harness_test(slow)]
fn a_frozen_holder_of_redis_s_lock_writes_nothing(harness: &Harness) -> Result<()> {
    let redis = service::redis(harness.rundir(), false)?;
    SCENARIOS.iter().try_for_each(|scenario| scenario(&redis_lock(harness, &redis, &[])?))
}

/// As after a failover to a replica that had none of the grants.
#[harness_test(slow)]
fn numbers_of_a_redis_that_has_lost_its_counter_are_refused(harness: &Harness) -> Result<()> {
    let redis = service::redis(harness.rundir(), false)?;
    counts(&redis, 40)?;
    let scene = redis_lock(harness, &redis, &[])?;
    scene.ends(&mut scene.at_work()?, "the forty-first")?;
    redis_cli(&redis, "FLUSHALL")?;
    let said = scene.holder()?.program.leaves_with_failure()?;
    ensure!(said.contains("PF001") && said.contains("has had 41"), "{said}");
    // The counter is set to the greatest number of the name: no stale number becomes valid.
    redis_cli(&redis, "SET {report-writer}:number 41")?;
    scene.ends(&mut scene.at_work()?, "the forty-second")?;
    scene.refuses(41, "PF001")?;
    // Alternatively the name is deleted here: it then begins with any number.
    redis_cli(&redis, "FLUSHALL")?;
    scene.databases[0]
        .connect()?
        .run("SELECT lease_revoke('report-writer'); SELECT lease_forget('report-writer')")?;
    scene.ends(&mut scene.at_work()?, "the first again")?;
    ensure!(scene.number()? == 1);
    Ok(())
}

/// Redis lost the grant before its number was adopted here. The present holder is refused, so that not both write.
#[harness_test(slow)]
fn a_lost_grant_with_a_greater_number_ends_the_present_one(harness: &Harness) -> Result<()> {
    let redis = service::redis(harness.rundir(), false)?;
    counts(&redis, 44)?;
    let scene = redis_lock(harness, &redis, &[])?;
    let (mut lost, link) = scene.kept_from(0)?;
    lost.program.freeze()?;
    counts(&redis, 40)?;
    let mut present = scene.at_work()?;
    ensure!(scene.number()? == 41);
    link.hold(false);
    lost.program.thaw()?;
    lost.is_at_work()?;
    ensure!(scene.number()? == 45);
    present.reads("by the present one")?;
    scene.comes_late(&mut present, "has had 45")?;
    scene.ends(&mut lost, "by the lost one")
}

/// Without the holders' names the database could not see that there are two.
#[harness_test(slow)]
fn a_number_that_redis_grants_twice_is_used_by_one_holder_who_is_named(
    harness: &Harness,
) -> Result<()> {
    let release = r#"connection.execute("SELECT lease_release(%s, %s)", [LEASE, number])"#;
    for changes in [&[][..], &[("\"me\": me", "\"me\": None"), (release, "pass")]] {
        let redis = service::redis(harness.rundir(), false)?;
        let scene = redis_lock(harness, &redis, changes)?;
        // The replica has missed only the last grant: the next holder gets the same number.
        counts(&redis, 40)?;
        let mut first = scene.at_work()?;
        counts(&redis, 40)?;
        let mut second = scene.holder()?;
        if changes.is_empty() {
            let said = second.program.leaves_with_failure()?;
            ensure!(said.contains("PF004") && said.contains("another holder's"), "{said}");
        } else {
            second.is_at_work()?;
            scene.ends(&mut second, "by the second")?;
        }
        scene.ends(&mut first, "by the first")?;
        if changes.is_empty() {
            scene.ends(&mut scene.at_work()?, "by the third")?;
        }
    }
    Ok(())
}

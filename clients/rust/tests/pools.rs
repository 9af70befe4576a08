//! Connections of sqlx and of pools, which a guard gives back as they were. The file is a process
//! of its own: an epoch silences the tokens of all tests that run beside it.

#![cfg(feature = "sqlx")]

use pg_fence_client::{Connected, Error, Fence, Lease, connect};
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection, Executor, PgConnection};
use std::sync::Mutex;
use std::time::Duration;
use tokio::time::timeout;
use tokio_postgres::{Config, NoTls};

const SHORT: Duration = Duration::from_millis(300);
const LONG: Duration = Duration::from_secs(10);

struct Place {
    url: String,
    admin: Connected,
    fence: Fence,
}

impl Place {
    async fn new() -> Place {
        let url = std::env::var("DATABASE_URL").expect("DATABASE_URL is set");
        let admin = connect(&url, NoTls).await.unwrap();
        Place { fence: Fence::new(&url).unwrap(), admin, url }
    }

    async fn lease(&self, name: &str) -> Lease {
        self.admin.execute("SELECT lease_revoke($1)", &[&name]).await.unwrap();
        self.fence.lease(name).ttl(LONG / 4).acquire().await.unwrap()
    }

    /// After a while.
    async fn end_of(&self, lease: &Lease) {
        tokio::time::sleep(SHORT).await;
        self.admin.execute("SELECT lease_revoke($1)", &[&lease.names()[0]]).await.unwrap();
        timeout(LONG, lease.lost()).await.expect("it is told").expect("it is a loss");
    }
}

async fn process(connection: &mut PgConnection) -> i32 {
    sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(connection).await.unwrap()
}

#[tokio::test]
async fn a_connection_of_sqlx_is_guarded_alike() {
    let place = Place::new().await;
    let table = "DROP TABLE IF EXISTS of_sqlx; CREATE TABLE of_sqlx (id bigint, status text);
        INSERT INTO of_sqlx VALUES (7, 'new'); SELECT fence_protect('of_sqlx', lease => 'of_sqlx')";
    place.admin.batch_execute(table).await.unwrap();
    let update = "UPDATE of_sqlx SET status = status || '!'";
    let lease = place.lease("of_sqlx").await;
    let mut connection = PgConnection::connect(&place.url).await.unwrap();
    let refused = Error::from(connection.execute(update).await.unwrap_err());
    assert!(matches!(refused, Error::Refused(refused) if refused.sqlstate == "PF002"));
    // The future can be spawned, too.
    let work = async move {
        let mut guard = lease.guard(&mut connection).await?;
        lease.run(guard.execute(update)).await??;
        let mut inner = lease.guard(&mut **guard).await?;
        inner.execute(update).await?;
        drop(inner);
        guard.commit_and_release().await?;
        Ok::<_, Error>(lease.check().is_err())
    };
    assert!(tokio::spawn(work).await.unwrap().unwrap());
    let row = place.admin.query_one("SELECT status FROM of_sqlx", &[]).await.unwrap();
    assert_eq!(row.get::<_, String>(0), "new!");
}

#[tokio::test]
async fn a_pool_of_one_connection_gets_it_back() {
    let place = Place::new().await;
    let pool = PgPoolOptions::new().max_connections(1).connect(&place.url).await.unwrap();
    let lease = place.lease("pooled").await;
    for work in
        ["SELECT 1", "SELECT 1 / 0", "COMMIT", "SELECT pg_terminate_backend(pg_backend_pid())"]
    {
        let mut connection = pool.acquire().await.unwrap();
        let mut guard = lease.guard(&mut *connection).await.unwrap();
        let _ = guard.execute(work).await;
        assert_eq!(guard.commit().await.is_ok(), work == "SELECT 1", "{work}");
    }
    // No token speaks until its holder has renewed.
    place.admin.batch_execute("SELECT fence_new_epoch()").await.unwrap();
    let mut connection = pool.acquire().await.unwrap();
    let before = process(&mut connection).await;
    let mut guard = lease.guard(&mut *connection).await.unwrap();
    assert_eq!(process(&mut guard).await, before);
    assert_eq!((pool.size(), pool.num_idle()), (1, 0));
    guard.commit().await.unwrap();
    drop(connection);
    assert_eq!(process(&mut pool.acquire().await.unwrap()).await, before);
}

/// No token of the name speaks until both are renewed, and the row is renewed only once the guard that found that out has
/// let go of it.
#[tokio::test]
async fn a_name_and_a_row_are_guarded_in_a_new_epoch() {
    let place = Place::new().await;
    let table = "DROP TABLE IF EXISTS kept; CREATE TABLE kept (id int PRIMARY KEY);
        INSERT INTO kept VALUES (1); SELECT fence_protect('kept', deadline => 'held_until')";
    place.admin.batch_execute(table).await.unwrap();
    let claim = "UPDATE kept SET held_until = clock_timestamp() + '10 s' RETURNING fence";
    let token: i64 = place.admin.query_one(claim, &[]).await.unwrap().get(0);
    let row = place.fence.keep_row("kept", &[&1], token, LONG).acquire().await.unwrap();
    let name = place.lease("beside a row").await;
    place.admin.batch_execute("SELECT fence_new_epoch()").await.unwrap();
    let mut client = connect(&place.url, NoTls).await.unwrap();
    let guard = place.fence.guard(&mut client, [&name, &row]);
    let guard = timeout(LONG / 2, guard).await.expect("no renewal is waited for in vain").unwrap();
    guard.commit().await.unwrap();
}

/// On a driver's own connection, which a loss does not break off.
#[tokio::test]
async fn what_a_loss_has_ended_hangs_no_more() {
    let place = Place::new().await;
    let revoked = async |lease: &Lease| {
        tokio::time::sleep(Duration::from_millis(300)).await;
        place.admin.execute("SELECT lease_revoke($1)", &[&lease.names()[0]]).await.unwrap();
        lease.check()
    };
    let (mut client, connection) = tokio_postgres::connect(&place.url, NoTls).await.unwrap();
    tokio::spawn(connection);
    let lease = place.fence.lease("hangs").ttl(Duration::from_secs(1)).acquire().await.unwrap();
    let guard = lease.guard(&mut client).await.unwrap();
    let (hung, _) = tokio::join!(guard.batch_execute("SELECT pg_sleep(300)"), revoked(&lease));
    assert!(matches!(hung, Err(Error::LeaseLost { .. })), "{hung:?}");
    drop(guard);
    client.batch_execute("SELECT 1").await.unwrap();
    let pool = PgPoolOptions::new().max_connections(1).connect(&place.url).await.unwrap();
    let lease = place.fence.lease("hangs").ttl(Duration::from_secs(1)).acquire().await.unwrap();
    let mut connection = pool.acquire().await.unwrap();
    let mut guard = lease.guard(&mut *connection).await.unwrap();
    let (hung, _) = tokio::join!(lease.run(guard.execute("SELECT pg_sleep(300)")), revoked(&lease));
    assert!(matches!(hung, Err(Error::LeaseLost { .. })), "{hung:?}");
    drop(guard);
    drop(connection);
    process(&mut pool.acquire().await.unwrap()).await;
    // And what the caller has given up.
    let lease = place.lease("given up").await;
    let guard = lease.guard(&mut client).await.unwrap();
    let sleep = guard.batch_execute("SELECT pg_sleep(300)");
    assert!(tokio::time::timeout(Duration::from_millis(300), sleep).await.is_err());
    drop(guard);
    client.batch_execute("SELECT 1").await.unwrap();
    place.fence.close().await;
}

/// The caller that began the transaction goes on in it.
#[tokio::test]
async fn what_comes_after_a_savepoint_is_not_cancelled() {
    let place = Place::new().await;
    let mut client = connect(&place.url, NoTls).await.unwrap();
    let mut outer = client.transaction().await.unwrap();
    let lease = place.lease("inner").await;
    let guard = lease.guard(&mut outer).await.unwrap();
    place.end_of(&lease).await;
    drop(guard);
    outer.batch_execute("SELECT pg_sleep(1)").await.unwrap();
}

/// Where not even BEGIN comes through.
#[tokio::test]
async fn a_loss_breaks_off_what_has_not_begun() {
    let place = Place::new().await;
    let mut client = connect(&place.url, NoTls).await.unwrap();
    let lease = place.lease("begins").await;
    assert!(timeout(SHORT, client.batch_execute("SELECT pg_sleep(300)")).await.is_err());
    let begins = async { lease.guard(&mut client).await.map(drop) };
    let (begun, ()) = tokio::join!(begins, place.end_of(&lease));
    assert!(matches!(begun, Err(Error::LeaseLost { .. })), "{begun:?}");
    timeout(LONG, client.batch_execute("SELECT 1")).await.expect("it is broken off").unwrap_err();
}

struct Warnings(Mutex<String>);

static WARNINGS: Warnings = Warnings(Mutex::new(String::new()));

impl log::Log for Warnings {
    fn enabled(&self, _: &log::Metadata) -> bool {
        true
    }

    fn log(&self, record: &log::Record) {
        self.0.lock().unwrap().push_str(&record.args().to_string());
    }

    fn flush(&self) {}
}

#[tokio::test]
async fn a_statement_of_another_role_is_not_cancelled_which_is_told() {
    let _ = log::set_logger(&WARNINGS).map(|()| log::set_max_level(log::LevelFilter::Warn));
    let mut place = Place::new().await;
    let role =
        "DO $$ BEGIN CREATE ROLE rust_app LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
        SELECT fence_grant('rust_app')";
    place.admin.batch_execute(role).await.unwrap();
    let mut config: Config = place.url.parse().unwrap();
    place.fence = Fence::at([config.user("rust_app").clone()], NoTls);
    let lease = place.lease("of a role").await;
    let (mut client, connection) = tokio_postgres::connect(&place.url, NoTls).await.unwrap();
    tokio::spawn(connection);
    let guard = lease.guard(&mut client).await.unwrap();
    let (hung, ()) = tokio::join!(guard.batch_execute("SELECT pg_sleep(3)"), place.end_of(&lease));
    assert!(matches!(hung, Err(Error::LeaseLost { .. })), "{hung:?}");
    drop(guard);
    client.batch_execute("SELECT 1").await.unwrap();
    assert!(WARNINGS.0.lock().unwrap().contains("only its own role may cancel it"));
}

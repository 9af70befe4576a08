//! What is Rust's own: the shape of the API, its drivers, its types. What a client decides is
//! played by vectors, and what a process shows by the scenarios of all clients.
//!
//! `DATABASE_URL=postgresql://… cargo test`. The database has the extension and is otherwise of no
//! use: tables are made and dropped in it.

use pg_fence_client::{Connected, Error, EventKind, Fence, Lease, Reason, classify, connect, open};
use std::error::Error as StdError;
use std::fmt::{Debug, Display};
use std::future::pending;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::{sleep, timeout};
use tokio_postgres::config::SslMode;
use tokio_postgres::{Config, NoTls, SimpleQueryMessage};
use tokio_util::sync::CancellationToken;

const LONG: Duration = Duration::from_secs(300);
const SHORT: Duration = Duration::from_secs(1);
const HANG: &str = "SELECT pg_sleep(300)";
const PAY: &str = "UPDATE orders SET status = 'paid'";
const STATUS: &str = "SELECT status FROM orders";
const STATE: &str = "SELECT state FROM lease_info('order:7')";

fn url() -> String {
    std::env::var("DATABASE_URL").expect("DATABASE_URL is set")
}

fn config(change: impl FnOnce(&mut Config) -> &mut Config) -> Config {
    let mut config: Config = url().parse().unwrap();
    change(&mut config).clone()
}

async fn client() -> Connected {
    connect(&url(), NoTls).await.unwrap()
}

fn lost<T: Debug>(outcome: Result<T, Error>) -> Reason {
    match outcome {
        Err(Error::LeaseLost { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

/// A table of one order, bound to its lease. A test has the database alone, for an epoch silences
/// the tokens of all others.
struct Shop {
    admin: Connected,
    fence: Fence,
    _alone: tokio::sync::MutexGuard<'static, ()>,
}

impl Shop {
    async fn new() -> Shop {
        static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
        let (_alone, admin) = (ALONE.lock().await, client().await);
        let _ = log::set_logger(&LINES).map(|()| log::set_max_level(log::LevelFilter::Warn));
        let shop = Shop { admin, fence: Fence::new(&url()).unwrap(), _alone };
        let table = "DROP TABLE IF EXISTS orders; CREATE TABLE orders (id bigint, status text);
            INSERT INTO orders VALUES (7, 'new'); SELECT lease_revoke('order:7');
            SELECT fence_protect('orders', lease => 'order:7')";
        shop.sql(table).await;
        shop
    }

    /// Runs statements, and returns the first value of the last row.
    async fn sql(&self, statements: &str) -> String {
        let said = self.admin.simple_query(statements).await.unwrap();
        let mut rows = said.iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => row.get(0),
            _ => None,
        });
        rows.next_back().unwrap_or_default().to_owned()
    }

    async fn lease(&self) -> Lease {
        self.fence.lease("order:7").ttl(SHORT * 2).wait(LONG).acquire().await.unwrap()
    }

    /// It is lost after a while.
    async fn ending(&self) -> Lease {
        let request = self.fence.lease("order:7").at_most(SHORT).wait(LONG);
        request.acquire().await.unwrap()
    }
}

/// The lines of the log.
struct Lines(Mutex<Vec<String>>);

static LINES: Lines = Lines(Mutex::new(Vec::new()));

impl Lines {
    fn count(&self, words: &str) -> usize {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().filter(|line| line.contains(words)).count()
    }
}

impl log::Log for Lines {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, line: &log::Record<'_>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(line.args().to_string());
    }

    fn flush(&self) {}
}

#[tokio::test]
async fn a_lease_is_held_until_its_last_clone_is_dropped() {
    let shop = Shop::new().await;
    let lease = shop.fence.lease("order:7").ttl(LONG).acquire().await.unwrap();
    assert!(lease.held() && lease.check().is_ok() && lease.remaining() > LONG / 2);
    let taken = shop.fence.lease("order:7").holder("other").acquire().await.unwrap_err();
    assert!(taken.to_string().contains(" s at the most unless"), "{taken}");
    let Error::LeaseTaken { holder: Some(holder), remaining, .. } = taken else { panic!() };
    assert!(holder.contains('/') && remaining > Some(LONG / 2));
    let mut client = client().await;
    let (clone, guard) = (lease.clone(), lease.guard(&mut client).await.unwrap());
    drop(lease);
    drop(clone);
    // The fence does one call after the other, so a release would be through by now.
    shop.fence.lease("order:8").acquire().await.unwrap().release().await.unwrap();
    assert_eq!(shop.sql(STATE).await, "held");
    guard.execute(PAY, &[]).await.unwrap();
    guard.commit().await.unwrap();
    // In the background.
    shop.lease().await.release().await.unwrap();
    shop.fence.close().await;
    assert!(matches!(shop.fence.lease("x").acquire().await, Err(Error::Closed)));
}

/// The verbs' futures can be spawned. A lease lives on if the transaction of others rolls back.
#[tokio::test]
async fn a_guard_in_the_transaction_of_others_is_a_savepoint() {
    let shop = Shop::new().await;
    let (lease, fence) = (shop.lease().await, shop.fence.clone());
    let work = async move {
        let mut client = client().await;
        let mut outer = client.transaction().await?;
        lease.guard(&mut outer).await?.commit_and_release().await?;
        outer.rollback().await?;
        sleep(SHORT * 3).await;
        lease.check()?;
        let mut guard = lease.guard(&mut client).await?;
        let inner = lease.guard(&mut guard).await?;
        inner.execute(PAY, &[]).await?;
        inner.commit().await?;
        guard.commit().await?;
        let both = fence.lease(["order:8", "order:9"]).acquire().await?;
        fence.guard(&mut client, [&lease, &both]).await?.commit_and_release().await?;
        assert_eq!(lost(lease.check()), Reason::Released);
        assert!(matches!(fence.guard(&mut client, []).await, Err(Error::Invalid(_))));
        let other = fence.lease("order:8").acquire().await?;
        other.run(async { other.release().await }).await?
    };
    tokio::spawn(work).await.unwrap().unwrap();
    assert_eq!(shop.sql(STATUS).await, "paid");
}

/// The future of the release is dropped where it waits for somebody's lock.
#[tokio::test]
async fn a_lease_is_kept_after_a_release_that_was_given_up() {
    let shop = Shop::new().await;
    let (lease, mut client) = (shop.lease().await, client().await);
    shop.sql(&format!("BEGIN; SELECT lease_renew('order:7', {})", lease.token())).await;
    let guard = lease.guard(&mut client).await.unwrap();
    assert!(timeout(SHORT / 5, guard.commit_and_release()).await.is_err());
    shop.sql("COMMIT").await;
    sleep(SHORT * 3).await;
    lease.check().unwrap();
}

#[tokio::test]
async fn a_number_is_of_one_holder() {
    let (shop, mut client) = (Shop::new().await, client().await);
    for same in [&shop.fence, &Fence::new(&url()).unwrap()] {
        same.adopted("elsewhere", 7).guard(&mut client).await.unwrap().commit().await.unwrap();
    }
    let named = shop.fence.adopted("elsewhere", 7).holder("night shift");
    let taken = named.guard(&mut client).await.err();
    shop.sql("SELECT lease_revoke('elsewhere'), lease_forget('elsewhere')").await;
    let Some(Error::LeaseTaken { holder: Some(holder), .. }) = taken else { panic!("{taken:?}") };
    assert!(holder.contains(&format!("/{}/", std::process::id())), "{holder}");
}

#[tokio::test]
async fn another_role_has_leases_and_statements_of_its_own() {
    let shop = Shop::new().await;
    shop.sql("CREATE ROLE rust_1 LOGIN; CREATE ROLE rust_2 LOGIN").await;
    shop.sql("SELECT fence_grant('rust_1'), fence_grant('rust_2')").await;
    let (mut client, connection) = tokio_postgres::connect(&url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    let other = [config(|config| config.user("rust_2"))];
    let mut other = open(&other, NoTls, LONG).await.unwrap();
    let fence = Fence::at([config(|config| config.user("rust_1"))], NoTls);
    let lease = fence.lease("order:7").at_most(SHORT * 2).acquire().await.unwrap();
    let told = lease.guard(&mut other).await.err().unwrap().to_string();
    assert!(told.contains("act as one role (options=-c role="), "{told}");
    assert!(!told.contains("fence_grant"), "{told}");
    drop(other);
    let table =
        "DROP TABLE IF EXISTS runs; CREATE TABLE runs (id int, fence bigint, held_until date)";
    shop.sql(table).await;
    let row = fence.keep_row("runs", &[("id", &7)], 1, SHORT).acquire().await;
    let told = row.unwrap_err().to_string();
    assert!(told.contains("need SELECT and UPDATE: permission denied for table runs"), "{told}");
    // The fence cannot cancel what hangs.
    let guard = lease.guard(&mut client).await.unwrap();
    assert_eq!(lost(guard.batch_execute("SELECT pg_sleep(4)").await), Reason::AtMost);
    drop(guard);
    client.batch_execute("SELECT 1").await.unwrap();
    assert_eq!(LINES.count("only its own role may cancel it"), 1);
    fence.close().await;
    shop.sql("SELECT fence_revoke('rust_1'), fence_revoke('rust_2')").await;
    shop.sql("DROP ROLE rust_1, rust_2").await;
}

#[tokio::test]
async fn a_loss_ends_the_work_and_comes_out_as_a_type() {
    let shop = Shop::new().await;
    let request = shop.fence.lease("order:7").ttl(SHORT);
    let revoked = request.clone().hold(async |lease: Lease| {
        shop.sql("SELECT lease_revoke('order:7')").await;
        lease.run(pending::<()>()).await
    });
    assert_eq!(lost(revoked.await), Reason::Gone);
    let hangs = request.at_most(SHORT).hold(async |_| pending::<Result<(), Error>>().await);
    assert_eq!(lost(hangs.await), Reason::AtMost);
    // It is given back with the end of the work.
    shop.fence.close().await;
    assert_eq!(shop.sql(STATE).await, "free");
}

/// A caller who gives up ends what hangs, too, and the connection is whole after it.
#[tokio::test]
async fn what_a_loss_has_ended_hangs_no_more() {
    let shop = Shop::new().await;
    // On a driver's own connection, which a loss does not break off.
    let (mut client, connection) = tokio_postgres::connect(&url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    let lease = shop.ending().await;
    let guard = lease.guard(&mut client).await.unwrap();
    assert_eq!(lost(guard.batch_execute(HANG).await), Reason::AtMost);
    drop(guard);
    drop(lease);
    let lease = shop.lease().await;
    let guard = lease.guard(&mut client).await.unwrap();
    assert!(timeout(SHORT / 5, guard.batch_execute(HANG)).await.is_err());
    drop(guard);
    drop(lease);
    // What comes after a savepoint is not cancelled: the caller that began goes on.
    let lease = shop.ending().await;
    let mut outer = client.transaction().await.unwrap();
    let guard = lease.guard(&mut outer).await.unwrap();
    lease.lost().await;
    drop(guard);
    drop(lease);
    outer.batch_execute("SELECT pg_sleep(1)").await.unwrap();
    outer.rollback().await.unwrap();
    // What has not begun is broken off, where not even BEGIN comes through.
    let mut client = self::client().await;
    assert!(timeout(SHORT / 5, client.batch_execute(HANG)).await.is_err());
    let lease = shop.ending().await;
    assert_eq!(lost(lease.guard(&mut client).await.map(drop)), Reason::AtMost);
    let broken = timeout(SHORT * 10, client.batch_execute("SELECT 1")).await;
    broken.expect("it is broken off").unwrap_err();
}

#[tokio::test]
async fn errors_are_found_however_deep_they_are() {
    let shop = Shop::new().await;
    let refused = shop.admin.batch_execute(PAY).await.unwrap_err();
    let wrapped: Box<dyn StdError + Send + Sync> = Box::new(Error::other(refused));
    let Some(Error::Refused(refused)) = classify(&Error::other(wrapped)) else { panic!() };
    assert_eq!(refused.sqlstate, "PF002");
    assert_eq!(refused.detail["relation"], "public.orders");
    assert!(refused.hint.is_some());
    let other = shop.admin.batch_execute("SELECT 1 / 0").await.unwrap_err();
    assert!(classify(&other).is_none());
    let elsewhere = Fence::new(&url()).unwrap().in_schema("nowhere");
    assert!(matches!(elsewhere.lease("x").acquire().await, Err(Error::NotInstalled(_))));
    let brief = shop.fence.lease("x").ttl(SHORT / 11).acquire().await;
    assert!(matches!(brief, Err(Error::Invalid(_))), "{brief:?}");
}

/// Its callback may panic, and its own runtime may be blocked: the heartbeat has a thread.
#[tokio::test(flavor = "current_thread")]
async fn a_program_that_blocks_and_panics_keeps_its_lease() {
    let shop = Shop::new().await;
    let told: Arc<Mutex<Vec<EventKind>>> = Arc::default();
    let hears = told.clone();
    let fence = shop.fence.clone().on_event(move |event| {
        hears.lock().unwrap_or_else(PoisonError::into_inner).push(event.kind);
        // A panic without a trace, which would take its time from the heartbeat.
        std::panic::resume_unwind(Box::new("which takes nothing from the lease"));
    });
    let lease = fence.lease("order:7").ttl(SHORT * 2).acquire().await.unwrap();
    std::thread::sleep(SHORT * 3);
    lease.check().unwrap();
    lease.release().await.unwrap();
    fence.close().await;
    let mut told = told.lock().unwrap_or_else(PoisonError::into_inner).clone();
    told.dedup();
    let released = EventKind::Released { confirmed: true };
    assert_eq!(told, [EventKind::Acquired, EventKind::Renewed, released]);
}

#[tokio::test]
async fn leading_waits_for_the_work_that_was_stopped() {
    let (shop, stop) = (Shop::new().await, CancellationToken::new());
    let led = shop.fence.lead("order:7", LONG, &stop, async |lease: Lease| {
        stop.cancel();
        sleep(SHORT / 10).await;
        lease.check()?;
        Ok(lease.token())
    });
    assert!(led.await.unwrap().is_some());
    assert_eq!(shop.sql(STATE).await, "free");
    let (_held, stop) = (shop.lease().await, CancellationToken::new());
    let waits = shop.fence.lead("order:7", LONG, &stop, async |_| Ok(()));
    let stops = async {
        sleep(SHORT / 3).await;
        stop.cancel();
    };
    assert!(tokio::join!(waits, stops).0.unwrap().is_none());
}

#[tokio::test]
async fn what_never_opens_is_told_at_once_and_an_outage_is_one_line_of_the_log() {
    let _shop = Shop::new().await;
    let at = |config: Config| Fence::at([config], NoTls);
    for (words, fence) in [
        ("TLS", at(config(|config| config.ssl_mode(SslMode::Require)))),
        ("does not exist", at(config(|config| config.dbname("nowhere")))),
        ("no secret", Fence::with_opener(|| async { Err(Error::other("no secret")) })),
    ] {
        let wait = timeout(SHORT * 5, fence.lease("x").wait(LONG).acquire()).await;
        let stop = CancellationToken::new();
        let lead = timeout(SHORT * 5, fence.lead("x", SHORT, &stop, async |_| Ok(()))).await;
        let told = wait.expect("at once").unwrap_err().to_string();
        assert!(told.contains(words), "{told}");
        let told = lead.expect("at once").unwrap_err().to_string();
        assert!(told.contains(words), "{told}");
    }
    let nobody = Fence::new("host=127.0.0.1 port=1 user=nobody").unwrap();
    let waits = nobody.lease("x").wait(SHORT).acquire().await;
    assert!(matches!(waits, Err(Error::NoConnection(..))), "{waits:?}");
    let line = "no lease could be acquired, and it is tried again: cannot connect to a server: \
                \"127.0.0.1\", port 1, as user \"nobody\"";
    assert_eq!(LINES.count(line), 1);
}

/// Of both modes, with a key of two columns.
#[tokio::test]
async fn a_row_is_a_lease() {
    for mode in ["monotonic", "managed"] {
        let (shop, mut client) = (Shop::new().await, client().await);
        let table = format!(
            "DROP TABLE IF EXISTS runs; CREATE TABLE runs (part text, id int, state text,
                PRIMARY KEY (id, part)); INSERT INTO runs VALUES ('a', 1, 'ready');
            SELECT fence_protect('runs', mode => '{mode}', deadline => 'held_until')"
        );
        shop.sql(&table).await;
        let claim = "UPDATE runs SET held_until = clock_timestamp() + '2 s', state = 'running'
            WHERE held_until IS NULL OR held_until < clock_timestamp() RETURNING fence";
        let keep = |token: &str| {
            let key: [(&str, &(dyn Display + Sync)); 2] = [("id", &1), ("part", &"a")];
            shop.fence.keep_row("runs", &key, token.parse().unwrap(), SHORT * 2)
        };
        let row = keep(&shop.sql(claim).await).acquire().await.unwrap();
        assert_eq!(row.names(), ["runs", r#"["1","a"]"#]);
        // It is renewed, and while its own transaction has the row it is not lost.
        sleep(SHORT * 3).await;
        // No token of the name speaks until both are renewed, and the row is renewed only once the
        // guard that found that out has let go of it.
        let name = shop.fence.lease("order:7").acquire().await.unwrap();
        shop.sql("SELECT fence_new_epoch()").await;
        let guard = timeout(SHORT * 5, shop.fence.guard(&mut client, [&name, &row])).await;
        let guard = guard.expect("no renewal is waited for in vain").unwrap();
        guard.execute("UPDATE runs SET state = 'half'", &[]).await.unwrap();
        sleep(SHORT * 3).await;
        row.check().unwrap();
        guard.commit().await.unwrap();
        name.release().await.unwrap();
        // That transaction was longer than its ttl, so the row is anybody's now.
        assert_eq!(lost(row.check()), Reason::Deadline);
        let token = shop.sql(claim).await;
        let row = keep(&token).acquire().await.unwrap();
        row.guard(&mut client).await.unwrap().commit_and_release().await.unwrap();
        assert_eq!(lost(row.check()), Reason::Released);
        assert_eq!(shop.sql("SELECT held_until IS NULL FROM runs").await, "t");
        assert_eq!(lost(keep(&token).acquire().await), Reason::Gone);
        let shared = keep(&token).shared().acquire().await;
        assert!(matches!(shared, Err(Error::Invalid(_))), "{shared:?}");
        // What cannot be kept says why.
        for (table, key, state) in
            [("runs", "x", "22P02"), ("nowhere.runs", "1", "3F000"), ("rans", "1", "42P01")]
        {
            let wrong = shop.fence.keep_row(table, &[("id", &key), ("part", &"a")], 1, SHORT);
            assert_eq!(wrong.acquire().await.unwrap_err().sqlstate().as_deref(), Some(state));
        }
    }
}

#[cfg(feature = "blocking")]
#[test]
fn the_verbs_of_programs_that_are_not_asynchronous() {
    let fence = pg_fence_client::blocking::Fence::new(&url()).unwrap();
    let (_shop, mut client) = (fence.wait(Shop::new()), fence.wait(client()));
    let lease = fence.wait(fence.lease("order:7").ttl(LONG).acquire()).unwrap();
    assert!(matches!(fence.wait(fence.lease("order:7").acquire()), Err(Error::LeaseTaken { .. })));
    let guard = fence.wait(lease.guard(&mut client)).unwrap();
    fence.wait(guard.execute(PAY, &[])).unwrap();
    fence.wait(guard.commit_and_release()).unwrap();
    // Its work may wait, too.
    let stop = CancellationToken::new();
    let led = fence.wait(fence.lead("order:7", LONG, &stop, async |lease: Lease| {
        let mut client = fence.wait(connect(&url(), NoTls))?;
        let guard = fence.wait(lease.guard(&mut client))?;
        fence.wait(guard.execute(PAY, &[]))?;
        fence.wait(guard.commit())?;
        Ok(lease.token())
    }));
    assert!(led.unwrap().is_some());
    fence.wait(fence.close());
}

#[cfg(feature = "sqlx")]
mod of_sqlx {
    use super::*;
    use sqlx::postgres::PgPoolOptions;
    use sqlx::{Connection, Executor, PgConnection};

    #[tokio::test]
    async fn a_connection_is_guarded_alike() {
        let (shop, mut connection) =
            (Shop::new().await, PgConnection::connect(&url()).await.unwrap());
        let lease = shop.lease().await;
        let refused = Error::from(connection.execute(PAY).await.unwrap_err());
        assert!(matches!(refused, Error::Refused(refused) if refused.sqlstate == "PF002"));
        // The future can be spawned, too.
        let work = async move {
            let mut guard = lease.guard(&mut connection).await?;
            lease.run(guard.execute(PAY)).await??;
            let mut inner = lease.guard(&mut **guard).await?;
            inner.execute("UPDATE orders SET status = 'undone'").await?;
            drop(inner);
            guard.commit_and_release().await?;
            Ok::<_, Error>(lease.check())
        };
        assert_eq!(lost(tokio::spawn(work).await.unwrap().unwrap()), Reason::Released);
        assert_eq!(shop.sql(STATUS).await, "paid");
    }

    #[tokio::test]
    async fn a_pool_of_one_connection_gets_it_back() {
        let shop = Shop::new().await;
        let pool = PgPoolOptions::new().max_connections(1).connect(&url()).await.unwrap();
        let lease = shop.lease().await;
        for work in
            ["SELECT 1", "SELECT 1 / 0", "COMMIT", "SELECT pg_terminate_backend(pg_backend_pid())"]
        {
            let mut connection = pool.acquire().await.unwrap();
            let mut guard = lease.guard(&mut *connection).await.unwrap();
            let _ = guard.execute(work).await;
            assert_eq!(guard.commit().await.is_ok(), work == "SELECT 1", "{work}");
        }
        // No token speaks until its holder has renewed.
        shop.sql("SELECT fence_new_epoch()").await;
        let mut connection = pool.acquire().await.unwrap();
        let before = process(&mut connection).await;
        let mut guard = lease.guard(&mut *connection).await.unwrap();
        assert_eq!(process(&mut guard).await, before);
        assert_eq!((pool.size(), pool.num_idle()), (1, 0));
        guard.commit().await.unwrap();
        drop((lease, connection));
        let (lease, mut connection) = (shop.ending().await, pool.acquire().await.unwrap());
        assert_eq!(process(&mut connection).await, before);
        let mut guard = lease.guard(&mut *connection).await.unwrap();
        assert_eq!(lost(lease.run(guard.execute(HANG)).await), Reason::AtMost);
        drop(guard);
        drop(connection);
        process(&mut pool.acquire().await.unwrap()).await;
    }

    async fn process(connection: &mut PgConnection) -> i32 {
        sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(connection).await.unwrap()
    }
}

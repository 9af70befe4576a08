//! What is Rust's own: the shape of the API, its drivers, its types. What a client decides is
//! played by vectors, and what a process shows by the scenarios of all clients.
//!
//! `DATABASE_URL=postgresql://… cargo test`: of a database with the extension alone.

use pg_fence_client::{
    BoxError, Connected, Error, Event, EventKind, Fence, Lease, Reason, classify, connect, open,
};
use std::fmt::{Debug, Display};
use std::future::pending;
use std::panic::resume_unwind;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
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

/// A table of one order, bound to its lease; and the database alone, for epochs silence all tokens.
struct Shop {
    admin: Connected,
    fence: Fence,
    _alone: tokio::sync::MutexGuard<'static, ()>,
}

impl Shop {
    async fn new() -> Shop {
        static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
        let (_alone, admin) = (ALONE.lock().await, client().await);
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
        let mut rows = said.iter().rev().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => row.get(0),
            _ => None,
        });
        rows.next().unwrap_or_default().to_owned()
    }

    async fn lease(&self) -> Lease {
        self.fence.lease("order:7").ttl(SHORT * 2).wait(LONG).acquire().await.unwrap()
    }

    async fn lost_soon(&self) -> Lease {
        let request = self.fence.lease("order:7").at_most(SHORT).wait(LONG);
        request.acquire().await.unwrap()
    }
}

/// Also where the release that was given up waits for somebody's lock.
#[tokio::test]
async fn a_lease_is_held_until_its_last_clone_is_dropped() {
    let (shop, mut client) = (Shop::new().await, client().await);
    let lease = shop.lease().await;
    shop.sql(&format!("BEGIN; SELECT lease_renew('order:7', {})", lease.token())).await;
    let guard = lease.guard(&mut client).await.unwrap();
    assert!(timeout(SHORT / 5, guard.commit_and_release()).await.is_err());
    shop.sql("COMMIT").await;
    sleep(SHORT * 3).await;
    let (clone, guard) = (lease.clone(), lease.guard(&mut client).await.unwrap());
    drop((lease, clone));
    // The fence does one call after the other, so a release would be through by now.
    shop.fence.lease("order:8").acquire().await.unwrap().release().await.unwrap();
    assert_eq!(shop.sql(STATE).await, "held");
    guard.execute(PAY, &[]).await.unwrap();
    guard.commit().await.unwrap();
    // It is given back in the background; and with the end of the work.
    let request = shop.fence.lease("order:7").at_most(SHORT).wait(LONG);
    let hangs = request.hold(async |_| pending::<Result<(), Error>>().await);
    assert_eq!(lost(hangs.await), Reason::AtMost);
    shop.fence.close().await;
    assert_eq!(shop.sql(STATE).await, "free");
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
        lease.guard(&mut guard).await?.commit().await?;
        guard.execute(PAY, &[]).await?;
        guard.commit().await?;
        assert!(matches!(fence.guard(&mut client, []).await, Err(Error::Invalid(_))));
        let others = Fence::new(&url())?;
        assert!(matches!(others.guard(&mut client, [&lease]).await, Err(Error::Invalid(_))));
        lease.run(async { lease.release().await }).await?
    };
    tokio::spawn(work).await.unwrap().unwrap();
    assert_eq!(shop.sql(STATUS).await, "paid");
}

#[tokio::test]
async fn another_role_is_told_what_it_lacks() {
    let (shop, other) = (Shop::new().await, config(|config| config.user("rust_1")));
    let role = "CREATE ROLE rust_1 LOGIN; SELECT fence_grant('rust_1'); DROP TABLE IF EXISTS runs;
        CREATE TABLE runs (id int); SELECT fence_protect('runs', deadline => 'held_until')";
    shop.sql(role).await;
    let mut client = open(std::slice::from_ref(&other), NoTls, LONG).await.unwrap();
    let told = shop.lease().await.guard(&mut client).await.err().unwrap().to_string();
    assert!(told.contains("act as one role (options=-c role="), "{told}");
    let (fence, key) = (Fence::at([other], NoTls), [("id", &7 as &(dyn Display + Sync))]);
    let told = fence.keep_row("runs", &key, 1, SHORT).acquire().await.unwrap_err().to_string();
    assert!(told.ends_with("need SELECT and UPDATE: permission denied for table runs"), "{told}");
    fence.close().await;
    drop(client);
    shop.sql("SELECT fence_revoke('rust_1'); DROP ROLE rust_1").await;
}

static ASKED: OnceLock<Lease> = OnceLock::new();

/// A logger that asks the fence, and panics.
struct Asks;

impl log::Log for Asks {
    fn enabled(&self, _: &log::Metadata) -> bool {
        true
    }
    fn log(&self, _: &log::Record) {
        if ASKED.get().is_some_and(|lease| lease.check().is_err()) {
            resume_unwind(Box::new("as a log does whose pipe is closed"));
        }
    }
    fn flush(&self) {}
}

#[tokio::test]
async fn a_logger_may_ask_the_fence() {
    let shop = Shop::new().await;
    let lease = shop.lost_soon().await;
    let lease = ASKED.get_or_init(|| lease);
    log::set_logger(&Asks).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    assert_eq!(lost(lease.run(pending::<()>()).await), Reason::AtMost);
    assert_eq!(lost(lease.check()), Reason::AtMost);
    // The answers to others come after that line of the log.
    let answer = timeout(LONG / 30, shop.fence.lease("order:8").acquire()).await;
    answer.expect("an answer").unwrap();
}

/// A caller who gives up ends what hangs, too, and the connection is whole after it.
#[tokio::test]
async fn what_a_loss_has_ended_hangs_no_more() {
    let shop = Shop::new().await;
    // On a driver's own connection, which a loss does not break off.
    let (mut client, connection) = tokio_postgres::connect(&url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    let lease = shop.lost_soon().await;
    let guard = lease.guard(&mut client).await.unwrap();
    assert_eq!(lost(guard.batch_execute(HANG).await), Reason::AtMost);
    drop((guard, lease));
    let lease = shop.lease().await;
    let guard = lease.guard(&mut client).await.unwrap();
    // Also if another one, which was sent with it, has ended.
    let both = async { tokio::join!(guard.batch_execute("SELECT 1"), guard.batch_execute(HANG)) };
    assert!(timeout(SHORT / 5, both).await.is_err());
    drop((guard, lease));
    // What comes after a savepoint is not cancelled: the caller that began goes on.
    let lease = timeout(LONG / 30, shop.lost_soon()).await.expect("nothing hangs");
    let mut outer = client.transaction().await.unwrap();
    let guard = lease.guard(&mut outer).await.unwrap();
    lease.lost().await;
    drop((guard, lease));
    outer.batch_execute("SELECT pg_sleep(1)").await.unwrap();
    outer.rollback().await.unwrap();
    // What has not begun is broken off, where not even BEGIN comes through.
    let mut client = self::client().await;
    assert!(timeout(SHORT / 5, client.batch_execute(HANG)).await.is_err());
    let lease = shop.lost_soon().await;
    assert_eq!(lost(lease.guard(&mut client).await.map(drop)), Reason::AtMost);
    client.batch_execute("SELECT 1").await.unwrap_err();
}

#[tokio::test]
async fn errors_are_found_however_deep_they_are_and_told_at_once() {
    let shop = Shop::new().await;
    let refused = shop.admin.batch_execute(PAY).await.unwrap_err();
    let wrapped: BoxError = Box::new(Error::other(refused));
    let Some(Error::Refused(refused)) = classify(&Error::other(wrapped)) else { panic!() };
    assert!(refused.sqlstate == "PF002" && refused.detail["relation"] == "public.orders");
    let other = shop.admin.batch_execute("SELECT 1 / 0").await.unwrap_err();
    assert!(classify(&other).is_none());
    let elsewhere = Fence::new(&url()).unwrap().in_schema("nowhere");
    assert!(matches!(elsewhere.lease("x").acquire().await, Err(Error::NotInstalled(_))));
    // What never opens is told at once.
    for (words, fence) in [
        ("TLS", Fence::at([config(|config| config.ssl_mode(SslMode::Require))], NoTls)),
        ("does not exist", Fence::at([config(|config| config.dbname("nowhere"))], NoTls)),
        ("no host, as user", Fence::new("dbname=shop").unwrap()),
        ("no secret", Fence::with_opener(|| async { Err(Error::other("no secret")) })),
    ] {
        let stop = CancellationToken::new();
        let lead = fence.lead("x", SHORT, &stop, async |_| Ok(()));
        let told = timeout(SHORT * 5, lead).await.expect("at once").unwrap_err().to_string();
        assert!(told.contains(words), "{told}");
    }
}

/// Its callback may block and panic, and its own runtime may be blocked: the heartbeat has a thread.
#[tokio::test(flavor = "current_thread")]
async fn a_program_that_blocks_and_panics_keeps_its_lease() {
    let shop = Shop::new().await;
    // A panic without a trace, which would take its time from the heartbeat.
    let panics = |event: &Event| {
        if event.kind == EventKind::Renewed {
            std::thread::sleep(SHORT * 3);
        }
        resume_unwind(Box::new("which takes nothing from the lease"))
    };
    let fence = shop.fence.clone().on_event(panics);
    let lease = fence.lease("order:7").ttl(SHORT * 2).acquire().await.unwrap();
    std::thread::sleep(SHORT * 3);
    lease.check().unwrap();
    lease.release().await.unwrap();
    fence.close().await;
}

#[tokio::test]
async fn a_loss_is_told_while_what_opens_connections_blocks() {
    let (shop, opened) = (Shop::new().await, AtomicBool::new(false));
    let fence = Fence::with_opener(move || {
        if opened.swap(true, Relaxed) {
            std::thread::sleep(SHORT * 8);
        }
        async { Ok(client().await) }
    });
    let lease = fence.lease("order:7").ttl(SHORT * 2).acquire().await.unwrap();
    shop.sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE datname = current_database() AND pid <> pg_backend_pid()",
    )
    .await;
    let loss = timeout(SHORT * 5, lease.lost()).await.expect("by the deadline");
    assert_eq!(lost(loss.map_or(Ok(()), Err)), Reason::Deadline);
}

/// Of both modes, with a key of two columns, and columns of any name.
#[tokio::test]
async fn a_row_is_a_lease() {
    for (mode, fence) in [("monotonic", "fence"), ("managed", "Token")] {
        let (shop, mut client) = (Shop::new().await, client().await);
        let table = format!(
            "DROP TABLE IF EXISTS runs; CREATE TABLE runs (part text, id int, state text,
                PRIMARY KEY (id, part)); INSERT INTO runs VALUES ('a', 1, 'ready');
            SELECT fence_protect('runs', '{fence}', '{mode}', deadline => 'held_until')"
        );
        shop.sql(&table).await;
        let claim = format!(
            "UPDATE runs SET held_until = clock_timestamp() + '2 s', state = 'running'
            WHERE held_until IS NULL OR held_until < clock_timestamp() RETURNING \"{fence}\""
        );
        let keep = |table: &str, id: &str, token: &str| {
            let key: [(&str, &(dyn Display + Sync)); 2] = [("id", &id), ("part", &"a")];
            let row = shop.fence.keep_row(table, &key, token.parse().unwrap(), SHORT * 2);
            row.columns(fence, "held_until").acquire()
        };
        let row = keep("runs", "1", &shop.sql(&claim).await).await.unwrap();
        assert_eq!(row.names(), ["runs", r#"["1","a"]"#]);
        // It is renewed, and while its own transaction has the row it is not lost.
        sleep(SHORT * 3).await;
        // No token of the name speaks until both are renewed, and the row is renewed only once the
        // guard that found that out has let go of it.
        let name = shop.fence.lease("order:7").acquire().await.unwrap();
        shop.sql("SELECT fence_new_epoch()").await;
        let guard = shop.fence.guard(&mut client, [&name, &row]).await.unwrap();
        guard.execute("UPDATE runs SET state = 'half'", &[]).await.unwrap();
        sleep(SHORT * 3).await;
        row.check().unwrap();
        guard.commit().await.unwrap();
        // That transaction was longer than its ttl, so the row is anybody's now.
        assert_eq!(lost(row.check()), Reason::Deadline);
        let token = shop.sql(&claim).await;
        let row = keep("runs", "1", &token).await.unwrap();
        row.guard(&mut client).await.unwrap().commit_and_release().await.unwrap();
        assert_eq!(lost(row.check()), Reason::Released);
        assert_eq!(lost(keep("runs", "1", &token).await), Reason::Gone);
        keep("runs", "1", &shop.sql(&claim).await).await.unwrap().release().await.unwrap();
        assert_eq!(shop.sql("SELECT held_until IS NULL FROM runs").await, "t");
        // What cannot be kept says why.
        for (table, id, state) in [("runs", "x", "22P02"), ("no.runs", "1", "3F000")] {
            let wrong = keep(table, id, &token).await.unwrap_err();
            assert_eq!(wrong.sqlstate().as_deref(), Some(state));
        }
    }
}

#[cfg(feature = "blocking")]
#[test]
fn the_verbs_of_programs_that_are_not_asynchronous() {
    let fence = pg_fence_client::blocking::Fence::new(&url()).unwrap();
    let shop = fence.wait(Shop::new());
    // Its work may wait, too, and is waited for after a stop.
    let stop = CancellationToken::new();
    let led = fence.wait(fence.lead("order:7", LONG, &stop, async |lease: Lease| {
        stop.cancel();
        let mut client = fence.wait(client());
        let guard = fence.wait(lease.guard(&mut client))?;
        fence.wait(guard.execute(PAY, &[]))?;
        fence.wait(guard.commit())?;
        Ok(lease.token())
    }));
    assert_eq!((led.unwrap().is_some(), &*fence.wait(shop.sql(STATUS))), (true, "paid"));
    fence.wait(fence.close());
}

#[cfg(feature = "sqlx")]
mod of_sqlx {
    use super::*;
    use sqlx::Executor;
    use sqlx::postgres::PgPoolOptions;

    #[tokio::test]
    async fn a_pool_of_one_connection_gets_it_back() {
        let shop = Shop::new().await;
        let pool = PgPoolOptions::new().max_connections(1).connect(&url()).await.unwrap();
        let lease = shop.lease().await;
        let refused = Error::from(pool.execute(PAY).await.unwrap_err());
        assert!(matches!(refused, Error::Refused(refused) if refused.sqlstate == "PF002"));
        for work in
            ["SELECT 1", "SELECT 1 / 0", "COMMIT", "SELECT pg_terminate_backend(pg_backend_pid())"]
        {
            let mut connection = pool.acquire().await.unwrap();
            let mut guard = lease.guard(&mut *connection).await.unwrap();
            let _ = guard.execute(work).await;
            assert_eq!(guard.commit().await.is_ok(), work == "SELECT 1", "{work}");
        }
        // No token speaks until its holder has renewed; and the future can be spawned, too.
        shop.sql("SELECT fence_new_epoch()").await;
        let mut connection = pool.acquire().await.unwrap();
        let work = async move {
            let mut guard = lease.guard(&mut *connection).await?;
            lease.run(guard.execute(PAY)).await??;
            let mut inner = lease.guard(&mut **guard).await?;
            inner.execute("UPDATE orders SET status = 'undone'").await?;
            drop(inner);
            guard.commit_and_release().await?;
            Ok::<_, Error>(lease.check())
        };
        assert_eq!(lost(tokio::spawn(work).await.unwrap().unwrap()), Reason::Released);
        assert_eq!(shop.sql(STATUS).await, "paid");
        let (lease, mut connection) = (shop.lost_soon().await, pool.acquire().await.unwrap());
        let mut guard = lease.guard(&mut *connection).await.unwrap();
        assert_eq!(lost(lease.run(guard.execute(HANG)).await), Reason::AtMost);
        drop(guard);
        drop(connection);
        pool.acquire().await.unwrap().execute("SELECT 1").await.unwrap();
    }
}
